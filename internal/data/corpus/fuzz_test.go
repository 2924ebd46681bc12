package corpus

import (
	"bytes"
	"strings"
	"testing"
)

// oneLine fails the test if an error has several lines.
func oneLine(t *testing.T, err error) {
	t.Helper()
	if err != nil && strings.Contains(err.Error(), "\n") {
		t.Errorf("an error of several lines: %q", err)
	}
}

// FuzzIndex reads sequences of documents by hostile indexes: Megatron's, and those of a shard.
func FuzzIndex(f *testing.F) {
	f.Add([]byte("abcdefgh"), megatronIndex(8, 2, []int32{1, 3}), true)
	f.Add([]byte("abcdefgh"), []byte{3, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0}, false)
	f.Fuzz(func(t *testing.T, data, index []byte, megatron bool) {
		dir := t.TempDir()
		name := put(t, dir, "a.bin", data)
		put(t, dir, "a.idx", index)
		if !megatron {
			m := Manifest{Type: "uint16", Tokens: int64(len(data) / 2), Documents: int64(len(index) / 8), Highest: 1<<16 - 1}
			m.Shards = []Shard{{Name: "a", Tokens: m.Tokens, Documents: m.Documents, Highest: m.Highest}}
			if err := m.Write(dir); err != nil {
				t.Fatal(err)
			}
			name = dir
		}
		for _, pack := range []string{"cut", "whole"} {
			c, err := Open([][]string{{name}}, Options{Header: "auto", Documents: "index", Pack: pack}, Order{Sequence: 3}, 1<<31-1)
			oneLine(t, err)
			if err != nil {
				continue
			}
			for g := range int64(4) {
				s, out := c.Training(g), make([]int32, 3)
				oneLine(t, s.Tokens(0, out, 1))
				oneLine(t, s.Positions(0, out, 1))
				for i, p := range out {
					if p < 0 || int(p) > i {
						t.Errorf("sequence %d, token %d has position %d in its document", g, i, p)
					}
				}
				oneLine(t, s.Labels(0, out, 1, -1))
			}
			c.Close()
		}
	})
}

// FuzzManifest reads hostile manifests of token files. What is read can be written and read again.
func FuzzManifest(f *testing.F) {
	m := Manifest{Format: manifestFormat, Type: "uint16", Tokens: 4, Highest: 9, Masks: true, Shards: []Shard{{Name: "a", Tokens: 4, Highest: 9}}}
	m.Shards[0].Seal([]*Sums{{Blocks: []uint32{1}}, {}, {Blocks: []uint32{2}}})
	text, err := m.text()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte(`{"format":"sppo tokens 1","type":"uint32","crc":"00000000"}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		dir := t.TempDir()
		put(t, dir, ManifestName, text)
		m, err := ReadManifest(dir)
		oneLine(t, err)
		if err != nil {
			return
		}
		for i := range m.Shards {
			m.Shards[i].proofs("a", widths[m.Type], m.Masks)
		}
		if err := m.Write(dir); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadManifest(dir); err != nil {
			t.Fatal(err)
		}
	})
}

// FuzzLines reads hostile jsonl.
func FuzzLines(f *testing.F) {
	f.Add([]byte("{\"text\": \"a\", \"prompt\": \"b\"}\n\n{\"text\": \"c\"}"))
	f.Add([]byte(`{"chat": [{"text": "a", "train": true}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		for _, fields := range []Fields{{Text: "text"}, {Text: "text", Prompt: "prompt"}, {Segments: "chat"}} {
			ended := true
			oneLine(t, Lines(bytes.NewReader(text), fields, func(d Document) error { ended = d.Ends; return nil }))
			if !ended {
				t.Error("the last document has no end")
			}
		}
	})
}

package prepare

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sppo.dev/internal/data/corpus"
)

// TestMasks prepares documents of both kinds: prompts with answers, and lists of segments. It compares tokens and masks
// with those obtained by tokenizing each text on its own, for several numbers of workers and with a few documents per
// shard.
func TestMasks(t *testing.T) {
	tok := open(t, "gpt2.json")
	words := strings.Fields("the of 12 naïve 你好 return x, <tool> word ... 🙂")
	r := rand.New(rand.NewPCG(7, 7))
	text := func() string {
		var b strings.Builder
		for range r.IntN(12) {
			b.WriteString(words[r.IntN(len(words))] + " ")
		}
		return b.String()
	}
	type segment struct {
		Text  string `json:"text"`
		Train bool   `json:"train"`
	}
	for _, segments := range []bool{false, true} {
		var lines bytes.Buffer
		var want []string // tokens and masks by document
		for range 200 {
			parts := []segment{{text(), false}, {text(), true}}
			object := map[string]any{"question": parts[0].Text, "answer": parts[1].Text}
			if segments {
				parts = parts[:1+r.IntN(2)]
				for range r.IntN(3) {
					parts = append(parts, segment{text(), r.IntN(2) == 0})
				}
				object = map[string]any{"chat": parts}
			}
			line, err := json.Marshal(object)
			if err != nil {
				t.Fatal(err)
			}
			lines.Write(append(line, '\n'))
			document := ""
			for i, p := range parts {
				ids, err := tok.Encode(nil, p.Text, false)
				if err != nil {
					t.Fatal(err)
				}
				if i == len(parts)-1 {
					ids = append(ids, 1)
				}
				for _, id := range ids {
					document += fmt.Sprintf("%d:%t ", id, p.Train)
				}
			}
			want = append(want, document)
		}
		in := filepath.Join(t.TempDir(), "a.jsonl")
		if err := os.WriteFile(in, lines.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
		var first map[string]string
		for _, workers := range []int{1, 3} {
			out := t.TempDir()
			job := jobOf(t, in, out, tok, workers)
			job.Field, job.Prompt = "answer", "question"
			if segments {
				job.Prompt, job.Segments = "", "chat"
			}
			m, err := job.Run(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if !m.Masks || len(m.Shards) < 2 {
				t.Errorf("masks %t in %d shards", m.Masks, len(m.Shards))
			}
			if diff := cmp.Diff(want, maskedDocuments(t, out, m)); diff != "" {
				t.Errorf("segments %t (-want +got):\n%s", segments, diff)
			}
			if all := contents(t, out); first == nil {
				first = all
			} else if diff := cmp.Diff(first, all); diff != "" {
				t.Errorf("%d workers change it:\n%s", workers, diff)
			}
		}
	}
}

// maskedDocuments reads a folder directly, following the definition of its format.
func maskedDocuments(t *testing.T, dir string, m *corpus.Manifest) (out []string) {
	t.Helper()
	for _, s := range m.Shards {
		read := func(ending string) []byte {
			data, err := os.ReadFile(filepath.Join(dir, s.Name+ending))
			if err != nil {
				t.Fatal(err)
			}
			return data
		}
		bin, idx, mask := read(".bin"), read(".idx"), read(corpus.MaskEnding)
		for ; len(idx) > 0; idx = idx[8:] {
			document := ""
			for range idx[0] { // lengths below 256
				document += fmt.Sprintf("%d:%t ", int(bin[0])|int(bin[1])<<8, mask[0] == 1)
				bin, mask = bin[2:], mask[1:]
			}
			out = append(out, document)
		}
	}
	return out
}

// TestBadSegments checks the errors for lines without a valid list of segments, and for prompts in files that
// are not jsonl.
func TestBadSegments(t *testing.T) {
	tok := open(t, "gpt2.json")
	for line, want := range map[string]string{
		`{"text": "a"}`:                          `line 1, at byte 0: the object has no field "chat"`,
		`{"chat": "a"}`:                          `field "chat" is not a list of segments`,
		`{"chat": []}`:                           `field "chat" is not a list of segments`,
		`{"chat": [{"text": "a"}]}`:              `segment 0 needs a text and a flag that selects it for training`,
		`{"chat": [{"text": 1, "train": true}]}`: `field "chat" is not a list of segments`,
	} {
		in := filepath.Join(t.TempDir(), "a.jsonl")
		if err := os.WriteFile(in, []byte(line), 0o644); err != nil {
			t.Fatal(err)
		}
		job := jobOf(t, in, t.TempDir(), tok, 1)
		job.Segments = "chat"
		if _, err := job.Run(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", line, err, want)
		}
	}
	in := filepath.Join(t.TempDir(), "a.txt")
	if err := os.WriteFile(in, []byte("a"), 0o644); err != nil {
		t.Fatal(err)
	}
	job := jobOf(t, in, t.TempDir(), tok, 1)
	job.Prompt = "question"
	if _, err := job.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "only read from jsonl") {
		t.Error(err)
	}
}

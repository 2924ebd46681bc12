package prepare

import (
	"bytes"
	"context"
	"encoding/json"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sppo.dev/internal/data/corpus"
)

// chats writes a corpus with masks in several shards and returns its folder.
func chats(t *testing.T, r *rand.Rand) string {
	t.Helper()
	var lines bytes.Buffer
	for range 3000 {
		text := func() string { return strings.Repeat("the naïve 你好 ", r.IntN(20)) }
		line, err := json.Marshal(map[string]string{"prompt": text(), "text": text()})
		if err != nil {
			t.Fatal(err)
		}
		lines.Write(append(line, '\n'))
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "a.jsonl"), lines.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	job := jobOf(t, dir, filepath.Join(t.TempDir(), "out"), open(t, "gpt2.json"), 2)
	job.Prompt, job.ShardText, job.EOS = "prompt", 500<<10, 50256
	if _, err := job.Run(context.Background()); err != nil {
		t.Fatal(err)
	}
	return job.Dir
}

// readAll reads everything that a run reads: tokens, documents and masks of all sequences.
func readAll(dir string) error {
	const sequence = 512
	c, err := corpus.Open([][]string{{dir}}, corpus.Options{Documents: "index", Masks: "on"}, corpus.Order{Sequence: sequence}, 50257)
	if err != nil {
		return err
	}
	defer c.Close()
	tokens := make([]int32, sequence)
	for g := range c.Tokens()/sequence + 1 {
		s := c.Training(g)
		if err := s.Tokens(0, tokens, 1); err != nil {
			return err
		}
		if err := s.Positions(0, tokens, 1); err != nil {
			return err
		}
		if err := s.Labels(0, tokens, 1, -1); err != nil {
			return err
		}
	}
	return nil
}

// older removes from a corpus what earlier versions did not write: the checksums of blocks and of the manifest.
func older(t *testing.T, dir string) {
	t.Helper()
	path := filepath.Join(dir, corpus.ManifestName)
	text, err := os.ReadFile(path)
	var m map[string]any
	if err == nil {
		err = json.Unmarshal(text, &m)
	}
	if err != nil {
		t.Fatal(err)
	}
	delete(m, "crc")
	for _, s := range m["shards"].([]any) {
		delete(s.(map[string]any), "blocks")
	}
	if text, err = json.Marshal(m); err == nil {
		err = os.WriteFile(path, text, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// A changed bit anywhere in the files of a corpus is noticed, at the latest when a sequence needs the byte.
func TestChangedCorpus(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	dir := chats(t, r)
	for _, old := range []bool{false, true} {
		if old {
			older(t, dir)
		}
		if err := readAll(dir); err != nil {
			t.Fatalf("old %t: %v", old, err)
		}
		if checked, err := Check(context.Background(), dir, corpus.Options{}, 0); err != nil || len(checked.Damage) > 0 || !checked.Sums {
			t.Fatalf("%+v, %v", checked, err)
		}
		names, err := filepath.Glob(filepath.Join(dir, "*"))
		if err != nil || len(names) < 7 {
			t.Fatal(names, err)
		}
		for try := range 60 {
			name := names[try%len(names)]
			if old && filepath.Base(name) == corpus.ManifestName {
				continue // it had no checksum
			}
			whole, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			data := bytes.Clone(whole)
			at := r.IntN(len(data))
			data[at] ^= 1 << r.IntN(8)
			put := func(data []byte) {
				if err := os.WriteFile(name, data, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			put(data)
			err = readAll(dir)
			checked, failed := Check(context.Background(), dir, corpus.Options{}, 0)
			put(whole)
			if err != nil && (failed != nil || len(checked.Damage) != 1 || !strings.Contains(checked.Damage[0].Error(), name)) {
				t.Errorf("old %t: byte %d of %s: Check finds %+v, %v", old, at, name, checked, failed)
			}
			if filepath.Base(name) == corpus.ManifestName && (strings.TrimSpace(string(whole[at:at+1])) == "" || bytes.EqualFold(data, whole)) {
				continue // neither white space nor the case of a key matters
			}
			if err == nil || !strings.Contains(err.Error(), name) || strings.Contains(err.Error(), "\n") {
				t.Errorf("old %t: byte %d of %s: %v", old, at, name, err)
			}
		}
	}
}

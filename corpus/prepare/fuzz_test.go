package prepare

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/parquet-go/parquet-go"

	"sppo.dev/corpus"
	"sppo.dev/tokenizer"
)

// A parquet file that declares a footer of 4 GiB is refused before that is allocated.
func TestParquetFooter(t *testing.T) {
	text := "some text"
	var b bytes.Buffer
	w := parquet.NewGenericWriter[row](&b)
	if _, err := w.Write([]row{{1, &text}}); err != nil {
		t.Fatal(err)
	}
	w.Close()
	name := filepath.Join(t.TempDir(), "a.parquet")
	if err := os.WriteFile(name, append(b.Bytes()[:b.Len()-8], "\xff\xff\xff\xffPAR1"...), 0o644); err != nil {
		t.Fatal(err)
	}
	out, err := Check(t.Context(), name, corpus.Options{Field: "text"}, 0)
	if err != nil || len(out.Damage) != 1 || !strings.Contains(out.Damage[0].Error(), "its footer should have 4294967295 bytes") {
		t.Errorf("%v, %v", out, err)
	}
}

// FuzzRecords continues jobs from hostile records of shards.
func FuzzRecords(f *testing.F) {
	f.Add([]byte(`{"name":"00000","tokens":1,"documents":1,"highest":5,"checksum":"0000000000000000","next":{"input":0,"skip":1},"last":false}`))
	f.Add([]byte(`{"name":"00000","tokens":1,"next":{"input":-1,"skip":-1},"last":true}`))
	tok, err := tokenizer.Open(filepath.Join("..", "..", "tokenizer", "testdata", "reference", "gpt2.json"))
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		dir := t.TempDir()
		for name, data := range map[string][]byte{"00000" + recordEnding: text, "00000.bin": {5, 0}} {
			if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		records, err := (&Job{Dir: dir, Tokenizer: tok}).readRecords()
		if err != nil && strings.Contains(err.Error(), "\n") {
			t.Errorf("an error of several lines: %q", err)
		}
		for _, r := range records {
			if r.Next.Input < 0 || r.Next.Skip < 0 {
				t.Errorf("it continues at %+v", r.Next)
			}
		}
	})
}

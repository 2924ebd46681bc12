package prepare

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime/debug"
	"runtime/metrics"
	"slices"
	"strings"
	"testing"
	"time"

	kgzip "github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/parquet-go/parquet-go"

	"github.com/google/go-cmp/cmp"
	"sppo.dev/internal/data/corpus"
	"sppo.dev/internal/data/tokenizer"
)

func open(t *testing.T, name string) *tokenizer.Tokenizer {
	t.Helper()
	tok, err := tokenizer.Open(filepath.Join("..", "..", "tokenizer", "testdata", "reference", name))
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// row is a row of jsonl and parquet files.
type row struct {
	ID   int     `json:"id" parquet:"id"`
	Text *string `json:"text" parquet:"text,optional"`
}

// inputs writes random documents in every format and returns the folder and its documents in order.
func inputs(t *testing.T, r *rand.Rand) (string, []string) {
	t.Helper()
	dir := t.TempDir()
	var all []string
	words := strings.Fields("the of 12 naïve 你好 return x, <tool> word \n ... 🙂")
	text := func() string {
		var b strings.Builder
		for range r.IntN(60) {
			b.WriteString(words[r.IntN(len(words))] + []string{" ", "  ", "\n"}[r.IntN(3)])
		}
		return b.String()
	}
	put := func(name string, data []byte) {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	lines := func() []byte {
		var b bytes.Buffer
		for i := range 20 + r.IntN(40) {
			s := text()
			all = append(all, s)
			line, _ := json.Marshal(row{i, &s})
			b.Write(append(line, '\n'))
		}
		return b.Bytes()
	}
	put("a.jsonl", lines())
	var z bytes.Buffer
	w := kgzip.NewWriter(&z)
	w.Write(lines())
	w.Close()
	put("b.jsonl.gz", z.Bytes())
	s, _ := zstd.NewWriter(nil)
	put("c.jsonl.zst", s.EncodeAll(lines(), nil))
	var rows []row
	for i := range 20 + r.IntN(40) {
		s := text()
		if i%7 == 3 {
			rows = append(rows, row{ID: i})
			continue
		}
		all = append(all, s)
		rows = append(rows, row{i, &s})
	}
	var p bytes.Buffer
	pw := parquet.NewGenericWriter[row](&p, parquet.MaxRowsPerRowGroup(10), parquet.Compression(&parquet.Zstd))
	if _, err := pw.Write(rows); err != nil {
		t.Fatal(err)
	}
	pw.Close()
	put("d.parquet", p.Bytes())
	for _, name := range []string{"e.txt", "f.md"} {
		one := text()
		all = append(all, one)
		put(name, []byte(one))
	}
	return dir, all
}

func jobOf(t *testing.T, in, out string, tok *tokenizer.Tokenizer, workers int) *Job {
	t.Helper()
	files, err := Inputs([]string{in})
	if err != nil {
		t.Fatal(err)
	}
	return &Job{Inputs: files, Dir: out, Tokenizer: tok, Field: "text", EOS: 1, Workers: workers, ShardText: 2000, pace: 1}
}

// contents returns the contents of all files in a folder.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			var data []byte
			data, err = os.ReadFile(name)
			out[strings.TrimPrefix(name, dir)] = string(data)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// The result contains the tokens of every document in order, regardless of the number of workers and of how
// often the job was stopped.
func TestJob(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	tok := open(t, "qwen2.json")
	stops := 0
	for round := range 8 {
		in, documents := inputs(t, r)
		whole := filepath.Join(t.TempDir(), "out")
		m, err := jobOf(t, in, whole, tok, 1).Run(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		want := contents(t, whole)
		var ids []int32
		for _, d := range documents {
			x, err := tok.Encode(nil, d, false)
			if err != nil {
				t.Fatal(err)
			}
			for _, id := range append(x, 1) {
				ids = append(ids, int32(id))
			}
		}
		if m.Tokens != int64(len(ids)) || m.Documents != int64(len(documents)) {
			t.Fatalf("%d tokens in %d documents, want %d in %d", m.Tokens, m.Documents, len(ids), len(documents))
		}
		c, err := corpus.Open([][]string{{whole}}, corpus.Options{}, corpus.Order{Sequence: int64(len(ids)) - 1}, m.Vocab)
		if err != nil {
			t.Fatal(err)
		}
		got := make([]int32, len(ids))
		if err := c.Training(0).Tokens(0, got, 1); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(ids, got); diff != "" {
			t.Fatal(diff)
		}
		if len(m.Shards) < 8 {
			t.Errorf("%d shards of six files", len(m.Shards))
		}
		stopped := filepath.Join(t.TempDir(), "out")
		for try := 0; ; try++ {
			ctx, cancel := context.WithCancel(context.Background())
			job := jobOf(t, in, stopped, tok, 1+r.IntN(5))
			left := r.IntN(12)
			job.Progress = func(Progress) {
				if left--; left < 0 && try < 6 {
					cancel()
				}
			}
			_, err := job.Run(ctx)
			cancel()
			if err == nil {
				break
			}
			if !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
			stops++
		}
		if diff := cmp.Diff(want, contents(t, stopped)); diff != "" {
			t.Fatalf("round %d: %s", round, diff)
		}
	}
	if stops < 10 {
		t.Errorf("stopped %d times", stops)
	}
}

// A folder with other contents is left unchanged, and the error names an input that has changed.
func TestRefusals(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	in, _ := inputs(t, r)
	tok := open(t, "qwen2.json")
	out := filepath.Join(t.TempDir(), "out")
	begin := func() {
		ctx, cancel := context.WithCancel(context.Background())
		job := jobOf(t, in, out, tok, 2)
		calls := 0
		job.Progress = func(Progress) {
			if calls++; calls == 3 { // two shards are complete
				cancel()
			}
		}
		if _, err := job.Run(ctx); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	}
	fails := func(job *Job, want string) {
		t.Helper()
		before := contents(t, job.Dir)
		if _, err := job.Run(context.Background()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
		if diff := cmp.Diff(before, contents(t, job.Dir)); diff != "" {
			t.Error(diff)
		}
	}
	fails(jobOf(t, in, in, tok, 1), "the folder is not empty: it contains a.jsonl")
	begin()
	fails(jobOf(t, in, out, open(t, "gpt2.json"), 1), "begun with another tokenizer")
	other := jobOf(t, in, out, tok, 1)
	other.EOS = -1
	fails(other, "begun with other options")
	other = jobOf(t, in, out, tok, 1)
	other.Inputs = other.Inputs[1:]
	fails(other, "begun of 6 files rather than 5")
	if err := os.WriteFile(filepath.Join(in, "e.txt"), []byte("changed"), 0o644); err != nil {
		t.Fatal(err)
	}
	fails(jobOf(t, in, out, tok, 1), "e.txt changed")
	if err := os.RemoveAll(out); err != nil {
		t.Fatal(err)
	}
	if _, err := jobOf(t, in, out, tok, 1).Run(context.Background()); err != nil {
		t.Fatal(err)
	}
	fails(jobOf(t, in, out, tok, 1), "the folder already contains a corpus")
}

// A damaged file either causes an error that names it, or is read as it is. After an error there is no corpus.
func TestDamaged(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	in, _ := inputs(t, r)
	tok := open(t, "gpt2.json")
	errs := 0
	for _, name := range []string{"a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet"} {
		whole, err := os.ReadFile(filepath.Join(in, name))
		if err != nil {
			t.Fatal(err)
		}
		dir := t.TempDir()
		for try := range 60 {
			data := bytes.Clone(whole)
			if try%3 == 0 {
				data = data[:r.IntN(len(data))]
			} else {
				data[r.IntN(len(data))] ^= byte(1 + r.IntN(255))
			}
			if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
				t.Fatal(err)
			}
			out := filepath.Join(t.TempDir(), "out")
			_, err := jobOf(t, dir, out, tok, 2).Run(context.Background())
			if err == nil {
				continue
			}
			errs++
			if !strings.Contains(err.Error(), name) && !strings.Contains(err.Error(), "no text in the files") {
				t.Errorf("%s: %v", name, err)
			}
			if _, err := os.Stat(filepath.Join(out, corpus.ManifestName)); err == nil {
				t.Errorf("%s: a corpus in spite of an error", name)
			}
			if left, _ := filepath.Glob(filepath.Join(out, "*"+temporary)); len(left) > 0 {
				t.Errorf("%s: %v is left", name, left)
			}
		}
	}
	if errs < 60 {
		t.Errorf("%d of 240 damaged files were noticed", errs)
	}
	job := jobOf(t, in, filepath.Join(t.TempDir(), "out"), tok, 1)
	job.Field = "body"
	if _, err := job.Run(context.Background()); err == nil || !strings.Contains(err.Error(), `a.jsonl: line 1, at byte 0: the object has no field "body"`) {
		t.Error(err)
	}
	job.Dir, job.Inputs = job.Dir+"2", job.Inputs[3:]
	if _, err := job.Run(context.Background()); err == nil || !strings.Contains(err.Error(), `d.parquet: there is no column "body": it has id, text`) {
		t.Error(err)
	}
}

// A text that cannot be cut without changing tokens is cut after line breaks, and stays one document.
func TestLongText(t *testing.T) {
	var b strings.Builder
	for i := 0; b.Len() < 40<<20; i++ {
		fmt.Fprintf(&b, "line %d of many that are long enough to be few ...............................................\n", i)
	}
	var got []string
	ends := 0
	err := corpus.Text(strings.NewReader(b.String()), func([]byte) int { return 0 }, func(d corpus.Document) error {
		got = append(got, d.Text)
		if d.Ends {
			ends++
		} else if !strings.HasSuffix(d.Text, "\n") || d.Before != "" {
			t.Error("a piece ends inside a line")
		}
		return nil
	})
	if err != nil || strings.Join(got, "") != b.String() || ends != 1 || len(got) != 3 {
		t.Errorf("%d pieces, %d ends, %v", len(got), ends, err)
	}
}

// oneLine returns a text without line breaks of at least n bytes.
func oneLine(r *rand.Rand, n int) string {
	words := strings.Fields("the of 12 1984 naïve 你好，世界。 return x, don't <tool> word (and) ... 🙂 Straße e\u0301 ▁ ﬁne \xff")
	b := make([]byte, 0, n+32)
	for len(b) < n {
		b = append(append(b, words[r.IntN(len(words))]...), []string{" ", " ", "  ", "", "\t"}[r.IntN(5)]...)
	}
	return string(b)
}

// A text of one line has the same tokens whether it is tokenized in pieces or as a whole, with every tokenizer.
func TestOneLine(t *testing.T) {
	dir := filepath.Join("..", "..", "tokenizer", "testdata", "reference")
	names, err := filepath.Glob(filepath.Join(dir, "*.[jm]*"))
	if err != nil || len(names) < 13 {
		t.Fatal(names, err)
	}
	text := oneLine(rand.New(rand.NewPCG(1, 2)), 9<<17)
	for _, name := range names {
		if !strings.HasSuffix(name, ".json") && !strings.HasSuffix(name, ".model") {
			continue
		}
		tok := open(t, filepath.Base(name))
		want, err := tok.Encode(nil, text, false)
		if err != nil {
			t.Fatal(err)
		}
		var got []uint32
		parts := 0
		err = corpus.Text(strings.NewReader(text), tok.Cut, func(d corpus.Document) (err error) {
			parts++
			got, err = d.Encode(got, tok)
			return err
		})
		if err != nil || parts != 2 || !slices.Equal(got, want) {
			t.Errorf("%s: %d parts with %d tokens rather than %d, %v", name, parts, len(got), len(want), err)
		}
	}
	whole, parts := tokenizer.NewTrainer(), tokenizer.NewTrainer()
	if err := whole.Add(text); err != nil {
		t.Fatal(err)
	}
	if err := corpus.Text(strings.NewReader(text), parts.Cut, func(d corpus.Document) error { return parts.Add(d.Text) }); err != nil {
		t.Fatal(err)
	}
	a, errA := whole.Train(600, nil)
	b, errB := parts.Train(600, nil)
	if errA != nil || errB != nil || !bytes.Equal(a, b) {
		t.Errorf("the tokenizers differ: %v, %v", errA, errB)
	}
}

// peak calls f and returns the largest size of the heap that it saw meanwhile.
func peak(f func()) (most uint64) {
	stop, done := make(chan bool), make(chan bool)
	go func() {
		defer close(done)
		sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
		for {
			metrics.Read(sample)
			most = max(most, sample[0].Value.Uint64())
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
		}
	}()
	f()
	close(stop)
	<-done
	return most
}

// Memory does not grow with the length of a line.
func TestOneLineMemory(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(100)) // the heap must not depend on GOGC
	dir := t.TempDir()
	name := filepath.Join(dir, "a.txt")
	text := oneLine(rand.New(rand.NewPCG(1, 2)), 1<<20)
	if err := os.WriteFile(name, []byte(strings.Repeat(text, 20)), 0o644); err != nil {
		t.Fatal(err)
	}
	files, err := Inputs([]string{name})
	if err != nil {
		t.Fatal(err)
	}
	for i, f := range []func() error{
		func() error {
			_, err := (&Job{Inputs: files, Dir: filepath.Join(dir, "out"), Tokenizer: open(t, "llama2.json"), EOS: -1, Workers: 2}).Run(t.Context())
			return err
		},
		func() error {
			_, err := (&Training{Inputs: files, Dir: filepath.Join(dir, "tok"), Vocab: 300, Workers: 2}).Run(t.Context())
			return err
		},
	} {
		var err error
		if most := peak(func() { err = f() }); err != nil || most > 300<<20 {
			t.Errorf("%d: at most %d MiB at a time, %v", i, most>>20, err)
		} else {
			t.Logf("%d: at most %d MiB at a time", i, most>>20)
		}
	}
}

// A line in which no place to cut is found is refused.
func TestLineWithoutCut(t *testing.T) {
	err := corpus.Text(strings.NewReader(strings.Repeat("ACGT", 5<<20)), open(t, "gpt2.json").Cut, func(corpus.Document) error { return nil })
	if err == nil || !strings.Contains(err.Error(), "16 MiB of text have no line break and no place") {
		t.Error(err)
	}
}

// A trained tokenizer depends only on the text, and it works.
func TestTraining(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	in, documents := inputs(t, r)
	files, err := Inputs([]string{in})
	if err != nil {
		t.Fatal(err)
	}
	var first map[string]string
	for workers := range 4 {
		job := Training{Inputs: files, Dir: filepath.Join(t.TempDir(), "tok"), Vocab: 300, Field: "text", Workers: workers + 1}
		result, err := job.Run(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		if result.Vocab != 300 || !result.Whole {
			t.Errorf("%+v", result)
		}
		all := contents(t, job.Dir)
		if first == nil {
			first = all
		}
		if diff := cmp.Diff(first, all); diff != "" {
			t.Fatal(diff)
		}
		tok, err := tokenizer.Open(job.Dir)
		if err != nil {
			t.Fatal(err)
		}
		if id, ok := tok.EOS(); !ok || id != 0 {
			t.Errorf("the end of a document is %d, %v", id, ok)
		}
		text := strings.Join(documents, "")
		ids, err := tok.Encode(nil, text, true)
		if err != nil || tok.Decode(ids, false) != text || len(ids) > len(text)/2 {
			t.Errorf("%d tokens for %d bytes, %v", len(ids), len(text), err)
		}
		if _, err := job.Run(context.Background()); err == nil || !strings.Contains(err.Error(), "already contains a tokenizer.json") {
			t.Error(err)
		}
	}
	small := Training{Inputs: files, Dir: filepath.Join(t.TempDir(), "tok"), Vocab: 100, Field: "text"}
	if _, err := small.Run(context.Background()); err == nil || !strings.Contains(err.Error(), "need 257 tokens") {
		t.Error(err)
	}
}

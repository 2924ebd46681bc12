package corpus

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const vocab = 60000

// put writes a file.
func put(t *testing.T, dir, name string, data []byte) string {
	t.Helper()
	full := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(full), 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(full, data, 0o666); err != nil {
		t.Fatal(err)
	}
	return full
}

// packed encodes token IDs as integers of width bytes.
func packed(width int, ids []int32) []byte {
	var out []byte
	for _, id := range ids {
		out = append(out, binary.LittleEndian.AppendUint64(nil, uint64(id))[:width]...)
	}
	return out
}

// megatronIndex returns a Megatron index of sequences with the given lengths, each of which is a document.
func megatronIndex(code byte, width int, lengths []int32) []byte {
	out := append([]byte(megatronMagic), 1, 0, 0, 0, 0, 0, 0, 0, code)
	out = binary.LittleEndian.AppendUint64(out, uint64(len(lengths)))
	out = binary.LittleEndian.AppendUint64(out, uint64(len(lengths)+1))
	for _, n := range lengths {
		out = binary.LittleEndian.AppendUint32(out, uint32(n))
	}
	at := 0
	for _, n := range lengths {
		out = binary.LittleEndian.AppendUint64(out, uint64(at*width))
		at += int(n)
	}
	for i := range len(lengths) + 1 {
		out = binary.LittleEndian.AppendUint64(out, uint64(i))
	}
	return out
}

// drawn writes token IDs in a randomly chosen format, and returns the name of the file or folder.
func drawn(t *testing.T, r *rand.Rand, dir, name string, width int, ids []int32) string {
	t.Helper()
	switch r.IntN(4) {
	case 0:
		magic := map[int]uint32{2: 20240520, 4: 20240801}[width]
		head := binary.LittleEndian.AppendUint32(nil, magic)
		head = binary.LittleEndian.AppendUint32(head, 1)
		head = binary.LittleEndian.AppendUint32(head, uint32(len(ids)))
		return put(t, dir, name+".bin", append(append(head, make([]byte, headerBytes-len(head))...), packed(width, ids)...))
	case 1:
		cut := int32(r.IntN(len(ids) + 1))
		put(t, dir, name+".idx", megatronIndex(map[int]byte{2: 8, 4: 4}[width], width, []int32{cut, int32(len(ids)) - cut}))
	case 2:
		m := Manifest{Type: fmt.Sprintf("uint%d", 8*width), Tokens: int64(len(ids)), Documents: 1, Highest: int64(slices.Max(ids)), EOS: -1,
			Shards: []Shard{{Name: "a", Tokens: int64(len(ids)), Documents: 1, Highest: int64(slices.Max(ids))}}}
		put(t, dir, filepath.Join(name, "a.bin"), packed(width, ids))
		if err := m.Write(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
		return filepath.Join(dir, name)
	}
	return put(t, dir, name+".bin", packed(width, ids))
}

// patternsOf writes random tokens to several files of several patterns, and returns the tokens of each pattern.
func patternsOf(t *testing.T, r *rand.Rand, patterns int) (names [][]string, tokens [][]int32, kind string) {
	t.Helper()
	dir, width := t.TempDir(), 2*(1+r.IntN(2))
	for p := range patterns {
		names, tokens = append(names, nil), append(tokens, nil)
		for f := range 1 + r.IntN(4) {
			ids := make([]int32, 1+r.IntN(90))
			for i := range ids {
				ids[i] = r.Int32N(vocab)
			}
			names[p] = append(names[p], drawn(t, r, dir, fmt.Sprint(p, "-", f), width, ids))
			tokens[p] = append(tokens[p], ids...)
		}
	}
	return names, tokens, fmt.Sprintf("uint%d", 8*width)
}

// Without shuffling, sequence g is the S+1 tokens starting at g*S, wrapping at the end, however they are divided
// among files and requests.
func TestSequential(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 100 {
		names, parts, kind := patternsOf(t, r, 1+r.IntN(3))
		tokens := slices.Concat(parts...)
		sequence := 1 + r.Int64N(int64(len(tokens)))
		if sequence+1 > int64(len(tokens)) {
			continue
		}
		c, err := Open(names, Options{Type: kind, Header: "auto"}, Order{Sequence: sequence}, vocab)
		if err != nil {
			t.Fatal(err)
		}
		if c.Tokens() != int64(len(tokens)) {
			t.Fatalf("%d tokens, want %d", c.Tokens(), len(tokens))
		}
		for range 50 {
			g, position := r.Int64N(1<<40), r.Int64N(sequence+1)
			stride := 1 + r.IntN(3)
			n := int(1 + r.Int64N(sequence+1-position))
			out := make([]int32, (n-1)*stride+1+r.IntN(stride))
			if err := c.Training(g).Tokens(position, out, stride); err != nil {
				t.Fatal(err)
			}
			for i := range n {
				want := tokens[(uint64(g)%uint64(len(tokens))*uint64(sequence)+uint64(position)+uint64(i))%uint64(len(tokens))]
				if out[i*stride] != want {
					t.Fatalf("token %d of sequence %d is %d, want %d", position+int64(i), g, out[i*stride], want)
				}
			}
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}

// With shuffling, an epoch uses every window once; other epochs and seeds use other orders.
func TestShuffled(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 30 {
		train, sequence := 2+r.Int64N(5000), 1+r.Int64N(40)
		windows := (train - 1) / sequence
		if windows < 20 {
			continue
		}
		orders := map[string]bool{}
		for seed := range int64(3) {
			c := Corpus{order: Order{Sequence: sequence, Seed: seed}, parts: []part{{stream: stream{[]file{{name: "a", count: train}}}}}}
			if err := c.divide(0, true); err != nil {
				t.Fatal(err)
			}
			for epoch := range int64(3) {
				seen := map[int64]bool{}
				var order strings.Builder
				for i := range windows {
					start := c.parts[0].start(epoch*windows+i, sequence)
					if start%sequence != 0 || start+sequence+1 > train || seen[start] {
						t.Fatalf("window %d of epoch %d starts at token %d of %d", i, epoch, start, train)
					}
					seen[start] = true
					fmt.Fprintln(&order, start)
				}
				orders[order.String()] = true
			}
		}
		if len(orders) != 9 {
			t.Errorf("%d orders of %d windows by 3 seeds in 3 epochs", len(orders), windows)
		}
	}
}

// A shuffle shows no trace of the original order.
func TestShuffleIsEven(t *testing.T) {
	const n = 10000
	ascending, sum := 0, 0.0
	for i := range int64(n - 1) {
		a, b := permute(i, n, 7), permute(i+1, n, 7)
		if a < b {
			ascending++
		}
		sum += math.Abs(float64(a - b))
	}
	// For a random permutation, half of the neighbours ascend (standard deviation 29), and their average
	// distance is n/3 (standard deviation 24).
	if ascending < n/2-150 || ascending > n/2+150 || math.Abs(sum/n-n/3.) > 120 {
		t.Errorf("%d neighbours ascend, at a distance of %.0f", ascending, sum/n)
	}
}

// After any number of sequences of a mixture, each part has had its share of them, give or take the number of
// parts, and has used its own sequences in order, without gaps.
func TestMixture(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for range 200 {
		weights := make([]float64, 1+r.IntN(6))
		total := 0.0
		for i := range weights {
			weights[i] = math.Exp(3 * r.NormFloat64())
			total += weights[i]
		}
		c := Corpus{parts: make([]part, len(weights)), picks: deal(weights)}
		counts := make([]int64, len(weights))
		for g := range int64(3000) {
			i, own := c.pick(g)
			if own != counts[i] || c.count(i, g) != counts[i] {
				t.Fatalf("weights %v: sequence %d is number %d of part %d, which has had %d", weights, g, own, i, counts[i])
			}
			counts[i]++
			for j, n := range counts {
				if diff := float64(n) - float64(g+1)*weights[j]/total; math.Abs(diff) > float64(len(weights)) {
					t.Fatalf("weights %v: after %d sequences part %d has had %d", weights, g+1, j, n)
				}
			}
		}
	}
}

// Each part of a mixture yields the same sequences as it would without the other parts.
func TestMixtureOfFiles(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	names, _, kind := patternsOf(t, r, 3)
	for _, shuffle := range []bool{false, true} {
		o, order := Options{Type: kind, Header: "auto", Shuffle: shuffle, Weights: []float64{1, 2, 0.5}}, Order{Sequence: 4, Seed: 9}
		c, err := Open(names, o, order, vocab)
		if err != nil {
			t.Fatal(err)
		}
		for g := range int64(200) {
			part, own := c.pick(g)
			got, want := make([]int32, 5), make([]int32, 5)
			if err := c.Training(g).Tokens(0, got, 1); err != nil {
				t.Fatal(err)
			}
			p := &c.parts[part]
			if err := p.read(p.start(own, 4), 0, 0, p.train, want, 1); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Fatal(diff)
			}
		}
	}
}

// Held-out tokens are never trained on, and the validation windows extend from the first held-out token to the
// last.
func TestHeldOut(t *testing.T) {
	ids := make([]int32, 1000)
	for i := range ids {
		ids[i] = int32(i)
	}
	name := put(t, t.TempDir(), "a.bin", packed(2, ids))
	for _, shuffle := range []bool{false, true} {
		c, err := Open([][]string{{name}}, Options{Type: "uint16", Header: "auto", Shuffle: shuffle}, Order{Sequence: 9, Holdout: 0.1, Held: 4}, 1000)
		if err != nil {
			t.Fatal(err)
		}
		out := make([]int32, 10)
		for g := range int64(300) {
			if err := c.Training(g).Tokens(0, out, 1); err != nil || slices.Max(out) >= 900 {
				t.Fatal(err, out)
			}
		}
		var starts []int32
		for w := range int64(4) {
			s, err := c.Validation(w)
			if err = errors.Join(err, s.Tokens(0, out, 1)); err != nil {
				t.Fatal(err)
			}
			starts = append(starts, out[0])
		}
		if diff := cmp.Diff([]int32{900, 930, 960, 990}, starts); diff != "" {
			t.Error(diff)
		}
		if _, err := c.Validation(4); err == nil {
			t.Error("window 4 of 4")
		}
	}
}

// Invalid input causes an error that names the file and the place in it.
func TestErrors(t *testing.T) {
	dir := t.TempDir()
	ids := make([]int32, 100)
	ids[70] = 500
	flat := put(t, dir, "flat.bin", packed(2, ids))
	odd := put(t, dir, "odd.bin", make([]byte, 101))
	empty := put(t, dir, "empty.bin", nil)
	head := binary.LittleEndian.AppendUint32(nil, 20240520)
	short := put(t, dir, "short.bin", append(head, make([]byte, 2000)...))
	text := put(t, dir, "some.jsonl", []byte(`{"text":"a"}`))
	folder := filepath.Dir(put(t, dir, "sub/x.bin", packed(2, ids)))
	broken := filepath.Dir(put(t, dir, "broken/manifest.json", []byte(`{"format":"sppo tokens 1","type":"uint16","tokens":5,"shards":[{"name":"../x","tokens":5}]}`)))
	missing := filepath.Dir(put(t, dir, "missing/manifest.json", []byte(`{"format":"sppo tokens 1","type":"uint16","tokens":5,"highest":1,"shards":[{"name":"x","tokens":5}]}`)))
	high := filepath.Dir(put(t, dir, "high/manifest.json", []byte(`{"format":"sppo tokens 1","type":"uint32","tokens":5,"highest":70000,"shards":[{"name":"x","tokens":5,"highest":70000}]}`)))
	put(t, dir, "mega.idx", megatronIndex(8, 2, []int32{60, 41}))
	mega := put(t, dir, "mega.bin", packed(2, ids))
	for _, c := range []struct {
		name, want string
		options    Options
	}{
		{odd, "odd.bin: 101 bytes of tokens, which is not a multiple of 2", Options{}},
		{empty, "it contains no tokens", Options{}},
		{flat, "100 tokens to train on (0 held out) are fewer than the 201", Options{}},
		{flat, "does not begin with an llm.c header", Options{Header: "llmc"}},
		{short, "its header, at byte 8, says 0 tokens of 2 bytes, but 980 bytes follow it", Options{Header: "llmc"}},
		{text, "set tokenizer = ..., or tokenize it first", Options{}},
		{folder, "is a folder without manifest.json: append /**", Options{}},
		{broken, `shards[0]: "../x" is not the name of a file`, Options{}},
		{missing, "x.bin: no such file", Options{}},
		{high, "it contains token 70000, but the vocabulary has 60000", Options{}},
		{mega, "mega.idx: at byte 18: 101 tokens of 2 bytes, but", Options{Header: "auto"}},
		{flat, "2 weights for 1 patterns", Options{Weights: []float64{1, 2}}},
	} {
		_, err := Open([][]string{{c.name}}, c.options, Order{Sequence: 200}, vocab)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %s", c.name, err, c.want)
		}
	}
	c, err := Open([][]string{{flat}}, Options{}, Order{Sequence: 50}, 300)
	if err != nil {
		t.Fatal(err)
	}
	out := make([]int32, 51)
	if err := c.Training(0).Tokens(0, out, 1); err != nil {
		t.Error(err)
	}
	err = c.Training(1).Tokens(0, out, 1)
	if want := flat + ": token 70 at byte 140 is 500, but the vocabulary has 300"; err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
	if err := os.Truncate(flat, 100); err != nil {
		t.Fatal(err)
	}
	if err := c.Training(1).Tokens(0, out, 1); err == nil || !strings.Contains(err.Error(), "flat.bin: reading 100 bytes at byte 100: the file has become shorter") {
		t.Error(err)
	}
}

// Changing a byte of an index either causes an error or leaves the tokens as they were.
func TestMegatronIndexChanged(t *testing.T) {
	dir := t.TempDir()
	index := megatronIndex(8, 2, []int32{3, 0, 5})
	name := put(t, dir, "a.bin", packed(2, []int32{1, 2, 3, 4, 5, 6, 7, 8}))
	for i := range index {
		for _, by := range []byte{1, 0x80, 0xff} {
			changed := slices.Clone(index)
			changed[i] ^= by
			put(t, dir, "a.idx", changed)
			c, err := Open([][]string{{name}}, Options{Header: "auto"}, Order{Sequence: 7}, 9)
			if err != nil {
				if !strings.Contains(err.Error(), "a.idx: at byte") {
					t.Errorf("byte %d: %v", i, err)
				}
				continue
			}
			out := make([]int32, 8)
			if err := c.Training(0).Tokens(0, out, 1); err != nil || !slices.Equal(out, []int32{1, 2, 3, 4, 5, 6, 7, 8}) {
				t.Errorf("byte %d changed by %#x: %v, %v", i, by, out, err)
			}
			c.Close()
		}
	}
}

// The error for a changed file names the file and the place of the change. A file with another name counts as
// different data, which is not an error.
func TestUnchanged(t *testing.T) {
	dir := t.TempDir()
	ids := make([]int32, 200000)
	name := put(t, dir, "a.bin", packed(2, ids))
	reopen := func() *Corpus {
		t.Helper()
		c, err := Open([][]string{{name}}, Options{Type: "uint16"}, Order{Sequence: 10}, vocab)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	first := reopen()
	before := first.Fingerprints()
	if err := reopen().Unchanged(before); err != nil {
		t.Error(err)
	}
	ids[199999] = 5
	put(t, dir, "a.bin", packed(2, ids))
	if err := reopen().Unchanged(before); err == nil || !strings.Contains(err.Error(), "a.bin changed since the checkpoint: bytes 395904 to 400000 differ") {
		t.Error(err)
	}
	if reopen().Describe() == first.Describe() {
		t.Error("a changed file is described alike")
	}
	put(t, dir, "a.bin", packed(2, ids[:199999]))
	if err := reopen().Unchanged(before); err == nil || !strings.Contains(err.Error(), "it has 199999 tokens in 399998 bytes, but had 200000 in 400000") {
		t.Error(err)
	}
	name = put(t, dir, "b.bin", packed(2, ids))
	if err := reopen().Unchanged(before); err != nil {
		t.Error(err)
	}
}

// Memory does not grow with the size of the file.
func TestLargeFile(t *testing.T) {
	name := put(t, t.TempDir(), "large.bin", nil)
	if err := os.Truncate(name, 1<<36); err != nil {
		t.Skip("no sparse files here: ", err)
	}
	c, err := Open([][]string{{name}}, Options{Type: "uint16", Shuffle: true}, Order{Sequence: 1 << 16, Holdout: 0.001, Held: 8}, vocab)
	if err != nil {
		t.Fatal(err)
	}
	out := make([]int32, 1<<16+1)
	read := func(g int64) {
		if err := c.Training(g).Tokens(0, out, 1); err != nil {
			t.Fatal(err)
		}
	}
	read(0)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for g := range int64(200) {
		read(g * 1000)
	}
	runtime.ReadMemStats(&after)
	if grown := after.TotalAlloc - before.TotalAlloc; grown > 4<<20 {
		t.Errorf("200 sequences allocate %d bytes", grown)
	}
	c.Close()
}

// Text and jsonl are tokenized when they are opened.
func TestLive(t *testing.T) {
	dir := t.TempDir()
	tok := filepath.Join("..", "tokenizer", "testdata", "reference", "gpt2.json")
	line := put(t, dir, "a.jsonl", []byte("{\"text\":\"the word\"}\n\n{\"other\":1,\"text\":\"of \\u00e9\"}"))
	plain := put(t, dir, "b.txt", []byte("the word"))
	read := func(name string, o Options) ([]int32, error) {
		o.Tokenizer = tok
		c, err := Open([][]string{{name}}, o, Order{Sequence: 1}, 1000)
		if err != nil {
			return nil, err
		}
		out := make([]int32, c.Tokens())
		return out, c.parts[0].read(0, 0, 0, c.Tokens(), out, 1)
	}
	a, err := read(line, Options{Field: "text"})
	if err != nil {
		t.Fatal(err)
	}
	b, err := read(plain, Options{})
	if err != nil || !slices.Equal(a[:len(b)], b) || len(a) <= len(b) {
		t.Errorf("jsonl gives %v, text %v, %v", a, b, err)
	}
	for _, c := range []struct {
		text, field, want string
	}{
		{"{\"text\":\"a\"}\n{\"text\":3}", "text", `a.jsonl: line 2, at byte 13: field "text" is not a string`},
		{"{\"text\":\"a\"}\n[1]", "text", `line 2, at byte 13: it is not a JSON object`},
		{"{\"text\":\"a\"}", "body", `line 1, at byte 0: the object has no field "body"`},
	} {
		put(t, dir, "a.jsonl", []byte(c.text))
		if _, err := read(line, Options{Field: c.field}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: %v, want %s", c.text, err, c.want)
		}
	}
	if _, err := read(plain, Options{AppendEOS: true}); err == nil || !strings.Contains(err.Error(), "does not name the end-of-sequence token") {
		t.Error(err)
	}
}

// FuzzOpen checks that hostile files are either read or refused, without a panic and without running out of
// memory.
func FuzzOpen(f *testing.F) {
	f.Add([]byte("abcdefgh"), megatronIndex(8, 2, []int32{1, 3}), []byte(`{"format":"sppo tokens 1","type":"uint16","tokens":4,"shards":[{"name":"a","tokens":4}]}`))
	f.Add(append(binary.LittleEndian.AppendUint32(nil, 20240801), make([]byte, 1028)...), []byte(megatronMagic), []byte(`{}`))
	f.Fuzz(func(t *testing.T, data, index, manifest []byte) {
		dir := t.TempDir()
		name := put(t, dir, "a.bin", data)
		put(t, dir, "a.idx", index)
		put(t, dir, ManifestName, manifest)
		for _, open := range []string{name, dir} {
			for _, header := range []string{"auto", "none", "llmc"} {
				c, err := Open([][]string{{open}}, Options{Header: header, Shuffle: true}, Order{Sequence: 2}, 1<<31-1)
				if err != nil {
					continue
				}
				out := make([]int32, 3)
				_ = c.Training(12345).Tokens(0, out, 1)
				c.Close()
			}
		}
	})
}

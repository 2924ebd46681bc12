package corpus

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// documents holds a file's tokens by document, and the mask of all tokens.
type documents struct {
	list [][]int32
	mask []byte
}

func drawDocuments(r *rand.Rand, n, longest int) (d documents) {
	for range n {
		var ids []int32
		for range 1 + r.IntN(longest) {
			ids = append(ids, int32(1+r.IntN(400)))
			d.mask = append(d.mask, byte(r.IntN(2)))
		}
		ids[len(ids)-1] = 0 // ends the document if Documents is "0"
		d.list = append(d.list, ids)
	}
	return d
}

// write writes documents in a format that records their boundaries.
func (d documents) write(t *testing.T, r *rand.Rand, dir, name string, megatron bool) string {
	t.Helper()
	ids := slices.Concat(d.list...)
	if megatron {
		var lengths []int32
		for _, x := range d.list {
			lengths = append(lengths, int32(len(x)))
		}
		put(t, dir, name+".idx", megatronIndex(8, 2, lengths))
		return put(t, dir, name+".bin", packed(2, ids))
	}
	var idx []byte
	for _, x := range d.list {
		idx = binary.LittleEndian.AppendUint64(idx, uint64(len(x)))
	}
	m := Manifest{Type: "uint16", Tokens: int64(len(ids)), Documents: int64(len(d.list)), Highest: 499, EOS: -1, Masks: true,
		Shards: []Shard{{Name: "a", Tokens: int64(len(ids)), Documents: int64(len(d.list)), Highest: 499}}}
	put(t, dir, filepath.Join(name, "a.bin"), packed(2, ids))
	put(t, dir, filepath.Join(name, "a.idx"), idx)
	put(t, dir, filepath.Join(name, "a.mask"), d.mask)
	if err := m.Write(filepath.Join(dir, name)); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, name)
}

// place is a token of the corpus: its ID, the number of its document, and whether its label counts.
type place struct {
	id       int32
	document int
	counts   bool
}

// sequences returns the sequences of a corpus that is not shuffled, computed directly from the definition. Each
// has S+1 places; those after the last document have document -1.
func sequences(all []place, sequence, n int, whole bool) (out [][]place) {
	padding := place{document: -1}
	if !whole {
		for g := range n {
			var s []place
			for i := range sequence + 1 {
				at := g*sequence + i
				p := all[at%len(all)]
				p.document += at / len(all) * 1_000_000 // a new round of the ring begins a new document
				s = append(s, p)
			}
			out = append(out, s)
		}
		return out
	}
	var packs [][]place
	for first := 0; first < len(all); {
		end := first
		for end < len(all) { // add documents while they fit
			next := end
			for next < len(all) && all[next].document == all[end].document {
				next++
			}
			if next-first > sequence {
				break
			}
			end = next
		}
		last := end
		if end == first { // not even the first document fits
			end = first + sequence
			last = end + 1 // the last label, since the document continues
		}
		s := slices.Clone(all[first:last])
		for len(s) < sequence+1 {
			s = append(s, padding)
		}
		packs = append(packs, s)
		first = end
	}
	for g := range n {
		out = append(out, packs[g%len(packs)])
	}
	return out
}

// TestSequencesOfDocuments compares positions, labels and the number of labels that count with the definitions,
// for documents of random lengths in files of several formats, read in pieces.
func TestSequencesOfDocuments(t *testing.T) {
	for seed := range uint64(120) {
		r := rand.New(rand.NewPCG(seed, 5))
		dir, sequence := t.TempDir(), 1+r.IntN(40)
		whole, byToken, masked, megatron := r.IntN(2) == 0, r.IntN(3) == 0, r.IntN(2) == 0, r.IntN(2) == 0
		o := Options{Type: "auto", Header: "auto", Documents: "index", Pack: "cut", Masks: "ignore"}
		if whole {
			o.Pack = "whole"
		}
		if byToken {
			o.Documents = "0"
		}
		if masked && !megatron {
			o.Masks = "on"
		}
		var files []string
		var all []place
		number := 0
		for i := range 1 + r.IntN(3) {
			d := drawDocuments(r, 1+r.IntN(300), 1+r.IntN(2*sequence+1))
			at := 0
			for _, ids := range d.list {
				for _, id := range ids {
					all = append(all, place{id, number, o.Masks != "on" || d.mask[at] == 1})
					at++
				}
				number++
			}
			files = append(files, d.write(t, r, dir, fmt.Sprint(i), megatron))
		}
		if len(all) < sequence+1 {
			continue
		}
		c, err := Open([][]string{files}, o, Order{Sequence: int64(sequence)}, 500)
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		for g, want := range sequences(all, sequence, 12, whole) {
			checkSequence(t, fmt.Sprintf("seed %d, %+v, sequence %d", seed, o, g), r, c, int64(g), want)
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func checkSequence(t *testing.T, what string, r *rand.Rand, c *Corpus, g int64, want []place) {
	t.Helper()
	n := len(want)
	positions, labels, counted := make([]int32, n), make([]int32, n), int64(0)
	for i, p := range want {
		goesOn := i > 0 && p.document >= 0 && p.document == want[i-1].document
		labels[i] = -7
		if goesOn {
			positions[i] = positions[i-1] + 1
		}
		if goesOn && p.counts {
			labels[i] = p.id
			counted++
		}
	}
	s := c.Training(g)
	if got, err := s.Counted(); err != nil || got != counted {
		t.Fatalf("%s: %d labels count, want %d (%v)", what, got, counted, err)
	}
	for _, window := range []int64{0, 1, 1 + r.Int64N(int64(n))} {
		pairs := int64(0)
		for _, p := range positions[:n-1] { // the last is only a label
			if pairs += int64(p) + 1; window > 0 {
				pairs -= max(0, int64(p)+1-window)
			}
		}
		if got, err := s.Pairs(window); err != nil || got != pairs {
			t.Fatalf("%s: %d pairs with window %d, want %d (%v)", what, got, window, pairs, err)
		}
	}
	first := r.IntN(n)
	end, stride := first+1+r.IntN(n-first), 1+r.IntN(3)
	for name, read := range map[string]func(out []int32) error{
		"positions": func(out []int32) error { return s.Positions(int64(first), out, stride) },
		"labels":    func(out []int32) error { return s.Labels(int64(first), out, stride, -7) },
	} {
		out := make([]int32, (end-first-1)*stride+1)
		if err := read(out); err != nil {
			t.Fatalf("%s: %s: %v", what, name, err)
		}
		of := map[string][]int32{"positions": positions, "labels": labels}[name]
		for i := first; i < end; i++ {
			if got := out[(i-first)*stride]; got != of[i] {
				t.Fatalf("%s: %s %d to %d: number %d is %d, want %d of %v", what, name, first, end, i, got, of[i], of)
			}
		}
	}
}

// TestShuffledPacks checks that each sequence of whole documents occurs once per epoch.
func TestShuffledPacks(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 3))
	d, dir := drawDocuments(r, 200, 30), t.TempDir()
	name := d.write(t, r, dir, "a", false)
	o := Options{Type: "auto", Header: "auto", Documents: "index", Pack: "whole", Masks: "ignore", Shuffle: true}
	c, err := Open([][]string{{name}}, o, Order{Sequence: 40, Seed: 1, Holdout: 0.2, Held: 3}, 500)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	packs := c.parts[0].packs.count()
	for epoch := range int64(2) {
		seen := map[int64]bool{}
		for g := range packs {
			seen[c.train(epoch*packs+g).start] = true
		}
		if int64(len(seen)) != packs {
			t.Errorf("epoch %d has %d of %d sequences", epoch, len(seen), packs)
		}
	}
	for g := range int64(3) {
		if w, err := c.held(g); err != nil || w.base != c.parts[0].train || w.start+w.length > w.size+1 {
			t.Errorf("validation %d is %+v, %v", g, w, err)
		}
	}
}

// TestBadDocuments checks the errors for options that do not fit the files, and for invalid indexes and masks.
func TestBadDocuments(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 4))
	open := func(spoil func(dir string), o Options) error {
		dir := t.TempDir()
		name := drawDocuments(r, 20, 9).write(t, r, dir, "a", false)
		spoil(name)
		o.Type, o.Header = "auto", "auto"
		c, err := Open([][]string{{name}}, o, Order{Sequence: 4}, 500)
		if err == nil {
			_, err = c.Training(0).Counted()
			c.Close()
		}
		return err
	}
	nothing := func(string) {}
	plain := put(t, t.TempDir(), "b.bin", packed(2, make([]int32, 100)))
	for _, c := range []struct {
		spoil func(dir string)
		o     Options
		want  string
	}{
		{nothing, Options{Documents: "index"}, "it has masks: set masks = on"},
		{nothing, Options{Documents: "500", Masks: "on"}, "documents = 500 is not a token in a vocabulary of 500"},
		{func(dir string) { put(t, dir, "a.idx", make([]byte, 12)) }, Options{Documents: "index", Masks: "on"}, "a.idx: it has 12 bytes, but the manifest says 20 documents"},
		{func(dir string) { put(t, dir, "a.idx", make([]byte, 160)) }, Options{Documents: "index", Masks: "on"}, "a.idx: its documents have 0 tokens in total"},
		{func(dir string) { put(t, dir, "a.idx", slices.Repeat([]byte{255}, 160)) }, Options{Documents: "index", Masks: "on"}, "a.idx: at byte 0: document 0 has"},
		{func(dir string) { put(t, dir, "a.mask", make([]byte, 3)) }, Options{Documents: "index", Masks: "on"}, "a.mask: it has 3 bytes for"},
	} {
		if err := open(c.spoil, c.o); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want %s", err, c.want)
		}
	}
	_, err := Open([][]string{{plain}}, Options{Type: "auto", Header: "auto", Documents: "index"}, Order{Sequence: 4}, 500)
	if err == nil || !strings.Contains(err.Error(), "b.bin: it has no index of documents") {
		t.Error(err)
	}
}

// TestChangedMarks checks that the error names an index or a mask that has changed since its fingerprint was
// taken.
func TestChangedMarks(t *testing.T) {
	r := rand.New(rand.NewPCG(8, 8))
	d, dir := drawDocuments(r, 50, 9), t.TempDir()
	name := d.write(t, r, dir, "a", false)
	open := func() *Corpus {
		t.Helper()
		o := Options{Type: "auto", Header: "auto", Documents: "index", Masks: "on"}
		c, err := Open([][]string{{name}}, o, Order{Sequence: 4}, 500)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	before := open().Fingerprints()
	if err := open().Unchanged(before); err != nil {
		t.Error(err)
	}
	d.mask[7] ^= 1
	put(t, name, "a.mask", d.mask)
	if err := open().Unchanged(before); err == nil || !strings.Contains(err.Error(), "a.mask changed since the checkpoint: bytes 0 to") {
		t.Error(err)
	}
	d.mask[7] ^= 1
	slices.Reverse(d.list) // the same lengths in another order
	var idx []byte
	for _, x := range d.list {
		idx = binary.LittleEndian.AppendUint64(idx, uint64(len(x)))
	}
	put(t, name, "a.mask", d.mask)
	put(t, name, "a.idx", idx)
	if err := open().Unchanged(before); err == nil || !strings.Contains(err.Error(), "a.idx changed since the checkpoint: bytes 0 to 400") {
		t.Error(err)
	}
}

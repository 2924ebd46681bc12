package corpus

import (
	"errors"
	"fmt"
	"io"
	"sort"
	"strconv"
	"sync"
)

// window locates the tokens of a sequence in its part. The part's tokens base to base+size form a ring. The
// window begins at position `start` of the ring and has `length` tokens. Padding fills the rest of the sequence.
type window struct {
	part                      int
	start, base, size, length int64
}

// padding is the token that fills a sequence after its last document. Its label does not count.
const padding = 0

// train returns the window of sequence g.
func (c *Corpus) train(g int64) window {
	i, g := c.pick(g)
	p := &c.parts[i]
	if p.packs != nil {
		return c.pack(i, p.packs, p.turn(g, p.packs.count()), 0)
	}
	return window{part: i, start: p.start(g, c.order.Sequence), size: p.train, length: c.order.Sequence + 1}
}

// held returns the window of a validation sequence.
func (c *Corpus) held(g int64) (window, error) {
	if g < 0 || g >= c.order.Held {
		return window{}, fmt.Errorf("sequence %d of a validation that has %d", g, c.order.Held)
	}
	i, k := c.pick(g)
	p := &c.parts[i]
	n := c.count(i, c.order.Held)
	if p.heldPacks != nil {
		at := int64(0)
		if n > 1 {
			at = mulDiv(k, p.heldPacks.count()-1, n-1)
		}
		return c.pack(i, p.heldPacks, at, p.train), nil
	}
	w := window{part: i, base: p.train, size: p.tokens() - p.train, length: c.order.Sequence + 1}
	if n > 1 {
		w.start = mulDiv(k, w.size-c.order.Sequence-1, n-1)
	}
	return w, nil
}

// pack returns the window of pack i of a part.
func (c *Corpus) pack(part int, of *packs, i, base int64) window {
	w := window{part: part, start: of.starts[i], base: base, size: of.starts[of.count()]}
	w.length = of.starts[i+1] - w.start
	// A pack of full length includes the last label, because the document that is cut here may continue.
	if w.length == c.order.Sequence && w.start+w.length < w.size {
		w.length++
	}
	return w
}

// read puts tokens position, position+1, ... of a window into out[0], out[stride], ...
func (c *Corpus) read(w window, position int64, out []int32, stride int) error {
	n := int((int64(len(out)) + int64(stride) - 1) / int64(stride))
	there := int(min(int64(n), max(0, w.length-position)))
	for i := there; i < n; i++ {
		out[i*stride] = padding
	}
	if there == 0 {
		return nil
	}
	return c.parts[w.part].read(w.start, position, w.base, w.size, out[:(there-1)*stride+1], stride)
}

// Sequence is one sequence of a corpus with its documents and masks.
type Sequence struct {
	c *Corpus
	window
}

// Training returns sequence g of the training data.
func (c *Corpus) Training(g int64) Sequence { return Sequence{c, c.train(g)} }

// Validation returns sequence g of the validation data, whose sequences are spread evenly over the held-out tokens.
func (c *Corpus) Validation(g int64) (Sequence, error) {
	w, err := c.held(g)
	return Sequence{c, w}, err
}

// Tokens puts tokens position, position+1, ... of the sequence into out[0], out[stride], ...
func (s Sequence) Tokens(position int64, out []int32, stride int) error {
	return s.c.read(s.window, position, out, stride)
}

// Positions is like Tokens, but writes the position of each token in its document. The rest of a document that
// is cut restarts at 0 in the next sequence, and every padding token is a document of its own.
func (s Sequence) Positions(position int64, out []int32, stride int) error {
	starts, err := s.starts()
	if err != nil {
		return err
	}
	next := sort.Search(len(starts), func(i int) bool { return starts[i] > position })
	begin := int64(0)
	if next > 0 {
		begin = starts[next-1]
	}
	for i := 0; i < len(out); i += stride {
		if next < len(starts) && starts[next] == position {
			begin = position
			next++
		}
		out[i] = int32(position - begin)
		if position >= s.length {
			out[i] = 0
		}
		position++
	}
	return nil
}

// Labels is like Tokens, but writes the value none for the first token of each document in the sequence, for padding,
// and for tokens that the mask excludes.
func (s Sequence) Labels(position int64, out []int32, stride int, none int32) error {
	if err := s.Tokens(position, out, stride); err != nil {
		return err
	}
	starts, err := s.starts()
	if err != nil {
		return err
	}
	n := (len(out) + stride - 1) / stride
	counts, err := s.mask(position, n)
	if err != nil {
		return err
	}
	next := sort.Search(len(starts), func(i int) bool { return starts[i] >= position })
	for i := range n {
		at := position + int64(i)
		begins := at == 0 || next < len(starts) && starts[next] == at
		if begins && at > 0 {
			next++
		}
		if begins || at >= s.length || counts != nil && counts[i] == 0 {
			out[i*stride] = none
		}
	}
	return nil
}

// Counted returns the number of the sequence's labels that count.
func (s Sequence) Counted() (int64, error) {
	end := min(s.length-1, s.c.order.Sequence) // the last label
	starts, err := s.starts()
	if err != nil {
		return 0, err
	}
	begun := starts[:sort.Search(len(starts), func(i int) bool { return starts[i] > end })]
	if !s.c.masked {
		return end - int64(len(begun)), nil
	}
	var n int64
	const most = 1 << 16
	for at := int64(1); at <= end; at += most {
		counts, err := s.mask(at, int(min(most, end+1-at)))
		if err != nil {
			return 0, err
		}
		for i, yes := range counts {
			for len(begun) > 0 && begun[0] < at+int64(i) {
				begun = begun[1:]
			}
			if yes != 0 && (len(begun) == 0 || begun[0] != at+int64(i)) {
				n++
			}
		}
	}
	return n, nil
}

// Pairs returns the number of query-key pairs that attention inside the documents of the sequence computes. A query attends to as many
// tokens as a window has, including its own, or to all before it in its document if the window is 0.
func (s Sequence) Pairs(window int64) (pairs int64, err error) {
	starts, err := s.starts()
	if err != nil {
		return 0, err
	}
	end, begin := min(s.length, s.c.order.Sequence), int64(0)
	add := func(next int64) {
		n, full := next-begin, int64(0)
		if window > 0 && n > window { // after its first tokens, each attends to a full window
			n, full = window, n-window
		}
		pairs += n*(n+1)/2 + full*window
		begin = next
	}
	for _, start := range starts {
		if start < end {
			add(start)
		}
	}
	add(end)
	return pairs + s.c.order.Sequence - end, nil // each padding token is a document
}

// Ordered is a range of the tokens of the first part, as disjoint sequences in the order of its files.
type Ordered struct {
	c          *Corpus
	base, size int64
	packs      *packs // nil: documents are cut at the end of a sequence
}

// Ordered divides tokens base to base+size of the first part into sequences of the given length. With whole, a
// sequence holds whole documents.
func (c *Corpus) Ordered(base, size, sequence int64, whole bool) (o *Ordered, err error) {
	c.order.Sequence = sequence
	o = &Ordered{c: c, base: base, size: size}
	if whole {
		o.packs, err = c.parts[0].packsOf(base, size, sequence)
	}
	return o, err
}

// Count returns the number of sequences, and the number of tokens after the last one.
func (o *Ordered) Count() (sequences, rest int64) {
	if o.packs != nil {
		return o.packs.count(), 0
	}
	labelled, length := max(0, o.size-1), o.c.order.Sequence
	return labelled / length, labelled % length
}

// Sequence returns a sequence.
func (o *Ordered) Sequence(i int64) Sequence {
	if o.packs != nil {
		return Sequence{o.c, o.c.pack(0, o.packs, i, o.base)}
	}
	length := o.c.order.Sequence
	return Sequence{o.c, window{start: i * length, base: o.base, size: o.size, length: length + 1}}
}

// mask returns one value for each of n labels, from the given position on: 1 if the label counts, otherwise 0. It
// returns nil if the corpus uses no masks. Values after the last token are 0.
func (s Sequence) mask(position int64, n int) ([]byte, error) {
	if !s.c.masked {
		return nil, nil
	}
	out := make([]byte, n)
	there := out[:min(int64(n), max(0, s.length-position))]
	p := &s.c.parts[s.part]
	return out, p.runs(s.start, position, s.base, s.size, int64(len(there)), func(f *file, at, take int64) error {
		got := there[:take]
		there = there[take:]
		if err := f.maskProof.check(f.mask, at, int64(len(got))); err != nil {
			return err
		}
		if _, err := f.mask.ReadAt(got, at); err != nil {
			return fmt.Errorf("%s: its mask, %d bytes at byte %d: %w", f.name, take, at, err)
		}
		for i, b := range got {
			if b > 1 {
				return fmt.Errorf("%s: its mask has %d at byte %d, not 0 or 1", f.name, b, at+int64(i))
			}
		}
		return nil
	})
}

// startCache caches where the documents in a sequence start, because many ranks read a sequence piece by piece.
type startCache struct {
	sync.Mutex
	known map[window][]int64
}

// rememberedWindows is the maximum number of sequences in a cache.
const rememberedWindows = 256

// starts lists the tokens of the sequence at which a document starts, except the first token.
func (s Sequence) starts() ([]int64, error) {
	if !s.c.documents {
		return nil, nil
	}
	s.c.cache.Lock()
	defer s.c.cache.Unlock()
	if known, ok := s.c.cache.known[s.window]; ok {
		return known, nil
	}
	list, at := []int64{}, int64(0)
	err := s.c.parts[s.part].runs(s.start, 0, s.base, s.size, s.length, func(f *file, first, take int64) error {
		if at > 0 && first == 0 || at > 0 && f.start+first == s.base { // a file begins, or the ring restarts
			list = append(list, at)
		}
		err := f.borders.between(first, first+take-1, func(start int64) {
			if t := at + start - first; len(list) == 0 || list[len(list)-1] != t {
				list = append(list, t)
			}
		})
		at += take
		return err
	})
	if err != nil {
		return nil, err
	}
	if len(s.c.cache.known) >= rememberedWindows {
		s.c.cache.known = nil
	}
	if s.c.cache.known == nil {
		s.c.cache.known = map[window][]int64{}
	}
	s.c.cache.known[s.window] = list
	return list, nil
}

// packs is a list of runs of whole documents: pack i has the tokens from starts[i] to starts[i+1], which fit
// into a sequence.
type packs struct{ starts []int64 }

func (p *packs) count() int64 { return int64(len(p.starts) - 1) }

// packsOf packs the documents in tokens base to base+size, in order. A document begins a new pack if it does
// not fit into the current one. A document longer than a sequence is cut into sequences, and the remainder
// begins a new pack.
func (p *part) packsOf(base, size, sequence int64) (*packs, error) {
	out := &packs{starts: []int64{0}}
	begin, from := int64(0), int64(0) // start of the pack, start of the document
	document := func(end int64) {
		if end-begin > sequence && from > begin {
			out.starts = append(out.starts, from)
			begin = from
		}
		for end-begin > sequence {
			begin += sequence
			out.starts = append(out.starts, begin)
		}
		from = end
	}
	at := int64(0)
	err := p.runs(0, 0, base, size, size, func(f *file, first, take int64) error {
		if at > 0 && first == 0 {
			document(at)
		}
		err := f.borders.between(first, first+take-1, func(start int64) {
			if end := at + start - first; end > from {
				document(end)
			}
		})
		at += take
		return err
	})
	document(size)
	out.starts = append(out.starts, size)
	return out, err
}

// openDocuments finds the starts of documents and the labels that count, if the options require it.
func (r *reader) openDocuments(f *file) error {
	switch r.Documents {
	case "", "off":
	case "index":
		if f.borders == nil {
			return fmt.Errorf("%s: it has no index of documents: set documents to the ID of the token that ends a document", f.name)
		}
	default:
		id, err := strconv.ParseInt(r.Documents, 10, 32)
		if err != nil || id < 0 || id >= int64(r.vocab) {
			return fmt.Errorf("documents = %s is not a token in a vocabulary of %d", r.Documents, r.vocab)
		}
		if f.borders != nil {
			err = f.borders.Close()
		}
		if f.borders = (&byToken{f, int32(id)}); err != nil {
			return err
		}
	}
	if r.Masks == "on" && f.mask == nil {
		return fmt.Errorf("%s: masks = on, but it has no mask: sppoc tokenize writes one with --prompt or --segments", f.name)
	}
	return nil
}

// packParts packs the documents of all parts into sequences.
func (c *Corpus) packParts() error {
	for i := range c.parts {
		p := &c.parts[i]
		var err error
		if p.packs, err = p.packsOf(0, p.train, c.order.Sequence); err != nil {
			return err
		}
		if held := p.tokens() - p.train; held > 0 {
			if p.heldPacks, err = p.packsOf(p.train, held, c.order.Sequence); err != nil {
				return err
			}
		}
	}
	return nil
}

// close closes a token file with its index and mask.
func (f *file) close() error {
	var errs []error
	for _, x := range []any{f.data, f.borders, f.mask} {
		if closer, ok := x.(io.Closer); ok && closer != nil {
			errs = append(errs, closer.Close())
		}
	}
	return errors.Join(errs...)
}

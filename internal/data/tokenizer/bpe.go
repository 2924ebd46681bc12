package tokenizer

import "fmt"

// bpe is byte-pair encoding (Sennrich, Haddow and Birch, 2016): it merges the pair with the lowest rank until
// no pair can be merged.
type bpe struct {
	vocab    map[string]uint32 // keyed by text, or by bytes if level is set
	merges   map[uint64]merge  // by left<<32 | right
	bytes    [256]int64        // if level is set: the ID of each byte, or -1
	fallback [256]int64        // for byte_fallback: the IDs of <0x00> to <0xFF>, or -1
	unknown  int64             // -1: characters without an ID are dropped
	missing  string            // name of the unknown token if the vocabulary lacks it
	fuse     bool              // adjacent unknown characters become one token
	whole    bool              // a piece that is a token becomes that token, regardless of merges
	level    bool              // pieces are bytes, not characters
}

// merge is the result of merging a pair.
type merge struct{ rank, id uint32 }

func pair(a, b uint32) uint64 { return uint64(a)<<32 | uint64(b) }

// symbol is a part of a piece during merging. Size 0 marks a removed symbol.
type symbol struct {
	id         uint32
	prev, next int32
	size       int32
}

// candidate is a pair that may be merged: the symbol at pos and the one after it.
type candidate struct {
	rank, id uint32
	pos      int32
}

func (c candidate) before(d candidate) bool {
	return c.rank < d.rank || c.rank == d.rank && c.pos < d.pos
}

const (
	cachedBytes  = 256     // maximum length of a cached piece
	cachedPieces = 1 << 16 // maximum number of cached pieces per encoder
)

func (m *bpe) encode(e *encoder, ids []uint32, text string) []uint32 {
	if m.whole {
		if id, ok := m.vocab[text]; ok {
			return append(ids, id)
		}
	}
	if known, ok := e.cache[text]; ok {
		return append(ids, known...)
	}
	start := len(ids)
	e.symbols = e.symbols[:0]
	if m.level {
		m.cutBytes(e, text)
	} else {
		m.cutRunes(e, text)
	}
	m.mergeAll(e)
	for _, s := range e.symbols {
		if s.size > 0 {
			ids = append(ids, s.id)
		}
	}
	if len(text) < cachedBytes && len(e.cache) < cachedPieces {
		e.cache[string([]byte(text))] = append([]uint32(nil), ids[start:]...) // the key must not pin the whole text
	}
	return ids
}

// add appends a symbol of size bytes.
func (e *encoder) add(id int64, size int) {
	n := int32(len(e.symbols))
	e.symbols = append(e.symbols, symbol{uint32(id), n - 1, n + 1, int32(size)})
}

// cutBytes creates one symbol for each byte.
func (m *bpe) cutBytes(e *encoder, text string) {
	pending := false
	for i := range len(text) {
		id := m.bytes[text[i]]
		pending = m.start(e, id, 1, pending)
	}
	if pending {
		e.add(m.unknown, 1)
	}
}

// start adds a symbol. An unknown symbol is held back and added before the next known one, as in the reference.
func (m *bpe) start(e *encoder, id int64, size int, pending bool) bool {
	switch {
	case id >= 0:
		if pending {
			e.add(m.unknown, 1)
		}
		e.add(id, size)
		return false
	case m.unknown < 0:
		return pending
	case pending && !m.fuse:
		e.add(m.unknown, 1)
	}
	return true
}

// cutRunes creates one symbol for each character, or for each of its bytes if the vocabulary lacks the
// character.
func (m *bpe) cutRunes(e *encoder, text string) {
	pending := false
	for i, r := range text {
		end := i + runeLen(r)
		id, ok := m.vocab[text[i:end]]
		switch {
		case ok:
			pending = m.start(e, int64(id), end-i, pending)
		case m.fallen(text[i:end]):
			for j := i; j < end; j++ {
				e.add(m.fallback[text[j]], 1)
			}
		default:
			pending = m.start(e, -1, end-i, pending)
		}
	}
	if pending {
		e.add(m.unknown, 1)
	}
}

// fallen reports whether a character can fall back to bytes, that is, whether each of its bytes has a token.
func (m *bpe) fallen(s string) bool {
	for i := range len(s) {
		if m.fallback[s[i]] < 0 {
			return false
		}
	}
	return true
}

func runeLen(r rune) int {
	switch {
	case r < 0x80:
		return 1
	case r < 0x800:
		return 2
	case r < 0x10000:
		return 3
	}
	return 4
}

// mergeAll merges e.symbols by rank, and pairs of equal rank from left to right.
func (m *bpe) mergeAll(e *encoder) {
	all := e.symbols
	if len(all) == 0 {
		return
	}
	all[len(all)-1].next = -1
	e.queue = e.queue[:0]
	offer := func(pos int32) {
		if next := all[pos].next; next >= 0 {
			if x, ok := m.merges[pair(all[pos].id, all[next].id)]; ok {
				e.queue = push(e.queue, candidate{x.rank, x.id, pos})
			}
		}
	}
	for i := range all {
		offer(int32(i))
	}
	for len(e.queue) > 0 {
		var c candidate
		c, e.queue = pop(e.queue)
		left := &all[c.pos]
		if left.size == 0 || left.next < 0 {
			continue
		}
		right := &all[left.next]
		if x, ok := m.merges[pair(left.id, right.id)]; !ok || x.id != c.id {
			continue // one of the two symbols has been merged since
		}
		left.id, left.size, left.next = c.id, left.size+right.size, right.next
		right.size = 0
		if left.next >= 0 {
			all[left.next].prev = c.pos
		}
		if left.prev >= 0 {
			offer(left.prev)
		}
		offer(c.pos)
	}
}

// push and pop maintain a binary heap with the first candidate at the front.
func push(h []candidate, c candidate) []candidate {
	h = append(h, c)
	i := len(h) - 1
	for i > 0 {
		up := (i - 1) / 2
		if !c.before(h[up]) {
			break
		}
		h[i] = h[up]
		i = up
	}
	h[i] = c
	return h
}

func pop(h []candidate) (candidate, []candidate) {
	top, last := h[0], h[len(h)-1]
	h = h[:len(h)-1]
	if len(h) == 0 {
		return top, h
	}
	i := 0
	for {
		down := 2*i + 1
		if down >= len(h) {
			break
		}
		if down+1 < len(h) && h[down+1].before(h[down]) {
			down++
		}
		if !h[down].before(last) {
			break
		}
		h[i] = h[down]
		i = down
	}
	h[i] = last
	return top, h
}

// newBPE returns a model, or an error unless the vocabulary has both tokens of every merge and their result.
func newBPE(vocab map[string]uint32, merges [][2]string) (*bpe, error) {
	m := &bpe{vocab: vocab, merges: make(map[uint64]merge, len(merges)), unknown: -1}
	for i := range m.bytes {
		m.bytes[i], m.fallback[i] = -1, -1
	}
	for rank, x := range merges {
		var ids [3]uint32
		for i, token := range []string{x[0], x[1], x[0] + x[1]} {
			id, ok := vocab[token]
			if !ok {
				return nil, fmt.Errorf("merges[%d] joins %.40q and %.40q, but the vocabulary has no %.80q", rank, x[0], x[1], token)
			}
			ids[i] = id
		}
		m.merges[pair(ids[0], ids[1])] = merge{uint32(rank), ids[2]}
	}
	return m, nil
}

// byteLevel makes the model use bytes: the vocabulary is then keyed by the bytes that its names represent.
func (m *bpe) byteLevel() {
	raw := make(map[string]uint32, len(m.vocab))
	for name, id := range m.vocab {
		if bytes, ok := unmapBytes(name); ok {
			raw[bytes] = id
			if len(bytes) == 1 {
				m.bytes[bytes[0]] = int64(id)
			}
		}
	}
	m.vocab, m.level = raw, true
}

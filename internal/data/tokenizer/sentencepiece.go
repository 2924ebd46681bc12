package tokenizer

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
)

// SentencePiece models are ModelProto messages of sentencepiece_model.proto in github.com/google/sentencepiece.
// Only the fields below are used.

// pieceType is ModelProto.SentencePiece.Type.
type pieceType uint64

const (
	pieceNormal pieceType = iota + 1
	pieceUnknown
	pieceControl
	pieceUser
	pieceUnused
	pieceByte
)

// spPiece is ModelProto.SentencePiece.
type spPiece struct {
	text  string
	score float32
	kind  pieceType
}

// spFile is ModelProto, with the defaults of the format.
type spFile struct {
	pieces        []spPiece
	kind          uint64 // 2: BPE
	fallback      bool
	suffix        bool // whitespace is a suffix
	eos           int64
	surface       string // decoded text of an unknown token
	unknown       string // its name
	normalization string
	charsMap      bool // has precompiled normalization rules
	prefix        bool // add a space in front of the text
	squeeze       bool // remove spaces at both ends and repeated spaces inside
	escape        bool // U+2581 for spaces
}

// spModel is SentencePiece's BPE: it merges the adjacent symbols whose joined text is the piece with the highest score.
type spModel struct {
	pieces   map[string]uint32 // pieces that merging can create
	scores   []float32
	reserved map[string]uint32
	user     matcher // pieces that are found in the text first and never merged
	fallback *[256]uint32
	unknown  uint32
}

const space = "\u2581" // LOWER ONE EIGHTH BLOCK, which represents a space

// ReadSentencePiece reads a SentencePiece model of type BPE.
func ReadSentencePiece(data []byte) (*Tokenizer, error) {
	f := spFile{kind: 1, eos: 2, surface: " \u2047 ", prefix: true, squeeze: true, escape: true}
	if err := fields(data, "the file", f.field); err != nil {
		return nil, err
	}
	switch {
	case len(f.pieces) == 0:
		return nil, errors.New("it is neither a tokenizer.json nor a SentencePiece model: no pieces")
	case f.kind != 2:
		return nil, fmt.Errorf("SentencePiece models of type %d are not supported; only BPE (2) is", f.kind)
	case f.charsMap:
		return nil, fmt.Errorf("SentencePiece models with normalization %.40q are not supported; only identity is", f.normalization)
	case f.suffix:
		return nil, errors.New("SentencePiece models that treat whitespace as a suffix are not supported")
	case len(f.pieces) > maxID:
		return nil, fmt.Errorf("the SentencePiece model has %d pieces; the limit is %d", len(f.pieces), maxID)
	}
	t := &Tokenizer{tokens: map[string]uint32{}, names: map[uint32]string{}, eos: -1, size: len(f.pieces), hash: hashOf(data)}
	t.added.special, t.added.decoded = map[string]bool{}, map[uint32]string{}
	m, err := t.pieceTable(&f)
	if err != nil {
		return nil, err
	}
	if f.eos >= 0 && f.eos < int64(len(f.pieces)) && f.pieces[f.eos].kind == pieceControl {
		t.eos = f.eos
	}
	t.model = m
	t.normalize = []normalizer{{func(_ *encoder, s string) (string, error) { return f.normalize(s), nil }, f.cross}}
	t.decode = []decoder{func(tokens []string) []string { return f.decode(tokens, t.added.special) }}
	return t, nil
}

// pieceTable fills the vocabulary and creates the model.
func (t *Tokenizer) pieceTable(f *spFile) (*spModel, error) {
	m := &spModel{pieces: map[string]uint32{}, reserved: map[string]uint32{}}
	var bytes [256]uint32
	seen := map[byte]bool{}
	unknowns := 0
	for i, p := range f.pieces {
		id := uint32(i)
		if _, ok := t.tokens[p.text]; ok || p.text == "" {
			return nil, fmt.Errorf("piece %d is %.40q, which is empty or a duplicate", i, p.text)
		}
		t.tokens[p.text], t.names[id] = id, p.text
		m.scores = append(m.scores, p.score)
		switch p.kind {
		case pieceNormal, pieceUser:
			m.pieces[p.text] = id
			if p.kind == pieceUser {
				m.user.add(p.text, addedToken{ID: id})
			}
			continue
		case pieceUnused:
			return nil, fmt.Errorf("piece %d, %.40q: pieces of type unused are not supported", i, p.text)
		case pieceUnknown:
			m.unknown, f.unknown = id, p.text
			unknowns++
		case pieceControl:
			t.added.special[p.text] = true
		case pieceByte:
			b, ok := fallbackByte(p.text)
			if !ok {
				return nil, fmt.Errorf("piece %d, %.40q: names of bytes are <0x00> to <0xFF>", i, p.text)
			}
			bytes[b], seen[b] = id, true
		default:
			return nil, fmt.Errorf("piece %d has type %d, which is not defined", i, p.kind)
		}
		m.reserved[p.text] = id
	}
	switch {
	case unknowns != 1:
		return nil, fmt.Errorf("the model has %d pieces of type unknown, but needs one", unknowns)
	case f.fallback && len(seen) != 256:
		return nil, fmt.Errorf("the model falls back to bytes, but has pieces for only %d of 256", len(seen))
	case f.fallback:
		m.fallback = &bytes
	}
	return m, nil
}

// fields calls f for each field of a message. f gets a number for varint and fixed32 fields, bytes for the others.
func fields(data []byte, where string, f func(field protowire.Number, n uint64, b []byte) error) error {
	for len(data) > 0 {
		field, kind, size := protowire.ConsumeTag(data)
		if size < 0 {
			return fmt.Errorf("%s is malformed for a SentencePiece model", where)
		}
		data = data[size:]
		var n uint64
		var b []byte
		switch kind {
		case protowire.VarintType:
			n, size = protowire.ConsumeVarint(data)
		case protowire.Fixed32Type:
			var x uint32
			x, size = protowire.ConsumeFixed32(data)
			n = uint64(x)
		case protowire.BytesType:
			b, size = protowire.ConsumeBytes(data)
		default:
			size = protowire.ConsumeFieldValue(field, kind, data)
		}
		if size < 0 {
			return fmt.Errorf("%s is malformed for a SentencePiece model", where)
		}
		data = data[size:]
		if err := f(field, n, b); err != nil {
			return err
		}
	}
	return nil
}

func (f *spFile) field(field protowire.Number, _ uint64, b []byte) error {
	switch field {
	case 1:
		p := spPiece{kind: pieceNormal}
		err := fields(b, fmt.Sprintf("piece %d", len(f.pieces)), func(field protowire.Number, n uint64, b []byte) error {
			switch field {
			case 1:
				p.text = validUTF8(string(b))
			case 2:
				p.score = math.Float32frombits(uint32(n))
			case 3:
				p.kind = pieceType(n)
			}
			return nil
		})
		f.pieces = append(f.pieces, p)
		return err
	case 2:
		return fields(b, "trainer_spec", func(field protowire.Number, n uint64, b []byte) error {
			switch field {
			case 3:
				f.kind = n
			case 24:
				f.suffix = n != 0
			case 35:
				f.fallback = n != 0
			case 42:
				f.eos = int64(n)
			case 44:
				f.surface = validUTF8(string(b))
			}
			return nil
		})
	case 3:
		return fields(b, "normalizer_spec", func(field protowire.Number, n uint64, b []byte) error {
			switch field {
			case 1:
				f.normalization = string(b)
			case 2:
				f.charsMap = len(b) > 0
			case 3:
				f.prefix = n != 0
			case 4:
				f.squeeze = n != 0
			case 5:
				f.escape = n != 0
			}
			return nil
		})
	}
	return nil
}

// normalize implements Normalizer::Normalize of SentencePiece, without rules for characters.
func (f *spFile) normalize(s string) string {
	if f.squeeze {
		s = strings.TrimLeft(s, " ")
	}
	if s == "" {
		return ""
	}
	by := " "
	if f.escape {
		by = space
	}
	var b strings.Builder
	b.Grow(len(s) + len(s)/2)
	if f.prefix {
		b.WriteString(by)
	}
	inSpaces := f.squeeze
	for _, r := range s {
		switch {
		case r != ' ':
			b.WriteRune(r)
			inSpaces = false
		case !inSpaces:
			b.WriteString(by)
			inSpaces = f.squeeze
		}
	}
	out := b.String()
	for f.squeeze && strings.HasSuffix(out, by) {
		out = strings.TrimSuffix(out, by)
	}
	return out
}

func (m *spModel) encode(e *encoder, ids []uint32, text string) []uint32 {
	e.symbols = e.symbols[:0]
	for rest := text; rest != ""; {
		_, n := utf8.DecodeRuneInString(rest)
		id := int64(0)
		if user := m.user.longest(rest); user > 0 {
			n, id = user, 1
		}
		e.add(id, n) // an ID of 1 marks symbols that are never merged
		rest = rest[n:]
	}
	m.mergeAll(e, text)
	at, afterUnknown := 0, false
	for i := 0; i >= 0 && len(e.symbols) > 0; i = int(e.symbols[i].next) {
		part := text[at : at+int(e.symbols[i].size)]
		at += len(part)
		id, ok := m.reserved[part]
		if !ok {
			id, ok = m.pieces[part]
		}
		if !ok {
			id = m.unknown
		}
		switch {
		case id == m.unknown && m.fallback != nil:
			for j := range len(part) {
				ids = append(ids, m.fallback[part[j]])
			}
		case id == m.unknown && afterUnknown: // adjacent unknown characters are one unknown token
		default:
			ids = append(ids, id)
		}
		afterUnknown = id == m.unknown
	}
	return ids
}

// longest returns the length of the longest token at the start of s.
func (m *matcher) longest(s string) int {
	for _, n := range m.sizes[s[0]] {
		if n <= len(s) {
			if _, ok := m.tokens[s[:n]]; ok {
				return n
			}
		}
	}
	return 0
}

// mergeAll merges e.symbols by score; ties go to the leftmost.
func (m *spModel) mergeAll(e *encoder, text string) {
	all := e.symbols
	if len(all) == 0 {
		return
	}
	all[len(all)-1].next = -1
	starts := make([]int32, len(all))
	for i := 1; i < len(all); i++ {
		starts[i] = starts[i-1] + all[i-1].size
	}
	e.queue = e.queue[:0]
	offer := func(left int32) {
		right := all[left].next
		if right < 0 || all[left].id != 0 || all[right].id != 0 {
			return
		}
		size := all[left].size + all[right].size
		if id, ok := m.pieces[text[starts[left]:starts[left]+size]]; ok {
			e.queue = push(e.queue, candidate{rank: descending(m.scores[id]), id: uint32(size), pos: left})
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
		if uint32(left.size+right.size) != c.id {
			continue // one of the two symbols has been merged since
		}
		left.size, left.next, right.size = int32(c.id), right.next, 0
		if left.next >= 0 {
			all[left.next].prev = c.pos
		}
		if left.prev >= 0 {
			offer(left.prev)
		}
		offer(c.pos)
	}
}

// descending maps scores to ranks: a higher score has a lower rank.
func descending(score float32) uint32 {
	bits := math.Float32bits(score + 0) // no negative zero
	if bits>>31 == 0 {
		return ^(bits | 1<<31)
	}
	return bits
}

// decode implements SentencePieceProcessor::Decode.
func (f *spFile) decode(tokens []string, control map[string]bool) []string {
	text := tokens[:0]
	atStart := f.prefix || f.squeeze
	for _, t := range tokens {
		if control[t] {
			continue
		}
		if t == f.unknown {
			text, atStart = append(text, f.surface), false
			continue
		}
		if atStart {
			t = strings.TrimPrefix(t, space)
			atStart = f.squeeze && t == ""
		}
		text = append(text, strings.ReplaceAll(t, space, " "))
	}
	return decodeSPBytes(text)
}

// decodeSPBytes turns runs of <0x00> to <0xFF> into text, with U+FFFD for each byte that is not part of a character.
func decodeSPBytes(tokens []string) []string {
	out, run := []string{}, []byte{}
	flush := func() {
		for rest := run; len(rest) > 0; {
			r, n := utf8.DecodeRune(rest)
			out, rest = append(out, string(r)), rest[n:]
		}
		run = run[:0]
	}
	for _, t := range tokens {
		if b, ok := fallbackByte(t); ok {
			run = append(run, b)
			continue
		}
		flush()
		out = append(out, t)
	}
	flush()
	return out
}

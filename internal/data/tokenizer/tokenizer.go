// Package tokenizer turns text into token IDs and back, as Hugging Face's tokenizers library does.
//
// It reads tokenizer.json files whose model is BPE (byte-level, or characters with byte fallback), and
// SentencePiece models of type BPE. The IDs are exactly those produced by the libraries that wrote the files.
// A part of a file that this package does not implement causes an error that names it, never a silent
// difference.
//
// The stages of Encode are those of the tokenizers library: extract added tokens, normalize, pre-tokenize,
// apply the model, post-process. A file's settings for truncation and padding are ignored, because they
// apply to a batch, not to a single text.
//
// Long texts can be cut where Cut finds that this changes no ID: border.go says what each stage does at a place between
// two characters, and shape.go what a regular expression can match there.
package tokenizer

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
)

// Tokenizer is immutable after it has been read. Its methods are safe for concurrent use.
type Tokenizer struct {
	tokens    map[string]uint32 // the model's vocabulary and the added tokens
	names     map[uint32]string // by ID; if tokens share one: the added token's name, else the first in byte order
	added     added
	normalize []normalizer
	split     []preTokenizer
	firsts    bool // a pre-tokenizer treats the start of the text differently
	model     model
	before    []uint32 // special tokens of the post-processor
	after     []uint32
	decode    []decoder
	joined    string // text between tokens if there is no decoder
	eos       int64  // end-of-sequence token; -1: unknown
	hash      string
	size      int
	encoders  sync.Pool
	cuts      sync.Map // known results of canCut, by border: at most maxCuts
	known     atomic.Int64
}

// model turns one piece of pre-tokenized text into IDs.
type model interface {
	encode(e *encoder, ids []uint32, piece string) []uint32
	// joins reports whether the IDs of a piece with a border are those of the two sides.
	joins(at border) bool
}

// piece is a part of the text on its way to the model.
type piece struct {
	text  string
	id    uint32
	done  bool // id is the ID of an added token; text is unused
	first bool // the piece is at the start of the text
}

// encoder is the scratch memory of Encode, kept for later calls.
type encoder struct {
	pieces, spare []piece
	runes         []rune
	spans         []span
	symbols       []symbol
	queue         []candidate
	cache         map[string][]uint32
}

// maxText is the maximum length of Encode's text, in bytes; callers cut longer documents.
const maxText = 1 << 30

// Encode appends the IDs of text to ids. Each maximal part of an invalid UTF-8 sequence becomes U+FFFD.
// If special is set, the tokens that the file's post-processor adds around a text are included. Encode fails
// only if the text is longer than 1 GiB, or if a pattern in the file needs too much memory or time to match the text.
func (t *Tokenizer) Encode(ids []uint32, text string, special bool) ([]uint32, error) {
	if len(text) > maxText {
		return ids, fmt.Errorf("the text has %d bytes; at most %d are tokenized at a time", len(text), maxText)
	}
	e, _ := t.encoders.Get().(*encoder)
	if e == nil {
		e = &encoder{cache: map[string][]uint32{}}
	}
	defer t.encoders.Put(e)
	if special {
		ids = append(ids, t.before...)
	}
	if err := t.pieces(e, validUTF8(text)); err != nil {
		return ids, err
	}
	for i := range e.pieces {
		if p := &e.pieces[i]; p.done {
			ids = append(ids, p.id)
		} else {
			ids = t.model.encode(e, ids, p.text)
		}
	}
	if special {
		ids = append(ids, t.after...)
	}
	clear(e.pieces[:cap(e.pieces)]) // keep no text alive
	clear(e.spare[:cap(e.spare)])
	return ids, nil
}

// pieces fills e.pieces: added tokens and the inputs of the model, first to last.
func (t *Tokenizer) pieces(e *encoder, text string) error {
	e.pieces = append(e.pieces[:0], piece{text: text, first: true})
	e.each(func(out []piece, p piece) []piece { return t.added.raw.extract(out, p) })
	var failed error
	e.each(func(out []piece, p piece) []piece {
		for _, n := range t.normalize {
			var err error
			if p.text, err = n.rewrite(e, p.text); err != nil {
				failed = errors.Join(failed, err)
			}
		}
		return t.added.normalized.extract(out, p)
	})
	for _, s := range t.split {
		e.each(func(out []piece, p piece) []piece {
			out, err := s.split(e, out, p)
			failed = errors.Join(failed, err)
			return out
		})
	}
	return failed
}

// each replaces every unfinished piece with the pieces that f appends for it. Empty pieces are dropped.
func (e *encoder) each(f func(out []piece, p piece) []piece) {
	out := e.spare[:0]
	for _, p := range e.pieces {
		switch {
		case p.done:
			out = append(out, p)
		case p.text != "":
			out = f(out, p)
		}
	}
	kept := out[:0]
	for _, p := range out {
		if p.done || p.text != "" {
			kept = append(kept, p)
		}
	}
	e.pieces, e.spare = kept, e.pieces
}

// Decode returns the text of ids. IDs without a token are omitted; if skip is set, so are special tokens.
func (t *Tokenizer) Decode(ids []uint32, skip bool) string {
	tokens := make([]string, 0, len(ids))
	for _, id := range ids {
		name, ok := t.added.decoded[id]
		if !ok {
			name, ok = t.names[id]
		}
		if ok && !(skip && t.added.special[name]) {
			tokens = append(tokens, name)
		}
	}
	if t.decode == nil {
		return strings.Join(tokens, t.joined)
	}
	for _, d := range t.decode {
		tokens = d(tokens)
	}
	return strings.Join(tokens, "")
}

// Size returns the highest ID plus 1: the size of the smallest vocabulary that contains every token.
func (t *Tokenizer) Size() int { return t.size }

// ID returns the ID of a token by its name in the file.
func (t *Tokenizer) ID(name string) (uint32, bool) {
	id, ok := t.tokens[name]
	return id, ok
}

// Name returns the name of a token in the file.
func (t *Tokenizer) Name(id uint32) (string, bool) {
	name, ok := t.names[id]
	return name, ok
}

// EOS returns the end-of-sequence token, if the files name one.
func (t *Tokenizer) EOS() (uint32, bool) { return uint32(max(0, t.eos)), t.eos >= 0 }

// Hash identifies the tokenizer: "sha256:" and the hash of the file it was read from.
func (t *Tokenizer) Hash() string { return t.hash }

package sample

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"sppo.dev/internal/data/tokenizer"
)

// Text converts prompts to tokens, and generated tokens to text, one by one.
type Text interface {
	// Encode returns the tokens of a prompt, including those that the model requires at the start of a text.
	Encode(prompt string) ([]int32, error)
	// Decode returns the text that the next token adds. It may hold back text that later tokens can change.
	Decode(token int32) string
	// Rest returns the text held back.
	Rest() string
}

// Bytes is a Text for models whose tokens are bytes.
type Bytes struct{ held []byte }

// Encode implements Text.
func (*Bytes) Encode(prompt string) ([]int32, error) {
	tokens := make([]int32, len(prompt))
	for i := range len(prompt) {
		tokens[i] = int32(prompt[i])
	}
	return tokens, nil
}

// Decode implements Text. It holds back the bytes of an incomplete character.
func (b *Bytes) Decode(token int32) string {
	b.held = append(b.held, byte(token))
	if !utf8.FullRune(b.held) {
		return ""
	}
	return b.Rest()
}

// Rest implements Text. Invalid UTF-8 becomes U+FFFD.
func (b *Bytes) Rest() string {
	text := strings.ToValidUTF8(string(b.held), "\ufffd")
	b.held = b.held[:0]
	return text
}

// Tokens is a Text for models with a tokenizer.
type Tokens struct {
	*tokenizer.Tokenizer
	ids         []uint32
	shown, read int // text of ids[:read] has been returned; ids[shown:read] is context for decoding the next
}

// Encode implements Text.
func (t *Tokens) Encode(prompt string) ([]int32, error) {
	ids, err := t.Tokenizer.Encode(nil, prompt, true)
	if eos, ok := t.EOS(); ok && len(ids) > 0 && ids[len(ids)-1] == eos {
		ids = ids[:len(ids)-1] // some post-processors add it, and nothing may follow it
	}
	tokens := make([]int32, len(ids))
	for i, id := range ids {
		tokens[i] = int32(id)
	}
	return tokens, err
}

// Decode implements Text. The text of a token can depend on a few tokens before it, for example for spaces between words.
// Decode therefore decodes them together and returns the new text. It holds back bytes that do not yet form a whole
// character.
func (t *Tokens) Decode(token int32) string {
	t.ids = append(t.ids, uint32(token))
	before, all := t.text(t.ids[t.shown:t.read]), t.text(t.ids[t.shown:])
	if strings.HasSuffix(all, "\ufffd") || !strings.HasPrefix(all, before) {
		return ""
	}
	if t.text(t.ids[t.read:]) != "" { // a token without text cannot serve as context for the next one
		t.shown = t.read
	}
	t.read = len(t.ids)
	return all[len(before):]
}

// Rest implements Text.
func (t *Tokens) Rest() string {
	before, all := t.text(t.ids[t.shown:t.read]), t.text(t.ids[t.shown:])
	t.shown, t.read = len(t.ids), len(t.ids)
	return strings.TrimPrefix(all, before)
}

func (t *Tokens) text(ids []uint32) string { return t.Tokenizer.Decode(ids, true) }

// Request is the input of Write.
type Request struct {
	Tokens int64 // maximum number of tokens to generate
	Choice Choice
	End    []uint32 // tokens that end the text
}

// ErrEmpty is returned for a prompt without tokens.
var ErrEmpty = errors.New("the prompt has no tokens, and this model needs at least one to begin a text")

// Write continues a prompt. It calls the function each with every piece of text, and the function stop before
// every token. It returns the number of tokens that it has generated, and whether the last of them ended the
// text.
func (s *Model) Write(prompt []int32, r *Request, text Text, stop func() error, each func(piece string) error) (n int64, ended bool, err error) {
	if len(prompt) == 0 {
		return 0, false, ErrEmpty
	}
	if room := s.Left(); int64(len(prompt)) > room {
		return 0, false, fmt.Errorf("internal: a prompt of %d tokens and room for %d", len(prompt), room)
	}
	next := prompt
	for n < r.Tokens && int64(len(next)) <= s.Left() {
		if err := stop(); err != nil {
			return n, false, err
		}
		logits, err := s.Feed(next)
		if err != nil {
			return n, false, err
		}
		token := r.Choice.Pick(logits, int(n))
		n++
		for _, end := range r.End {
			if uint32(token) == end {
				return n, true, each(text.Rest())
			}
		}
		if err := each(text.Decode(token)); err != nil {
			return n, false, err
		}
		next = []int32{token}
	}
	return n, false, each(text.Rest())
}

package tokenizer

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// addedToken is a token that is found in the text before the model sees it.
type addedToken struct {
	ID         uint32 `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	LStrip     bool   `json:"lstrip"`
	RStrip     bool   `json:"rstrip"`
	Normalized bool   `json:"normalized"`
	Special    bool   `json:"special"`
}

// added holds the added tokens: those that are matched in raw text, and those that are then matched in
// normalized text.
type added struct {
	raw, normalized matcher
	special         map[string]bool
	decoded         map[uint32]string // the decoder's input where it differs from the name: the normalized content
}

// matcher finds the leftmost of its tokens in a text, and the longest if several start there.
type matcher struct {
	tokens map[string]addedToken
	starts [256]bool
	sizes  map[byte][]int // by first byte: lengths of the tokens, longest first
}

func (m *matcher) add(text string, t addedToken) {
	if m.tokens == nil {
		m.tokens, m.sizes = map[string]addedToken{}, map[byte][]int{}
	}
	m.tokens[text] = t
	m.starts[text[0]] = true
	sizes := m.sizes[text[0]]
	if !slices.Contains(sizes, len(text)) {
		sizes = append(sizes, len(text))
		slices.SortFunc(sizes, func(a, b int) int { return b - a })
		m.sizes[text[0]] = sizes
	}
}

// next returns the first match that starts at byte `from` or later, with its bounds. If there is none, the
// bounds are -1.
func (m *matcher) next(text string, from int) (addedToken, int, int) {
	for i := from; i < len(text); i++ {
		if !m.starts[text[i]] {
			continue
		}
		for _, n := range m.sizes[text[i]] {
			if i+n <= len(text) {
				if t, ok := m.tokens[text[i:i+n]]; ok {
					return t, i, i + n
				}
			}
		}
	}
	return addedToken{}, -1, -1
}

// extract splits a piece into the tokens that occur in it and the text between them, and appends all of them.
func (m *matcher) extract(out []piece, p piece) []piece {
	if len(m.tokens) == 0 {
		return append(out, p)
	}
	text, done := p.text, 0
	rest := func(to int) {
		if done < to {
			out = append(out, piece{text: text[done:to], first: p.first && done == 0})
		}
	}
	for at := 0; ; {
		t, start, end := m.next(text, at)
		if start < 0 {
			break
		}
		at = end
		if t.SingleWord && (endsWithWord(text[:start]) || startsWithWord(text[end:])) {
			continue
		}
		if t.LStrip {
			start = max(done, len(strings.TrimRightFunc(text[:start], unicode.IsSpace)))
		}
		if t.RStrip {
			end = len(text) - len(strings.TrimLeftFunc(text[end:], unicode.IsSpace))
		}
		rest(start)
		out = append(out, piece{id: t.ID, done: true})
		done = end
	}
	rest(len(text))
	return out
}

func startsWithWord(s string) bool {
	r, _ := utf8.DecodeRuneInString(s)
	return s != "" && isWord(r)
}

func endsWithWord(s string) bool {
	r, _ := utf8.DecodeLastRuneInString(s)
	return s != "" && isWord(r)
}

// isWord reports whether a character matches \w in Unicode regular expressions (UTS #18, Annex C).
func isWord(r rune) bool {
	return unicode.In(r, unicode.L, unicode.M, unicode.Nd, unicode.Nl, unicode.Pc, unicode.Other_Alphabetic, unicode.Join_Control) ||
		isNewer(r, "L", "M", "Nd")
}

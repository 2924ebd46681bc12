package tokenizer

import (
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// border is the place between two adjacent characters of a text: before and after it.
type border struct{ a, b rune }

// crossing says what a stage of Encode does at a border. ok: the stage treats the text on either side as if the other
// side were absent, except that it may have one piece across the border where there would otherwise be two; next is then
// the border in its result. ends: a piece always ends at the border.
type crossing func(at border) (next border, ends, ok bool)

// keeps is the crossing of a stage that changes only the start of a text.
func keeps(at border) (border, bool, bool) { return at, false, true }

// Cut returns the last position at which text, and any text that follows it, can be cut without a change to the IDs:
// Encode of the part before the position, and EncodeNext of the rest. It returns 0 if it knows no such position.
func (t *Tokenizer) Cut(text []byte) int {
	var right rune
	for end := len(text); end > 0; {
		left, n := utf8.DecodeLastRune(text[:end])
		if n == 1 && left == utf8.RuneError {
			left = -1 // a part of a character, or none
		}
		if end < len(text) && left > 0 && right > 0 && t.canCut(border{left, right}) {
			return end
		}
		right, end = left, end-n
	}
	return 0
}

// EncodeNext appends the IDs of a text that follows a cut. before is the text in front of the cut, or any end of it.
func (t *Tokenizer) EncodeNext(ids []uint32, before, text string) ([]uint32, error) {
	_, n := utf8.DecodeLastRuneInString(before)
	before = before[len(before)-n:]
	head, err := t.Encode(nil, before, false)
	if err != nil {
		return ids, err
	}
	start := len(ids)
	if ids, err = t.Encode(ids, before+text, false); err != nil {
		return ids, err
	}
	return append(ids[:start], ids[start+len(head):]...), nil
}

// maxCuts limits the memory of canCut.
const maxCuts = 1 << 16

// canCut reports whether the IDs of a text with this border are those of the text before it, followed by those that
// the text after it has behind any other text that ends with the same character.
func (t *Tokenizer) canCut(at border) bool {
	if known, ok := t.cuts.Load(at); ok {
		return known.(bool)
	}
	can := t.cross(at)
	if t.known.Add(1) <= maxCuts {
		t.cuts.Store(at, can)
	}
	return can
}

func (t *Tokenizer) cross(at border) bool {
	if unicode.IsSpace(at.a) { // tokens and normalizers may strip the space around them
		return false
	}
	ends, ok := false, false
	for _, stage := range t.crossings() {
		if at, ends, ok = stage(at); ends || !ok {
			return ok
		}
	}
	return t.model.joins(at)
}

func (t *Tokenizer) crossings() []crossing {
	out := []crossing{t.added.raw.cross}
	for _, n := range t.normalize {
		out = append(out, n.cross)
	}
	out = append(out, t.added.normalized.cross)
	for _, s := range t.split {
		out = append(out, s.cross)
	}
	return out
}

// cross refuses borders inside a token, and those after one, because the text after a token is normalized on its own.
func (m *matcher) cross(at border) (border, bool, bool) {
	a, both := string(at.a), string([]rune{at.a, at.b})
	for text := range m.tokens {
		if strings.HasSuffix(text, a) || strings.Contains(text, both) {
			return at, false, false
		}
	}
	return at, false, true
}

// crossForm accepts characters that a normal form leaves alone, whatever is next to them.
func crossForm(form norm.Form) crossing {
	stays := func(r rune) bool {
		return !isInert(r) && form.PropertiesString(string(r)).BoundaryBefore() && form.String(string(r)) == string(r)
	}
	return func(at border) (border, bool, bool) { return at, false, stays(at.a) && stays(at.b) }
}

func crossStrip(at border) (border, bool, bool) { return at, false, !unicode.IsSpace(at.a) }

func crossBytes(at border) (border, bool, bool) {
	a, b := string(at.a), string(at.b)
	return border{byteChars[a[len(a)-1]], byteChars[b[0]]}, false, true
}

func crossDigits(individual bool) crossing {
	return func(at border) (border, bool, bool) {
		a, b := isNumeric(at.a), isNumeric(at.b)
		return at, a != b || a && individual, true
	}
}

// crossSplit is the crossing of a pattern that cuts a text, without the pattern's matches if the behavior says so.
func (p *pattern) crossSplit(plain bool) crossing {
	return func(at border) (border, bool, bool) {
		s := p.shape
		switch {
		case !s.separates(at):
			return at, false, false
		case !s.mayMatch(at.a) && !s.mayMatch(at.b):
			return at, false, true // text between two matches, which no behavior cuts
		}
		return at, s.matches(at.a) || s.matches(at.b), plain
	}
}

// crossReplace is the crossing of a pattern whose matches are replaced.
func (p *pattern) crossReplace(by string) crossing {
	return func(at border) (border, bool, bool) {
		if !p.shape.separates(at) {
			return at, false, false
		}
		if p.regexp != nil || utf8.RuneCountInString(p.text) != 1 {
			return at, false, !p.shape.mayMatch(at.a) && !p.shape.mayMatch(at.b)
		}
		if string(at.a) == p.text {
			at.a, _ = utf8.DecodeLastRuneInString(by)
		}
		if string(at.b) == p.text {
			at.b, _ = utf8.DecodeRuneInString(by)
		}
		return at, false, by != ""
	}
}

// crossMetaspace replaces spaces with a character, and splits before it if split is set.
func crossMetaspace(by string, split bool) crossing {
	to, _ := utf8.DecodeRuneInString(by)
	return func(at border) (border, bool, bool) {
		if at.a == ' ' {
			at.a = to
		}
		if at.b == ' ' {
			at.b = to
		}
		return at, split && at.b == to, true
	}
}

// cross is the crossing of normalize.
func (f *spFile) cross(at border) (border, bool, bool) {
	to, _ := utf8.DecodeRuneInString(space)
	ok := at.a != ' ' && at.a != to
	if at.b == ' ' && f.escape {
		at.b = to
	}
	return at, false, ok
}

// joins reports whether encoding a piece with this border yields the IDs of the two sides, which it does if both
// characters are known and no token contains them side by side.
func (m *bpe) joins(at border) bool {
	a, b := string(at.a), string(at.b)
	if m.whole {
		return false // a longer piece may be a token without merges
	}
	if m.level {
		a, b = a[len(a)-1:], b[:1]
	}
	_, left := m.vocab[a]
	_, right := m.vocab[b]
	return left && right && !inAny(m.vocab, a+b)
}

func (m *spModel) joins(at border) bool {
	a, b := string(at.a), string(at.b)
	_, left := m.pieces[a]
	_, right := m.pieces[b]
	return left && right && !inAny(m.pieces, a+b)
}

func inAny(vocab map[string]uint32, part string) bool {
	for text := range vocab {
		if strings.Contains(text, part) {
			return true
		}
	}
	return false
}

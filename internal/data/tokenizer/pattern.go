package tokenizer

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/dlclark/regexp2/v2"
)

// pattern is the pattern of Split and Replace: a text, or a regular expression with look-ahead.
type pattern struct {
	text   string // used if regexp is nil
	regexp *regexp2.Regexp
	source string // the expression as the file has it, and where it is
	shape  *shape
}

// span is a range of bytes of a text. Its flag reports whether the pattern matched there.
type span struct {
	start, end int
	match      bool
}

const (
	maxPattern = 64 << 10 // limit on the bytes of an expression
	maxStack   = 16 << 20 // limit on the entries of the backtracking stack of a match
)

// maxMatch limits the time in which an expression finds its next match, because the time can grow with the square of a
// text's length or faster. All matches in a text together may take as long, and perByte for each byte of the text.
var maxMatch = 10 * time.Second

const perByte = 10 * time.Microsecond

func readPattern(raw json.RawMessage, where string) (pattern, error) {
	var p struct{ String, Regex *string }
	if err := unmarshal(raw, &p, where); err != nil {
		return pattern{}, err
	}
	switch {
	case p.String != nil && p.Regex == nil:
		return pattern{text: *p.String, shape: textShape(*p.String)}, nil
	case p.Regex == nil || p.String != nil:
		return pattern{}, fmt.Errorf(`%s: it is neither {"String": ...} nor {"Regex": ...}`, where)
	}
	compiled, err := compile(*p.Regex)
	if err != nil {
		return pattern{}, fmt.Errorf("%s: %w", where, err)
	}
	compiled.source = fmt.Sprintf("%s: expression %.200q", where, *p.Regex)
	return compiled, nil
}

// compile compiles an expression in Oniguruma's Ruby syntax, after translating it to the syntax of regexp2.
func compile(expression string) (p pattern, err error) {
	if len(expression) > maxPattern {
		return p, fmt.Errorf("the expression has %d bytes; the limit is %d", len(expression), maxPattern)
	}
	translated, err := translate(expression)
	if err != nil {
		return p, fmt.Errorf("expression %.200q: %w", expression, err)
	}
	defer func() {
		if r := recover(); r != nil { // the compiler may panic on a hostile expression
			p, err = pattern{}, fmt.Errorf("expression %.200q: %v", expression, r)
		}
	}()
	re, err := regexp2.Compile(translated, regexp2.Multiline, regexp2.OptionMaxBacktrackingStackSize(maxStack))
	if err != nil {
		return p, fmt.Errorf("expression %.200q: %w", expression, err)
	}
	re.MatchTimeout = maxMatch
	return pattern{regexp: re, shape: shapeOf(translated)}, nil
}

// translator rewrites constructs that the two syntaxes interpret differently, and refuses those that only one supports.
type translator struct {
	in    string
	out   strings.Builder
	class bool // inside [ ]
}

// categories lists the names after \p that mean the same in both syntaxes: general categories, except those in
// C, and except Mn and Mc, because a character moved between these two in a later Unicode version.
var categories = map[string]bool{
	"L": true, "Lu": true, "Ll": true, "Lt": true, "Lm": true, "Lo": true, "M": true, "Me": true,
	"N": true, "Nd": true, "Nl": true, "No": true, "P": true, "Pc": true, "Pd": true, "Ps": true, "Pe": true,
	"Pi": true, "Pf": true, "Po": true, "S": true, "Sm": true, "Sc": true, "Sk": true, "So": true,
	"Z": true, "Zs": true, "Zl": true, "Zp": true,
}

func translate(in string) (string, error) {
	if !utf8.ValidString(in) {
		return "", fmt.Errorf("invalid UTF-8")
	}
	t := translator{in: in}
	for i := 0; i < len(in); {
		n, err := t.next(in[i:], i)
		if err != nil {
			return "", err
		}
		i += n
	}
	return t.out.String(), nil
}

// next translates the construct at the start of s and returns its length.
func (t *translator) next(s string, at int) (int, error) {
	fail := func(what string) (int, error) { return 0, fmt.Errorf("%s at byte %d is not supported", what, at) }
	switch {
	case s[0] == '\\':
		return t.escape(s, at)
	case t.class && s[0] == '[':
		return fail("a class inside a class")
	case t.class && strings.HasPrefix(s, "&&"):
		return fail("an intersection of classes")
	case t.class && s[0] == ']':
		t.class = false
	case !t.class && s[0] == '[':
		t.class = true
		for _, open := range []string{"[^]", "[]"} {
			if strings.HasPrefix(s, open) {
				return fail("a class that begins with ]")
			}
		}
		if strings.HasPrefix(s, "[^") {
			t.out.WriteString("[^")
			return 2, nil
		}
	case !t.class && (s[0] == '+' || s[0] == '*' || s[0] == '?') && len(s) > 1 && s[1] == '+':
		return fail("a possessive quantifier")
	case !t.class && strings.HasPrefix(s, "(?") && len(s) > 2 && !strings.ContainsRune(":=!<>", rune(s[2])) &&
		!strings.HasPrefix(s, "(?i:") && !(at == 0 && strings.HasPrefix(s, "(?i)")) && !strings.HasPrefix(s, "(?-i:"):
		return fail("this kind of group")
	}
	t.out.WriteByte(s[0])
	return 1, nil
}

// escape translates an escape sequence. If the sequence stands for a category, escape adds the characters
// that Unicode versions newer than Go's have in that category.
func (t *translator) escape(s string, at int) (int, error) {
	fail := func(what string) (int, error) { return 0, fmt.Errorf("%.20q at byte %d is not supported", what, at) }
	if len(s) < 2 {
		return 0, fmt.Errorf("a \\ at its end")
	}
	category, negated, n := "", false, 2
	switch c := s[1]; {
	case c == 'p' || c == 'P':
		end := strings.IndexByte(s, '}')
		if end < 0 || s[2] != '{' || !categories[strings.TrimPrefix(s[3:end], "^")] {
			return fail(s[:min(len(s), 20)])
		}
		category, n = strings.TrimPrefix(s[3:end], "^"), end+1
		negated = (c == 'P') != (s[3] == '^')
	case c == 'd' || c == 'D':
		category, negated = "Nd", c == 'D'
	case strings.IndexByte("rntfvsSAzZ", c) >= 0 || c < 0x80 && c > ' ' && !isASCIIWord(c):
		t.out.WriteString(s[:2])
		return 2, nil
	default:
		return fail(s[:2])
	}
	if negated && t.class {
		return fail(s[:n])
	}
	open, end := "[", "]"
	if negated {
		open = "[^"
	}
	if t.class {
		open, end = "", ""
	}
	t.out.WriteString(open + `\p{` + category + "}")
	newerOf(category, func(r [2]rune) {
		t.out.WriteRune(r[0])
		if r[0] != r[1] {
			t.out.WriteByte('-')
			t.out.WriteRune(r[1])
		}
	})
	t.out.WriteString(end)
	return n, nil
}

func isASCIIWord(c byte) bool {
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
}

// spans divides s into matches and the text between them. The result is valid until the next call.
func (p *pattern) spans(e *encoder, s string) ([]span, error) {
	out := e.spans[:0]
	defer func() { e.spans = out }()
	done := 0
	add := func(start, end int) {
		if done < start {
			out = append(out, span{done, start, false})
		}
		out = append(out, span{start, end, true})
		done = end
	}
	if p.regexp == nil {
		for p.text != "" {
			i := strings.Index(s[done:], p.text)
			if i < 0 {
				break
			}
			add(done+i, done+i+len(p.text))
		}
	} else if err := p.matches(e, s, add); err != nil {
		return nil, err
	}
	if done < len(s) {
		out = append(out, span{done, len(s), false})
	}
	return out, nil
}

// matches calls f with the byte range of each match of the expression.
func (p *pattern) matches(e *encoder, s string, f func(start, end int)) error {
	e.runes = e.runes[:0]
	for _, r := range s {
		e.runes = append(e.runes, r)
	}
	found := 0
	at, offset := 0, 0 // the same position, counted in runes and in bytes
	to := func(index int) int {
		for ; at < index; at++ {
			offset += utf8.RuneLen(e.runes[at])
		}
		return offset
	}
	limit := maxMatch + time.Duration(len(s))*perByte
	stop := time.Now().Add(limit)
	late := false
	err := p.regexp.FindRunesMatches(e.runes, 0, func(m regexp2.MatchView) bool {
		index, length, _ := m.GroupRange(0)
		start := to(index)
		f(start, to(index+length))
		found++
		late = found%1024 == 0 && time.Now().After(stop)
		return !late
	})
	switch {
	case err != nil && strings.HasPrefix(err.Error(), "match timeout"): // the rest of the error is the text
		return fmt.Errorf("%s: one match in a text of %d bytes takes more than %s", p.source, len(s), maxMatch)
	case late:
		return fmt.Errorf("%s: the matches in a text of %d bytes take more than %s", p.source, len(s), limit)
	case err != nil:
		return fmt.Errorf("%s: matching a text of %d bytes: %w", p.source, len(s), err)
	}
	return nil
}

func (p *pattern) replace(e *encoder, s, by string) (string, error) {
	if p.regexp == nil {
		if p.text == "" {
			return s, nil
		}
		return strings.ReplaceAll(s, p.text, by), nil
	}
	spans, err := p.spans(e, s)
	if err != nil {
		return s, err
	}
	var b strings.Builder
	for _, x := range spans {
		if x.match {
			b.WriteString(by)
		} else {
			b.WriteString(s[x.start:x.end])
		}
	}
	return b.String(), nil
}

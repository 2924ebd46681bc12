package lang

import (
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/alecthomas/participle/v2/lexer"
)

// Format writes a specification in the standard style. It changes only spaces and line breaks, so the meaning
// stays the same. It is idempotent and keeps comments. If the text has syntax errors, it returns them as
// Diagnostics that show the name.
//
// The style is: indentation by two spaces; one space around operators and none inside brackets; `=` aligned
// over consecutive lines with one key each; trailing comments aligned over consecutive lines; at most one empty
// line, and none at the edges of a block. Keys on the same line stay on it, separated by three spaces.
func Format(name string, text []byte) ([]byte, error) {
	src := &sourceText{name: name, text: string(text)}
	var diags Diagnostics
	parseFile(src, func(d *Diagnostic) { diags = append(diags, d) })
	if err := diags.Err(); err != nil {
		return nil, err
	}
	lines := collapse(layout(lex(src)))
	alignEquals(lines)
	alignComments(lines)
	var b strings.Builder
	for _, l := range lines {
		b.WriteString(l.String())
		b.WriteByte('\n')
	}
	return []byte(b.String()), nil
}

// line is one line of the result.
type line struct {
	indent  int
	code    string
	comment string // with its `#`
	gap     int    // spaces before a trailing comment
	equals  int    // bytes of code before the `=` of the only key; -1 where `=` is not aligned
}

func (l *line) empty() bool { return l.code == "" && l.comment == "" }

func (l *line) String() string {
	if l.empty() {
		return ""
	}
	out := strings.Repeat("  ", l.indent) + l.code
	if l.comment == "" {
		return out
	}
	if l.code != "" {
		out += strings.Repeat(" ", l.gap)
	}
	return out + l.comment
}

func (l *line) width() int { return 2*l.indent + utf8.RuneCountInString(l.code) }

// layout divides tokens into lines and sets the spaces between them. In a block of several lines, nothing
// follows `{` or precedes `}` on the same line.
func layout(toks []lexer.Token) []*line {
	var lines []*line
	for _, row := range rows(toks) {
		indent := row.depth
		for i := 0; i < len(row.toks) && closes(row.toks[i]); i++ {
			indent--
		}
		l := &line{indent: indent, equals: -1}
		code := row.toks
		if n := len(code); n > 0 && code[n-1].Type == tokComment {
			l.comment = comment(code[n-1].Value)
			code = code[:n-1]
		}
		l.code = spaced(code, row.before)
		if key := soleKey(code, row); key > 0 {
			l.equals = len(spaced(code[:key], row.before))
		}
		lines = append(lines, l)
	}
	return lines
}

func closes(t lexer.Token) bool { return t.Value == "}" || t.Value == ")" || t.Value == "]" }

func opens(t lexer.Token) bool { return t.Value == "{" || t.Value == "(" || t.Value == "[" }

// row holds the tokens of one line.
type row struct {
	toks    []lexer.Token
	depth   int         // brackets that are open before it
	inBlock bool        // directly inside the braces of a block
	before  lexer.Token // the preceding token, which determines whether an initial `-` is a sign or a subtraction
}

// rows splits tokens at line breaks, after the `{` of a block over several lines, and before its `}`.
func rows(toks []lexer.Token) []row {
	several := bracesOverLines(toks)
	var out []row
	var open []string
	cur := row{}
	flush := func() {
		out = append(out, cur)
		cur = row{depth: len(open), inBlock: len(open) == 1 && open[0] == "{", before: cur.before}
		if n := len(out[len(out)-1].toks); n > 0 {
			cur.before = out[len(out)-1].toks[n-1]
		}
	}
	for i, t := range toks {
		switch {
		case t.EOF():
			flush()
			return out
		case t.Type == tokNL:
			flush()
			continue
		case t.Value == "}" && several[i] && len(cur.toks) > 0:
			flush()
		}
		cur.toks = append(cur.toks, t)
		if opens(t) {
			open = append(open, t.Value)
		} else if closes(t) && len(open) > 0 {
			open = open[:len(open)-1]
		}
		if t.Value == "{" && several[i] && toks[i+1].Type != tokNL && toks[i+1].Type != tokComment {
			flush()
		}
	}
	return out
}

// bracesOverLines marks the braces of blocks that span several lines.
func bracesOverLines(toks []lexer.Token) map[int]bool {
	several := map[int]bool{}
	opening := -1
	for i, t := range toks {
		switch t.Value {
		case "{":
			opening = i
		case "}":
			if opening >= 0 && toks[opening].Pos.Line != t.Pos.Line {
				several[opening], several[i] = true, true
			}
			opening = -1
		}
	}
	return several
}

// soleKey returns the index of `=` in a line with exactly one `key = value` or `let`, and 0 for other lines.
func soleKey(code []lexer.Token, r row) int {
	at, depth := 0, 0
	for i, t := range code {
		switch {
		case opens(t):
			depth++
		case closes(t):
			depth--
		case t.Value == "=" && depth == 0 && at > 0:
			return 0
		case t.Value == "=" && depth == 0:
			at = i
		}
		if t.Value == "{" || t.Value == "}" {
			return 0
		}
	}
	if len(code) == 0 || !r.inBlock && code[0].Value != "let" {
		return 0
	}
	return at
}

// spaced joins tokens with the spaces that the style requires.
func spaced(toks []lexer.Token, before lexer.Token) string {
	var b strings.Builder
	depth := 0
	prev := before
	sign := false   // prev is a sign, not a subtraction
	second := false // this is not the first key on the line
	for i, t := range toks {
		key := depth == 0 && (t.Value == "let" || i+1 < len(toks) && toks[i+1].Value == "=" && prev.Value != "let")
		if i > 0 {
			b.WriteString(between(prev, t, sign, key && second))
		}
		second = second && t.Value != "}" || depth == 0 && t.Value == "="
		b.WriteString(t.Value)
		sign = t.Value == "-" && !endsValue(prev)
		if opens(t) && t.Value != "{" {
			depth++
		} else if closes(t) && t.Value != "}" {
			depth--
		}
		prev = t
	}
	return b.String()
}

// between returns the space between two adjacent tokens of a line. If second is set, t starts another key on
// the line.
func between(prev, t lexer.Token, sign, second bool) string {
	switch {
	case sign, prev.Value == "(", prev.Value == "[":
		return ""
	case t.Value == ")", t.Value == "]", t.Value == ",":
		return ""
	case t.Value == "(" && prev.Type == tokName:
		return ""
	case prev.Value == "{" && t.Value == "}":
		return ""
	case second:
		return "   "
	}
	return " "
}

// endsValue reports whether a `-` after the token subtracts.
func endsValue(t lexer.Token) bool {
	return t.Type == tokName || t.Type == tokNumber || t.Type == tokString || t.Value == ")" || t.Value == "]"
}

// comment normalises a comment: one space after the `#` and none at the end.
func comment(text string) string {
	body := strings.TrimRight(strings.TrimPrefix(text, "#"), " \t\r\ufeff")
	if body == "" || strings.HasPrefix(body, " ") || strings.HasPrefix(body, "#") || strings.HasPrefix(body, "!") {
		return "#" + body
	}
	return "# " + strings.TrimLeft(body, "\t")
}

// collapse reduces several empty lines to one, and removes those at the start, the end, and the edges of
// brackets.
func collapse(lines []*line) []*line {
	var out []*line
	for i, l := range lines {
		if l.empty() {
			if len(out) == 0 || out[len(out)-1].empty() || endsOpen(out[len(out)-1].code) || closesNext(lines[i:]) {
				continue
			}
		}
		out = append(out, l)
	}
	for len(out) > 0 && out[len(out)-1].empty() {
		out = out[:len(out)-1]
	}
	return out
}

func endsOpen(code string) bool {
	return strings.HasSuffix(code, "{") || strings.HasSuffix(code, "(") || strings.HasSuffix(code, "[")
}

// closesNext reports whether the first non-empty line starts with a closing bracket.
func closesNext(lines []*line) bool {
	for _, l := range lines {
		if !l.empty() {
			return l.code != "" && strings.ContainsRune("})]", rune(l.code[0]))
		}
	}
	return false
}

// alignEquals pads the keys of consecutive lines to the width of the longest.
func alignEquals(lines []*line) {
	for from := 0; from < len(lines); {
		to := from
		for to < len(lines) && lines[to].equals >= 0 && lines[to].indent == lines[from].indent {
			to++
		}
		widest := 0
		for _, l := range lines[from:to] {
			widest = max(widest, l.equals)
		}
		for _, l := range lines[from:to] {
			l.code = l.code[:l.equals] + strings.Repeat(" ", widest-l.equals) + l.code[l.equals:]
		}
		from = max(to, from+1)
	}
}

// alignComments aligns the trailing comments of consecutive lines.
func alignComments(lines []*line) {
	const gap = 3
	behind := func(l *line) bool { return l.code != "" && l.comment != "" }
	for from := 0; from < len(lines); from++ {
		if !behind(lines[from]) {
			continue
		}
		to := from
		for to < len(lines) && behind(lines[to]) && lines[to].indent == lines[from].indent {
			to++
		}
		group := lines[from:to]
		widest := slices.MaxFunc(group, func(a, b *line) int { return a.width() - b.width() }).width()
		for _, l := range group {
			l.gap = widest - l.width() + gap
		}
		from = to - 1
	}
}

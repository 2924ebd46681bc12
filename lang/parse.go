package lang

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/alecthomas/participle/v2"
	"github.com/alecthomas/participle/v2/lexer"

	"sppo.dev/internal/infile"
)

// These limits keep malicious input from taking too much time or stack. Real specs stay far below them.
const (
	MaxFileBytes    = 256 << 10
	maxNesting      = 64
	maxSyntaxErrors = 20
)

// sourceText is a text that positions refer to: a file, or a --set flag.
type sourceText struct {
	name   string // shown in diagnostics
	text   string
	dir    string // base of relative paths written in it
	hidden bool   // diagnostics must not show its lines
}

// span is a range of source text. The zero span means that there is no position.
type span struct {
	src        *sourceText
	start, end lexer.Position
}

func tokenSpan(src *sourceText, t lexer.Token) span {
	end := t.Pos
	end.Advance(t.Value)
	return span{src, t.Pos, end}
}

// nodeSpan covers the tokens of a node.
func nodeSpan(src *sourceText, tokens []lexer.Token) span {
	if len(tokens) == 0 {
		return span{src: src}
	}
	return span{src, tokens[0].Pos, tokenSpan(src, tokens[len(tokens)-1]).end}
}

func (s span) pos() Pos {
	if s.src == nil {
		return Pos{}
	}
	return Pos{File: s.src.name, Line: s.start.Line, Column: s.start.Column, Offset: s.start.Offset}
}

// words returns the text of the span, for messages.
func (s span) words() string {
	if s.src == nil {
		return ""
	}
	return s.src.text[s.start.Offset:min(s.end.Offset, len(s.src.text))] // a brace added by repair is not in the text
}

// line returns the source line on which the span starts, or "" if it must not be shown.
func (s span) line() string {
	if s.src == nil || s.src.hidden {
		return ""
	}
	text := s.src.text
	from := strings.LastIndexByte(text[:s.start.Offset], '\n') + 1
	line, _, _ := strings.Cut(text[from:], "\n")
	return strings.TrimRight(line, "\r")
}

// lex cuts text into tokens and drops spaces. It cannot fail: a character that starts no token becomes a Stray
// token.
func lex(src *sourceText) []lexer.Token {
	lx, err := tokens.LexString(src.name, src.text)
	if err != nil {
		panic("internal: lexer: " + err.Error())
	}
	var out []lexer.Token
	for {
		t, err := lx.Next()
		if err != nil {
			panic("internal: lexer: " + err.Error())
		}
		if t.Type != tokSpace {
			out = append(out, t)
		}
		if t.EOF() {
			return out
		}
	}
}

// tokenList feeds existing tokens to participle.
type tokenList []lexer.Token

func (l *tokenList) Next() (lexer.Token, error) {
	t := (*l)[0]
	if !t.EOF() {
		*l = (*l)[1:]
	}
	return t, nil
}

// visible removes tokens that the parser must not see: comments, and line breaks inside ( ) and [ ].
func visible(tokens []lexer.Token) []lexer.Token {
	out := make([]lexer.Token, 0, len(tokens))
	depth := 0
	for _, t := range tokens {
		switch t.Value {
		case "(", "[":
			depth++
		case ")", "]":
			depth = max(depth-1, 0)
		}
		if t.Type == tokComment || t.Type == tokNL && depth > 0 {
			continue
		}
		out = append(out, t)
	}
	return out
}

// parseTokens parses the tokens. After an error it also returns the index of the offending token, otherwise -1.
func parseTokens[N any](p *participle.Parser[N], tokens []lexer.Token) (*N, int) {
	list := tokenList(visible(tokens))
	peeking, err := lexer.Upgrade(&list)
	if err != nil {
		panic("internal: token list: " + err.Error())
	}
	node, err := p.ParseFromLexer(peeking)
	if err == nil {
		return node, -1
	}
	var at participle.Error
	if !errors.As(err, &at) {
		panic("internal: parser: " + err.Error())
	}
	for i, t := range tokens {
		if t.Pos.Offset >= at.Position().Offset && t.Type != tokComment {
			return node, i
		}
	}
	return node, len(tokens) - 1
}

// parseFile parses a whole file. After a syntax error it drops the offending statement and tries again, so
// that one run reports several errors. The tree contains the remaining statements.
func parseFile(src *sourceText, report func(*Diagnostic)) *fileNode {
	if len(src.text) > MaxFileBytes {
		at := span{src: src, start: lexer.Position{Line: 1, Column: 1}, end: lexer.Position{Line: 1, Column: 1}}
		report(newDiagnostic(Syntax, at, "", "the file is larger than %d KiB", MaxFileBytes>>10))
		return &fileNode{}
	}
	if what, hint := notSpec(src.text); what != "" {
		hidden := *src
		hidden.hidden = true // its lines say nothing
		start := lexer.Position{Line: 1, Column: 1}
		report(newDiagnostic(Syntax, span{src: &hidden, start: start, end: start}, hint, "this is %s, not a spec", what))
		return &fileNode{}
	}
	toks := lex(src)
	if deep := tooDeep(toks); deep >= 0 {
		report(newDiagnostic(Syntax, tokenSpan(src, toks[deep]), "", "more than %d nested brackets", maxNesting))
		return &fileNode{}
	}
	for range maxSyntaxErrors {
		node, bad := parseTokens(fileParser, toks)
		if bad < 0 {
			return node
		}
		report(syntaxDiagnostic(src, toks, bad))
		toks = repair(toks, bad)
	}
	return &fileNode{}
}

// jsonStart matches the start of a JSON object with a member, or of a list. No spec starts like this.
var jsonStart = regexp.MustCompile(`^\s*(\{\s*["}]|\[)`)

// notSpec says what a text is if it is clearly no spec, with a hint.
func notSpec(text string) (what, hint string) {
	const spec = "a spec is a text with the blocks model, cluster and train; sppoc init writes one for the folder of a model"
	if format, _ := infile.Format(text); format != "" {
		return format, spec
	}
	switch {
	case jsonStart.MatchString(text):
		return "JSON", "the name of a plan ends in .json; for the config.json of a model, give its folder"
	case strings.Contains(text, "\x00"):
		return "a binary file", spec
	}
	return "", ""
}

// parseFlag parses `block.key=value`, as given to --set.
func parseFlag(src *sourceText, report func(*Diagnostic)) *entryNode {
	toks := lex(src)
	deep := tooDeep(toks)
	if deep >= 0 || len(src.text) > MaxFileBytes {
		report(newDiagnostic(Syntax, tokenSpan(src, toks[max(deep, 0)]), "", "more than %d nested brackets", maxNesting))
		return nil
	}
	node, bad := parseTokens(entryParser, toks)
	if bad >= 0 {
		report(syntaxDiagnostic(src, toks, bad))
		return nil
	}
	return node
}

func tooDeep(toks []lexer.Token) int {
	depth := 0
	for i, t := range toks {
		switch t.Value {
		case "(", "[":
			depth++
		case ")", "]":
			depth--
		}
		if depth > maxNesting {
			return i
		}
	}
	return -1
}

// openAt returns the indexes of the brackets that are open before token i, outermost first. A
// block's closing brace also closes all brackets inside the block.
func openAt(toks []lexer.Token, i int) []int {
	var open []int
	for j, t := range toks[:i] {
		switch t.Value {
		case "(", "[", "{":
			open = append(open, j)
		case ")", "]":
			if n := len(open); n > 0 && toks[open[n-1]].Value != "{" {
				open = open[:n-1]
			}
		case "}":
			for n := len(open); n > 0; n = len(open) {
				last := toks[open[n-1]].Value
				open = open[:n-1]
				if last == "{" {
					break
				}
			}
		}
	}
	return open
}

func lineStart(toks []lexer.Token, i int) int {
	for i > 0 && toks[i-1].Type != tokNL {
		i--
	}
	return i
}

func lineEnd(toks []lexer.Token, i int) int {
	for toks[i].Type != tokNL && !toks[i].EOF() {
		i++
	}
	return i
}

// repair returns the tokens without the statement that contains the offending token i, or with a
// block closed before it, so that each attempt parses more of the file.
func repair(toks []lexer.Token, i int) []lexer.Token {
	open := openAt(toks, i)
	inBlock := len(open) > 0 && toks[open[0]].Value == "{"
	brackets := open
	if inBlock {
		brackets = open[1:]
	}
	from, to := lineStart(toks, i), lineEnd(toks, i)
	if len(brackets) > 0 { // the statement began at its first open bracket, and ends before the next line
		if start := lineStart(toks, brackets[0]); start < from {
			from, to = start, max(from, start+1)
		}
	}
	brace := lexer.Token{Type: tokPunct, Value: "}", Pos: toks[i].Pos}
	switch {
	case !inBlock && toks[i].Value == "}":
		return splice(toks, i, i+1)
	case inBlock && toks[i].EOF():
		if len(brackets) == 0 && !unfinished(toks, i) {
			from = i
		}
		return splice(toks, max(from, open[0]+1), i, brace)
	case inBlock && from > open[0] && isHeader(toks[from:to]):
		return splice(toks, from, from, brace)
	}
	return dropStatement(toks, from, to)
}

// unfinished reports whether the tokens before i end in the middle of `key = value`.
func unfinished(toks []lexer.Token, i int) bool {
	prev, before := previous(toks, i, 1), previous(toks, i, 2)
	return isOperator(prev.Value) || prev.Type == tokName && !isOperator(before.Value)
}

// dropStatement removes tokens from..to. It keeps the closing brace of an earlier block, and also
// removes a block that the statement opens.
func dropStatement(toks []lexer.Token, from, to int) []lexer.Token {
	depth, keep := 0, -1
	for j := from; j < to; j++ {
		switch toks[j].Value {
		case "{":
			depth++
		case "}":
			depth--
			if depth < 0 {
				keep, depth = j, 0
			}
		}
	}
	for ; depth > 0 && !toks[to].EOF(); to++ {
		switch toks[to].Value {
		case "{":
			depth++
		case "}":
			depth--
		}
	}
	if from == to && !toks[to].EOF() { // the offending token is a line break with nothing before it
		to++
	}
	if keep >= 0 && to-from > 1 {
		return splice(toks, from, to, toks[keep])
	}
	return splice(toks, from, to)
}

// isHeader reports whether a line looks like the start of a block.
func isHeader(line []lexer.Token) bool {
	if len(line) < 2 || line[0].Type != tokName || line[1].Value == "=" {
		return false
	}
	for _, t := range line {
		if t.Value == "{" {
			return true
		}
	}
	return false
}

func splice(toks []lexer.Token, from, to int, put ...lexer.Token) []lexer.Token {
	out := make([]lexer.Token, 0, len(toks)+len(put)+from-to)
	out = append(out, toks[:from]...)
	out = append(out, put...)
	return append(out, toks[to:]...)
}

// syntaxDiagnostic explains the error at token i by its context.
func syntaxDiagnostic(src *sourceText, toks []lexer.Token, i int) *Diagnostic {
	t := toks[i]
	at := tokenSpan(src, t)
	open := openAt(toks, i)
	var inner string
	if len(open) > 0 {
		inner = toks[open[len(open)-1]].Value
	}
	switch {
	case t.Type == tokOpenString:
		return newDiagnostic(Syntax, at, `close it with a double quote on the same line`, "unterminated string")
	case t.Type == tokStray:
		return strayDiagnostic(at, t)
	case t.EOF() && inner != "":
		opening := open[len(open)-1]
		return newDiagnostic(Syntax, tokenSpan(src, toks[opening]), fmt.Sprintf("add a `%s`", closing[inner]),
			"`%s` is never closed", inner)
	}
	prev, before := previous(toks, i, 1), previous(toks, i, 2)
	_, isUnit := units[prev.Value]
	if isUnit && before.Type == tokNumber && prev.Pos.Line == before.Pos.Line {
		whole := before.Value + prev.Value
		if t.Value == "/" && toks[min(i+1, len(toks)-1)].Value == "s" {
			whole += "/s"
		}
		return newDiagnostic(Syntax, tokenSpan(src, prev), "write "+whole,
			"the unit `%s` must directly follow its number", prev.Value)
	}
	return expectation(src, toks, i, open)
}

// expectation describes the tokens that would be valid at i; open lists the brackets around it.
func expectation(src *sourceText, toks []lexer.Token, i int, open []int) *Diagnostic {
	at, prev, found := tokenSpan(src, toks[i]), previous(toks, i, 1), describe(toks[i])
	fail := func(hint, format string, args ...any) *Diagnostic {
		return newDiagnostic(Syntax, at, hint, "%s, found %s", fmt.Sprintf(format, args...), found)
	}
	var inner string
	var innerLine int
	if n := len(open); n > 0 {
		inner, innerLine = toks[open[n-1]].Value, toks[open[n-1]].Pos.Line
	}
	switch {
	case toks[i].Value == "}" && inner == "":
		return newDiagnostic(Syntax, at, "", "`}` closes nothing")
	case prev.Value == "let":
		return fail("write `let name = value`", "expected a name after `let`")
	case prev.Value == "import":
		return fail(`write import "clusters/a100-80g.sppo"`, "expected a path in quotes after `import`")
	case isOperator(prev.Value):
		return fail("", "expected a value after `%s`", prev.Value)
	case inner == "(" || inner == "[":
		return fail(fmt.Sprintf("the `%s` on line %d may be missing its `%s`", inner, innerLine, closing[inner]), "expected `,` or `%s`", closing[inner])
	case inner == "{" && isHeader(toks[lineStart(toks, i):lineEnd(toks, i)]):
		return fail(fmt.Sprintf("the block opened on line %d may be missing its `}`", innerLine), "expected `=` after `%s`", prev.Value)
	case inner == "{" && prev.Type == tokName:
		return fail("", "expected `=` after `%s`", prev.Value)
	case inner == "{":
		return fail("a block contains `key = value`", "expected a key")
	case prev.Type == tokName:
		return fail("a block is `kind name { key = value }`", "expected `{` or `=` after `%s`", prev.Value)
	}
	return fail("a file contains `import`, `let` and blocks", "expected a block")
}

var closing = map[string]string{"(": ")", "[": "]", "{": "}"}

func strayDiagnostic(at span, t lexer.Token) *Diagnostic {
	hint := ""
	switch t.Value {
	case "'":
		hint = "write strings in double quotes"
	case ".":
		hint = "a number starts with a digit: 0.5"
	case ";":
		hint = "separate keys with spaces or newlines"
	case ":":
		hint = "write `key = value`"
	}
	return newDiagnostic(Syntax, at, hint, "unexpected character %q", t.Value)
}

// previous returns the n-th token before i, not counting comments, or the zero token if there is none.
func previous(toks []lexer.Token, i, n int) lexer.Token {
	for i--; i >= 0; i-- {
		if toks[i].Type == tokComment {
			continue
		}
		if n--; n == 0 {
			return toks[i]
		}
	}
	return lexer.Token{}
}

func isOperator(s string) bool {
	return s == "=" || s == "+" || s == "-" || s == "*" || s == "/"
}

func describe(t lexer.Token) string {
	switch {
	case t.EOF():
		return "the end of the file"
	case t.Type == tokNL:
		return "the end of the line"
	}
	return "`" + t.Value + "`"
}

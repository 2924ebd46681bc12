package ir

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"
	"unicode/utf8"
)

// SyntaxError is an error in a .sppir file.
type SyntaxError struct {
	File         string
	Line, Column int    // from 1; columns count characters
	Msg          string // the problem
	Hint         string // a suggested fix, or empty
	Source       string // the line
}

// Error formats the error as compilers do: position and message, the line, a caret, a hint.
func (e *SyntaxError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s:%d:%d: error: %s", e.File, e.Line, e.Column, e.Msg)
	if e.Source != "" {
		before, after := e.window()
		fmt.Fprintf(&b, "\n    %s%s\n    %s^", before, after, strings.Repeat(" ", utf8.RuneCountInString(before)))
	}
	if e.Hint != "" {
		fmt.Fprintf(&b, "\n    hint: %s", e.Hint)
	}
	return b.String()
}

// window returns the part of the line around the error that fits on a screen.
func (e *SyntaxError) window() (before, after string) {
	const most, lead = 140, 60
	line := []rune(strings.ReplaceAll(strings.ToValidUTF8(e.Source, "?"), "\t", " "))
	at := min(e.Column-1, len(line))
	from := max(0, min(at-lead, len(line)-most))
	to := min(len(line), from+most)
	before, after = string(line[from:at]), string(line[at:to])
	if from > 0 {
		before = "..." + before
	}
	if to < len(line) {
		after += "..."
	}
	return before, after
}

// ParseText reads the text format. Errors are of type *SyntaxError.
func ParseText(file string, src []byte) (*Program, error) {
	ps := &parser{file: file, src: string(src), p: &Program{}}
	err := ps.parse()
	var mistake *parseMistake
	switch {
	case err == nil:
		return ps.p, nil
	case errors.As(err, &mistake):
		return nil, ps.syntaxError(mistake)
	}
	return nil, ps.syntaxError(&parseMistake{msg: err.Error()})
}

// parseMistake is an error at a byte of the current line.
type parseMistake struct {
	at        int
	msg, hint string
}

func (m *parseMistake) Error() string { return m.msg }

// parser reads line by line. Every construct is a single line or a block of lines.
type parser struct {
	file string
	src  string
	next int // start of the line after the current one
	num  int // number of the current line
	line string
	at   int // byte of line

	p       *Program
	consts  map[string]int
	groups  map[string]int
	passes  map[string]int
	tensors map[string]int
	codes   map[string]int
	buffers map[string]int // of the current code

	views      []View // storage for operands and attributes of instructions
	attributes []Attr
}

func (ps *parser) syntaxError(m *parseMistake) *SyntaxError {
	at := min(m.at, len(ps.line))
	return &SyntaxError{
		File: ps.file, Line: max(ps.num, 1), Column: 1 + utf8.RuneCountInString(ps.line[:at]),
		Msg: m.msg, Hint: m.hint, Source: ps.line,
	}
}

func (ps *parser) errorAt(at int, hint, format string, args ...any) error {
	return &parseMistake{at, fmt.Sprintf(format, args...), hint}
}

func (ps *parser) errorf(format string, args ...any) error {
	return ps.errorAt(ps.at, "", format, args...)
}

// nextLine advances to the next line with content. It returns false at the end.
func (ps *parser) nextLine() bool {
	for ps.next < len(ps.src) {
		ps.num++
		end := strings.IndexByte(ps.src[ps.next:], '\n')
		if end < 0 {
			ps.line, ps.next = ps.src[ps.next:], len(ps.src)
		} else {
			ps.line, ps.next = ps.src[ps.next:ps.next+end], ps.next+end+1
		}
		ps.line = strings.TrimSuffix(ps.line, "\r")
		ps.at = 0
		if !ps.atEnd() {
			return true
		}
	}
	return false
}

func (ps *parser) space() {
	for ps.at < len(ps.line) && (ps.line[ps.at] == ' ' || ps.line[ps.at] == '\t') {
		ps.at++
	}
}

// mark returns the start of the next token.
func (ps *parser) mark() int {
	ps.space()
	return ps.at
}

// atEnd reports whether the rest of the line is empty or a comment.
func (ps *parser) atEnd() bool {
	ps.space()
	return ps.at >= len(ps.line) || ps.line[ps.at] == '#'
}

func (ps *parser) endOfLine() error {
	if !ps.atEnd() {
		return ps.errorf("expected the end of the line")
	}
	return nil
}

func (ps *parser) peek() byte {
	ps.space()
	if ps.at < len(ps.line) {
		return ps.line[ps.at]
	}
	return 0
}

// take skips one character if it is b.
func (ps *parser) take(b byte) bool {
	if ps.peek() == b {
		ps.at++
		return true
	}
	return false
}

func (ps *parser) expect(b byte) error {
	if !ps.take(b) {
		return ps.errorf("expected %q", b)
	}
	return nil
}

// word reads a word of plain characters, which may be empty.
func (ps *parser) word() string {
	ps.space()
	start := ps.at
	for ps.at < len(ps.line) && nameByte(ps.line[ps.at]) {
		ps.at++
	}
	return ps.line[start:ps.at]
}

// name reads a name, plain or quoted.
func (ps *parser) name(what string) (string, error) {
	if ps.peek() == '"' {
		return ps.quoted()
	}
	at := ps.mark()
	w := ps.word()
	if w == "" || w == "-" {
		return "", ps.errorAt(at, "", "expected the name of a %s", what)
	}
	return w, nil
}

func (ps *parser) quoted() (string, error) {
	start := ps.at
	end := jsonStringEnd(ps.line, start)
	if end < 0 {
		return "", ps.errorf("the quotes are not closed on this line")
	}
	var s string
	if err := json.Unmarshal([]byte(ps.line[start:end]), &s); err != nil {
		return "", ps.errorf("not a string: %v", err)
	}
	ps.at = end
	return s, nil
}

// jsonStringEnd returns the position after the string that starts at start, or -1.
func jsonStringEnd(s string, start int) int {
	for i := start + 1; i < len(s); i++ {
		switch s[i] {
		case '\\':
			i++
		case '"':
			return i + 1
		}
	}
	return -1
}

// rest returns the rest of the line without its comment.
func (ps *parser) rest() string {
	ps.space()
	i := ps.at
	for i < len(ps.line) && ps.line[i] != '#' {
		if ps.line[i] != '"' {
			i++
			continue
		}
		end := jsonStringEnd(ps.line, i)
		if end < 0 {
			end = len(ps.line)
		}
		i = end
	}
	return strings.TrimRight(ps.line[ps.at:i], " \t")
}

// json reads the rest of the line into v.
func (ps *parser) json(what string, v any) error {
	text := ps.rest()
	if err := json.Unmarshal([]byte(text), v); err != nil {
		return ps.errorf("%s must be %v in JSON, not %q", what, reflect.TypeOf(v).Elem(), text)
	}
	ps.at += len(text)
	return ps.endOfLine()
}

// number reads an integer between lo and hi.
func (ps *parser) number(what string, lo, hi int64) (int64, error) {
	at := ps.mark()
	w := ps.word()
	v, err := strconv.ParseInt(w, 0, 64)
	switch {
	case w == "":
		return 0, ps.errorAt(at, "", "expected %s", what)
	case err != nil || strings.Contains(w, "_"):
		return 0, ps.errorAt(at, "", "%s must be a whole number, not %q", what, w)
	case v < lo || v > hi:
		return 0, ps.errorAt(at, fmt.Sprintf("%d to %d", lo, hi), "%s is out of range: %s", what, w)
	}
	return v, nil
}

// keyed reads name=number.
func (ps *parser) keyed(key string, lo, hi int64) (int64, error) {
	at := ps.mark()
	if ps.word() != key {
		return 0, ps.errorAt(at, "", "expected %s=", key)
	}
	if err := ps.expect('='); err != nil {
		return 0, err
	}
	return ps.number(key, lo, hi)
}

// lookup resolves a name, which must already be defined.
func (ps *parser) lookup(what string, table map[string]int) (int, error) {
	at := ps.mark()
	name, err := ps.name(what)
	if err != nil {
		return 0, err
	}
	i, ok := table[name]
	if !ok {
		return 0, ps.errorAt(at, suggest(name, table), "no %s is named %s", what, name)
	}
	return i, nil
}

// choice reads a word that must be in a list.
func (ps *parser) choice(what string, words []string) (int, error) {
	at := ps.mark()
	w := ps.word()
	for i := range words {
		if words[i] == w {
			return i, nil
		}
	}
	if w == "" {
		return 0, ps.errorAt(at, "one of "+strings.Join(words, ", "), "expected %s", what)
	}
	hint := nearest(w, words)
	if hint == "" {
		hint = "one of " + strings.Join(words, ", ")
	}
	return 0, ps.errorAt(at, hint, "no %s is named %s", what, w)
}

// define adds a name to a table.
func (ps *parser) define(what string, table map[string]int) (string, error) {
	at := ps.mark()
	name, err := ps.name(what)
	if err != nil {
		return "", err
	}
	if _, double := table[name]; double || name == "" {
		return "", ps.errorAt(at, "", "a second %s is named %q", what, name)
	}
	table[name] = len(table)
	return name, nil
}

func (ps *parser) parse() error {
	ps.consts, ps.groups, ps.passes = map[string]int{}, map[string]int{}, map[string]int{}
	ps.tensors, ps.codes = map[string]int{}, map[string]int{}
	if !ps.nextLine() || ps.word() != textMagic {
		return ps.errorAt(0, `a program in text form starts with "sppir 4"`, "not a program")
	}
	at := ps.mark()
	if v, err := ps.number("the version", 0, math.MaxInt32); err != nil {
		return err
	} else if v != version {
		return ps.errorAt(at, "", "format version %d, but this build reads version %d", v, version)
	}
	if err := ps.endOfLine(); err != nil {
		return err
	}
	seen := map[string]bool{}
	for ps.nextLine() {
		i, err := ps.choice("entry", topWords)
		if err != nil {
			return err
		}
		if i < topOnce && seen[topWords[i]] {
			return ps.errorAt(0, "", "a second %s", topWords[i])
		}
		seen[topWords[i]] = true
		if err := ps.entry(topWords[i]); err != nil {
			return err
		}
	}
	ps.line, ps.num = "", ps.num+1
	return ps.p.Check()
}

// topWords lists the words that begin the entries of a file; each of the first topOnce words may occur only
// once.
var topWords = []string{"program", "flops_model", "run", "model", "machine", "line", "pass", "const", "group", "tensor", "code", "rank"}

const topOnce = 5

func (ps *parser) entry(word string) (err error) {
	p := ps.p
	switch word {
	case "program":
		return ps.json("the name", &p.Name)
	case "flops_model":
		return ps.json("flops_model", &p.FlopsModel)
	case "run":
		return ps.record("run", &p.Run)
	case "model":
		return ps.record("model", &p.Model)
	case "machine":
		return ps.record("machine", &p.Machine)
	case "line":
		return ps.specLine()
	case "pass":
		return ps.definition("pass", ps.passes, &p.Passes)
	case "const":
		return ps.definition("const", ps.consts, &p.Consts)
	case "group":
		return ps.definition("group", ps.groups, &p.Groups)
	case "tensor":
		return ps.tensor()
	case "code":
		return ps.code()
	}
	return ps.rank()
}

func (ps *parser) specLine() error {
	at := ps.mark()
	n, err := ps.number("the number of the line", 0, math.MaxUint16)
	if err != nil {
		return err
	}
	if int(n) != len(ps.p.Lines) {
		return ps.errorAt(at, "", "line %d, but %d is next", n, len(ps.p.Lines))
	}
	var text string
	err = ps.json("a line", &text)
	ps.p.Lines = append(ps.p.Lines, text)
	return err
}

func (ps *parser) definition(what string, table map[string]int, list *[]string) error {
	if len(ps.p.Codes) > 0 {
		return ps.errorAt(0, "move it up", "%s after the first code", what)
	}
	name, err := ps.define(what, table)
	if err != nil {
		return err
	}
	*list = append(*list, name)
	return ps.endOfLine()
}

func (ps *parser) tensor() error {
	name, err := ps.define("tensor", ps.tensors)
	if err != nil {
		return err
	}
	t := Tensor{Name: name}
	if err := ps.expect('['); err != nil {
		return err
	}
	for i := range t.Shape {
		if i > 0 {
			if err := ps.expect(','); err != nil {
				return err
			}
		}
		if t.Shape[i], err = ps.number("a dimension", math.MinInt64, math.MaxInt64); err != nil {
			return err
		}
	}
	ps.p.Tensors = append(ps.p.Tensors, t)
	if err := ps.expect(']'); err != nil {
		return err
	}
	return ps.endOfLine()
}

// record reads a block of "key = JSON" lines into a struct, whose JSON tags are the keys.
func (ps *parser) record(what string, into any) error {
	if err := ps.open(); err != nil {
		return err
	}
	s := reflect.ValueOf(into).Elem()
	var keys []string
	for i := range s.NumField() {
		keys = append(keys, jsonKey(s.Type().Field(i)))
	}
	seen := make([]bool, len(keys))
	return ps.block(what, func() error {
		at := ps.mark()
		i, err := ps.choice("key of "+what, keys)
		if err != nil {
			return err
		}
		if seen[i] {
			return ps.errorAt(at, "", "a second %s", keys[i])
		}
		seen[i] = true
		if err := ps.expect('='); err != nil {
			return err
		}
		return ps.json(keys[i], s.Field(i).Addr().Interface())
	})
}

// open reads the opening brace of a block.
func (ps *parser) open() error {
	if err := ps.expect('{'); err != nil {
		return err
	}
	return ps.endOfLine()
}

// block reads lines up to the closing brace.
func (ps *parser) block(what string, line func() error) error {
	opened := ps.num
	for ps.nextLine() {
		if ps.take('}') {
			return ps.endOfLine()
		}
		ps.at = 0
		if err := line(); err != nil {
			return err
		}
	}
	ps.num++
	ps.line, ps.at = "", 0
	return ps.errorAt(0, fmt.Sprintf("it was opened on line %d", opened), "the end of %s is missing", what)
}

func (ps *parser) rank() error {
	at := ps.mark()
	n, err := ps.number("the rank", 0, math.MaxInt32)
	if err != nil {
		return err
	}
	if int(n) != len(ps.p.Ranks) {
		return ps.errorAt(at, "", "rank %d, but %d is next", n, len(ps.p.Ranks))
	}
	code, err := ps.lookup("code", ps.codes)
	if err != nil {
		return err
	}
	r := Rank{Code: int32(code)}
	for _, c := range []struct {
		key string
		to  *int32
	}{{"dp", &r.DP}, {"pp", &r.PP}, {"sp", &r.SP}} {
		v, err := ps.keyed(c.key, math.MinInt32, math.MaxInt32)
		if err != nil {
			return err
		}
		*c.to = int32(v)
	}
	if err := ps.rankTables(&r); err != nil {
		return err
	}
	ps.p.Ranks = append(ps.p.Ranks, r)
	return nil
}

// rankTables reads the values of all constants and the members of groups.
func (ps *parser) rankTables(r *Rank) error {
	if n := len(ps.p.Consts); n > 0 {
		r.Consts = make([]int64, n)
	}
	if n := len(ps.p.Groups); n > 0 {
		r.Groups = make([][]int32, n)
	}
	given := make([]bool, len(r.Consts))
	for !ps.atEnd() {
		at := ps.mark()
		switch {
		case ps.take('$'):
			i, err := ps.lookup("const", ps.consts)
			if err != nil {
				return err
			}
			if given[i] {
				return ps.errorAt(at, "", "a second value of %s", ps.p.Consts[i])
			}
			given[i] = true
			if err := ps.expect('='); err != nil {
				return err
			}
			if r.Consts[i], err = ps.number("a constant", math.MinInt64, math.MaxInt64); err != nil {
				return err
			}
		case ps.take('@'):
			i, err := ps.lookup("group", ps.groups)
			if err != nil {
				return err
			}
			if r.Groups[i] != nil {
				return ps.errorAt(at, "", "a second list for %s", ps.p.Groups[i])
			}
			if r.Groups[i], err = ps.members(); err != nil {
				return err
			}
		default:
			return ps.errorf("expected $constant=value or @group=[ranks]")
		}
	}
	for i := range given {
		if !given[i] {
			return ps.errorf("constant $%s has no value", ps.p.Consts[i])
		}
	}
	return nil
}

func (ps *parser) members() ([]int32, error) {
	if err := ps.expect('='); err != nil {
		return nil, err
	}
	if err := ps.expect('['); err != nil {
		return nil, err
	}
	var members []int32
	for !ps.take(']') {
		if len(members) > 0 {
			if err := ps.expect(','); err != nil {
				return nil, err
			}
		}
		v, err := ps.number("a rank", 0, math.MaxInt32)
		if err != nil {
			return nil, err
		}
		members = append(members, int32(v))
	}
	return members, nil
}

package lang

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// Pos is a position in a source text. Lines and columns are numbered from 1, and columns count characters. The
// zero Pos means that there is no position.
type Pos struct {
	File   string `json:"file"`
	Line   int    `json:"line"`
	Column int    `json:"column"`
	Offset int    `json:"offset"` // bytes from the start of the text
}

func (p Pos) String() string {
	if p.Line == 0 {
		return p.File
	}
	return fmt.Sprintf("%s:%d:%d", p.File, p.Line, p.Column)
}

// Diagnostic is one error in the user's input: its position, the problem, and a suggested fix.
type Diagnostic struct {
	Code    Code
	Pos     Pos
	Message string
	Hint    string // may be empty
	Source  string // the line of Pos
	Width   int    // characters to underline, at least 1
}

// newDiagnostic returns a diagnostic that points at a span; hint may be empty.
func newDiagnostic(code Code, at span, hint, format string, args ...any) *Diagnostic {
	d := &Diagnostic{Code: code, Message: short(fmt.Sprintf(format, args...)), Hint: hint, Pos: at.pos(), Source: at.line(), Width: 1}
	if at.src != nil {
		first, _, _ := strings.Cut(at.words(), "\n")
		d.Width = max(1, utf8.RuneCountInString(strings.TrimRight(first, "\r")))
	}
	return d
}

// WithHint sets the suggested fix.
func (d *Diagnostic) WithHint(format string, args ...any) *Diagnostic {
	d.Hint = fmt.Sprintf(format, args...)
	return d
}

// Error formats the diagnostic as compilers do: position and message, the source line, a caret, a hint.
func (d *Diagnostic) Error() string {
	var b strings.Builder
	if d.Pos != (Pos{}) {
		fmt.Fprintf(&b, "%s: ", d.Pos)
	}
	fmt.Fprintf(&b, "error: %s [%s]", d.Message, d.Code)
	if d.Source != "" {
		before, marked, after := d.window()
		fmt.Fprintf(&b, "\n    %s\n    %s%s", clean(before+marked+after), blank(before), strings.Repeat("^", max(1, utf8.RuneCountInString(marked))))
	}
	if d.Hint != "" {
		fmt.Fprintf(&b, "\n    hint: %s", d.Hint)
	}
	return b.String()
}

// window splits the source line into three parts, the second of which is underlined. A line that is too long
// for a screen is cut to the text around that part.
func (d *Diagnostic) window() (before, marked, after string) {
	const most, lead = 160, 40
	line := []rune(d.Source)
	at := min(max(d.Pos.Column-1, 0), len(line))
	end := min(at+d.Width, len(line))
	if len(line) <= most {
		return string(line[:at]), string(line[at:end]), string(line[end:])
	}
	from := max(0, min(at-lead, len(line)-most))
	to := min(len(line), from+most)
	end = min(end, to)
	before, after = string(line[from:at]), string(line[end:to])
	if from > 0 {
		before = "..." + before
	}
	if to < len(line) {
		after += "..."
	}
	return before, string(line[at:end]), after
}

// blank returns white space of the same width as the text. Tabs are kept, so that the width is right in any
// terminal.
func blank(text string) string {
	return strings.Map(func(r rune) rune {
		if r != '\t' {
			r = ' '
		}
		return r
	}, text)
}

// short limits a message to a few lines.
func short(message string) string {
	const most = 400
	if runes := []rune(message); len(runes) > most {
		return string(runes[:most]) + "..."
	}
	return message
}

// clean replaces control characters, so that a malicious file cannot send them to the terminal.
func clean(line string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' && r != '\t' || r == 0x7f || r == utf8.RuneError {
			return '?'
		}
		return r
	}, line)
}

// Diagnostics is a list of errors in a spec, sorted by position, without duplicates.
type Diagnostics []*Diagnostic

func (ds Diagnostics) Error() string {
	lines := make([]string, len(ds))
	for i, d := range ds {
		lines[i] = d.Error()
	}
	return strings.Join(lines, "\n")
}

// Unwrap allows errors.As to find a Diagnostic.
func (ds Diagnostics) Unwrap() []error {
	errs := make([]error, len(ds))
	for i, d := range ds {
		errs[i] = d
	}
	return errs
}

// maxDiagnostics limits the number of diagnostics that are reported.
const maxDiagnostics = 50

// Err returns nil if there are no diagnostics. Otherwise it returns the first maxDiagnostics of them, sorted
// and without duplicates.
func (ds Diagnostics) Err() error {
	if len(ds) == 0 {
		return nil
	}
	sorted := slices.Clone(ds)
	slices.SortStableFunc(sorted, func(a, b *Diagnostic) int {
		return cmp.Or(cmp.Compare(a.Pos.File, b.Pos.File), cmp.Compare(a.Pos.Offset, b.Pos.Offset))
	})
	sorted = slices.CompactFunc(sorted, func(a, b *Diagnostic) bool {
		return a.Pos == b.Pos && a.Code == b.Code && a.Message == b.Message
	})
	return sorted[:min(len(sorted), maxDiagnostics)]
}

// source is what a Spec keeps of its text: the positions of values and blocks.
type source struct {
	values map[string]span // by key, such as "schedule.sp"; elements as "train.data[0]"
	blocks map[string]span // by name, such as "schedule"

	given map[string]value  // by key, such as "schedule.sp" or "train.optimizer.lr"
	names map[string]string // of blocks, by kind
	cells [][]span          // of the file that schedule.strategy names: those of "schedule.strategy[rank][i]"
}

func (s *source) find(key string) (at span, written bool) {
	if s == nil {
		return span{}, false
	}
	if at, ok := s.values[key]; ok {
		return at, true
	}
	var rank, i int
	if n, _ := fmt.Sscanf(key, "schedule.strategy[%d][%d]", &rank, &i); n == 2 && rank < len(s.cells) {
		return s.cells[rank][min(i, len(s.cells[rank])-1)], true
	}
	for part := key; part != ""; { // find the nearest enclosing part that was written
		i := strings.LastIndexAny(part, ".[")
		if i < 0 {
			return s.blocks[part], false
		}
		part = part[:i]
		if at, ok := s.values[part]; ok {
			return at, false
		}
	}
	return span{}, false
}

// At returns the position of the value of a key such as "schedule.sp". For an omitted key it
// returns the position of its call or block. Elements of lists are named as in
// "schedule.subsequences[3]".
func (s *Spec) At(key string) Pos {
	at, _ := s.source.find(key)
	return at.pos()
}

// Written reports whether the user gave the key a value, in a file or by --set.
func (s *Spec) Written(key string) bool {
	_, written := s.source.find(key)
	return written
}

// Diagnose returns a diagnostic at the value of a key, for later phases. If the Spec was not read from text,
// the diagnostic has no position.
func (s *Spec) Diagnose(key string, code Code, format string, args ...any) *Diagnostic {
	at, _ := s.source.find(key)
	if at.src == nil {
		return newDiagnostic(code, at, "", "%s: %s", key, fmt.Sprintf(format, args...))
	}
	return newDiagnostic(code, at, "", format, args...)
}

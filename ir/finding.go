package ir

import (
	"fmt"
	"strings"
)

// FindingKind is the kind of rule that a program breaks.
type FindingKind string

// Kinds of findings.
const (
	FindMalformed     FindingKind = "malformed"     // an index is out of range, or an operand is missing
	FindHeader        FindingKind = "header"        // an invalid figure of the run, a tensor or a rank
	FindShape         FindingKind = "shape"         // shapes, element types or attributes that the row does not allow
	FindBounds        FindingKind = "bounds"        // a view, buffer or arena is too small or misaligned
	FindPlace         FindingKind = "place"         // an operand in the wrong arena, an instruction on the wrong stream
	FindOverlap       FindingKind = "overlap"       // an instruction writes over its own operands
	FindEvent         FindingKind = "event"         // an event recorded twice, or waited for but not recorded before
	FindRace          FindingKind = "race"          // two conflicting accesses that no event orders
	FindUninitialised FindingKind = "uninitialised" // a read of bytes that hold no value of the buffer that is read
	FindLife          FindingKind = "life"          // a value overwritten or changed while the old value is still needed
	FindDead          FindingKind = "dead"          // a result that is never read
	FindState         FindingKind = "state"         // a value that outlives a step but is no state, or a state that a step does not update as a whole and once
	FindMessage       FindingKind = "message"       // sends and receives that do not match
	FindCollective    FindingKind = "collective"    // members of a group that disagree about a collective
	FindDeadlock      FindingKind = "deadlock"      // ranks that wait for each other
	FindFormula       FindingKind = "formula"       // values that are combined although they do not belong together, such as a gradient with another operand than that of its product
	FindCapacity      FindingKind = "capacity"      // more memory than the machine has
)

// Site is a position in a program.
type Site struct {
	Rank    int // None: every rank that runs the code
	Code    string
	Section Section
	Index   int    // of the instruction in its section; None: the code or rank as a whole
	Text    string // the instruction
	Line    string // the spec line that it comes from
}

func (s *Site) String() string {
	var parts []string
	if s.Rank != None {
		parts = append(parts, fmt.Sprintf("rank %d", s.Rank))
	}
	if s.Code != "" && (s.Rank == None || s.Index != None) {
		parts = append(parts, "code "+s.Code)
	}
	if s.Index != None {
		parts = append(parts, fmt.Sprintf("%s %d", s.Section, s.Index))
	}
	return strings.Join(parts, ", ")
}

// detail returns the instruction and its origin, on separate lines.
func (s *Site) detail() string {
	if s.Text == "" {
		return ""
	}
	d := fmt.Sprintf("\n    %s %d: %s", s.Section, s.Index, s.Text)
	if s.Line != "" {
		d += "\n        from " + s.Line
	}
	return d
}

// Finding is one reason why a program must not run.
type Finding struct {
	Kind  FindingKind
	At    Site
	Other *Site // the other instruction of the pair, if there is one
	Msg   string
}

func (f *Finding) String() string {
	s := fmt.Sprintf("%s: ", f.Kind)
	if at := f.At.String(); at != "" {
		s += at + ": "
	}
	s += f.Msg + f.At.detail()
	if f.Other != nil {
		s += f.Other.detail()
	}
	return s
}

// VerifyError holds the findings, up to a limit.
type VerifyError struct {
	Findings []Finding
	More     int // number of findings beyond the limit
}

func (e *VerifyError) Error() string {
	var b strings.Builder
	n := len(e.Findings) + e.More
	fmt.Fprintf(&b, "the program failed verification: %d finding%s", n, strings.Repeat("s", min(n-1, 1)))
	for i := range e.Findings {
		b.WriteString("\n" + e.Findings[i].String())
	}
	if e.More > 0 {
		fmt.Fprintf(&b, "\nand %d more", e.More)
	}
	return b.String()
}

// Has reports whether any finding is of the given kind.
func (e *VerifyError) Has(kind FindingKind) bool {
	for i := range e.Findings {
		if e.Findings[i].Kind == kind {
			return true
		}
	}
	return false
}

// findings collects findings up to a limit.
type findings struct {
	list  []Finding
	more  int
	limit int
}

func (f *findings) add(x Finding) {
	if len(f.list) < f.limit {
		f.list = append(f.list, x)
		return
	}
	f.more++
}

// addOnce adds a finding unless another rank already has one of the same kind at the same instruction.
func (f *findings) addOnce(x Finding) {
	for i := range f.list {
		y := &f.list[i]
		sameSite := x.At.Code == y.At.Code && x.At.Section == y.At.Section && x.At.Index == y.At.Index
		if x.Kind == y.Kind && sameSite && (x.At.Code != "" || x.Msg == y.Msg) {
			return
		}
	}
	f.add(x)
}

func (f *findings) append(other *findings) {
	for _, x := range other.list {
		f.add(x)
	}
	f.more += other.more
}

func (f *findings) empty() bool { return len(f.list) == 0 }

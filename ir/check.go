package ir

import (
	"errors"
	"fmt"
	"unicode/utf8"
)

// Check reports whether the program is well formed: every index is in range, every instruction has the operands
// and attributes of its opcode's row, and every name can be written. Each of the two file formats can represent
// all well-formed programs and no others, so code that uses a decoded program need not check indices. Verify
// decides whether a program is correct.
func (p *Program) Check() error {
	errs := p.malformed(1)
	if len(errs) == 0 {
		return nil
	}
	return errs[0]
}

// malformed returns up to limit reasons why the program is not well formed.
func (p *Program) malformed(limit int) []error {
	c := checker{p: p, limit: limit}
	c.header()
	for i := range p.Codes {
		c.code(&p.Codes[i])
	}
	c.ranks()
	return c.errs
}

type checker struct {
	p     *Program
	errs  []error
	limit int
	where func() string // returns the name of the checked part, for messages
}

// that reports a problem if ok is false.
func (c *checker) that(ok bool, format string, args ...any) {
	if !ok {
		c.fail(format, args...)
	}
}

func (c *checker) fail(format string, args ...any) {
	if len(c.errs) >= c.limit {
		return
	}
	err := fmt.Errorf(format, args...)
	if c.where != nil {
		err = fmt.Errorf("%s: %w", c.where(), err)
	}
	c.errs = append(c.errs, err)
}

func (c *checker) full() bool { return len(c.errs) >= c.limit }

func (c *checker) header() {
	p := c.p
	c.names("constant", len(p.Consts), func(i int) string { return p.Consts[i] })
	c.names("group", len(p.Groups), func(i int) string { return p.Groups[i] })
	c.names("pass", len(p.Passes), func(i int) string { return p.Passes[i] })
	c.names("tensor", len(p.Tensors), func(i int) string { return p.Tensors[i].Name })
	c.names("code", len(p.Codes), func(i int) string { return p.Codes[i].Name })
	if _, err := marshalHeader(p); err != nil {
		c.that(false, "header: %w", err)
	}
}

// names checks that names can be used as references: they must be distinct and writable.
func (c *checker) names(what string, n int, name func(int) string) {
	seen := make(map[string]bool, n)
	for i := range n {
		s := name(i)
		switch {
		case s == "":
			c.fail("%s %d has no name", what, i)
		case !utf8.ValidString(s):
			c.fail("name of %s %d is not UTF-8", what, i)
		case seen[s]:
			c.fail("two %ss are named %q", what, s)
		}
		seen[s] = true
	}
}

func (c *checker) code(code *Code) {
	c.where = func() string { return "code " + code.Name }
	c.names("buffer", len(code.Buffers), func(i int) string { return code.Buffers[i].Name })
	for a, peak := range code.Arenas {
		c.that(peak >= 0, "%s arena of %d bytes", Arena(a), int64(peak))
	}
	for i := range code.Buffers {
		b := &code.Buffers[i]
		if b.Arena >= NumArenas {
			c.fail("buffer %s is in arena %d of %d", b.Name, b.Arena, NumArenas)
		}
		if b.Offset < 0 || b.Size < 0 || b.Offset+b.Size < 0 {
			c.fail("buffer %s has %d bytes at %d", b.Name, int64(b.Size), int64(b.Offset))
		}
	}
	for i := range code.States {
		s := &code.States[i]
		c.that(s.Tensor >= 0 && int(s.Tensor) < len(c.p.Tensors), "state %d is of tensor %d of %d", i, s.Tensor, len(c.p.Tensors))
		c.that(s.Role < NumRoles, "state %d has role %d of %d", i, s.Role, NumRoles)
		c.that(s.View.Present(), "state %d has no view", i)
		c.that(c.attr(&s.Row0, KindInt, 0) && c.attr(&s.Col0, KindInt, 0) && c.attr(&s.End, KindInt, 0), "state %d refers to a constant that does not exist", i)
		c.view(code, "state", &s.View)
	}
	for i := range code.Results {
		r := &code.Results[i]
		c.that(utf8.ValidString(r.Name) && r.Name != "", "name %q of a result", r.Name)
		c.that(r.View.Present(), "result %s has no view", r.Name)
		c.view(code, r.Name, &r.View)
	}
	for s := range code.Sections {
		c.section(code, Section(s))
	}
}

func (c *checker) section(code *Code, s Section) {
	events := code.Events[s]
	c.where = func() string { return fmt.Sprintf("code %s, %s", code.Name, s) }
	// Every event must have a record instruction. This bounds the memory that readers allocate for events.
	n := len(code.Sections[s])
	c.that(events >= 0 && int(events) <= n, "%d events in %d instructions", events, n)
	at := 0
	c.where = func() string { return fmt.Sprintf("code %s, %s %d", code.Name, s, at) }
	for i := range code.Sections[s] {
		if c.full() {
			return
		}
		at = i
		c.instr(code, &code.Sections[s][i], events)
	}
}

// instr checks an instruction. It is called millions of times, so it formats messages only for errors.
func (c *checker) instr(code *Code, in *Instr, events int32) {
	if in.Op >= NumOps {
		c.fail("opcode %d of %d", in.Op, NumOps)
		return
	}
	row, p := in.Info(), &in.Prov
	if in.Stream >= NumStreams {
		c.fail("%s on stream %d of %d", row.Name, in.Stream, NumStreams)
	}
	if p.Phase >= NumPhases || !inTable(int(p.Line), len(c.p.Lines)) || !inTable(int(p.Pass), len(c.p.Passes)) {
		c.fail("comes from phase %d of %d, spec line %d of %d, pass %d of %d", p.Phase, NumPhases, p.Line, len(c.p.Lines), p.Pass, len(c.p.Passes))
	}
	if len(in.Args) != len(row.Operands) || len(in.Attrs) != len(row.Attrs) {
		c.fail("%s has %d operands and %d attributes, not %d and %d", row.Name, len(in.Args), len(in.Attrs), len(row.Operands), len(row.Attrs))
		return
	}
	for i := range in.Args {
		v, o := &in.Args[i], &row.Operands[i]
		switch {
		case v.Present():
			c.view(code, o.Name, v)
			if !o.allows(v.DType) {
				c.fail("%s of %s is %s, not %s", o.Name, row.Name, describeType(v.DType), o.typeText())
			}
		case !o.Optional:
			c.fail("%s is missing operand %s", row.Name, o.Name)
		case *v != Absent():
			c.fail("absent operand %s of %s has a shape", o.Name, row.Name)
		}
	}
	for i := range in.Attrs {
		a, info := &in.Attrs[i], &row.Attrs[i]
		if !c.attr(a, info.Kind, events) {
			c.fail("%s: attribute %s: no such %s (%s)", row.Name, info.Name, info.Kind, describeAttr(a))
		}
	}
}

// inTable reports whether i indexes a table of n entries. Programs written by hand may omit the tables that
// provenance refers to.
func inTable(i, n int) bool { return i < n || i == 0 && n == 0 }

// describeType returns the name of an element type, which may be invalid.
func describeType(d DType) string {
	if d < NumDTypes {
		return d.String()
	}
	return fmt.Sprintf("element type %d", d)
}

func describeAttr(a *Attr) string {
	if a.Const != 0 {
		return fmt.Sprintf("constant %d", a.Const-1)
	}
	return fmt.Sprint(int64(a.Bits))
}

// attr reports whether an attribute refers to something that exists. An attribute that selects
// behaviour must be literal, so that checking a code once is enough for all its ranks.
func (c *checker) attr(a *Attr, kind AttrKind, events int32) bool {
	if a.Const != 0 {
		literalKind := kind == KindBool || kind == KindTensor || kind == KindGroup || kind == KindEvent || kind == KindFunction
		return !literalKind && a.Const > 0 && int(a.Const) <= len(c.p.Consts) && a.Bits == 0
	}
	switch kind {
	case KindTensor:
		return a.Bits < uint64(len(c.p.Tensors))
	case KindFunction:
		return a.Bits < uint64(len(Functions))
	case KindGroup:
		return a.Bits < uint64(len(c.p.Groups))
	case KindEvent:
		return a.Bits < uint64(max(events, 0))
	}
	return true
}

func (c *checker) view(code *Code, name string, v *View) {
	switch {
	case int(v.Buffer) >= len(code.Buffers):
		c.fail("%s is in buffer %d of %d", name, v.Buffer, len(code.Buffers))
	case v.DType >= NumDTypes:
		c.fail("%s has element type %d of %d", name, v.DType, NumDTypes)
	case v.Offset < 0:
		c.fail("%s starts at byte %d of its buffer", name, int64(v.Offset))
	case !wellShaped(&v.Shape):
		c.fail("%s has shape %v", name, v.Shape)
	}
}

// wellShaped reports whether positive dimensions come first and zeros fill the rest.
func wellShaped(shape *[MaxDims]int64) bool {
	used := true
	for i, d := range shape {
		switch {
		case d < 0, d > 0 && !used, d == 0 && i == 0:
			return false
		case d == 0:
			used = false
		}
	}
	return true
}

func (c *checker) ranks() {
	p := c.p
	at := 0
	c.where = func() string { return fmt.Sprintf("rank %d", at) }
	for i := range p.Ranks {
		r := &p.Ranks[i]
		at = i
		c.that(r.Code >= 0 && int(r.Code) < len(p.Codes), "code %d of %d", r.Code, len(p.Codes))
		c.that(len(r.Consts) == len(p.Consts), "%d values for %d constants", len(r.Consts), len(p.Consts))
		c.that(len(r.Groups) == len(p.Groups), "%d lists for %d groups", len(r.Groups), len(p.Groups))
		for g, members := range r.Groups {
			for _, m := range members {
				if m < 0 || int(m) >= len(p.Ranks) {
					c.fail("member %d of group %d is not one of the %d ranks", m, g, len(p.Ranks))
					break
				}
			}
		}
		if c.full() {
			return
		}
	}
}

// errNotText reports a header that is not valid UTF-8, because JSON would silently replace the invalid bytes.
var errNotText = errors.New("holds text that is not UTF-8")

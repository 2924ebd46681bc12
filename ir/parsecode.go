package ir

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// This file parses the text format of a Code: its buffers, states, results and instructions.

var dtypeNames = func() []string {
	var names []string
	for d := range NumDTypes {
		names = append(names, d.String())
	}
	return names
}()

var arenaNames = []string{Device.String(), Host.String()}

var codeWords = []string{"arena", "buffer", "state", "result", "section"}

func (ps *parser) code() error {
	name, err := ps.define("code", ps.codes)
	if err != nil {
		return err
	}
	if err := ps.open(); err != nil {
		return err
	}
	ps.p.Codes = append(ps.p.Codes, Code{Name: name})
	c := &ps.p.Codes[len(ps.p.Codes)-1]
	ps.buffers = map[string]int{}
	return ps.block("code "+name, func() error {
		i, err := ps.choice("entry of a code", codeWords)
		if err != nil {
			return err
		}
		switch codeWords[i] {
		case "arena":
			return ps.arena(c)
		case "buffer":
			return ps.buffer(c)
		case "state":
			return ps.state(c)
		case "result":
			return ps.result(c)
		}
		return ps.section(c)
	})
}

func (ps *parser) arenaName() (Arena, error) {
	i, err := ps.choice("arena", arenaNames)
	return Arena(i), err
}

func (ps *parser) arena(c *Code) error {
	a, err := ps.arenaName()
	if err != nil {
		return err
	}
	n, err := ps.number("the size of an arena", 0, math.MaxInt64)
	if err != nil {
		return err
	}
	c.Arenas[a] = Bytes(n)
	return ps.endOfLine()
}

func (ps *parser) buffer(c *Code) error {
	name, err := ps.define("buffer", ps.buffers)
	if err != nil {
		return err
	}
	a, err := ps.arenaName()
	if err != nil {
		return err
	}
	offset, err := ps.number("the offset of a buffer", 0, math.MaxInt64)
	if err != nil {
		return err
	}
	size, err := ps.number("the size of a buffer", 0, math.MaxInt64-offset)
	if err != nil {
		return err
	}
	c.Buffers = append(c.Buffers, Buffer{name, a, Bytes(offset), Bytes(size)})
	return ps.endOfLine()
}

func (ps *parser) state(c *Code) error {
	tensor, err := ps.lookup("tensor", ps.tensors)
	if err != nil {
		return err
	}
	role, err := ps.choice("role", roleNames())
	if err != nil {
		return err
	}
	s := State{Tensor: int32(tensor), Role: Role(role)}
	if s.View, err = ps.view(); err != nil {
		return err
	}
	for _, c := range []struct {
		key string
		to  *Attr
	}{{"row", &s.Row0}, {"col", &s.Col0}, {"end", &s.End}} {
		if c.to == &s.End && ps.atEnd() {
			break
		}
		at := ps.mark()
		if ps.word() != c.key {
			return ps.errorAt(at, "", "expected %s=", c.key)
		}
		if err := ps.expect('='); err != nil {
			return err
		}
		if *c.to, err = ps.attrValue(c.key, KindInt, 0); err != nil {
			return err
		}
	}
	c.States = append(c.States, s)
	return ps.endOfLine()
}

func (ps *parser) result(c *Code) error {
	name, err := ps.name("result")
	if err != nil {
		return err
	}
	v, err := ps.view()
	if err != nil {
		return err
	}
	c.Results = append(c.Results, Result{name, v})
	return ps.endOfLine()
}

func (ps *parser) section(c *Code) error {
	at := ps.mark()
	s, err := ps.choice("section", sectionNames[:])
	if err != nil {
		return err
	}
	if c.Sections[s] != nil || c.Events[s] != 0 {
		return ps.errorAt(at, "", "a second section %s", Section(s))
	}
	events, err := ps.keyed("events", 0, math.MaxInt32)
	if err != nil {
		return err
	}
	c.Events[s] = int32(events)
	if err := ps.open(); err != nil {
		return err
	}
	return ps.block("section "+sectionNames[s], func() error {
		var in Instr
		if err := ps.instr(&in, c.Events[s]); err != nil {
			return err
		}
		c.Sections[s] = append(c.Sections[s], in)
		return nil
	})
}

func (ps *parser) instr(in *Instr, events int32) error {
	s, err := ps.choice("stream", streamNames[:])
	if err != nil {
		return err
	}
	in.Stream = Stream(s)
	if err := ps.origin(&in.Prov); err != nil {
		return err
	}
	if in.Op, err = ps.opcode(); err != nil {
		return err
	}
	if err := ps.operands(in); err != nil {
		return err
	}
	if err := ps.attrs(in, events); err != nil {
		return err
	}
	if err := ps.decision(&in.Prov); err != nil {
		return err
	}
	return ps.endOfLine()
}

// origin reads phase, microbatch, subsequence, layer and stage.
func (ps *parser) origin(p *Provenance) error {
	p.Microbatch, p.Subsequence, p.Layer, p.Stage = None, None, None, None
	at := ps.mark()
	w := ps.word()
	phase := strings.Index(phaseLetters, w)
	if len(w) != 1 || phase < 0 {
		return ps.errorAt(at, "I init, F forward, B backward, W weights, O optimizer, E eval", "expected the phase")
	}
	p.Phase = Phase(phase)
	for {
		at := ps.mark()
		w := ps.word()
		if len(w) < 2 || !strings.Contains("mslp", w[:1]) || w[1] != '-' && (w[1] < '0' || w[1] > '9') {
			ps.at = at
			return nil
		}
		bits := 32
		if w[0] == 'p' {
			bits = 16
		}
		v, err := strconv.ParseInt(w[1:], 10, bits)
		if err != nil {
			return ps.errorAt(at, "", "%q is not an index", w)
		}
		switch w[0] {
		case 'm':
			p.Microbatch = int32(v)
		case 's':
			p.Subsequence = int32(v)
		case 'l':
			p.Layer = int32(v)
		case 'p':
			p.Stage = int16(v)
		}
	}
}

func (ps *parser) opcode() (Op, error) {
	at := ps.mark()
	w := ps.word()
	if op, ok := opByName()[w]; ok {
		return op, nil
	}
	if w == "" {
		return 0, ps.errorAt(at, "", "expected an opcode")
	}
	return 0, ps.errorAt(at, nearest(w, opNames()), "no opcode is named %s", w)
}

// operands reads both sides of an instruction.
func (ps *parser) operands(in *Instr) error {
	row := in.Info()
	if len(row.Operands) == 0 {
		return nil
	}
	in.Args = slab(&ps.views, len(row.Operands))
	for i := range in.Args {
		in.Args[i] = Absent()
	}
	written := row.Written()
	if err := ps.side(row, in.Args[:written], 0); err != nil {
		return err
	}
	if written == 0 || written == len(in.Args) {
		return ps.side(row, in.Args[written:], written)
	}
	if !ps.take('=') {
		return ps.errorAt(ps.at, row.Usage(), `expected "=" between the outputs and the inputs of %s`, row.Name)
	}
	return ps.side(row, in.Args[written:], written)
}

// slab takes n values from store, which it replaces with a large new array when too few are left.
func slab[T any](store *[]T, n int) []T {
	if len(*store) < n {
		*store = make([]T, 1024)
	}
	piece := (*store)[:n:n]
	*store = (*store)[n:]
	return piece
}

// side reads operands into views until views is full; first is the index of the first of these operands in the
// row.
func (ps *parser) side(row *OpInfo, views []View, first int) error {
	n := 0
	for ; n < len(views); n++ {
		if n > 0 && !ps.take(',') {
			break
		}
		o := &row.Operands[first+n]
		at := ps.mark()
		if ps.absent() {
			if !o.Optional {
				return ps.errorAt(at, row.Usage(), "operand %s of %s is not optional", o.Name, row.Name)
			}
			continue
		}
		v, err := ps.operand(row, o)
		if err != nil {
			return err
		}
		views[n] = v
	}
	if ps.peek() == ',' {
		return ps.errorAt(ps.at, row.Usage(), "too many operands for %s", row.Name)
	}
	for ; n < len(views); n++ {
		if o := &row.Operands[first+n]; !o.Optional {
			return ps.errorAt(ps.at, row.Usage(), "%s is missing operand %s", row.Name, o.Name)
		}
	}
	return nil
}

// absent reads the dash that represents an absent operand.
func (ps *parser) absent() bool {
	at := ps.mark()
	if ps.word() == "-" {
		return true
	}
	ps.at = at
	return false
}

// operand reads a view. It rejects an element type that the row does not allow, because the position is still
// known here.
func (ps *parser) operand(row *OpInfo, o *Operand) (View, error) {
	at := ps.mark()
	v, err := ps.view()
	if err != nil {
		if m, ok := err.(*parseMistake); ok && m.hint == "" {
			m.hint = row.Usage()
		}
		return v, err
	}
	if !o.allows(v.DType) {
		return v, ps.errorAt(at, row.Usage(), "operand %s of %s is %s, not %s", o.Name, row.Name, o.typeText(), v.DType)
	}
	return v, nil
}

func (ps *parser) view() (View, error) {
	i, err := ps.lookup("buffer", ps.buffers)
	if err != nil {
		return View{}, err
	}
	v := View{Buffer: uint32(i)}
	if ps.take('+') {
		n, err := ps.number("an offset", 0, math.MaxInt64)
		if err != nil {
			return v, err
		}
		v.Offset = Bytes(n)
	}
	if err := ps.expect(':'); err != nil {
		return v, err
	}
	d, err := ps.choice("element type", dtypeNames)
	if err != nil {
		return v, err
	}
	v.DType = DType(d)
	return v, ps.shape(&v)
}

func (ps *parser) shape(v *View) error {
	if err := ps.expect('['); err != nil {
		return err
	}
	for i := 0; ; i++ {
		if i == MaxDims {
			return ps.errorf("more than %d dimensions", MaxDims)
		}
		n, err := ps.number("a dimension", 1, math.MaxInt64)
		if err != nil {
			return err
		}
		v.Shape[i] = n
		if ps.take(']') {
			return nil
		}
		if err := ps.expect(','); err != nil {
			return err
		}
	}
}

// attrs reads attributes, which may be in any order. Only booleans, options and factors may be missing.
func (ps *parser) attrs(in *Instr, events int32) error {
	row := in.Info()
	if len(row.Attrs) == 0 {
		return nil
	}
	in.Attrs = slab(&ps.attributes, len(row.Attrs))
	var given [maxAttrs]bool
	for !ps.atEnd() && ps.peek() != '!' {
		at := ps.mark()
		i, err := ps.attr(in, events)
		if err != nil {
			return err
		}
		if given[i] {
			return ps.errorAt(at, "", "a second %s", row.Attrs[i].Name)
		}
		given[i] = true
	}
	for i := range row.Attrs {
		if a := &row.Attrs[i]; !given[i] && !a.Kind.MayBeLeftOut() {
			return ps.errorAt(ps.at, row.Usage(), "%s is missing attribute %s", row.Name, a.Name)
		}
	}
	return nil
}

// attr reads one attribute and returns its index.
func (ps *parser) attr(in *Instr, events int32) (int, error) {
	row := in.Info()
	at := ps.mark()
	if ps.peek() == '@' {
		return ps.attrOfKind(in, KindGroup, events)
	}
	w := ps.word()
	if i := row.findAttr(KindEvent); i >= 0 && len(w) > 1 && w[0] == 'e' && w[1] >= '0' && w[1] <= '9' {
		ps.at = at
		return ps.attrOfKind(in, KindEvent, events)
	}
	for i := range row.Attrs {
		a := &row.Attrs[i]
		if a.Name != w || a.Kind == KindGroup || a.Kind == KindEvent {
			continue
		}
		if a.Kind == KindBool && ps.peek() != '=' {
			in.Attrs[i] = Bool(true)
			return i, nil
		}
		if err := ps.expect('='); err != nil {
			return 0, err
		}
		v, err := ps.attrValue(w, a.Kind, events)
		in.Attrs[i] = v
		return i, err
	}
	if w == "" {
		return 0, ps.errorAt(at, row.Usage(), "expected an attribute of %s", row.Name)
	}
	return 0, ps.errorAt(at, row.Usage(), "%s has no attribute %s", row.Name, w)
}

// attrOfKind reads an attribute that is recognised by its first character.
func (ps *parser) attrOfKind(in *Instr, kind AttrKind, events int32) (int, error) {
	row := in.Info()
	i := row.findAttr(kind)
	if i < 0 {
		return 0, ps.errorAt(ps.at, row.Usage(), "%s has no %s", row.Name, kind)
	}
	v, err := ps.attrValue(row.Attrs[i].Name, kind, events)
	in.Attrs[i] = v
	return i, err
}

// attrValue reads an attribute's value in the syntax for its kind.
func (ps *parser) attrValue(name string, kind AttrKind, events int32) (Attr, error) {
	at := ps.mark()
	if ps.take('$') {
		i, err := ps.lookup("const", ps.consts)
		if err == nil && (kind == KindBool || kind == KindTensor || kind == KindFunction) {
			err = ps.errorAt(at, "", "%s must be literal", name)
		}
		return ConstRef(i), err
	}
	switch kind {
	case KindFloat, KindFactor:
		return ps.float(name)
	case KindFunction:
		w := ps.word()
		i := slices.Index(Functions, w)
		if i < 0 {
			return Attr{}, ps.errorAt(at, nearest(w, Functions), "there is no function %q", w)
		}
		return Int(int64(i)), nil
	case KindTensor:
		i, err := ps.lookup("tensor", ps.tensors)
		return Int(int64(i)), err
	case KindGroup:
		ps.at++
		i, err := ps.lookup("group", ps.groups)
		return Int(int64(i)), err
	case KindEvent:
		w := ps.word()
		v, err := strconv.ParseInt(w[1:], 10, 32)
		if err != nil || v >= int64(events) {
			return Attr{}, ps.errorAt(at, fmt.Sprintf("the section declares events=%d", events), "no event %s", w)
		}
		return Int(v), nil
	}
	v, err := ps.number(name, math.MinInt64, math.MaxInt64)
	return Int(v), err
}

// float reads a number up to the next space. 0x introduces the bits of a number that cannot be written otherwise.
func (ps *parser) float(name string) (Attr, error) {
	ps.space()
	start := ps.at
	for ps.at < len(ps.line) && ps.line[ps.at] != ' ' && ps.line[ps.at] != '\t' && ps.line[ps.at] != '!' && ps.line[ps.at] != '#' {
		ps.at++
	}
	w := ps.line[start:ps.at]
	if bits, ok := strings.CutPrefix(w, "0x"); ok {
		if v, err := strconv.ParseUint(bits, 16, 64); err == nil {
			return Attr{Bits: v}, nil
		}
	}
	v, err := strconv.ParseFloat(w, 64)
	if err != nil || math.IsNaN(v) {
		return Attr{}, ps.errorAt(start, "", "%s must be a number, not %q", name, w)
	}
	return Float(v), nil
}

// decision reads the pass and the spec line.
func (ps *parser) decision(p *Provenance) error {
	if !ps.take('!') {
		return nil
	}
	if c := ps.peek(); c != ':' && !ps.atEnd() {
		i, err := ps.lookup("pass", ps.passes)
		if err != nil {
			return err
		}
		if i > math.MaxUint8 {
			return ps.errorf("pass %d of at most %d", i, math.MaxUint8)
		}
		p.Pass = uint8(i)
	}
	if !ps.take(':') {
		return nil
	}
	n, err := ps.number("the spec line", 0, int64(max(len(ps.p.Lines)-1, 0)))
	p.Line = uint16(n)
	return err
}

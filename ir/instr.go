package ir

import "math"

// Attr is a scalar attribute: a literal, or a reference to a constant of the rank.
type Attr struct {
	Bits  uint64 // of a literal: the int64, or the bits of the float64
	Const int32  // 0: literal; else 1 + index into Program.Consts
}

// Int returns a literal integer, which may also stand for a boolean or be the index of a tensor, group or
// event.
func Int(v int64) Attr { return Attr{Bits: uint64(v)} }

// Float returns a literal number.
func Float(v float64) Attr { return Attr{Bits: math.Float64bits(v)} }

// Bool returns a literal truth value.
func Bool(v bool) Attr {
	if v {
		return Int(1)
	}
	return Int(0)
}

// ConstRef returns an attribute that refers to entry i of Program.Consts.
func ConstRef(i int) Attr { return Attr{Const: int32(i) + 1} }

// Int resolves an attribute of an integer kind for a rank with the given constants.
func (a Attr) Int(consts []int64) int64 {
	if a.Const != 0 {
		return consts[a.Const-1]
	}
	return int64(a.Bits)
}

// Float resolves an attribute of the float kind.
func (a Attr) Float(consts []int64) float64 {
	if a.Const != 0 {
		return float64(consts[a.Const-1])
	}
	return math.Float64frombits(a.Bits)
}

// Instr is one instruction. Args and Attrs are in the order of the opcode's row.
type Instr struct {
	Args   []View
	Attrs  []Attr
	Prov   Provenance
	Op     Op
	Stream Stream
}

// Info returns the opcode's row.
func (in *Instr) Info() *OpInfo { return &Ops[in.Op] }

// Arg returns the operand with that name in the opcode's row.
func (in *Instr) Arg(name string) View { return in.Args[in.Info().operand(name)] }

// Attr returns the attribute with that name in the opcode's row.
func (in *Instr) Attr(name string) Attr { return in.Attrs[in.Info().attr(name)] }

// Access reports whether operand i is read and whether it is written.
func (in *Instr) Access(i int) (reads, writes bool) {
	if !in.Args[i].Present() {
		return false, false
	}
	switch in.Info().Operands[i].Dir {
	case Read:
		return true, false
	case Write:
		return false, true
	case WriteOrAdd:
		accumulate := in.Attr(in.Info().Operands[i].AddsBy())
		return accumulate.Const != 0 || accumulate.Bits != 0, true
	}
	return true, true
}

// AddsBy returns the name of the attribute that makes an instruction add to a WriteOrAdd operand instead of
// overwriting it.
func (o *Operand) AddsBy() string {
	if o.Adds != "" {
		return o.Adds
	}
	return attrAccumulate.Name
}

// Written returns the number of operands that are written at least in part. These operands precede
// those that are only read.
func (o *OpInfo) Written() int {
	n := 0
	for n < len(o.Operands) && o.Operands[n].Dir != Read {
		n++
	}
	return n
}

func (o *OpInfo) operand(name string) int {
	for i := range o.Operands {
		if o.Operands[i].Name == name {
			return i
		}
	}
	panic("internal: opcode " + o.Name + " has no operand " + name)
}

func (o *OpInfo) attr(name string) int {
	for i := range o.Attrs {
		if o.Attrs[i].Name == name {
			return i
		}
	}
	panic("internal: opcode " + o.Name + " has no attribute " + name)
}

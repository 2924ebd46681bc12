package irtest

import "sppo.dev/ir"

// Collective returns one member's instruction for a collective, on stream Coll. shapes are those of its
// operands, the result first; attrs are its attributes other than the group.
func Collective(op ir.Op, t ir.DType, shapes [][]int64, attrs ...ir.Attr) *ir.Instr {
	in := &ir.Instr{Op: op, Stream: ir.Coll, Attrs: append([]ir.Attr{ir.Int(0)}, attrs...)}
	for _, shape := range shapes {
		v := ir.View{DType: t}
		copy(v.Shape[:], shape)
		in.Args = append(in.Args, v)
	}
	return in
}

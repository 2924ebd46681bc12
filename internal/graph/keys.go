package graph

import "sppo.dev/ir"

// BlockInstr returns the instruction that a node becomes, without addresses.
func BlockInstr(b *Block, n *Node, z Size) ir.Instr {
	return b.Instr(n, z, func(_ Arg, v ir.View) ir.View { return v }, func(Attr) ir.Attr { return ir.Int(0) })
}

// OverKeys narrows an instruction of attention, or of its gradient, to the keys and values of the tokens from
// first up to end.
func OverKeys(in ir.Instr, z Size, first, end int64) ir.Instr {
	row := in.Info()
	in.Args, in.Attrs = append([]ir.View(nil), in.Args...), append([]ir.Attr(nil), in.Attrs...)
	for i := range row.Operands {
		switch row.Operands[i].Name {
		case "k", "v", "dk", "dv":
			in.Args[i] = RowsOf(in.Args[i], first*z.Batch, (end-first)*z.Batch)
		}
	}
	for i := range row.Attrs {
		if row.Attrs[i].Name == "prefix" {
			in.Attrs[i] = ir.Int(z.Prefix - first)
		}
	}
	return in
}

// RowsOf returns a range of a matrix's rows.
func RowsOf(v ir.View, first, rows int64) ir.View {
	v.Offset += ir.Bytes(first*v.Cols()) * v.DType.Bytes()
	v.Shape[0] = rows
	return v
}

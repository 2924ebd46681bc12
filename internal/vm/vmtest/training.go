package vmtest

import "sppo.dev/ir"

// Zero makes a program clear an operand after every instruction with the given opcode, to show that a check sees that.
func Zero(p *ir.Program, op ir.Op, operand string) {
	for c := range p.Codes {
		for s := range p.Codes[c].Sections {
			var code []ir.Instr
			for _, in := range p.Codes[c].Sections[s] {
				if code = append(code, in); in.Op == op {
					code = append(code, ir.Instr{Op: ir.Fill, Stream: in.Stream, Args: []ir.View{in.Arg(operand)}, Attrs: []ir.Attr{ir.Float(0)}, Prov: in.Prov})
				}
			}
			p.Codes[c].Sections[s] = code
		}
	}
}

// AttentionResults lists the results of attention that a comparison of training runs must depend on.
var AttentionResults = []struct {
	Op      ir.Op
	Operand string
}{{ir.Attention, "o"}, {ir.AttentionGrad, "dq"}, {ir.AttentionGrad, "dk"}, {ir.AttentionGrad, "dv"}}

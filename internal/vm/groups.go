package vm

import "sppo.dev/ir"

// Groups returns, for each instruction of a section, whether a device may begin it together with the collective before it, as
// one group: a collective of the same ranks on the same stream that follows it, with nothing but waits of that stream between
// them. A member of a group has no start-up time of its own.
func Groups(code []ir.Instr) []bool {
	grouped := make([]bool, len(code))
	before := -1 // the collective before, if one of its group may follow
	for pc := range code {
		in := &code[pc]
		switch c := in.Op.Collective(); {
		case c != nil && c.Traffic == ir.TrafficRing:
			grouped[pc] = before >= 0 && code[before].Stream == in.Stream && code[before].Attr("group") == in.Attr("group")
			before = pc
		case in.Op != ir.Wait || before >= 0 && code[before].Stream != in.Stream:
			before = -1
		}
	}
	return grouped
}

// GroupEnds returns, for each instruction of a section, whether it is the last collective of its group. Every collective that is
// not in a larger group is one of its own.
func GroupEnds(code []ir.Instr) []bool {
	ends, grouped, next := make([]bool, len(code)), Groups(code), false
	for pc := len(code) - 1; pc >= 0; pc-- {
		switch {
		case code[pc].Op.Collective() != nil:
			ends[pc] = !next
			next = grouped[pc]
		case code[pc].Op != ir.Wait:
			next = false
		}
	}
	return ends
}

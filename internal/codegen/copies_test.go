package codegen

import (
	"testing"

	"sppo.dev/ir"
)

// TestCopiesFollowTheirProducers checks that the copy of a unit to the host is issued right after the
// instruction that completes the unit, not at the end of its layer or task.
func TestCopiesFollowTheirProducers(t *testing.T) {
	for _, set := range [][]string{{"schedule.offload=full"}, {"schedule.offload=memory"}, {"schedule.offload=full", "train.batch=2", "schedule.strategy=seq1f1b"}} {
		p := buildOf(t, planOf(t, "../../examples/gpt-docs.sppo", set...))
		copies := 0
		for c := range p.Codes {
			step := p.Codes[c].Sections[ir.SectionStep]
			work := -1 // the last instruction that is not a copy, message or event
			writer := map[uint32]int{}
			for pc := range step {
				in := &step[pc]
				if in.Op == ir.CopyD2H {
					copies++
					if at, made := writer[in.Args[1].Buffer]; made && at != work {
						t.Errorf("%v: instruction %d copies what %d has made, %d instructions of work later", set, pc, at, work-at)
					}
				}
				if in.Stream != ir.Compute && in.Stream != ir.Coll || in.Op == ir.Record || in.Op == ir.Wait {
					continue
				}
				work = pc
				for k, o := range ir.Ops[in.Op].Operands {
					if o.Dir != ir.Read && in.Args[k].Present() {
						writer[in.Args[k].Buffer] = pc
					}
				}
			}
		}
		if copies == 0 {
			t.Errorf("%v: nothing is copied", set)
		}
	}
}

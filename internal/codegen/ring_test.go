package codegen

import (
	"testing"

	"sppo.dev/ir"
)

// TestRingIsBalanced counts the visible query-key pairs in the forward passes of a step. In every turn of the
// ring, all ranks must have the same number of pairs. All turns together must have as many pairs as causal
// attention. The cost model must count the same number.
func TestRingIsBalanced(t *testing.T) {
	for _, sp := range []string{"2", "4"} {
		plan := planOf(t, "../../examples/gpt-docs.sppo", "schedule.sp_mode=ring", "schedule.pp=1", "schedule.align=8", "schedule.sp="+sp, "schedule.subsequences=3")
		p := buildOf(t, plan)
		var total int64
		turns := map[int]int64{} // by instruction: pairs of the first rank
		for r := range p.Ranks {
			rank := &p.Ranks[r]
			section := p.Codes[rank.Code].Sections[ir.SectionStep]
			for i := range section {
				in := &section[i]
				if in.Op != ir.Attention {
					continue
				}
				pairs := visible(in, rank.Consts)
				total += pairs
				if r == 0 {
					turns[i] = pairs
				}
				if pairs != turns[i] {
					t.Errorf("sp %s, instruction %d: rank %d attends to %d pairs, rank 0 to %d", sp, i, r, pairs, turns[i])
				}
				work := int64(in.Work().Flops) / (4 * int64(in.Arg("q").Cols()) * int64(in.Attr("batch").Bits))
				if work != pairs {
					t.Errorf("sp %s, instruction %d: %d pairs are priced as %d", sp, i, pairs, work)
				}
			}
		}
		s, tasks := plan.Train.Sequence, int64(plan.Model.Layers*plan.Parallel.Microbatches)
		if want := s * (s + 1) / 2 * tasks; total != want {
			t.Errorf("sp %s: %d pairs, want %d", sp, total, want)
		}
	}
}

// visible counts the visible pairs of one sequence in an attention instruction.
func visible(in *ir.Instr, consts []int64) (n int64) {
	for _, p := range in.AttentionParts(consts) {
		for q := range p.Queries {
			n += min(p.Keys, p.Prefix+q+1)
		}
	}
	return n
}

package codegen

import (
	"slices"
	"testing"

	"sppo.dev/ir"
)

// If no data is held out, or if a validation pass has no sequences, a program has no validation section and
// no buffers for one.
func TestValidationIsSwitchedOff(t *testing.T) {
	for _, set := range []string{"train.holdout=0", "train.eval_batch=0", "train.eval_every=1"} {
		p := buildOf(t, planOf(t, "testdata/stream.sppo", set))
		if err := ir.Verify(p); err != nil {
			t.Fatalf("%s: %v", set, err)
		}
		on := set == "train.eval_every=1"
		if (p.Run.EvalBatch > 0) != on || (p.Run.EvalSequences > 0) != on {
			t.Errorf("%s: %d sequences, %d a section", set, p.Run.EvalBatch, p.Run.EvalSequences)
		}
		for i := range p.Codes {
			c := &p.Codes[i]
			if (len(c.Sections[ir.SectionEval]) > 0) != on {
				t.Errorf("%s: %d instructions of validation", set, len(c.Sections[ir.SectionEval]))
			}
			last := slices.ContainsFunc(c.Results, func(r ir.Result) bool { return r.Name == ir.ResultLoss })
			if has := slices.ContainsFunc(c.Results, func(r ir.Result) bool { return r.Name == ir.ResultEvalLoss }); has != (on && last) {
				t.Errorf("%s: %s has a loss of validation: %v", set, c.Name, has)
			}
		}
	}
}

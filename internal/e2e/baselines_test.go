package e2e

import (
	"fmt"
	"regexp"
	"testing"

	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/plan"
)

// TestBaselines checks that the shipped schedules of other systems are ordinary schedules, which train like the
// plain program.
func TestBaselines(t *testing.T) {
	c := Case{Family: "gpt", KVHeads: 4, Positions: "rope", DType: "f32", Batch: 4, Microbatch: 1, Steps: 5, Layers: 4, Sequence: 48, Vocab: tinyVocab}
	for _, b := range []struct{ name, arguments string }{
		{"megatron", "sp = 2, pp = 2"},
		{"megatron", "sp = 2, pp = 4, dp = 2"},
		{"megatron-interleaved", "sp = 2, pp = 2, groups = 2"},
		{"megatron-tuned", ""},
		{"deepspeed-ulysses", "sp = 4"},
		{"deepspeed-ulysses", "sp = 2, dp = 2"},
		{"fpdt", "sp = 2, dp = 2, chunks = 3"},
		{"megatron-cp", ""},
		{"fsdp2-cp", ""},
		{"ulysses-selective", ""},
		{"alst", ""},
	} {
		t.Run(b.name+"("+b.arguments+")", func(t *testing.T) {
			t.Parallel()
			schedule := fmt.Sprintf("import \"baselines/%s.sppo\"\nschedule tiny = %s(%s)\n", b.name, b.name, b.arguments)
			text := regexp.MustCompile(`(?s)schedule tiny \{.*`).ReplaceAllString(c.plain().Spec(), schedule)
			spec, err := parse(text)
			if err != nil {
				t.Fatal(err)
			}
			plan := plan.New(spec)
			if err := passes.Run(spec, plan, passes.Options{}); err != nil {
				t.Fatal(err)
			}
			checkClose(t, c, b.name, runPlan(t, c, plan), run(t, c.plain()))
		})
	}
}

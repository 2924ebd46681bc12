package probe

import (
	"math"
	"testing"
)

// The comparison of training runs fails for differences beyond rounding, for NaN, for missing steps, and for a run that
// does not learn.
func TestSameTraining(t *testing.T) {
	run := func(loss func(i int) float64, steps int) (out []TrainingStep) {
		for i := range steps {
			out = append(out, TrainingStep{loss(i), 1})
		}
		return out
	}
	falling := func(i int) float64 { return 5 - float64(i)/20 }
	still := func(int) float64 { return 5 }
	norm := run(falling, 20)
	norm[7].Norm = 1.005
	for _, c := range []struct {
		name      string
		got, want []TrainingStep
		bf16, ok  bool
	}{
		{"equal", run(falling, 20), run(falling, 20), false, true},
		{"rounded", run(func(i int) float64 { return falling(i) * 1.001 }, 20), run(falling, 20), true, true},
		{"too far for f32", run(func(i int) float64 { return falling(i) * 1.001 }, 20), run(falling, 20), false, false},
		{"norm", norm, run(falling, 20), false, false},
		{"norm in bf16", norm, run(falling, 20), true, true},
		{"NaN", run(func(int) float64 { return math.NaN() }, 20), run(falling, 20), true, false},
		{"short", run(falling, 19), run(falling, 20), true, false},
		{"empty", nil, nil, true, false},
		{"does not learn", run(still, 20), run(still, 20), true, false},
		{"has no time to learn", run(still, 5), run(still, 5), true, true},
	} {
		if worst, err := SameTraining(c.got, c.want, c.bf16); (err == nil) != c.ok {
			t.Errorf("%s: %g, %v", c.name, worst, err)
		}
	}
}

package watch

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// Prediction is what a simulation predicts for a step.
type Prediction struct {
	Seconds    Number `json:"step_s"`
	Split      *Split `json:"split"`
	Comparable bool   `json:"comparable"` // the device is of the kind that the program was compiled for
}

// Predict simulates a step. The prediction is comparable only with runs on the same kind of device, CPU or GPU,
// as the program's machine. A machine whose ranks share processors is a CPU.
func Predict(p *ir.Program, cpu bool) (*Prediction, error) {
	t, err := sim.Run(p, ir.SectionStep, sim.Options{})
	if err != nil {
		return nil, err
	}
	return &Prediction{Number(t.Makespan), SplitOf(t.Split()), cpu == (p.Machine.Parallelism > 0)}, nil
}

// Compare collects steps until it can tell whether they deviate from the prediction. Its zero value has no
// prediction and reports nothing.
type Compare struct {
	Predicted *Prediction
	seconds   []float64
	splits    []*Split
	told      bool
}

// Limits beyond which Compare warns, and the number of steps that it needs.
const (
	compareSteps = 10   // number of steps compared
	mostRatio    = 1.25 // maximum ratio of the median step time to the predicted one, or its inverse
	mostShare    = 0.10 // maximum difference between a part's mean share and the predicted one
)

// Add adds a step. The caller must leave out the first step of a run, which is a warm-up. Add returns at most
// one warning in a run, and otherwise "".
func (c *Compare) Add(s *Step) string {
	if c.told || c.Predicted == nil || !c.Predicted.Comparable || !s.Seconds.Finite() {
		return ""
	}
	c.seconds = append(c.seconds, float64(s.Seconds))
	if s.Split != nil {
		c.splits = append(c.splits, s.Split)
	}
	if len(c.seconds) < compareSteps {
		return ""
	}
	c.told = true
	slices.Sort(c.seconds)
	return c.warning(c.seconds[len(c.seconds)/2])
}

func (c *Compare) warning(median float64) string {
	want := float64(c.Predicted.Seconds)
	var parts []string
	if want > 0 && math.Max(median/want, want/median) > mostRatio {
		parts = append(parts, fmt.Sprintf("a step takes %s, but the prediction is %s", ir.Seconds(median), ir.Seconds(want)))
	}
	if len(c.splits) > 0 {
		for i, p := range c.Predicted.Split.Parts() {
			mean := 0.0
			for _, s := range c.splits {
				mean += s.Parts()[i].Share / float64(len(c.splits))
			}
			if math.Abs(mean-p.Share) > mostShare {
				parts = append(parts, fmt.Sprintf("%s is %.0f%% of the time, but the prediction is %.0f%%", p.Name, 100*mean, 100*p.Share))
			}
		}
	}
	if parts == nil {
		return ""
	}
	return "warning: " + strings.Join(parts, "; ") + "; measure this machine with sppovm probe, and a step with --profile"
}

// LayerOf returns the layer that a tensor's name belongs to: "layer.3" for "layer.3.wq". Outside the layers,
// the first part of the name counts as a layer: "ln_f" for "ln_f.gamma".
func LayerOf(tensor string) string {
	if rest, ok := strings.CutPrefix(tensor, "layer."); ok {
		number, _, _ := strings.Cut(rest, ".")
		return "layer." + number
	}
	name, _, _ := strings.Cut(tensor, ".")
	return name
}

// compareLayers orders layers as in the model: tensors before the first layer, the layers, the rest.
func compareLayers(a, b string) int {
	rank := func(name string) (int, int) {
		if n, err := strconv.Atoi(strings.TrimPrefix(name, "layer.")); err == nil {
			return 1, n
		}
		if name == "embed" || name == "pos" {
			return 0, 0
		}
		return 2, 0
	}
	i, m := rank(a)
	j, n := rank(b)
	return cmp.Or(cmp.Compare(i, j), cmp.Compare(m, n), cmp.Compare(a, b))
}

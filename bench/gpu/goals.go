package main

import (
	"math"
	"strings"
)

// Goal is a requirement that a card meets or misses. A goal without figures counts as missed.
type Goal struct {
	Name string  `json:"name"`
	Want string  `json:"want"`
	Got  float64 `json:"got"`
	Seen int     `json:"seen"` // number of figures
	Met  bool    `json:"met"`
}

// least returns a goal that is met if the smallest figure is at least the limit.
func least(name, want string, limit float64, seen []float64) Goal {
	g := Goal{Name: name, Want: want, Seen: len(seen)}
	for i, x := range seen {
		if i == 0 || x < g.Got {
			g.Got = x
		}
	}
	g.Met = g.Seen > 0 && g.Got >= limit
	return g
}

// most returns a goal that is met if the largest figure is at most the limit.
func most(name, want string, limit float64, seen []float64) Goal {
	g := Goal{Name: name, Want: want, Seen: len(seen)}
	for _, x := range seen {
		g.Got = max(g.Got, x)
	}
	g.Met = g.Seen > 0 && g.Got <= limit
	return g
}

// goals returns the requirements for a Hopper card. Each training run is judged by its own tolerance.
func goals(r *Report) []Goal {
	figures := func(kind, name, by string, value func(Figure) float64) (out []float64) {
		for _, f := range r.Figures {
			if f.Kind == kind && strings.HasPrefix(f.Name, name) && (by == "" || f.By == by) {
				out = append(out, value(f))
			}
		}
		return out
	}
	share := func(f Figure) float64 { return f.Share }
	tflops := func(f Figure) float64 { return f.TFLOPS }
	var failed, worst, mfu, simulated []float64
	for _, result := range r.Tests {
		failed = append(failed, map[bool]float64{true: 1}[result != "pass"])
	}
	for _, t := range r.Training {
		if worst = append(worst, t.Worst); t.Error != "" {
			worst = append(worst, max(t.Worst, 2)) // it has not learned, or differs
		}
	}
	steps := map[string]float64{}
	for _, l := range r.Layers {
		steps[l.Name] = l.Step
		if l.MFU > 0 && l.Tokens >= 128<<10 {
			mfu = append(mfu, l.MFU)
		}
		if l.Step > 0 && l.Simulated > 0 {
			simulated = append(simulated, math.Abs(l.Simulated/l.Step-1))
		}
	}
	var offload []float64
	for _, name := range []string{"7b-32k", "8b-128k"} {
		if full, none := steps[name+"-full"], steps[name+"-none"]; full > 0 && none > 0 {
			offload = append(offload, full/none-1)
		}
	}
	return []Goal{
		most("tests", "none fails or is skipped", 0, failed),
		most("training", "losses and gradient norms equal to the CPU's up to rounding, and losses that fall; shown is the largest difference divided by the tolerance", 1, worst),
		least("products", "90% of cuBLASLt's fastest algorithm", 0.9, figures("matmul", "", "cuBLASLt", share)),
		least("attention", "500 TFLOP/s forward", 500, figures("attention", "attention ", "for the card", tflops)),
		least("attention_grad", "400 TFLOP/s backward", 400, figures("attention", "attention_grad ", "for the card", tflops)),
		least("memory-bound kernels", "85% of the copy bandwidth", 0.85, figures("memory", "", "", share)),
		least("layers", "MFU of 50% from 128K tokens on", 0.5, mfu),
		most("losses of layers", "within 2% of the logarithm of the vocabulary, and 0.1% of each other with different offload; shown is the largest difference divided by that", 1,
			lossDifferences(r.Layers)),
		most("offload", "costs less than 2% where both fit", 0.02, offload),
		most("issue", "less than 2% of a step", 0.02, figures("issue", "", "calls", share)),
		most("simulation", "within 10% of the measurement", 0.1, simulated),
	}
}

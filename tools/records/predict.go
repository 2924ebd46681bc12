package main

import (
	"fmt"
	"sort"

	"sppo.dev"
	"sppo.dev/internal/compile"
	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/memory"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// prediction is the result of the compiler and the simulator for a record's job.
type prediction struct {
	fits     bool  // the published number of tokens fits
	sequence int64 // the published number of tokens, or the largest that fits; 0: none does
	stepS    float64
	tgs, mfu float64
	ceiling  ceiling // ceiling for the published number of tokens
}

// ceiling is the speed of a job whose GPUs do nothing but arithmetic, at the kernels' rates.
type ceiling struct{ tgs, mfu float64 }

// grid is the step between the lengths that are tried if the published one does not fit.
const grid = 64 << 10

// spec returns the job with the given number of tokens.
func (r *record) spec(sequence int64) (*lang.Spec, error) {
	text := fmt.Sprintf("import \"../%s\"\nimport \"clusters/%s.sppo\"\ncluster machine = %s\n"+
		"train {\n  sequence = %d\n  batch = %d\n  data = random()\n}\nschedule record {}\n", r.model, r.cluster, r.machine, sequence, max(1, r.batch))
	return sppo.Parse("examples/today/record.sppo", []byte(text))
}

// predict plans and simulates the job with the published number of tokens or, if that does not fit, the largest number
// that does.
func (r *record) predict() (prediction, error) {
	spec, err := r.spec(r.sequence)
	if err != nil {
		return prediction{}, err
	}
	out := prediction{sequence: r.sequence, ceiling: ceilingOf(spec)}
	if out.fits, err = r.fits(r.sequence); err != nil {
		return out, err
	}
	if !out.fits {
		if out.sequence, err = r.longest(); err != nil || out.sequence == 0 {
			return out, err
		}
	}
	if spec, err = r.spec(out.sequence); err != nil {
		return out, err
	}
	plan, err := compile.Plan(spec, passes.Options{})
	if err != nil {
		return out, err
	}
	program, err := compile.Build(plan, nil)
	if err != nil {
		return out, err
	}
	if !plan.Memory.Fits {
		return out, fmt.Errorf("%s: %d tokens seemed to fit, but their program does not: %s", r.name, out.sequence, plan.Memory.Excess())
	}
	t, err := sim.Run(program, ir.SectionStep, sim.Options{})
	if err != nil {
		return out, err
	}
	out.stepS, out.tgs, out.mfu = float64(t.Makespan), t.TGS(), t.MFU()
	return out, nil
}

// longest returns the greatest length that fits, in steps of the grid, up to the published one.
func (r *record) longest() (int64, error) {
	var failed error
	steps := sort.Search(int(r.sequence/grid), func(i int) bool {
		fits, err := r.fits(int64(i+1) * grid)
		if err != nil {
			failed = err
		}
		return !fits
	})
	return int64(steps) * grid, failed
}

// fits reports whether there is a plan that fits. If a plan fits according to its memory bound, it is not placed.
func (r *record) fits(sequence int64) (bool, error) {
	spec, err := r.spec(sequence)
	if err != nil {
		return false, err
	}
	plan, err := compile.Plan(spec, passes.Options{Fitting: true})
	if err != nil {
		return false, err
	}
	m := &plan.Memory
	if m.Placed {
		return m.Fits, nil
	}
	return memory.FootprintOf(plan).Fits(m.DeviceCapacityBytes, m.HostCapacityBytes), nil
}

// ceilingOf returns the speed of a job whose GPUs do nothing but the arithmetic of its model and perform each
// operation once:
//
//	seconds per token = (3 M / e_matmul + A / e_attention + 2.5 A / e_attention_grad) / peak
//
// M is the number of forward FLOPs per token in matmuls, A is the number in causal attention, and each e is the
// best efficiency that the cluster reaches with the kernel. The backward kernel of attention recomputes the scores,
// so it has 2.5 times as many FLOPs as the forward kernel, rather than twice as many (Dao 2023).
func ceilingOf(s *lang.Spec) ceiling {
	m, c := s.Model, s.Cluster
	g := graph.New(m, graph.Split{SP: 1}, s.Train.Sequence)
	z := graph.Size{Sequence: s.Train.Sequence, Tokens: s.Train.Sequence, Batch: 1, SP: 1}
	perToken := func(flops ir.Flops) float64 { return float64(flops) / float64(s.Train.Sequence) }
	matmul, attention := perToken(g.Head.ForwardFlops(z)[ir.WorkMatmul]), 0.0
	for kind := range g.Kinds() {
		layer, n := g.Plain(kind).ForwardFlops(g.OfKind(z, kind)), float64(g.LayersOf(kind))
		matmul, attention = matmul+n*perToken(layer[ir.WorkMatmul]), attention+n*perToken(layer[ir.WorkAttention])
	}
	seconds := (3*matmul/best(c.MatmulEfficiency) + attention/best(c.AttentionEfficiency) + 2.5*attention/best(c.AttentionGradEff)) / c.PeakBF16
	return ceiling{1 / seconds, 3 * (matmul + attention) / (seconds * c.PeakBF16)}
}

// best returns the highest efficiency on a curve, as a share of the peak.
func best(curve []lang.CurvePoint) float64 {
	share := 0.0
	for _, p := range curve {
		share = max(share, p[1])
	}
	return share
}

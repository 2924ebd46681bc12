package strategy

import (
	"slices"

	"sppo.dev/internal/passes/plan"
)

// LongStep is the number of layer visits in the forward passes of a step above which the step is long: placing,
// building and simulating its program takes more than some ten seconds of processor time, and more than a gibibyte of
// memory.
const LongStep = 24_000

// Short returns the plan of a step with fewer microbatches that stands for a long step, or nil if the step is not long
// or Shorten returns nil.
func Short(p *plan.Plan) *plan.Plan {
	if p.LayerVisits() <= LongStep {
		return nil
	}
	return Shorten(p)
}

// fewMicrobatches is the number of microbatches in a shorter step: the first, the last, and one between two others.
const fewMicrobatches = 3

// Shorten returns the plan of a step with fewer microbatches whose memory has the same peaks, or, in layer order, peaks
// that are equal within 0.5%, and in which each microbatch takes the same time. It returns nil if there is no such plan: if microbatches do not run one after another,
// if ranks share tasks, or if the tasks are not in the strategy's order. If microbatches alternate, placement leaves more
// gaps the longer a step is, so the peaks of a shorter step are up to 4% lower.
func Shorten(p *plan.Plan) *plan.Plan {
	s := Of(p)
	if s.Turns != EachTurn || p.Parallel.Microbatches <= fewMicrobatches || p.Mux.Left || p.Mux.Right || p.Split().Documents {
		return nil
	}
	for rank, tasks := range p.Tasks {
		if !slices.Equal(tasks, s.order(p, rank)) {
			return nil
		}
	}
	return withMicrobatches(p, fewMicrobatches)
}

// OneLess returns the plan of a shorter step without its middle microbatch. The figures of the two steps differ by what each further
// microbatch adds to a step.
func OneLess(short *plan.Plan) *plan.Plan {
	return withMicrobatches(short, short.Parallel.Microbatches-1)
}

// withMicrobatches returns the plan of a step with a smaller number of microbatches.
func withMicrobatches(p *plan.Plan, n int) *plan.Plan {
	s, short := Of(p), *p
	short.Parallel.Microbatches = n
	short.Train.Batch = n * p.Parallel.DP * p.Parallel.Microbatch
	short.Throughput.ModelFlops *= float64(n) / float64(p.Parallel.Microbatches)
	short.Offload.Lag = min(p.Offload.Lag, short.MostLag())
	short.Memory.Placed = false
	short.Tasks = make([][]plan.Task, len(p.Tasks))
	for rank := range short.Tasks {
		short.Tasks[rank] = s.order(&short, rank)
	}
	return &short
}

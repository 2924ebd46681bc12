package partition

import (
	"sppo.dev/internal/passes/estimate"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
)

// ByTime returns N+1 boundaries on the grid that minimise the time of the longest task, to within one part in
// timePrecision. The makespan contains the longest forward and backward PP-1 times.
func ByTime(c *estimate.Cache, p *plan.Plan) []int64 {
	const timePrecision = 1 << 12
	t, seq, n := estimate.NewTaskTime(c, p), p.Train.Sequence, p.Subsequences.N
	best := ByFlops(c.FlopsOfLayer(p), seq, n, p.Subsequences.Align)
	most, mean := longest(t, best)
	least := mean * 0.9 // a lower bound: most of the mean does not depend on the boundaries
	for most-least > most/timePrecision {
		middle := (least + most) / 2
		x := fill(t, middle)
		if longest, _ := longest(t, x); longest <= middle {
			best, most = x, longest
		} else {
			least = middle
		}
	}
	return best
}

// longest returns the time of the longest task and the mean time over all tasks.
func longest(t *estimate.TaskTime, x []int64) (most, mean ir.Seconds) {
	for i := 1; i < len(x); i++ {
		d := t.Of(x[i-1], x[i]-x[i-1])
		most, mean = max(most, d), mean+d
	}
	return most, mean / ir.Seconds(len(x)-1)
}

// fill makes every subsequence as long as a time limit allows, leaving at least one step of the
// grid for each later one. The last gets the rest, regardless of its time.
func fill(t *estimate.TaskTime, limit ir.Seconds) []int64 {
	seq, n, align := t.Plan.Train.Sequence, t.Plan.Subsequences.N, t.Plan.Subsequences.Align
	steps := (seq - 1) / align // number of grid points inside the sequence
	x := make([]int64, n+1)
	at, length := int64(0), max(1, steps/int64(n))
	for k := 1; k < n; k++ {
		length = largest(length, steps-int64(n-1-k)-at, func(steps int64) bool {
			return t.Of(at*align, steps*align) <= limit
		})
		at += length
		x[k] = at * align
	}
	x[n] = seq
	return x
}

// largest returns the largest value from 1 to a maximum for which a condition holds, or 1 if there is none. It
// searches near a guess first. If the condition holds for a value, it must hold for all smaller values.
func largest(guess, most int64, holds func(int64) bool) int64 {
	low, high := int64(0), most+1 // the answer is at least low and below high
	at, step := min(guess, most), int64(1)
	for high-low > 1 {
		if holds(at) {
			low = at
		} else {
			high = at
		}
		switch {
		case high > most:
			at = min(low+step, most)
		case low == 0:
			at = max(high-step, 1)
		default:
			at = (low + high) / 2
		}
		step *= 2
	}
	return max(low, 1)
}

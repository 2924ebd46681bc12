package passes

import (
	"sppo.dev/graph"
	"sppo.dev/ir"
	"sppo.dev/ir/cost"
)

// taskTime predicts what a subsequence takes on the stage that needs longest for it, forward and backward together, as a
// function of where the subsequence lies. Only attention depends on the prefix, and nothing runs beside it, so the rest
// is computed once for each length.
type taskTime struct {
	pricer
	plan    *Plan
	model   *graph.Model
	layer   *graph.Block // as the policy of recomputation leaves it
	attends []*graph.Node
	rest    map[int64]blockTimes // by tokens
}

// blockTimes are forward and backward of each block for one number of tokens, of the layer without attention. Attention takes
// some time for each token of the prefix and some besides, where that holds.
type blockTimes struct {
	embedding, layer, head ir.Seconds
	linear                 bool
	alone, perToken        ir.Seconds
}

func newTaskTime(c *cache, p *Plan) *taskTime {
	m := cost.New(ir.Machine(p.Cluster), p.Parallel.Ranks())
	t := &taskTime{pricer: newPricer(c, p, m), plan: p, model: c.model(p), rest: map[int64]blockTimes{}}
	b := t.model.LayerWithout(t.model.RemadeBy(p.Recompute))
	t.layer = b
	for _, nodes := range [][]graph.Node{b.Forward, b.Backward} {
		for i := range nodes {
			if nodes[i].Attends() {
				t.attends = append(t.attends, &nodes[i])
			}
		}
	}
	return t
}

// of is the time of tokens prefix .. prefix+tokens-1.
func (t *taskTime) of(prefix, tokens int64) ir.Seconds {
	rest, ok := t.rest[tokens]
	if !ok {
		z := t.size(0, tokens)
		rest = blockTimes{embedding: t.both(t.model.Embedding, z), layer: t.both(t.layer, z) - t.attentionTime(z), head: t.time(t.model, t.model.Head, t.model.Head.Backward, z)}
		t.straighten(&rest, tokens)
		t.rest[tokens] = rest
	}
	layer := rest.layer
	if rest.linear {
		layer += rest.alone + rest.perToken*ir.Seconds(prefix)
	} else {
		layer += t.attentionTime(t.size(prefix, tokens))
	}
	var longest ir.Seconds
	for s := range t.plan.Parallel.PP {
		stage := layer * ir.Seconds(t.plan.layersOf(s))
		if s == t.plan.Home(0) {
			stage += rest.embedding
		}
		if s == t.plan.Home(t.plan.Parallel.Stages()-1) {
			stage += rest.head
		}
		longest = max(longest, stage)
	}
	return longest
}

// straighten finds whether attention of a number of tokens is linear in the prefix: so it is unless memory bounds its kernels, or
// the prefix comes in blocks.
func (t *taskTime) straighten(b *blockTimes, tokens int64) {
	most := t.plan.Train.Sequence - tokens
	if most < 2 {
		return
	}
	at := func(prefix int64) ir.Seconds { return t.attentionTime(t.size(prefix, tokens)) }
	b.alone = at(0)
	b.perToken = (at(most) - b.alone) / ir.Seconds(most)
	b.linear = true
	for _, prefix := range []int64{1, most / 7, most / 2} {
		if d := at(prefix) - b.alone - b.perToken*ir.Seconds(prefix); d*d > 1e-18*at(most)*at(most) {
			b.linear = false
		}
	}
}

func (t *taskTime) both(b *graph.Block, z graph.Size) ir.Seconds {
	return t.time(t.model, b, b.Forward, z) + t.time(t.model, b, b.Backward, z)
}

func (t *taskTime) size(prefix, tokens int64) graph.Size {
	p := t.plan
	return graph.Size{Sequence: p.Train.Sequence, Prefix: prefix, Tokens: tokens, Batch: int64(p.Parallel.Microbatch), SP: int64(p.Parallel.SP)}
}

func (t *taskTime) attentionTime(z graph.Size) ir.Seconds {
	var sum ir.Seconds
	for _, n := range t.attends {
		sum += t.back(t.layer, n, z)
	}
	return sum
}

// timeBoundaries are N+1 borders on the grid under which the longest task is as short as can be, to a part in timePrecision:
// model.md, section 4, has the longest forward and backward PP-1 times in the makespan.
func timeBoundaries(c *cache, p *Plan) []int64 {
	const timePrecision = 1 << 12
	t, seq, n := newTaskTime(c, p), p.Train.Sequence, p.Subsequences.N
	best := flopsBoundaries(p.Model, seq, n, p.Subsequences.Align)
	most, mean := t.longest(best)
	least := mean * 0.9 // of any borders: what of the mean depends on them is a fraction of that
	for most-least > most/timePrecision {
		middle := (least + most) / 2
		x := t.fill(middle)
		if longest, _ := t.longest(x); longest <= middle {
			best, most = x, longest
		} else {
			least = middle
		}
	}
	return best
}

// longest returns the time of the longest task and that of all over their number.
func (t *taskTime) longest(x []int64) (most, mean ir.Seconds) {
	for i := 1; i < len(x); i++ {
		d := t.of(x[i-1], x[i]-x[i-1])
		most, mean = max(most, d), mean+d
	}
	return most, mean / ir.Seconds(len(x)-1)
}

// fill makes every subsequence as long as a time allows, and leaves at least one step of the grid for each of those that
// follow. The last takes what is left, whatever that takes.
func (t *taskTime) fill(limit ir.Seconds) []int64 {
	seq, n, align := t.plan.Train.Sequence, t.plan.Subsequences.N, t.plan.Subsequences.Align
	steps := (seq - 1) / align // borders inside the sequence
	x := make([]int64, n+1)
	at, length := int64(0), max(1, steps/int64(n))
	for k := 1; k < n; k++ {
		length = largest(length, steps-int64(n-1-k)-at, func(steps int64) bool {
			return t.of(at*align, steps*align) <= limit
		})
		at += length
		x[k] = at * align
	}
	x[n] = seq
	return x
}

// largest returns the largest of 1 to most that holds, or 1 where none does, looking near a guess first. Whatever is smaller
// than one that holds must hold, too.
func largest(guess, most int64, holds func(int64) bool) int64 {
	low, high := int64(0), most+1 // the answer is low at least and below high
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

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

// blockTimes are forward and backward of each block, of the layer without attention.
type blockTimes struct{ embedding, layer, head ir.Seconds }

func newTaskTime(c *Context, p *Plan) *taskTime {
	m := cost.New(ir.Machine(p.Cluster), p.Parallel.Ranks())
	t := &taskTime{pricer: newPricer(c, p, m), plan: p, model: c.Model(p), rest: map[int64]blockTimes{}}
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
		rest = blockTimes{t.both(t.model.Embedding, z), t.both(t.layer, z) - t.attentionTime(z), t.time(t.model, t.model.Head, t.model.Head.Backward, z)}
		t.rest[tokens] = rest
	}
	layer := rest.layer + t.attentionTime(t.size(prefix, tokens))
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

// timeSearchSteps halve the range of the longest task's time: to a thousandth of it.
const timeSearchSteps = 12

// timeBoundaries are N+1 borders on the grid under which the longest task is as short as can be: model.md, section 4, has the
// longest forward and backward PP-1 times in the makespan.
func timeBoundaries(c *Context, p *Plan) []int64 {
	t, seq, n := newTaskTime(c, p), p.Train.Sequence, p.Subsequences.N
	best := flopsBoundaries(p.Model, seq, n, p.Subsequences.Align)
	most := t.longest(best)
	var least ir.Seconds
	for range timeSearchSteps {
		middle := (least + most) / 2
		if x := t.fill(middle); t.longest(x) <= middle {
			best, most = x, t.longest(x)
		} else {
			least = middle
		}
	}
	return best
}

func (t *taskTime) longest(x []int64) ir.Seconds {
	var most ir.Seconds
	for i := 1; i < len(x); i++ {
		most = max(most, t.of(x[i-1], x[i]-x[i-1]))
	}
	return most
}

// fill makes every subsequence as long as a time allows, and leaves at least one step of the grid for each of those that
// follow. The last takes what is left, whatever that takes.
func (t *taskTime) fill(limit ir.Seconds) []int64 {
	seq, n, align := t.plan.Train.Sequence, t.plan.Subsequences.N, t.plan.Subsequences.Align
	steps := (seq - 1) / align // borders inside the sequence
	x := make([]int64, n+1)
	at := int64(0)
	for k := 1; k < n; k++ {
		short, long := int64(1), steps-int64(n-1-k)-at
		for short < long { // the most steps within the limit, at least one
			middle := (short + long + 1) / 2
			if t.of(at*align, middle*align) <= limit {
				short = middle
			} else {
				long = middle - 1
			}
		}
		at += short
		x[k] = at * align
	}
	x[n] = seq
	return x
}

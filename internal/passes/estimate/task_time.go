package estimate

import (
	"sppo.dev/internal/cost"
	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
)

// TaskTime predicts the forward and backward time of a subsequence on the slowest stage, as a
// function of the subsequence's position. Only attention depends on the prefix, and nothing runs
// concurrently with it, so the time of everything else is computed once per length.
type TaskTime struct {
	Pricer
	Plan    *plan.Plan
	Model   *graph.Model
	Layers  []*graph.Block       // of each kind, recomputing the units that the policy names
	Attends [][]*graph.Node      // attention nodes of each kind of layer
	rest    map[int64]blockTimes // by tokens
	lines   map[lineOf]line
}

// blockTimes holds the forward and backward times of each block for one number of tokens. The times of layers
// exclude attention.
type blockTimes struct {
	embedding, head ir.Seconds
	kinds           []ir.Seconds // of each kind of layer
}

// lineOf identifies attention for a number of tokens in a layer of one kind.
type lineOf struct {
	kind   int
	tokens int64
}

// line describes the time of attention as a function of the prefix. If linear is set, the time is a constant
// plus an amount per token of the prefix.
type line struct {
	linear          bool
	alone, perToken ir.Seconds
}

// NewTaskTime returns the predictor for a plan whose stages have been decided.
func NewTaskTime(c *Cache, p *plan.Plan) *TaskTime {
	m := cost.New(ir.Machine(p.Cluster), p.Parallel.Ranks())
	t := &TaskTime{Pricer: NewPricer(c, p, m), Plan: p, Model: c.Model(p), rest: map[int64]blockTimes{}, lines: map[lineOf]line{}}
	for kind := range t.Model.Kinds() {
		b, attends := t.Model.LayerWithout(kind, t.Model.RecomputedBy(p.Recompute)), []*graph.Node(nil)
		for _, nodes := range [][]graph.Node{b.Forward, b.Backward} {
			for i := range nodes {
				if nodes[i].Attends() {
					attends = append(attends, &nodes[i])
				}
			}
		}
		t.Layers, t.Attends = append(t.Layers, b), append(t.Attends, attends)
	}
	return t
}

// Of returns the forward and backward time of tokens prefix .. prefix+tokens-1 on the slowest stage.
func (t *TaskTime) Of(prefix, tokens int64) ir.Seconds {
	rest, ok := t.rest[tokens]
	if !ok {
		z := t.Size(0, tokens)
		rest = blockTimes{embedding: t.Both(t.Model.Embedding, z), head: t.Time(t.Model, t.Model.Head, t.Model.Head.Backward, t.Plan.HeadSize(z))}
		for kind := range t.Model.Kinds() {
			z := t.Model.OfKind(z, kind)
			rest.kinds = append(rest.kinds, t.Both(t.Layers[kind], z)-t.AttentionTime(kind, z))
		}
		t.rest[tokens] = rest
	}
	layers := make([]ir.Seconds, len(rest.kinds))
	for kind, without := range rest.kinds {
		layers[kind] = without + t.AttentionAfter(kind, prefix, tokens)
	}
	var longest ir.Seconds
	for s := range t.Plan.Parallel.PP {
		var stage ir.Seconds
		for kind, n := range t.Plan.KindsOf(t.Model, t.Plan.StagesOf(s)...) {
			stage += layers[kind] * ir.Seconds(n)
		}
		if s == t.Plan.Home(0) {
			stage += rest.embedding
		}
		if s == t.Plan.Home(t.Plan.Parallel.Stages()-1) {
			stage += rest.head
		}
		longest = max(longest, stage)
	}
	return longest
}

// AttentionAfter returns the forward and backward time of attention for tokens after a prefix, in a layer of the
// given kind, to within one part in a billion.
func (t *TaskTime) AttentionAfter(kind int, prefix, tokens int64) ir.Seconds {
	key := lineOf{kind, tokens}
	l, known := t.lines[key]
	if !known {
		l = t.straighten(key)
		t.lines[key] = l
	}
	if l.linear {
		return l.alone + l.perToken*ir.Seconds(prefix)
	}
	return t.attentionAfter(kind, prefix, tokens)
}

func (t *TaskTime) attentionAfter(kind int, prefix, tokens int64) ir.Seconds {
	return t.AttentionTime(kind, t.Model.OfKind(t.Size(prefix, tokens), kind))
}

// straighten determines whether the time of attention for a number of tokens is linear in the prefix. It is
// linear unless attention is memory-bound or has a window, or the prefix is streamed in blocks.
func (t *TaskTime) straighten(of lineOf) (l line) {
	most := t.Plan.Train.Sequence - of.tokens
	if most < 2 {
		return line{}
	}
	at := func(prefix int64) ir.Seconds { return t.attentionAfter(of.kind, prefix, of.tokens) }
	l.alone = at(0)
	l.perToken = (at(most) - l.alone) / ir.Seconds(most)
	l.linear = true
	for _, prefix := range []int64{1, most / 7, most / 2} {
		if d := at(prefix) - l.alone - l.perToken*ir.Seconds(prefix); d*d > 1e-18*at(most)*at(most) {
			l.linear = false
		}
	}
	return l
}

// Both returns the time of a block's forward and backward passes.
func (t *TaskTime) Both(b *graph.Block, z graph.Size) ir.Seconds {
	return t.Time(t.Model, b, b.Forward, z) + t.Time(t.Model, b, b.Backward, z)
}

// Size returns the size of a subsequence with the given prefix and number of tokens.
func (t *TaskTime) Size(prefix, tokens int64) graph.Size {
	p := t.Plan
	z := p.Split().Size()
	z.Sequence, z.Prefix, z.Tokens, z.Batch = p.Train.Sequence, prefix, tokens, int64(p.Parallel.Microbatch)
	if p.Stream.Latents {
		z.Piece = p.Stream.Block
	}
	return z
}

// AttentionTime returns the forward and backward time of attention in a layer of the given kind.
func (t *TaskTime) AttentionTime(kind int, z graph.Size) ir.Seconds {
	var sum ir.Seconds
	for _, n := range t.Attends[kind] {
		sum += t.Back(t.Layers[kind], n, z)
	}
	return sum
}

package memory

import (
	"slices"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
)

// Direction is the part of a block that is running.
type Direction uint8

const (
	forwardPass Direction = iota
	BackwardPass
	inputPass     // first half of a backward
	weightPass    // second half of a backward
	attendingPass // the rest of a backward after its own rows of streamed K and V have been loaded
	betweenHalves
	kvPass // the recomputation of K and V
)

// workingKey contains everything that the bytes of a running block depend on.
type workingKey struct {
	block   *graph.Block
	pass    Direction
	size    graph.Size
	begins  params
	passing params
	padding int // number of replicas, which determines the padding of the parameters in begins and passing; 0: there are none
}

func keyOf(p *plan.Plan, b *graph.Block, pass Direction, z graph.Size, begins, passing params) workingKey {
	key := workingKey{block: b, pass: pass, size: z, begins: begins, passing: passing}
	if begins|passing != 0 {
		key.padding = p.Parallel.DP
	}
	return key
}

// params is a set of a block's parameters; everything has all of them.
type params uint64

const everything = ^params(0)

func (s params) has(param int) bool { return s&(1<<param) != 0 }

// addsTo returns the parameters whose gradients a pass of a block adds to.
func addsTo(b *graph.Block, pass Direction) (s params) {
	l := lives{block: b, pass: pass}
	nodes, _, _ := l.nodes()
	for i := range nodes {
		for _, a := range nodes[i].Args {
			if a.Value != graph.Missing && b.Values[a.Value].Kind == graph.WeightGrad {
				s |= 1 << b.Values[a.Value].Param
			}
		}
	}
	return s
}

// Blocks caches the maximum number of bytes that each block holds at once. In a pass of a block, these are the
// bytes of its input, of the tensors that it has saved or will save, of its result, of the gradients of weights
// and of K and V that the pass creates, and, until their last use, of the weights that are gathered only for the
// pass. Between the halves of a backward, they are the bytes of the tensors that the second half reads.
type Blocks map[workingKey]ir.Bytes

func (c Blocks) Bytes(p *plan.Plan, g *graph.Model, b *graph.Block, pass Direction, z graph.Size, begins, passing params) ir.Bytes {
	key := keyOf(p, b, pass, z, begins, passing)
	n, known := c[key]
	if !known {
		l := lives{plan: p, block: b, pass: pass, size: z, begins: begins, passing: passing, of: make([]int, len(b.Values))}
		l.size.Rows = g.ChunkRows(z)
		if pass == attendingPass {
			l.pass = BackwardPass
			l.from = slices.IndexFunc(b.Backward, func(n graph.Node) bool {
				return slices.ContainsFunc(n.Args, func(a graph.Arg) bool { return a.Value != graph.Missing && l.streams(a.Value) })
			})
		}
		n = l.run()
		c[key] = n
	}
	return n
}

// updating returns the maximum number of bytes that an optimizer's update of a parameter holds at
// once, without persistent bytes.
func (c Blocks) updating(update *graph.Block) ir.Bytes {
	key := workingKey{block: update}
	n, known := c[key]
	if !known {
		l := lives{block: update, of: make([]int, len(update.Values))}
		n = l.run()
		c[key] = n
	}
	return n
}

// lives collects the spans of a pass's nodes during which bytes are held.
type lives struct {
	plan    *plan.Plan
	block   *graph.Block
	pass    Direction
	from    int // first node whose bytes are counted
	size    graph.Size
	begins  params
	passing params
	spans   []liveSpan
	of      []int // [value]: 1 + the index of its span; 0: it has none
}

type liveSpan struct {
	first, last int
	bytes       ir.Bytes
}

func (l *lives) run() ir.Bytes {
	nodes, given, result := l.nodes()
	end := len(nodes)
	l.begin(given, end)
	loop := l.loop(nodes)
	for i := range nodes {
		for _, a := range nodes[i].Args {
			if a.Value == graph.Missing || !l.counts(a.Value) {
				continue
			}
			from, to := i, i
			if nodes[i].Chunked && l.block.Values[a.Value].Rows != graph.ChunkRows {
				from, to = min(i, loop.first), max(i, loop.last)
			}
			if nodes[i].Loop > 0 && l.block.Values[a.Value].Rows != graph.Piece {
				from, to = graph.LoopOf(nodes, i)
				to--
			}
			switch v := &l.block.Values[a.Value]; {
			case v.Kind == graph.WeightGrad, v.Kind == graph.CacheGrad && v.Spans():
				to = end
			case v.Kind == graph.Weight, l.pass == BackwardPass && l.streams(a.Value): // held before its use
				from = 0
			}
			l.hold(a.Value, from, to)
		}
		l.attends(nodes, i)
	}
	if result != graph.Missing {
		l.hold(result, end, end)
	}
	return l.most(end)
}

// begin holds what does not depend on single nodes: saved units, values that exist before the pass, and those that
// another task reads after it.
func (l *lives) begin(given []int, end int) {
	for i := range l.block.Units {
		if u := &l.block.Units[i]; l.holdsUnit(u, given) {
			l.saved(u, end)
		}
	}
	for _, v := range given {
		if v != graph.Missing && l.counts(v) {
			l.hold(v, 0, l.needed(v, end))
		}
	}
	if l.pass == inputPass {
		for _, v := range l.block.Between {
			if l.counts(v) {
				l.hold(v, end, end)
			}
		}
	}
}

// nodes returns the nodes of the pass, the values that exist before the first node, and the result.
func (l *lives) nodes() (nodes []graph.Node, given []int, result int) {
	b := l.block
	switch l.pass {
	case forwardPass:
		return b.Forward, []int{b.Input}, b.Output
	case BackwardPass:
		return b.Backward, []int{b.DOutput, b.Input}, b.DInput
	case inputPass:
		return b.Halves[graph.InputGradient], []int{b.DOutput, b.Input}, b.DInput
	case weightPass:
		return b.Halves[graph.WeightGradient], b.Between, graph.Missing
	case kvPass:
		return b.KVNodes, []int{b.Input}, graph.Missing
	}
	return nil, b.Between, graph.Missing // between the halves
}

// holdsUnit reports whether the pass holds the bytes of a unit. In a forward, the block's input is counted with
// the given values.
func (l *lives) holdsUnit(u *graph.Unit, given []int) bool {
	switch l.pass {
	case forwardPass:
		return u.Producer >= 0
	case BackwardPass, inputPass:
		return true
	}
	return slices.ContainsFunc(u.Values, func(v int) bool { return slices.Contains(given, v) })
}

// needed returns the last node up to which a given value must stay in memory, regardless of its readers. A
// value of a unit stays to the end of a forward, because the backward needs it.
func (l *lives) needed(v, end int) int {
	if l.pass == forwardPass && slices.ContainsFunc(l.block.Units, func(u graph.Unit) bool { return slices.Contains(u.Values, v) }) {
		return end
	}
	return 0
}

// streams reports whether a value is K, V or one of their gradients, and has only the rows of this subsequence.
func (l *lives) streams(v int) bool {
	kind := l.block.Values[v].Kind
	return (kind == graph.Cache || kind == graph.CacheGrad) && l.block.Values[v].Rows == graph.Full
}

// attends adds the temporary tensors of attention over blocks: delta and, if the result has another type, an f32 sum.
func (l *lives) attends(nodes []graph.Node, i int) {
	n := &nodes[i]
	if !n.Attends() || l.size.Prefix == 0 || n.Loop == 0 && !slices.ContainsFunc(n.Args, func(a graph.Arg) bool { return a.Value != graph.Missing && l.streams(a.Value) }) {
		return
	}
	var bytes ir.Bytes
	if result := &l.block.Values[n.Args[0].Value]; result.DType != ir.F32 {
		bytes += graph.Align(result.Bytes(l.size) / result.DType.Bytes() * ir.F32.Bytes())
	}
	if n.Op == ir.AttentionGrad {
		lse := n.Args[slices.IndexFunc(ir.Ops[n.Op].Operands, func(o ir.Operand) bool { return o.Name == "lse" })]
		bytes += graph.Align(l.block.Values[lse.Value].Bytes(l.size))
	}
	from, end := graph.LoopOf(nodes, i)
	l.spans = append(l.spans, liveSpan{from, end - 1, bytes})
}

// counts reports whether a value's bytes are counted with the pass. Weights, K, V, and gradients
// that already exist usually persist and are counted elsewhere.
func (l *lives) counts(v int) bool {
	if l.streams(v) {
		return true
	}
	switch l.block.Values[v].Kind {
	case graph.Activation, graph.Input:
		return true
	case graph.Weight:
		return l.passing.has(l.block.Values[v].Param)
	case graph.WeightGrad:
		return l.begins.has(l.block.Values[v].Param)
	case graph.CacheGrad:
		// The backward of the last subsequence, which is the first backward, creates the gradients.
		return (l.pass == BackwardPass || l.pass == inputPass) && l.size.Prefix+l.size.Tokens == l.size.Sequence
	}
	return false
}

// saved holds a unit from its producer to the end of the forward, or up to its last reader in the backward.
func (l *lives) saved(u *graph.Unit, end int) {
	s := liveSpan{bytes: graph.Align(l.block.UnitBytes(u, l.size))}
	if l.pass == forwardPass {
		s.first, s.last = u.Producer, end
	}
	l.spans = append(l.spans, s)
	for _, v := range u.Values {
		l.of[v] = len(l.spans)
	}
}

// hold starts or extends the lifetime of a value.
func (l *lives) hold(v, first, last int) {
	if l.of[v] == 0 {
		l.spans = append(l.spans, liveSpan{first, last, graph.Align(l.bytes(v))})
		l.of[v] = len(l.spans)
	}
	s := &l.spans[l.of[v]-1]
	s.first, s.last = min(s.first, first), max(s.last, last)
}

// bytes returns the bytes of a value. Gathered weights and whole gradients have the padding that slices need.
func (l *lives) bytes(v int) ir.Bytes {
	value := &l.block.Values[v]
	if value.Kind != graph.WeightGrad && (value.Kind != graph.Weight || l.plan == nil) {
		return value.Bytes(l.size)
	}
	param := &l.block.Params[value.Param]
	return ir.Bytes(l.plan.Slicing(param).Whole()*param.Local[1]) * value.DType.Bytes()
}

func (l *lives) most(end int) ir.Bytes {
	change := make([]ir.Bytes, end+2)
	for _, s := range l.spans {
		change[s.first] += s.bytes
		change[s.last+1] -= s.bytes
	}
	var now, most ir.Bytes
	for i, d := range change {
		now += d
		if i >= l.from {
			most = max(most, now)
		}
	}
	return most
}

// loop returns the nodes of the head's loop over chunks, if it has several iterations. What the loop holds from one
// iteration to the next is live in all of them: an iteration that is neither the first nor the last is counted.
func (l *lives) loop(nodes []graph.Node) (span liveSpan) {
	span.first = len(nodes)
	if l.size.Rows >= l.size.Tokens*l.size.Batch {
		return span
	}
	for i := range nodes {
		if nodes[i].Chunked {
			span.first, span.last = min(span.first, i), i
		}
	}
	return span
}

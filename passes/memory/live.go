package memory

import (
	"slices"

	"sppo.dev/graph"
	"sppo.dev/ir"
)

// Direction is one in which a block runs.
type Direction uint8

const (
	forwardPass Direction = iota
	BackwardPass
	inputPass     // the first half of the backward
	weightPass    // the second
	attendingPass // of a backward what is left once it has taken its own rows of K and V, where they stream
	betweenHalves
	cachingPass // what computes K and V once more
)

// workingKey is what the bytes of a running block depend on.
type workingKey struct {
	block   *graph.Block
	pass    Direction
	size    graph.Size
	begins  params
	passing params
}

// params are some of a block's.
type params uint64

func (s params) has(param int) bool { return s&(1<<param) != 0 }

// addsTo are those whose gradients a pass of a block adds to.
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

// working is the most bytes that a block holds at once while a pass of it runs: its input, what it has saved or will save, its
// result; gradients of its weights that this run begins, and of its caches where it does; of weights those that are whole for this run
// alone, until they were read last. Between its halves it is what the second will read.
// blockBytes are the most bytes that blocks hold, as far as they were asked for.
type Blocks map[workingKey]ir.Bytes

func (c Blocks) Bytes(g *graph.Model, b *graph.Block, pass Direction, z graph.Size, begins, passing params) ir.Bytes {
	key := workingKey{b, pass, z, begins, passing}
	n, known := c[key]
	if !known {
		l := lives{block: b, pass: pass, size: z, begins: begins, passing: passing, of: make([]int, len(b.Values))}
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

// updating returns the most bytes that an optimizer's update of a parameter holds at once, besides what persists.
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

// lives are the spans of a pass's nodes over which bytes are held.
type lives struct {
	block   *graph.Block
	pass    Direction
	from    int // node from which on bytes are looked at
	size    graph.Size
	begins  params
	passing params
	spans   []liveSpan
	of      []int // value -> 1 + its span
}

type liveSpan struct {
	first, last int
	bytes       ir.Bytes
}

func (l *lives) run() ir.Bytes {
	b := l.block
	nodes, given, result := l.nodes()
	end := len(nodes)
	for i := range b.Units {
		if u := &b.Units[i]; l.holdsUnit(u, given) {
			l.saved(u, end)
		}
	}
	for _, v := range given {
		if v != graph.Missing && l.counts(v) {
			l.hold(v, 0, l.needed(v, end))
		}
	}
	if l.pass == inputPass {
		for _, v := range b.Between {
			if l.counts(v) {
				l.hold(v, end, end)
			}
		}
	}
	first, last := loop(nodes)
	turns := l.size.Rows < l.size.Tokens*l.size.Batch // of the loop there are more than one: this is neither first nor last
	for i := range nodes {
		for _, a := range nodes[i].Args {
			if a.Value == graph.Missing || !l.counts(a.Value) {
				continue
			}
			from, to := i, i
			if nodes[i].Chunked && turns && b.Values[a.Value].Rows != graph.ChunkRows {
				from, to = first, last
			}
			switch v := &b.Values[a.Value]; {
			case v.Kind == graph.WeightGrad, v.Kind == graph.CacheGrad && v.Spans():
				to = end
			case v.Kind == graph.Weight, l.pass == BackwardPass && l.streams(a.Value): // it has come before it is needed
				from = 0
			}
			l.hold(a.Value, from, to)
		}
		l.attends(i, &nodes[i])
	}
	if result != graph.Missing {
		l.hold(result, end, end)
	}
	return l.most(end)
}

// nodes are those of the pass, what is there before the first, and the result behind the last.
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
	case cachingPass:
		return b.Caching, []int{b.Input}, graph.Missing
	}
	return nil, b.Between, graph.Missing // between the halves
}

// holdsUnit reports whether the bytes of a unit are this pass's. The input's are counted with what is given.
func (l *lives) holdsUnit(u *graph.Unit, given []int) bool {
	switch l.pass {
	case forwardPass:
		return u.Producer >= 0
	case BackwardPass, inputPass:
		return true
	}
	return slices.ContainsFunc(u.Values, func(v int) bool { return slices.Contains(given, v) })
}

// needed returns how long a value must stay whatever reads it: the backward needs the units of the forward.
func (l *lives) needed(v, end int) int {
	if l.pass == forwardPass && slices.ContainsFunc(l.block.Units, func(u graph.Unit) bool { return slices.Contains(u.Values, v) }) {
		return end
	}
	return 0
}

// streams reports whether a value is K, V or one of their gradients, of own rows alone.
func (l *lives) streams(v int) bool {
	kind := l.block.Values[v].Kind
	return (kind == graph.Cache || kind == graph.CacheGrad) && l.block.Values[v].Rows == graph.Full
}

// attends holds what attention over blocks has besides its operands: a sum in f32, where its result is not, and delta.
func (l *lives) attends(i int, n *graph.Node) {
	if !n.Attends() || l.size.Prefix == 0 || !slices.ContainsFunc(n.Args, func(a graph.Arg) bool { return a.Value != graph.Missing && l.streams(a.Value) }) {
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
	l.spans = append(l.spans, liveSpan{i, i, bytes})
}

// counts reports whether a value's bytes are this pass's: weights and caches persist, as a rule, and so do gradients once they are begun.
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
		return (l.pass == BackwardPass || l.pass == inputPass) && l.size.Prefix+l.size.Tokens == l.size.Sequence // the last subsequence goes first
	}
	return false
}

// saved holds a unit from its producer to the end of the forward, or to its last reader in the backward.
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

// hold prolongs a value's life, or begins it.
func (l *lives) hold(v, first, last int) {
	if l.of[v] == 0 {
		l.spans = append(l.spans, liveSpan{first, last, graph.Align(l.block.Values[v].Bytes(l.size))})
		l.of[v] = len(l.spans)
	}
	s := &l.spans[l.of[v]-1]
	s.first, s.last = min(s.first, first), max(s.last, last)
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

// loop returns where the head's loop over chunks begins and ends.
func loop(nodes []graph.Node) (first, last int) {
	first = -1
	for i := range nodes {
		if nodes[i].Chunked {
			if first < 0 {
				first = i
			}
			last = i
		}
	}
	return first, last
}

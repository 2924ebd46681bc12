package walk

import (
	"slices"

	"sppo.dev/graph"
	"sppo.dev/ir"
	"sppo.dev/passes/plan"
)

// This file describes the loads of K and V that do not stay on the device. A forward copies the rows that it
// computes to the host. Attention in later subsequences loads the earlier rows that it sees, one block of
// tokens after another, and then frees them. In the backward pass, dK and dV of a block are loaded with it,
// unless nothing has been added to them yet, and are copied back once the subsequence has added its
// contribution.

// Load is the transfer of rows of K and V for one layer of a task: a block of earlier rows or, in
// the backward pass, the task's own rows.
type Load struct {
	Task       plan.Task
	Layer      int
	First, End int64 // tokens
	Own        bool
	Again      bool  // for attention that the backward recomputes
	Grads      bool  // with dK and dV, as summed by later subsequences
	Begun      int64 // with Grads: the first token that later subsequences have attended to; earlier rows of the range have no gradient yet
}

// Blocks returns the blocks of earlier tokens that the attention of a subsequence sees, at least in
// part. Blocks have a fixed size, starting at the first token of the sequence.
func Blocks(block int64, z graph.Size) []Load {
	n := CountBlocks(block, z)
	if n == 0 {
		return nil
	}
	out := make([]Load, 0, n)
	for at := z.Earliest() / block * block; at < z.Prefix; at += block {
		out = append(out, Load{First: at, End: min(at+block, z.Prefix), Begun: at})
	}
	return out
}

// CountBlocks returns the number of blocks that Blocks would return.
func CountBlocks(block int64, z graph.Size) int {
	if z.Earliest() == z.Prefix {
		return 0
	}
	return int((z.Prefix+block-1)/block - z.Earliest()/block)
}

// VisitLoads returns the loads of one layer of a task, in the order of use. In the backward pass, these are the
// task's own rows, followed by blocks of earlier rows, which are loaded twice if attention is recomputed. It
// does not set the fields Task and Layer of the loads.
func VisitLoads(p *plan.Plan, g *graph.Model, v VisitKind) []Load {
	z := g.OfKind(p.Size(v.Subsequence), v.LayerKind)
	loads := Blocks(p.Stream.Block, z)
	if v.Kind == plan.Forward {
		return loads
	}
	if !g.LayerOf(v.LayerKind).Attends {
		return nil
	}
	own := Load{First: z.Prefix, End: z.Prefix + z.Tokens, Own: true}
	own.Begun = own.End
	if next := v.Subsequence + 1; next < p.Subsequences.N {
		if seen := Blocks(p.Stream.Block, g.OfKind(p.Size(next), v.LayerKind)); len(seen) > 0 {
			own.Begun = seen[0].First
		}
	}
	begun := own.Begun
	own.Begun, own.Grads = max(own.First, begun), begun < own.End
	out := []Load{own}
	if v.again {
		for _, l := range loads {
			l.Again = true
			out = append(out, l)
		}
	}
	for _, l := range loads {
		l.Grads = l.First >= begun
		out = append(out, l)
	}
	return out
}

// CountLoads returns the approximate number of blocks of K and V that the given number of layers load in a
// step.
func CountLoads(p *plan.Plan, layers int) (n int) {
	if !p.Streams() {
		return 0
	}
	var prefix int64
	for _, tokens := range p.Subsequences.Lengths {
		n += 2 * int(prefix/p.Stream.Block)
		prefix += tokens
	}
	return n * layers * max(1, p.Parallel.Microbatches)
}

// VisitKind contains everything that determines the loads of one layer of a task.
type VisitKind struct {
	Kind        plan.TaskKind
	Subsequence int
	LayerKind   int
	again       bool // the backward recomputes attention
}

// MakesAttention reports whether a layer's backward recomputes attention.
func MakesAttention(b *graph.Block) bool {
	return slices.ContainsFunc(b.Backward, func(n graph.Node) bool { return n.Op == ir.Attention })
}

// LoadQueue issues the loads of a rank's tasks in the order of use. Each is issued as early as the
// plan allows, but not before its rows are on the host.
type LoadQueue struct {
	plan        *plan.Plan
	graph       *graph.Model
	Sizes       []graph.Size // of subsequences
	tasks       []plan.Task  // not yet visited
	visit       int          // number of layers of the first task that have been visited
	known       map[VisitKind][]Load
	rest        []Load // remaining loads of the current visit
	task        plan.Task
	layer       int
	outstanding int        // issued and not yet used
	Rows        []int64    // [place]
	grads       []gradRows // [place]; end 0: no rows yet
}

// Place returns the index of the K and V to which a load belongs, by microbatch and layer.
func (q *LoadQueue) Place(l Load) int { return l.Task.Microbatch*q.plan.Model.Layers + l.Layer }

// gradRows records up to which token the backward of a subsequence has sent rows of dK and dV to the host.
type gradRows struct {
	subsequence int
	end         int64
}

// NewLoadQueue returns the queue for a rank's tasks in a section. It is empty if nothing is streamed.
func NewLoadQueue(p *plan.Plan, g *graph.Model, tasks []plan.Task) *LoadQueue {
	q := &LoadQueue{plan: p, graph: g, known: map[VisitKind][]Load{}}
	if !p.Streams() {
		return q
	}
	q.tasks = tasks
	places := p.Parallel.Microbatches * p.Model.Layers
	q.Rows, q.grads = make([]int64, places), make([]gradRows, places)
	for i := range p.Subsequences.N {
		q.Sizes = append(q.Sizes, p.Size(i))
	}
	return q
}

// Next issues a load, if one can be issued now.
func (q *LoadQueue) Next() (Load, bool) {
	for len(q.rest) == 0 && len(q.tasks) > 0 {
		q.nextVisit()
	}
	if len(q.rest) == 0 || q.outstanding > q.plan.Stream.Early {
		return Load{}, false
	}
	l := q.rest[0]
	l.Task, l.Layer = q.task, q.layer
	if !q.ready(l) {
		return Load{}, false
	}
	q.rest = q.rest[1:]
	q.outstanding++
	return l, true
}

func (q *LoadQueue) nextVisit() {
	q.task = q.tasks[0]
	layers := q.plan.Layers(q.task.Stage)
	if len(layers) == 0 {
		q.tasks = q.tasks[1:]
		return
	}
	k := q.visit
	v := VisitKind{Kind: q.task.Kind, Subsequence: q.task.Subsequence}
	if q.task.Kind == plan.Backward {
		k = len(layers) - 1 - k
	}
	if v.LayerKind = q.graph.KindOf(layers[k]); q.task.Kind == plan.Backward {
		v.again = MakesAttention(q.plan.LayerOf(q.graph, q.task, k))
	}
	loads, ok := q.known[v]
	if !ok {
		loads = VisitLoads(q.plan, q.graph, v)
		q.known[v] = loads
	}
	q.rest, q.layer = loads, layers[k]
	if q.visit++; q.visit == len(layers) {
		q.visit, q.tasks = 0, q.tasks[1:]
	}
}

// Take records that the first outstanding load has been used.
func (q *LoadQueue) Take() { q.outstanding-- }

func (q *LoadQueue) ready(l Load) bool {
	at := q.Place(l)
	if q.Rows[at] < l.End {
		return false
	}
	g := q.grads[at]
	by := l.Task.Subsequence + 1 // this subsequence has sent all blocks once the load's own task has sent one
	return !l.Grads || g.end > 0 && (g.subsequence < by || g.subsequence == by && g.end >= l.End)
}

// SentRows records that a forward has sent its rows of K and V.
func (q *LoadQueue) SentRows(t plan.Task, layer int) {
	if !q.plan.Streams() {
		return
	}
	z := q.Sizes[t.Subsequence]
	q.Rows[q.Place(Load{Task: t, Layer: layer})] = z.Prefix + z.Tokens
}

// SentGrads records that the copy of dK and dV of a block to the host has been issued.
func (q *LoadQueue) SentGrads(l Load) {
	q.grads[q.Place(l)] = gradRows{l.Task.Subsequence, l.End}
}

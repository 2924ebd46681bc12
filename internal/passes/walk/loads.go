package walk

import (
	"slices"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/schedule"
	"sppo.dev/ir"
)

// This file describes the loads of K and V that do not stay on the device. A forward copies the rows that it
// computes to the host. Attention in later subsequences loads the earlier rows that it sees, one block of
// tokens after another, and then frees them. In the backward pass, dK and dV of a block are loaded with it,
// unless nothing has been added to them yet, and are copied back once the subsequence has added its
// contribution.

// Load is the transfer of rows of K and V for one layer of a task: a block of earlier rows or, in
// the backward pass, the task's own rows.
type Load struct {
	First, End int64 // tokens
	Own        bool
	Recomputed bool  // for attention that the backward recomputes
	Grads      bool  // with dK and dV, as summed by later subsequences
	Begun      int64 // with Grads: the first token that later subsequences have attended to; earlier rows of the range have no gradient yet
}

// Blocks returns the blocks of earlier tokens that the attention of a subsequence sees, at least in
// part. Blocks have a fixed size, starting at the first token of the sequence.
func Blocks(block int64, z graph.Size) []Load {
	if z.Earliest() == z.Prefix {
		return nil
	}
	var out []Load
	for at := z.Earliest() / block * block; at < z.Prefix; at += block {
		out = append(out, Load{First: at, End: min(at+block, z.Prefix), Begun: at})
	}
	return out
}

// VisitLoads returns the loads of one layer of a task, in the order of use; a layer without K and V has none. In the backward pass, these are the
// task's own rows, followed by blocks of earlier rows, which are loaded twice if attention is recomputed.
func VisitLoads(p *plan.Plan, g *graph.Model, v VisitKind) []Load {
	b, z := g.LayerOf(v.LayerKind), g.OfKind(p.Size(v.Subsequence), v.LayerKind)
	if len(b.KVNodes) == 0 {
		return nil
	}
	loads := Blocks(p.Stream.Block, z)
	if v.Kind == plan.Forward {
		return loads
	}
	if !b.Attends {
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
	if v.recomputed {
		for _, l := range loads {
			l.Recomputed = true
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
	recomputed  bool // the backward recomputes attention
}

// Visited is a task's visit to a layer.
type Visited struct {
	Task       plan.Task
	Layer      int
	loads      int  // number of its loads
	recomputed bool // it recomputes attention
}

// Transfer is an action of a visit to a layer with streamed K and V. The order of these actions depends on the
// placement of saved tensors, so schedules do not contain them.
type Transfer struct {
	Op TransferOp
	*Load
	*Visited // the visit that uses the load; not set for Attend
}

// TransferOp is the kind of a transfer.
type TransferOp uint8

// Kinds of transfers.
const (
	Attend TransferOp = iota // begins attention, with the subsequence's own rows; Recomputed is set for attention that the backward recomputes
	Issue                    // issues a load
	Use                      // waits for a load, the first issued of those not yet used; attention continues with its block
	Send                     // copies dK and dV of the block in use back to the host
	Free                     // frees dK and dV of a block that has been sent: its copy has had the time of one block
)

// LoadQueue writes the transfers of a rank's tasks. Loads are issued in the order of use, each as early as the plan
// allows, but not before its rows are on the host.
type LoadQueue struct {
	plan  *plan.Plan
	graph *graph.Model
	Sizes []graph.Size // of subsequences
	tasks []plan.Task
	known map[VisitKind][]Load

	actions []schedule.Action // those whose loads have not been issued yet
	visits  []*Visited        // visits among earlier actions that Visit has not returned yet
	last    *Visited          // the last of them
	rest    []Load            // its loads that have not been issued yet
	rows    []int64           // [Place]: up to which token forwards have sent rows of K and V to the host; nil: nothing is streamed
	grads   []gradRows        // [Place]; end 0: no rows yet

	Issued []Transfer  // in the order of use; those that have been used are left out
	list   []Transfer  // of the current visit
	sent   [2]Transfer // blocks whose dK and dV have been sent before and since the last Use; Load nil: none
}

// Places returns the number of values that Place returns.
func Places(p *plan.Plan) int { return p.Parallel.Microbatches * p.Model.Layers }

// Place returns the index of K and V of the microbatch and layer of a visit.
func (q *LoadQueue) Place(v *Visited) int { return v.Task.Microbatch*q.plan.Model.Layers + v.Layer }

// gradRows records up to which token the backward of a subsequence has sent rows of dK and dV to the host.
type gradRows struct {
	subsequence int
	end         int64
}

// NewLoadQueue returns the queue for a rank's tasks in a section, with their schedule. It is empty if nothing is streamed.
func NewLoadQueue(p *plan.Plan, g *graph.Model, tasks []plan.Task, list *schedule.List) *LoadQueue {
	q := &LoadQueue{plan: p, graph: g, tasks: tasks, known: map[VisitKind][]Load{}}
	if p.Streams() {
		q.actions, q.Sizes = list.All(), p.Sizes()
		q.rows, q.grads = make([]int64, Places(p)), make([]gradRows, Places(p))
	}
	return q
}

// Visit returns the transfers of the rank's next visit to a layer: none if nothing is streamed. The next call overwrites
// the list.
func (q *LoadQueue) Visit() []Transfer {
	if q.rows == nil {
		return nil
	}
	for len(q.visits) == 0 {
		q.nextAction()
	}
	v := q.visits[0]
	q.visits, q.list = q.visits[1:], q.list[:0]
	n := v.loads
	if v.Task.Kind == plan.Forward {
		q.attend(n, false)
		z := q.Sizes[v.Task.Subsequence]
		q.rows[q.Place(v)] = z.Prefix + z.Tokens
		return q.list
	}
	if n == 0 {
		return nil
	}
	q.use()
	if n--; v.recomputed {
		n /= 2
		q.attend(n, true)
	}
	q.attend(n, false)
	return q.list
}

// attend lists attention over a number of blocks.
func (q *LoadQueue) attend(blocks int, recomputed bool) {
	q.list = append(q.list, Transfer{Op: Attend, Load: &Load{Recomputed: recomputed}})
	for range blocks {
		q.use()
	}
}

// use lists the use of the next load, after issuing the loads that should be in transit by now.
func (q *LoadQueue) use() {
	if x := q.sent[0]; x.Load != nil {
		x.Op = Free
		q.list = append(q.list, x)
	}
	q.sent = [2]Transfer{q.sent[1]}
	for x, ok := q.next(); ok; x, ok = q.next() {
		q.list, q.Issued = append(q.list, x), append(q.Issued, x)
	}
	if len(q.Issued) == 0 {
		panic("internal: a load that cannot be issued")
	}
	x := q.Issued[0]
	q.Issued = slices.Delete(q.Issued, 0, 1)
	x.Op = Use
	if q.list = append(q.list, x); x.Task.Kind == plan.Backward && !x.Own && !x.Recomputed {
		x.Op = Send
		q.list, q.sent[1] = append(q.list, x), x
		q.grads[q.Place(x.Visited)] = gradRows{x.Task.Subsequence, x.End}
	}
}

// next returns the transfer that issues the next load, if it can be issued now.
func (q *LoadQueue) next() (x Transfer, ok bool) {
	for len(q.rest) == 0 && len(q.actions) > 0 {
		q.nextAction()
	}
	if len(q.rest) == 0 || len(q.Issued) > q.plan.Stream.Early {
		return x, false
	}
	x = Transfer{Issue, &q.rest[0], q.last}
	if !q.ready(x) {
		return x, false
	}
	q.rest = q.rest[1:]
	return x, true
}

// nextAction goes on to the next action, which may be a visit.
func (q *LoadQueue) nextAction() {
	a := q.actions[0]
	q.actions = q.actions[1:]
	if a.Op != schedule.Visit {
		return
	}
	t := q.tasks[a.Task]
	layer := q.plan.LayerAt(t.Stage, int(a.Layer))
	v := VisitKind{Kind: t.Kind, Subsequence: t.Subsequence, LayerKind: q.graph.KindOf(layer)}
	if t.Kind == plan.Backward {
		b := q.plan.LayerOf(q.graph, t, int(a.Layer))
		v.recomputed = slices.ContainsFunc(b.Backward, func(n graph.Node) bool { return n.Op == ir.Attention })
	}
	loads, ok := q.known[v]
	if !ok {
		loads = VisitLoads(q.plan, q.graph, v)
		q.known[v] = loads
	}
	q.last, q.rest = &Visited{Task: t, Layer: layer, loads: len(loads), recomputed: v.recomputed}, loads
	q.visits = append(q.visits, q.last)
}

func (q *LoadQueue) ready(x Transfer) bool {
	at := q.Place(x.Visited)
	if q.rows[at] < x.End {
		return false
	}
	g := q.grads[at]
	by := x.Task.Subsequence + 1 // this subsequence has sent all blocks once the load's own task has sent one
	return !x.Grads || g.end > 0 && (g.subsequence < by || g.subsequence == by && g.end >= x.End)
}

package passes

import (
	"fmt"
	"slices"

	"sppo.dev/graph"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// K and V that do not stay on the device. A forward sends the rows that it makes to the host; attention of later subsequences
// brings all earlier rows back, a block of tokens after another, and forgets them. In the backward dK and dV of a block come
// with it, unless nobody has added to them yet, and go back with what this subsequence adds.

// Stream is how K and V pass through the device.
type Stream struct {
	Caches []string `json:"caches"` // of k and v those that do not stay on it
	Block  int64    `json:"block"`  // tokens of a block
	Early  int      `json:"early"`  // blocks that are on their way, or there, before they are needed
}

// Streams reports whether K, V or both pass by.
func (p *Plan) Streams() bool { return len(p.Stream.Caches) > 0 }

// streamable are K and V by the names that specs and the dataflow have for them.
var streamable = []string{"k", "v"}

// mostLoads bounds the blocks that a step's forwards bring back, each some ten instructions with its backward.
const mostLoads = 200_000

// solveStream takes the request, and makes blocks as long as an average subsequence, or longer where there would be too many.
func solveStream(p *Plan) {
	p.Stream = Stream{Caches: []string{}}
	for _, name := range streamable {
		if p.Schedule.Keep != nil && !slices.Contains(p.Schedule.Keep, name) {
			p.Stream.Caches = append(p.Stream.Caches, name)
		}
	}
	if !p.Streams() {
		return
	}
	if p.Subsequences.N == 1 {
		p.Stream.Caches = []string{}
		p.decide("solve", "stream", "none", "K and V of a sequence in one piece are activations like any other: offload moves them")
		return
	}
	n, align, seq := int64(p.Subsequences.N), max(1, p.Subsequences.Align), p.Train.Sequence
	visits := n * int64(p.Model.Layers) * int64(max(1, p.Parallel.Microbatches))
	block := max((seq+n-1)/n, visits*seq/(2*mostLoads))
	p.Stream.Block, p.Stream.Early = (block+align-1)/align*align, 2
	p.decide("solve", "stream", list(p.Stream.Caches),
		fmt.Sprintf("given: earlier tokens come from the host in blocks of %s for each layer of each subsequence, in backward with their gradients", tokens(p.Stream.Block)))
}

// streamProblems are faults of the request for streaming, or of an edited plan's.
func streamProblems(p *Plan) []problem {
	s := p.Stream
	if !p.Streams() {
		return nil
	}
	for i, name := range s.Caches {
		if !slices.Contains(streamable, name) || slices.Contains(s.Caches[:i], name) {
			return []problem{fault("schedule.keep", lang.UnknownName, "k or v, each once", "%q does not stream", name)}
		}
	}
	if s.Block < 1 || s.Early < 1 {
		return []problem{fault("schedule.keep", lang.OutOfRange, "both are at least 1", "blocks of %d tokens are to come %d blocks early", s.Block, s.Early)}
	}
	if m := p.Schedule.Mux; p.Schedule.SharesTasks() {
		return []problem{fault("schedule.keep", lang.Conflict, "keep = [k, v], or mux = off", "K and V that stream from a rank's host cannot be shared with other stages, and mux = %s does that", m)}
	}
	if s := p.chosenStrategy(); s.late {
		return []problem{fault("schedule.keep", lang.Conflict, "keep = [k, v], or strategy = sppo", "K and V stream with their gradients through whole backwards, and strategy = %s cuts them in two", s.name)}
	}
	return nil
}

// Load is an arrival of rows of K and V for one layer of a task: a block of those before its subsequence, or, in the backward, its
// own.
type Load struct {
	Task       Task
	Layer      int
	First, End int64 // tokens
	Own        bool
	Again      bool // for attention that the backward makes again
	Grads      bool // with dK and dV, as later subsequences have left them
}

// Blocks are the tokens before a subsequence.
func (p *Plan) Blocks(prefix int64) []Load {
	var out []Load
	for at := int64(0); at < prefix; at += p.Stream.Block {
		out = append(out, Load{First: at, End: min(at+p.Stream.Block, prefix)})
	}
	return out
}

// visitLoads are what one layer of a task brings, in the order of need: in the backward its own rows, then blocks, once more
// where attention is made again. Task and Layer are left open.
func (p *Plan) visitLoads(v visitKind) []Load {
	z := p.Size(v.subsequence)
	loads := p.Blocks(z.Prefix)
	if v.kind == Forward {
		return loads
	}
	grads := v.subsequence < p.Subsequences.N-1
	out := []Load{{First: z.Prefix, End: z.Prefix + z.Tokens, Own: true, Grads: grads}}
	if v.again {
		for _, l := range loads {
			l.Again = true
			out = append(out, l)
		}
	}
	for _, l := range loads {
		l.Grads = grads
		out = append(out, l)
	}
	return out
}

// visitKind is what the loads of a layer of a task depend on.
type visitKind struct {
	kind        TaskKind
	subsequence int
	again       bool // the backward makes attention again
}

// makesAttention reports whether a layer's backward computes attention again.
func makesAttention(b *graph.Block) bool {
	return slices.ContainsFunc(b.Backward, func(n graph.Node) bool { return n.Op == ir.Attention })
}

// LoadQueue issues the loads of some tasks of a rank in the order of need, as early as the plan wants them and their rows are on
// the host.
type LoadQueue struct {
	plan        *Plan
	graph       *graph.Model
	sizes       []graph.Size // of subsequences
	tasks       []Task       // yet to be looked at
	visit       int          // of the first of them
	known       map[visitKind][]Load
	rest        []Load // of the visit before that, of this task and layer
	task        Task
	layer       int
	outstanding int        // issued, and not taken
	rows        []int64    // [place]
	grads       []gradRows // [place]; up to 0: there are none
}

// place is that of K and V of a load's microbatch and layer among all.
func (q *LoadQueue) place(l Load) int { return l.Task.Microbatch*q.plan.Model.Layers + l.Layer }

// gradRows are the rows of dK and dV up to a token, from the backward of a subsequence.
type gradRows struct {
	subsequence int
	end         int64
}

// NewLoadQueue is for a section's tasks of one rank. There are none where nothing streams.
func NewLoadQueue(p *Plan, g *graph.Model, tasks []Task) *LoadQueue {
	q := &LoadQueue{plan: p, graph: g, known: map[visitKind][]Load{}}
	if !p.Streams() {
		return q
	}
	q.tasks = tasks
	places := p.Parallel.Microbatches * p.Model.Layers
	q.rows, q.grads = make([]int64, places), make([]gradRows, places)
	for i := range p.Subsequences.N {
		q.sizes = append(q.sizes, p.Size(i))
	}
	return q
}

// Next issues a load, if there is one that may be by now.
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
	k := q.visit
	v := visitKind{kind: q.task.Kind, subsequence: q.task.Subsequence}
	if q.task.Kind == Backward {
		k = len(layers) - 1 - k
		v.again = makesAttention(q.plan.LayerOf(q.graph, q.task, k))
	}
	loads, ok := q.known[v]
	if !ok {
		loads = q.plan.visitLoads(v)
		q.known[v] = loads
	}
	q.rest, q.layer = loads, layers[k]
	if q.visit++; q.visit == len(layers) {
		q.visit, q.tasks = 0, q.tasks[1:]
	}
}

// Take uses the first load that is outstanding.
func (q *LoadQueue) Take() { q.outstanding-- }

func (q *LoadQueue) ready(l Load) bool {
	at := q.place(l)
	if q.rows[at] < l.End {
		return false
	}
	g := q.grads[at]
	by := l.Task.Subsequence + 1 // all of its blocks are there once the load's own task has sent any
	return !l.Grads || g.end > 0 && (g.subsequence < by || g.subsequence == by && g.end >= l.End)
}

// SentRows notes that a forward has sent its rows of K and V.
func (q *LoadQueue) SentRows(t Task, layer int) {
	if !q.plan.Streams() {
		return
	}
	z := q.sizes[t.Subsequence]
	q.rows[q.place(Load{Task: t, Layer: layer})] = z.Prefix + z.Tokens
}

// SentGrads notes that dK and dV of a block are on their way to the host.
func (q *LoadQueue) SentGrads(l Load) {
	q.grads[q.place(l)] = gradRows{l.Task.Subsequence, l.End}
}

package passes

import (
	"fmt"
	"slices"

	"sppo.dev/graph"
	"sppo.dev/ir"
	"sppo.dev/ir/cost"
)

// The right part of mux: near the turn, in slot t = stage + subsequence >= N, the stages 0 .. t-N have nothing to forward
// any more. Each of them takes a part of the attention of every task of the slot: stage i's helper j < i takes a block of its
// keys and values in the tasks from subsequence N-i+j on, all queries of which come behind the block. Matmuls stay where
// they are. The backward of these tasks finds the same stages idle, and shares in the same way.

// shareRight says which keys the helpers of the last tasks of each stage take.
func (p *Plan) shareRight() {
	p.Mux.Right = true
	for i := 1; i < p.Parallel.PP; i++ {
		p.Mux.Stages[i].Blocks, p.Mux.Stages[i].Applied = p.blocks(i), true
	}
}

// blocks are the borders, in tokens, of the blocks of a stage's keys that its helpers take in each of its last tasks: helper j
// from the j-th to the next. Each block is 1/PP of the keys that a query of the task looks back at on the average, to the
// nearest step of the grid. It ends before the first task begins that its helper has a part in: what a helper will ever need has
// been made by then.
func (p *Plan) blocks(stage int) [][]int64 {
	n, grid := p.Subsequences.N, p.Subsequences.Align
	var tasks [][]int64
	for x := n - stage; x < n; x++ {
		borders := []int64{0}
		share := p.meanKeys(x) / float64(p.Parallel.PP)
		for j := range p.Helpers(Task{Kind: Forward, Subsequence: x, Stage: stage}) {
			end := int64(share*float64(j+1)/float64(grid)+0.5) * grid
			room := p.Size(p.firstHelped(stage, j)).Prefix
			borders = append(borders, max(borders[j]+grid, min(end, room)))
		}
		tasks = append(tasks, borders)
	}
	return tasks
}

// meanKeys is how many keys a query of a subsequence looks at, on the average.
func (p *Plan) meanKeys(x int) float64 {
	z := p.Size(x)
	return float64(z.Prefix) + float64(z.Tokens+1)/2
}

// Helpers are how many stages, from the first on, take a part of a task's attention: each a block of keys.
func (p *Plan) Helpers(t Task) int {
	if !p.Mux.Right {
		return 0
	}
	return max(0, t.Slot()-p.Subsequences.N+1)
}

// firstHelped is the first subsequence of a stage that a helper has a part in; it has one in all behind it.
func (p *Plan) firstHelped(stage, helper int) int { return p.Subsequences.N - stage + helper }

// HelpedBlocks are the borders of the blocks of keys that a task's helpers take.
func (p *Plan) HelpedBlocks(t Task) []int64 {
	return p.Mux.Stages[t.Stage].Blocks[t.Subsequence-p.firstHelped(t.Stage, 0)]
}

// Lending is what a stage lends a helper: from the first key of the first block to the last of the last, and the last
// subsequence with any of them, behind which they can go. Blocks grow with the sequence.
type Lending struct {
	First, End int64
	Behind     int
}

// Lent is what a stage lends a helper.
func (p *Plan) Lent(stage, helper int) Lending {
	blocks := p.Mux.Stages[stage].Blocks
	l := Lending{First: blocks[p.firstHelped(stage, helper)-p.firstHelped(stage, 0)][helper], End: blocks[len(blocks)-1][helper+1]}
	lengths := p.Subsequences.Lengths
	for at := lengths[0]; at < l.End; at += lengths[l.Behind] {
		l.Behind++
	}
	return l
}

// Returns are the helpers that have their last part of a stage in a backward: they give the gradients of its keys back.
func (p *Plan) Returns(t Task) (first, end int) {
	if t.Kind != Backward || t.Piece > 1 {
		return 0, 0
	}
	end = p.Helpers(t)
	for first = end; first > 0 && p.firstHelped(t.Stage, first-1) == t.Subsequence; first-- {
	}
	return first, end
}

// rightInWords says who holds what.
func (p *Plan) rightInWords() string {
	last := p.Parallel.PP - 1
	least, most := p.Train.Sequence, int64(0)
	for i := 1; i <= last; i++ {
		for j := range i {
			l := p.Lent(i, j)
			least, most = min(least, l.End-l.First), max(most, l.End-l.First)
		}
	}
	return fmt.Sprintf("right: stages 0-%d hold blocks of %d-%d tokens of the keys of those behind them, and share the attention of their last tasks", last-1, least, most)
}

// checkBlocks: every stage but the first has a block for each stage before it, which the tasks that it is for come behind.
func (p *Plan) checkBlocks() error {
	for i := range p.Mux.Stages {
		blocks := p.Mux.Stages[i].Blocks
		if !p.Mux.Right || i == 0 {
			if len(blocks) > 0 {
				return fmt.Errorf("mux of stage %d: it has blocks of keys, and nobody who holds them", i)
			}
			continue
		}
		if len(blocks) != i {
			return fmt.Errorf("mux of stage %d: there are blocks of keys for %d tasks, and %d have helpers", i, len(blocks), i)
		}
		for k := range blocks {
			if err := p.checkBorders(i, k); err != nil {
				return fmt.Errorf("mux of stage %d, subsequence %d: %w", i, p.Subsequences.N-i+k, err)
			}
		}
	}
	if !p.Mux.Right || p.Mux.Left {
		return nil
	}
	for rank, tasks := range p.Tasks {
		if !slices.Equal(tasks, oneSequence(p, rank)) {
			return fmt.Errorf("mux: stage %d goes through its tasks in another order than one sequence after another", rank)
		}
	}
	return nil
}

// checkBorders holds the blocks of a stage's k-th task with helpers to what a helper can have, and to those of the task before.
func (p *Plan) checkBorders(stage, k int) error {
	blocks := p.Mux.Stages[stage].Blocks
	borders := blocks[k]
	t := Task{Kind: Forward, Subsequence: p.Subsequences.N - stage + k, Stage: stage}
	if helpers := p.Helpers(t); len(borders) != helpers+1 || borders[0] != 0 {
		return fmt.Errorf("blocks of keys have %d borders from 0 on, for %d helpers", len(borders), helpers)
	}
	for j := range len(borders) - 1 {
		end := borders[j+1]
		if room := p.Size(p.firstHelped(stage, j)).Prefix; end <= borders[j] || end > room {
			return fmt.Errorf("a block of keys ends at %d, which is not behind its start at %d, or is behind token %d, where the first task begins that its helper has a part in", end, borders[j], room)
		}
		if k > 0 && j+1 < len(blocks[k-1]) && end < blocks[k-1][j+1] {
			return fmt.Errorf("a block of keys ends at %d, before that of the task before, at %d", end, blocks[k-1][j+1])
		}
	}
	return nil
}

// sharedCosts are what tasks with helpers take: they and their helpers go through layers together.
type sharedCosts struct {
	layer   map[Task]ir.Seconds // of a task of the first microbatch, in the place of that of the whole layer
	helping map[Task]ir.Seconds // what a layer of it costs each helper
}

// sharedCosts prices the slots in which stages help. In each layer a stage sends its queries, computes its own part while its
// helpers compute theirs, those of all stages one after another and behind one of their own, receives their results and joins them.
func (pr pricer) sharedCosts(p *Plan, g *graph.Model, t *costs, far cost.Link) *sharedCosts {
	out := &sharedCosts{layer: map[Task]ir.Seconds{}, helping: map[Task]ir.Seconds{}}
	n := p.Subsequences.N
	for slot := n; slot < n+p.Parallel.PP-1; slot++ {
		for _, kind := range []TaskKind{Forward, Backward} {
			var longest ir.Seconds
			tasks := p.slotTasks(kind, slot)
			parts, load := make([]sharedLayer, len(tasks)), make([]ir.Seconds, p.Parallel.PP)
			for k, task := range tasks {
				parts[k] = pr.shareLayer(p, g, task, far)
				out.helping[task] = parts[k].helping
				pieces := ir.Seconds(len(p.Pieces(task))) // which come one after another
				load[task.Stage] += parts[k].own / pieces
				for j := range p.Helpers(task) {
					load[j] += parts[k].helping / pieces
				}
			}
			for k, task := range tasks {
				part := parts[k]
				out.layer[task] = t.plain(p, task) - part.whole + max(part.own, part.messages+slices.Max(load[:p.Helpers(task)])) + part.join
				if task.Piece == 0 {
					longest = max(longest, out.layer[task])
				}
			}
			for _, task := range tasks {
				if task.Piece == 0 {
					out.layer[task] = longest
				}
			}
		}
	}
	return out
}

// plain is what a layer of a task takes that makes no units again.
func (c *costs) plain(p *Plan, t Task) ir.Seconds {
	if t.Kind == Forward {
		return c.forward[p.rangeOf(t)]
	}
	return c.backward[p.rangeOf(t)].whole
}

// layer runs a layer of a task, which takes so long alone, and keeps its helpers busy.
func (s *simulation) layer(st *simStage, at *stop, alone ir.Seconds) {
	if s.shared == nil {
		st.run(alone)
		return
	}
	t := st.tasks[st.done]
	t.Microbatch = 0
	helpers := s.plan.Helpers(t)
	if helpers == 0 {
		st.run(alone)
		return
	}
	st.run(s.shared.layer[t] + alone - s.plain(s.plan, t)) // and what it makes again
	for j := range helpers {
		s.stages[j].busy += s.shared.helping[t]
	}
}

// slotTasks are the tasks of a slot that have helpers, of the first microbatch.
func (p *Plan) slotTasks(kind TaskKind, slot int) (tasks []Task) {
	for i := slot - p.Subsequences.N + 1; i < p.Parallel.PP; i++ {
		if t := (Task{Kind: kind, Subsequence: slot - i, Stage: i}); p.Helpers(t) > 0 {
			tasks = append(tasks, p.Pieces(t)...)
		}
	}
	return tasks
}

// sharedLayer is what the attention of a layer takes, whole and in parts.
type sharedLayer struct{ whole, own, helping, messages, join ir.Seconds }

func (pr pricer) shareLayer(p *Plan, g *graph.Model, t Task, far cost.Link) (out sharedLayer) {
	z, helpers, m := p.SizeOf(t), p.Helpers(t), pr.cost
	borders := p.HelpedBlocks(t)
	nodes, op := g.Layer.Forward, ir.Attention
	if t.Kind == Backward {
		nodes, op = g.Layer.Backward, ir.AttentionGrad
	}
	for i := range nodes {
		if nodes[i].Op != op {
			continue
		}
		in := graph.BlockInstr(g.Layer, &nodes[i], z)
		out.whole = m.Time(in.Work(), pr.link)
		own := graph.OverKeys(in, z, borders[helpers], z.Prefix+z.Tokens)
		out.own = m.Time(own.Work(), pr.link)
		for j := range helpers {
			part := graph.OverKeys(in, z, borders[j], borders[j+1])
			out.helping = max(out.helping, m.Time(part.Work(), pr.link))
		}
		send := func(name string) ir.Seconds {
			return m.Time(ir.Work{Kind: ir.WorkP2P, Bytes: in.Arg(name).Bytes()}, far)
		}
		rows := in.Arg("q").Bytes()
		if op == ir.Attention {
			out.messages = ir.Seconds(helpers) * (send("q") + send("o") + send("lse"))
			rows *= ir.Bytes(helpers + 2)
		} else {
			out.messages = ir.Seconds(helpers) * (3*send("q") + 2*send("lse"))
			rows *= ir.Bytes(3*helpers + 2)
		}
		out.join = m.Time(ir.Work{Kind: ir.WorkMemory, Bytes: rows}, pr.link)
	}
	return out
}

// borrow counts the blocks of other stages' keys that have come by the time that a task begins.
func (r *tracker) borrow(t Task) {
	for i := r.stage + 1; i < len(r.plan.Tasks) && r.plan.Mux.Right; i++ {
		if i+r.loans[i].Behind+1 == t.Slot() {
			r.now[TermCaches] += r.lentBytes(i, graph.Cache)
		}
	}
}

// lentBytes are those of a stage's keys and values that this one holds, or of their gradients.
func (r *tracker) lentBytes(stage int, kind graph.Kind) (n ir.Bytes) {
	l := r.loans[stage]
	return r.keyBytes(kind, l.End-l.First) * ir.Bytes(r.plan.layersOf(stage))
}

// keyBytes are those of some tokens of a layer's keys and values, or of their gradients.
func (r *tracker) keyBytes(kind graph.Kind, tokens int64) (n ir.Bytes) {
	rows := tokens * r.sizes[0].Batch
	for _, v := range r.graph.Layer.Values {
		if v.Kind == kind {
			n += graph.Align(ir.Bytes(rows*v.Cols) * v.DType.Bytes())
		}
	}
	return n
}

// help counts what a stage holds between its last forward and its first backward: all blocks with their gradients, and of
// the slot with the longest tasks what travels, for all stages at once.
func (r *tracker) help(t Task) {
	if !r.plan.Mux.Right || r.stage == len(r.plan.Tasks)-1 {
		return
	}
	var blocks, gradients, travels ir.Bytes
	at := r.stage + 1 // it gets its gradients back layer by layer in the slot in which it begins
	for i := r.stage + 1; i < len(r.plan.Tasks); i++ {
		if i+r.loans[i].Behind+1 > t.Slot() {
			r.now[TermCaches] += r.lentBytes(i, graph.Cache)
		}
		blocks += r.lentBytes(i, graph.Cache)
		if n := r.lentBytes(i, graph.CacheGrad); i > at {
			gradients += n
		} else {
			gradients += n / ir.Bytes(r.plan.layersOf(i))
		}
	}
	for slot := len(r.sizes); slot < len(r.sizes)+len(r.plan.Tasks)-1; slot++ {
		travels = max(travels, r.travelling(slot))
	}
	r.now[TermCacheGrads] += gradients
	r.note(t, travels)
	r.now[TermCaches] -= blocks
	r.now[TermCacheGrads] -= gradients
}

// travelling is what a stage holds of others' queries, and of what becomes of them, while it helps in a slot.
func (r *tracker) travelling(slot int) (held ir.Bytes) {
	for _, shared := range r.plan.slotTasks(Backward, slot) {
		if shared.Stage > r.stage && r.plan.Helpers(shared) > r.stage {
			rows, stats := r.queryBytes(shared)
			held += 3*rows + 2*stats
		}
	}
	return held
}

// queryBytes are those of a task's queries, and of a number for each of their heads.
func (r *tracker) queryBytes(t Task) (rows, stats ir.Bytes) {
	nodes := r.graph.Layer.Forward
	for i := range nodes {
		if nodes[i].Op == ir.Attention {
			in := graph.BlockInstr(r.graph.Layer, &nodes[i], r.sizes[t.Subsequence])
			return graph.Align(in.Arg("q").Bytes()), graph.Align(in.Arg("lse").Bytes())
		}
	}
	return 0, 0
}

// sharing is what a layer of a task holds besides because helpers share its attention: the parts that come from them.
func (r *tracker) sharing(t Task) ir.Bytes {
	helpers := ir.Bytes(r.plan.Helpers(t))
	if helpers == 0 {
		return 0
	}
	rows, stats := r.queryBytes(t)
	others := r.travelling(t.Slot())
	if t.Kind == Forward {
		return (helpers+1)*(rows+stats) + others
	}
	for first, end := r.plan.Returns(t); first < end; first++ { // what is added to those of the stage
		others += r.keyBytes(graph.CacheGrad, r.plan.Lent(t.Stage, first).End-r.plan.HelpedBlocks(t)[first+1])
	}
	inF32 := rows * ir.Bytes(4/r.graph.DType().Bytes())
	return helpers*rows + inF32 + stats + others
}

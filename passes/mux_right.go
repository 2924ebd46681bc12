package passes

import (
	"fmt"
	"slices"

	"sppo/graph"
	"sppo/ir"
	"sppo/ir/cost"
)

// The right part of mux: near the turn, in slot t = stage + subsequence >= N, the stages 0 .. t-N have nothing to forward
// any more. Each of them takes a part of the attention of every task of the slot: stage i's helper j < i holds a block of its
// keys and values, for the tasks from subsequence N-i+j on, all queries of which come behind the block. Matmuls stay where
// they are. The backward of these tasks finds the same stages idle, and shares in the same way.

// shareRight gives stages blocks of the keys of those behind them.
func (p *Plan) shareRight() {
	p.Mux.Right = true
	for i := 1; i < p.Parallel.PP; i++ {
		p.Mux.Stages[i].Blocks, p.Mux.Stages[i].Applied = p.blocks(i), true
	}
}

// blocks are the borders, in tokens, of the blocks of a stage's keys that stages 0 .. i-1 hold: helper j from the j-th to
// the next. A block is as long as makes its part of the attention of the tasks that it is for 1/PP, to the nearest step of the
// grid, and ends before the first of them begins.
func (p *Plan) blocks(stage int) []int64 {
	n, grid := p.Subsequences.N, p.Subsequences.Align
	borders := []int64{0}
	for j := range stage {
		queries, pairs := 0.0, 0.0
		for x := n - stage + j; x < n; x++ {
			z := p.Size(x)
			queries += float64(z.Tokens)
			pairs += float64(z.Tokens) * (float64(z.Prefix) + float64(z.Tokens+1)/2)
		}
		steps := int64(pairs/queries/float64(p.Parallel.PP*int(grid)) + 0.5)
		last := borders[j]
		borders = append(borders, min(last+max(1, steps)*grid, p.Size(n-stage+j).Prefix))
	}
	return borders
}

// Helpers are how many stages, from the first on, take a part of a task's attention: each the block of keys that it holds.
func (p *Plan) Helpers(t Task) int {
	if !p.Mux.Right {
		return 0
	}
	return max(0, t.Slot()-p.Subsequences.N+1)
}

// Lent is the last subsequence with rows of the block of a stage's keys that a helper holds: once it has run, they can go.
func (p *Plan) Lent(stage, helper int) int {
	x, end := 0, p.Mux.Stages[stage].Blocks[helper+1]
	for p.Size(x).Prefix+p.Size(x).Tokens < end {
		x++
	}
	return x
}

// rightInWords says who holds what.
func (p *Plan) rightInWords() string {
	last := p.Parallel.PP - 1
	borders := p.Mux.Stages[last].Blocks
	least, most := borders[1], borders[1]
	for _, s := range p.Mux.Stages[1:] {
		for j := range len(s.Blocks) - 1 {
			n := s.Blocks[j+1] - s.Blocks[j]
			least, most = min(least, n), max(most, n)
		}
	}
	return fmt.Sprintf("right: stages 0-%d hold blocks of %d-%d tokens of the keys of those behind them, and share the attention of their last tasks", last-1, least, most)
}

// checkBlocks: every stage but the first has a block for each stage before it, which the tasks that it is for come behind.
func (p *Plan) checkBlocks() error {
	for i := range p.Mux.Stages {
		borders := p.Mux.Stages[i].Blocks
		if !p.Mux.Right || i == 0 {
			if len(borders) > 0 {
				return fmt.Errorf("mux of stage %d: it has blocks of keys, and nobody who holds them", i)
			}
			continue
		}
		if len(borders) != i+1 || borders[0] != 0 {
			return fmt.Errorf("mux of stage %d: blocks of keys have %d borders from 0 on, for %d stages that come before", i, len(borders), i)
		}
		for j := range i {
			if first := p.Size(p.Subsequences.N - i + j).Prefix; borders[j+1] <= borders[j] || borders[j+1] > first {
				return fmt.Errorf("mux of stage %d: a block of keys ends at %d, which is not behind its start at %d, or is behind token %d, where the first task begins that it is for",
					i, borders[j+1], borders[j], first)
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

// sharedCosts are what tasks with helpers take: they and their helpers go through layers together.
type sharedCosts struct {
	layer   map[Task]ir.Seconds // of a task, in the place of that of the whole layer
	helping map[Task]ir.Seconds // what a layer of it costs each helper
}

// sharedCosts prices the slots in which stages help. In each layer a stage sends its queries, computes its own part while its
// helpers compute theirs, those of all stages one after another, receives their results and joins them.
func (pr pricer) sharedCosts(p *Plan, g *graph.Model, t *costs, far cost.Link) *sharedCosts {
	out := &sharedCosts{layer: map[Task]ir.Seconds{}, helping: map[Task]ir.Seconds{}}
	n := p.Subsequences.N
	for slot := n; slot < n+p.Parallel.PP-1; slot++ {
		for _, kind := range []TaskKind{Forward, Backward} {
			var helping, longest ir.Seconds
			tasks := p.slotTasks(kind, slot)
			parts := make([]sharedLayer, len(tasks))
			for k, task := range tasks {
				parts[k] = pr.shareLayer(p, g, task, far)
				out.helping[task] = parts[k].helping
				helping += parts[k].helping / ir.Seconds(len(p.Pieces(task))) // pieces come one after another
			}
			for k, task := range tasks {
				part := parts[k]
				out.layer[task] = t.plain(p, task) - part.whole + max(part.own, part.messages+helping) + part.join
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
func (s *simulation) layer(st *simStage, t Task, alone ir.Seconds) {
	t.Microbatch = 0
	helpers := s.plan.Helpers(t)
	if helpers == 0 || s.shared == nil {
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
	borders := p.Mux.Stages[t.Stage].Blocks
	nodes, op := g.Layer.Forward, ir.Attention
	if t.Kind == Backward {
		nodes, op = g.Layer.Backward, ir.AttentionGrad
	}
	for i := range nodes {
		if nodes[i].Op != op {
			continue
		}
		in := BlockInstr(g.Layer, &nodes[i], z)
		out.whole = m.Time(in.Work(), pr.link)
		own := OverKeys(in, z, borders[helpers], z.Prefix+z.Tokens)
		out.own = m.Time(own.Work(), pr.link)
		for j := range helpers {
			part := OverKeys(in, z, borders[j], borders[j+1])
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
func (r *residence) borrow(t Task) {
	for i := r.stage + 1; i < len(r.plan.Tasks) && r.plan.Mux.Right; i++ {
		if i+r.plan.Lent(i, r.stage)+1 == t.Slot() {
			r.now[TermCaches] += r.lentBytes(i, graph.Cache)
		}
	}
}

// lentBytes are those of the block of a stage's keys and values that this one holds, or of their gradients.
func (r *residence) lentBytes(stage int, kind graph.Kind) (n ir.Bytes) {
	borders := r.plan.Mux.Stages[stage].Blocks
	rows := (borders[r.stage+1] - borders[r.stage]) * r.sizes[0].Batch
	for _, v := range r.graph.Layer.Values {
		if v.Kind == kind {
			n += graph.Align(ir.Bytes(rows*v.Cols) * v.DType.Bytes())
		}
	}
	return n * ir.Bytes(r.plan.layersOf(stage))
}

// help counts what a stage holds between its last forward and its first backward: all blocks with their gradients, and of
// the slot with the longest tasks what travels, for all stages at once.
func (r *residence) help(t Task) {
	if !r.plan.Mux.Right || r.stage == len(r.plan.Tasks)-1 {
		return
	}
	var blocks, gradients, travels ir.Bytes
	for i := r.stage + 1; i < len(r.plan.Tasks); i++ {
		if i+r.plan.Lent(i, r.stage)+1 > t.Slot() {
			r.now[TermCaches] += r.lentBytes(i, graph.Cache)
		}
		blocks += r.lentBytes(i, graph.Cache)
		if n := r.lentBytes(i, graph.CacheGrad); i > r.stage+1 {
			gradients += n
		} else { // it is given back layer by layer in the slot in which it begins
			gradients += n / ir.Bytes(r.plan.layersOf(i))
		}
	}
	for slot := len(r.sizes) + r.stage; slot < len(r.sizes)+len(r.plan.Tasks)-1; slot++ {
		var held ir.Bytes
		for _, shared := range r.plan.slotTasks(Backward, slot) {
			rows, stats := r.queryBytes(shared)
			held += 3*rows + 2*stats
		}
		travels = max(travels, held)
	}
	r.now[TermCacheGrads] += gradients
	r.note(t, travels)
	r.now[TermCacheGrads] -= gradients
	r.now[TermCaches] -= blocks
}

// queryBytes are those of a task's queries, and of a number for each of their heads.
func (r *residence) queryBytes(t Task) (rows, stats ir.Bytes) {
	nodes := r.graph.Layer.Forward
	for i := range nodes {
		if nodes[i].Op == ir.Attention {
			in := BlockInstr(r.graph.Layer, &nodes[i], r.sizes[t.Subsequence])
			return graph.Align(in.Arg("q").Bytes()), graph.Align(in.Arg("lse").Bytes())
		}
	}
	return 0, 0
}

// sharing is what a layer of a task holds besides because helpers share its attention: the parts that come from them.
func (r *residence) sharing(t Task) ir.Bytes {
	helpers := ir.Bytes(r.plan.Helpers(t))
	if helpers == 0 {
		return 0
	}
	rows, stats := r.queryBytes(t)
	if t.Kind == Forward {
		return (helpers + 1) * (rows + stats)
	}
	inF32 := rows * ir.Bytes(4/r.graph.DType().Bytes())
	return helpers*rows + inF32 + stats
}

// BlockInstr is the instruction of a node before anything is placed.
func BlockInstr(b *graph.Block, n *graph.Node, z graph.Size) ir.Instr {
	return b.Instr(n, z, func(_ graph.Arg, v ir.View) ir.View { return v }, func(graph.Attr) ir.Attr { return ir.Int(0) })
}

// OverKeys is an instruction of attention, or of its gradient, over a block of its keys.
func OverKeys(in ir.Instr, z graph.Size, first, end int64) ir.Instr {
	row := in.Info()
	in.Args, in.Attrs = append([]ir.View(nil), in.Args...), append([]ir.Attr(nil), in.Attrs...)
	for i := range row.Operands {
		switch row.Operands[i].Name {
		case "k", "v", "dk", "dv":
			in.Args[i] = RowsOf(in.Args[i], first*z.Batch, (end-first)*z.Batch)
		}
	}
	for i := range row.Attrs {
		if row.Attrs[i].Name == "prefix" {
			in.Attrs[i] = ir.Int(z.Prefix - first)
		}
	}
	return in
}

// RowsOf is a run of a matrix's rows.
func RowsOf(v ir.View, first, rows int64) ir.View {
	v.Offset += ir.Bytes(first*v.Cols()) * v.DType.Bytes()
	v.Shape[0] = int32(rows)
	return v
}

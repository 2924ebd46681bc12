package codegen

import (
	"fmt"
	"slices"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
)

// This file emits shared attention at the turnaround (mux = right). Helpers compute part of a task's attention,
// namely over the blocks of the stage's keys that they hold. This applies to layers without a window; attention
// with a window takes little time and is not shared. Rank k of a helper works with rank k of the owner, which
// has the same heads.
//
// Stages go through a slot together: in each layer all owners send to all helpers, every rank computes, and all
// helpers send back. The instructions of every rank follow this single order, stage by stage, even if a rank
// helps others while it runs its own task. Queries and results use the streams mux and mux_in, because ranks
// wait for them. Blocks of keys use the stream send_prev, and their gradients use send_next. In both passes,
// this is opposite to the direction of the main traffic.

// lentKey identifies the keys of a layer that a helper holds.
type lentKey struct{ microbatch, layer int }

// lentBlock holds the keys and values that a stage sends to a helper, and their gradients once they exist.
type lentBlock struct {
	plan.Lending
	k, v, dk, dv ir.View
	begun        bool
}

// rows limits a view of the whole block to the rows of a range of keys.
func (b *lentBlock) rows(v ir.View, z graph.Size, first, end int64) ir.View {
	return graph.RowsOf(v, (first-b.First)*z.Batch, (end-first)*z.Batch)
}

// shareTimeline adds the steps in which ranks help each other, and the messages that these steps need.
func shareTimeline(p *plan.Plan, items [][]item, starts, ends [][]int, messages int) {
	if !p.Mux.Right {
		return
	}
	for m := range p.Parallel.Microbatches {
		for i := range p.Mux.Stages {
			for j := range i {
				t := plan.Task{Kind: plan.Forward, Microbatch: m, Subsequence: p.Lent(i, j).Behind, Stage: i}
				when := moment{message: messages}
				for at, own := range p.Tasks[i] {
					if own.Piece = 0; own == t {
						when.time = max(when.time, ends[i][at])
					}
				}
				items[i] = append(items[i], item{when, step{kind: lending, shared: []plan.Task{t}, helper: j}})
				items[j] = append(items[j], item{when, step{kind: borrowing, shared: []plan.Task{t}, helper: j}})
				messages++
			}
		}
	}
	type slot struct{ time, helper int }
	helped := map[slot][]plan.Task{}
	for i, tasks := range p.Tasks {
		for at, t := range tasks {
			for j := range p.Helpers(t) {
				key := slot{starts[i][at], j}
				helped[key] = append(helped[key], t)
			}
		}
	}
	for r := range items { // help that starts together with one of the rank's own tasks becomes part of that task's step
		for k := range items[r] {
			it := &items[r][k]
			if key := (slot{it.at.time, r}); it.kind == running && helped[key] != nil {
				it.shared = helped[key]
				delete(helped, key)
			}
		}
	}
	for key, tasks := range helped {
		items[key.helper] = append(items[key.helper], item{moment{key.time, true, 0}, step{kind: helping, shared: tasks}})
	}
}

// share emits a step that helps with other ranks' tasks, or that transfers keys.
func (s *lowering) share(st step) {
	switch st.kind {
	case helping:
		s.helpWith(st.shared).rest()
	default:
		s.kv.lend(st.shared[0], st.helper, st.kind == lending)
	}
	s.nowhere()
}

// lend sends or receives a block of keys and values for each of a stage's layers without a window.
func (k *kv) lend(t plan.Task, helper int, owner bool) {
	lent, z := k.plan.Lent(t.Stage, helper), k.plan.Size(t.Subsequence)
	k.at(t)
	for at, layer := range k.stages[t.Stage] {
		if !k.model.Full(layer) {
			continue
		}
		k.prov.Layer = int32(layer)
		k.decidedBy("mux", "schedule.mux")
		b := k.plan.LayerOf(k.model, t, at)
		_, in := attentionOf(b, b.Forward, ir.Attention, z)
		in = graph.OverKeys(in, z, lent.First, lent.End)
		block := &lentBlock{Lending: lent}
		for _, name := range []string{"k", "v"} {
			v := in.Arg(name)
			if owner {
				v.Buffer = k.device[kvKey{t.Microbatch, layer, name}]
				k.op(ir.Send, ir.SendPrev, []ir.View{v}, k.constRef(rankConst(helper)))
				continue
			}
			v = k.fresh(fmt.Sprintf("m%d.l%d.%s.lent", t.Microbatch, layer, name), v)
			k.op(ir.Recv, ir.RecvNext, []ir.View{v}, k.constRef(rankConst(t.Stage)))
			if name == "k" {
				block.k = v
			} else {
				block.v = v
			}
		}
		if !owner {
			k.lent[lentKey{t.Microbatch, layer}] = block
		}
	}
}

// attentionOf reports whether there is a node with the given opcode, and returns its instruction, without
// addresses.
func attentionOf(b *graph.Block, nodes []graph.Node, op ir.Op, z graph.Size) (found bool, in ir.Instr) {
	for i := range nodes {
		if nodes[i].Op == op {
			return true, graph.BlockInstr(b, &nodes[i], z)
		}
	}
	return false, in
}

// fresh allocates a new buffer for a view.
func (e *emitter) fresh(name string, v ir.View) ir.View {
	v.Offset = 0
	v.Buffer = e.allocate(name, ir.Device, v.Bytes())
	return v
}

// planes returns a view of n stacked copies of a shape; plane returns one of them.
func planes(v ir.View, n int) ir.View {
	v.Offset, v.Shape = 0, [ir.MaxDims]int64{int64(n), v.Shape[0], v.Shape[1]}
	return v
}

func plane(v ir.View, i int) ir.View {
	v.Shape = [ir.MaxDims]int64{v.Shape[1], v.Shape[2]}
	v.Offset += ir.Bytes(i) * v.Bytes()
	return v
}

// swap sends operands to this rank's counterpart in another stage, or receives them from there.
func (e *emitter) swap(op ir.Op, rank int, views ...ir.View) {
	for _, v := range views {
		if op == ir.Send {
			e.toRank(rank, v)
		} else {
			e.fromRank(rank, v)
		}
	}
}

// shares emits a node if helpers share its work, and reports whether it did.
func (e *env) shares(n *graph.Node) bool {
	if n.Op != ir.Attention && n.Op != ir.AttentionGrad || !e.s.trains() {
		return false
	}
	helpers := e.s.plan.Helpers(e.task)
	if helpers == 0 || !e.s.model.Full(e.layer) {
		return false
	}
	in := e.block.Instr(n, e.size, e.view, func(a graph.Attr) ir.Attr { return e.attr(n, a) })
	own := graph.OverKeys(in, e.size, e.s.plan.HelpedBlocks(e.task)[helpers], e.size.Prefix+e.size.Tokens)
	e.s.decidedBy("mux", "schedule.mux")
	if n.Op == ir.Attention {
		e.shareAttention(e.block.Values[n.Args[0].Value].Name, in, own, helpers)
	} else {
		e.shareAttentionGrad(in, own, helpers)
	}
	e.s.decidedBy("lower", e.key())
	return true
}

// setArg and setAttr set an operand or attribute of an instruction by name.
func setArg(in *ir.Instr, name string, v ir.View) {
	for i, o := range in.Info().Operands {
		if o.Name == name {
			in.Args[i] = v
		}
	}
}

func setAttr(in *ir.Instr, name string, v ir.Attr) {
	for i, a := range in.Info().Attrs {
		if a.Name == name {
			in.Attrs[i] = v
		}
	}
}

// phase returns the number of the phase (see help) that consists of this layer's attention, or of its gradient.
func (e *env) phase(op ir.Op) int {
	return phaseOf(slices.Index(e.s.path(e.task), e.layer), op)
}

// shareAttention sends the queries, computes the owner's part, and merges it with the helpers' parts in the
// order of the keys.
func (e *env) shareAttention(name string, in, own ir.Instr, helpers int) {
	s, o, lse, q := e.s, in.Arg("o"), in.Arg("lse"), in.Arg("q")
	others := s.work.beside.at(e.phase(in.Op))
	for j := range helpers {
		s.swap(ir.Send, j, q)
	}
	parts := s.fresh(s.label(e.task, e.layer, name+".parts"), planes(o, helpers+1))
	lses := s.fresh(s.label(e.task, e.layer, name+".lses"), planes(lse, helpers+1))
	setArg(&own, "o", plane(parts, helpers))
	setArg(&own, "lse", plane(lses, helpers))
	others.receive()
	s.emit(own)
	others.compute()
	for j := range helpers {
		s.swap(ir.Recv, j, plane(parts, j), plane(lses, j))
	}
	others.send()
	s.op(ir.AttentionMerge, ir.Compute, []ir.View{o, lse, parts, lses}, in.Attr("heads"), ir.Int(in.Work().ValueDim))
}

// shareAttentionGrad sends the operands that helpers need, computes the owner's part, and adds the helpers'
// gradients of the queries in the order of the keys. Helpers return the gradients of their keys after their
// last task of this stage.
func (e *env) shareAttentionGrad(in, own ir.Instr, helpers int) {
	s, dq := e.s, in.Arg("dq")
	others := s.work.beside.at(e.phase(in.Op))
	e.clearKeys(in, helpers)
	delta := s.fresh(s.label(e.task, e.layer, "attn.delta"), in.Arg("lse"))
	s.op(ir.AttentionDelta, ir.Compute, []ir.View{delta, in.Arg("do"), in.Arg("o")}, in.Attr("heads"), ir.Int(in.Work().ValueDim))
	sent := []ir.View{in.Arg("q"), in.Arg("do"), in.Arg("lse"), delta}
	for j := range helpers {
		s.swap(ir.Send, j, sent...)
	}
	sum := dq
	sum.DType = ir.F32
	sum = s.fresh(s.label(e.task, e.layer, "d.q.sum"), sum)
	setArg(&own, "dq", sum)
	setArg(&own, "o", ir.Absent())
	setArg(&own, "delta", delta)
	others.receive()
	s.emit(own)
	others.compute()
	parts := make([]ir.View, helpers)
	for j := range helpers {
		parts[j] = s.fresh(s.label(e.task, e.layer, fmt.Sprintf("d.q.part%d", j)), dq)
		s.swap(ir.Recv, j, parts[j])
	}
	others.send()
	for first, j := s.plan.Returns(e.task); j > first; j-- {
		e.takeBack(in, j-1)
	}
	others.giveBack()
	for j, part := range parts {
		to := sum
		if j == helpers-1 {
			to = dq
		}
		s.op(ir.Add, ir.Compute, []ir.View{to, sum, part})
	}
	for _, v := range sent {
		s.hold(v.Buffer)
	}
}

// clearKeys clears the gradients of the keys that move from the helpers to the stage itself in this task,
// because the helpers' blocks now end earlier. Tasks that run later add to some of these gradients.
func (e *env) clearKeys(in ir.Instr, helpers int) {
	s, x := e.s, e.task.Subsequence
	if x == s.plan.Subsequences.N-1 || e.task.Piece > 0 && e.task.Piece < len(s.plan.Pieces(e.task)) {
		return
	}
	before := e.task
	before.Subsequence++
	first, end := s.plan.HelpedBlocks(e.task)[helpers], s.plan.HelpedBlocks(before)[helpers]
	s.clear(graph.OverKeys(in, e.size, first, end))
}

// clear sets gradients of keys and values to zero.
func (e *emitter) clear(in ir.Instr) {
	for _, name := range []string{"dk", "dv"} {
		if v := in.Arg(name); v.Rows() > 0 {
			e.op(ir.Fill, ir.Compute, []ir.View{v}, ir.Float(0))
		}
	}
}

// takeBack receives the gradients of the keys that a helper held. For the helper's current block, the stage has
// no gradients yet, so the received values initialise them. For keys after that block, the helper has gradients
// from the tasks of later subsequences. These are added, because the stage or the next helper already has
// contributions.
func (e *env) takeBack(in ir.Instr, helper int) {
	s, borders, lent := e.s, e.s.plan.HelpedBlocks(e.task), e.s.plan.Lent(e.task.Stage, helper)
	fresh, more := graph.OverKeys(in, e.size, lent.First, borders[helper+1]), graph.OverKeys(in, e.size, borders[helper+1], lent.End)
	for _, name := range []string{"dk", "dv"} {
		s.op(ir.Recv, ir.RecvPrev, []ir.View{fresh.Arg(name)}, s.constRef(rankConst(helper)))
		if sum := more.Arg(name); sum.Rows() > 0 {
			part := s.fresh(s.label(e.task, e.layer, fmt.Sprintf("%s.from%d", name, helper)), sum)
			s.op(ir.Recv, ir.RecvPrev, []ir.View{part}, s.constRef(rankConst(helper)))
			s.op(ir.Add, ir.Compute, []ir.View{sum, sum, part})
		}
	}
}

// help is a rank's work for other stages' tasks in a slot, divided into phases. Each phase is the attention
// of a layer, or its gradient.
type help struct {
	s      *lowering
	tasks  []plan.Task
	phases int
	next   int // the next phase
}

func phaseOf(layer int, op ir.Op) int {
	if op == ir.AttentionGrad {
		return 2*layer + 1
	}
	return 2 * layer
}

func (s *lowering) helpWith(tasks []plan.Task) *help {
	h := &help{s: s, tasks: tasks}
	for _, t := range tasks {
		h.phases = max(h.phases, phaseOf(len(s.stages[t.Stage]), ir.Attention))
	}
	return h
}

// rest emits all remaining phases: each receives from all stages, computes for all, and sends to all.
func (h *help) rest() {
	for h.next < h.phases {
		parts := h.at(h.next)
		parts.receive()
		parts.compute()
		parts.send()
		parts.giveBack()
	}
}

// at emits the remaining phases before the given one, and returns the parts of that phase.
func (h *help) at(phase int) (parts helpedParts) {
	last := *h
	last.phases = min(phase, h.phases)
	h.s.aside(last.rest)
	h.next = phase + 1
	op := ir.Attention
	if phase%2 == 1 {
		op = ir.AttentionGrad
	}
	for _, t := range h.tasks {
		if p := h.s.helped(t, phase/2, op); p != nil {
			parts = append(parts, p)
		}
	}
	return parts
}

// helpedParts holds a rank's parts in a phase. Between receive, compute, send and giveBack, the rank continues
// its own task.
type helpedParts []*helped

func (parts helpedParts) each(do func(*helped)) {
	for _, p := range parts {
		p.s.aside(func() { do(p) })
	}
}

func (parts helpedParts) receive()  { parts.each((*helped).receive) }
func (parts helpedParts) compute()  { parts.each((*helped).compute) }
func (parts helpedParts) send()     { parts.each((*helped).send) }
func (parts helpedParts) giveBack() { parts.each((*helped).giveBack) }

// helped is the part that this rank computes of the attention of another stage's task in one layer.
type helped struct {
	s     *lowering
	task  plan.Task
	layer int
	in    ir.Instr // over the rank's block of keys
	block *lentBlock

	first, end int64 // tokens of these keys
}

// helped returns this rank's part of an instruction in layer number at, counted in the order in which the task visits
// its layers. It returns nil if the layer has no such instruction to share.
func (s *lowering) helped(t plan.Task, at int, op ir.Op) *helped {
	layers := s.stages[t.Stage]
	if at >= len(layers) {
		return nil
	}
	k := at
	if t.Kind == plan.Backward {
		k = len(layers) - 1 - at
	}
	if !s.model.Full(layers[k]) {
		return nil
	}
	b, z := s.plan.LayerOf(s.model, t, k), s.plan.SizeOf(t)
	nodes := b.Forward
	if t.Kind == plan.Backward {
		nodes = b.Backward
	}
	found, in := attentionOf(b, nodes, op, z)
	if !found {
		return nil
	}
	borders := s.plan.HelpedBlocks(t)
	first, end := borders[s.rank], borders[s.rank+1]
	h := &helped{s: s, task: t, layer: layers[k], in: graph.OverKeys(in, z, first, end), first: first, end: end}
	h.block = s.kv.lent[lentKey{t.Microbatch, h.layer}]
	setArg(&h.in, "k", h.block.rows(h.block.k, z, first, end))
	setArg(&h.in, "v", h.block.rows(h.block.v, z, first, end))
	if positions := h.in.Arg("positions"); positions.Present() {
		positions.Buffer = s.work.documents[t.Microbatch]
		setArg(&h.in, "positions", positions)
	}
	return h
}

// begin sets the provenance of the following instructions.
func (h *helped) begin() {
	h.s.at(h.task)
	h.s.prov.Layer = int32(h.layer)
	h.s.decidedBy("mux", "schedule.mux")
}

// make allocates the buffer of an operand.
func (h *helped) make(name string) ir.View {
	suffix := ".part"
	switch {
	case h.in.Op == ir.AttentionGrad:
		suffix = ".grad.part"
	case h.task.Kind == plan.Backward:
		suffix = ".again.part"
	}
	v := h.s.fresh(h.s.label(h.task, h.layer, name+suffix), h.in.Arg(name))
	setArg(&h.in, name, v)
	return v
}

func (h *helped) receive() {
	h.begin()
	if h.in.Op == ir.Attention {
		h.s.swap(ir.Recv, h.task.Stage, h.make("q"))
		return
	}
	setArg(&h.in, "o", ir.Absent())
	setArg(&h.in, "delta", h.in.Arg("lse"))
	h.s.swap(ir.Recv, h.task.Stage, h.make("q"), h.make("do"), h.make("lse"), h.make("delta"))
}

func (h *helped) compute() {
	h.begin()
	if h.in.Op == ir.Attention {
		h.make("o")
		h.make("lse")
		h.s.emit(h.in)
		return
	}
	h.make("dq")
	if !h.block.begun {
		h.beginGradients()
	}
	z := h.s.plan.SizeOf(h.task)
	setArg(&h.in, "dk", h.block.rows(h.block.dk, z, h.first, h.end))
	setArg(&h.in, "dv", h.block.rows(h.block.dv, z, h.first, h.end))
	setAttr(&h.in, "accumulate", ir.Bool(h.block.begun))
	h.block.begun = true
	h.s.emit(h.in)
}

// beginGradients allocates the gradients of all lent keys. It clears those that this part, the first in the
// backward pass, does not cover.
func (h *helped) beginGradients() {
	z, b := h.s.plan.SizeOf(h.task), h.block
	name := fmt.Sprintf("m%d.l%d", h.task.Microbatch, h.layer)
	lent := graph.OverKeys(h.in, z, 0, b.End-b.First)
	b.dk = h.s.fresh(name+".d.k.lent", lent.Arg("dk"))
	b.dv = h.s.fresh(name+".d.v.lent", lent.Arg("dv"))
	setArg(&lent, "dk", b.rows(b.dk, z, b.First, h.first))
	setArg(&lent, "dv", b.rows(b.dv, z, b.First, h.first))
	h.s.clear(lent)
}

func (h *helped) send() {
	h.begin()
	if h.in.Op == ir.Attention {
		h.s.swap(ir.Send, h.task.Stage, h.in.Arg("o"), h.in.Arg("lse"))
		return
	}
	h.s.swap(ir.Send, h.task.Stage, h.in.Arg("dq"))
}

// giveBack returns the gradients of the lent keys to their stage, after the last task that adds to them. Those
// of the helper's current block go first.
func (h *helped) giveBack() {
	if first, end := h.s.plan.Returns(h.task); h.in.Op != ir.AttentionGrad || h.s.rank < first || h.s.rank >= end {
		return
	}
	h.begin()
	z := h.s.plan.SizeOf(h.task)
	for _, v := range []ir.View{h.block.dk, h.block.dv} {
		for _, keys := range [][2]int64{{h.first, h.end}, {h.end, h.block.End}} {
			if part := h.block.rows(v, z, keys[0], keys[1]); part.Rows() > 0 {
				h.s.op(ir.Send, ir.SendNext, []ir.View{part}, h.s.constRef(rankConst(h.task.Stage)))
			}
		}
	}
}

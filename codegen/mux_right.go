package codegen

import (
	"fmt"

	"sppo/graph"
	"sppo/ir"
	"sppo/passes"
)

// The right part of mux: helpers compute a task's attention over the blocks of its stage's keys that they hold. Rank k of a
// helper works with rank k of the owner, which has the same heads.
//
// Stages go through a slot together: in each layer, all owners send to all helpers, everyone computes, all helpers send
// back. Every rank's instructions are a part of that one order. Queries and results travel on mux and mux_in, since somebody
// waits for them; blocks of keys go on send_prev and their gradients on send_next, against the traffic of the pass in which they go.

// lentKey names the keys of a layer that a helper holds.
type lentKey struct{ microbatch, layer int }

// lentBlock is a block of keys and values, and their gradients once there are some.
type lentBlock struct {
	k, v, dk, dv ir.View
	begun        bool
}

// shareTimeline adds the steps by which ranks help each other, and the messages that bring what that takes.
func shareTimeline(p *passes.Plan, items [][]item, starts, ends [][]int, messages int) {
	if !p.Mux.Right {
		return
	}
	for m := range p.Parallel.Microbatches {
		for i := range p.Mux.Stages {
			for j := range max(0, len(p.Mux.Stages[i].Blocks)-1) {
				t := passes.Task{Kind: passes.Forward, Microbatch: m, Subsequence: p.Lent(i, j), Stage: i}
				when := moment{message: messages}
				for at, own := range p.Tasks[i] {
					if own.Piece = 0; own == t {
						when.time = max(when.time, ends[i][at])
					}
				}
				items[i] = append(items[i], item{when, step{kind: lending, shared: []passes.Task{t}, helper: j}})
				items[j] = append(items[j], item{when, step{kind: borrowing, shared: []passes.Task{t}, helper: j}})
				messages++
			}
		}
	}
	type slot struct{ time, helper int }
	helped := map[slot][]passes.Task{}
	for i, tasks := range p.Tasks {
		for at, t := range tasks {
			for j := range p.Helpers(t) {
				key := slot{starts[i][at], j}
				helped[key] = append(helped[key], t)
			}
		}
	}
	for key, tasks := range helped {
		items[key.helper] = append(items[key.helper], item{moment{key.time, true, 0}, step{kind: helping, shared: tasks}})
	}
}

// share issues what a rank does of other ranks' tasks, or for those who do of its own.
func (s *stage) share(st step) {
	switch st.kind {
	case helping:
		s.help(st.shared)
	default:
		s.lend(st.shared[0], st.helper, st.kind == lending)
	}
	s.nowhere()
}

// lend sends or receives a block of the keys of every layer of a stage.
func (s *stage) lend(t passes.Task, helper int, owner bool) {
	borders, z := s.plan.Mux.Stages[t.Stage].Blocks, s.plan.Size(t.Subsequence)
	s.at(t)
	for k, layer := range s.stages[t.Stage] {
		s.prov.Layer = int32(layer)
		s.decidedBy("mux", "schedule.mux")
		b := s.plan.LayerOf(s.model, t, k)
		_, in := attentionOf(b, b.Forward, ir.Attention, z)
		in = passes.OverKeys(in, z, borders[helper], borders[helper+1])
		block := &lentBlock{}
		for _, name := range []string{"k", "v"} {
			v := in.Arg(name)
			if owner {
				v.Buffer = s.caches[cacheKey{t.Microbatch, layer, name}]
				s.op(ir.Send, ir.SendPrev, []ir.View{v}, s.constRef(rankConst(helper)))
				continue
			}
			v = s.fresh(fmt.Sprintf("m%d.l%d.%s.lent", t.Microbatch, layer, name), v)
			s.op(ir.Recv, ir.RecvNext, []ir.View{v}, s.constRef(rankConst(t.Stage)))
			if name == "k" {
				block.k = v
			} else {
				block.v = v
			}
		}
		if !owner {
			s.lent[lentKey{t.Microbatch, layer}] = block
		}
	}
}

// attentionOf is the node of an opcode among nodes, and its instruction before anything is placed.
func attentionOf(b *graph.Block, nodes []graph.Node, op ir.Op, z graph.Size) (found bool, in ir.Instr) {
	for i := range nodes {
		if nodes[i].Op == op {
			return true, passes.BlockInstr(b, &nodes[i], z)
		}
	}
	return false, in
}

// fresh gives a view a buffer of its own.
func (s *stage) fresh(name string, v ir.View) ir.View {
	v.Offset = 0
	v.Buffer = s.allocate(name, ir.Device, v.Bytes())
	return v
}

// planes stacks so many views of one shape, and takes one of them.
func planes(v ir.View, n int) ir.View {
	v.Offset, v.Shape = 0, [ir.MaxDims]int32{int32(n), v.Shape[0], v.Shape[1]}
	return v
}

func plane(v ir.View, i int) ir.View {
	v.Shape = [ir.MaxDims]int32{v.Shape[1], v.Shape[2]}
	v.Offset += ir.Bytes(i) * v.Bytes()
	return v
}

// swap sends or receives what is borrowed.
func (s *stage) swap(op ir.Op, stage int, views ...ir.View) {
	for _, v := range views {
		if op == ir.Send {
			s.toRank(stage, v)
		} else {
			s.fromRank(stage, v)
		}
	}
}

// shares emits a node whose work helpers share, and says whether it is one.
func (e *env) shares(n *graph.Node) bool {
	if n.Op != ir.Attention && n.Op != ir.AttentionGrad || !e.s.training {
		return false
	}
	helpers := e.s.plan.Helpers(e.task)
	if helpers == 0 {
		return false
	}
	in := e.block.Instr(n, e.size, e.view, func(a graph.Attr) ir.Attr { return e.attr(n, a) })
	borders := e.s.plan.Mux.Stages[e.task.Stage].Blocks
	own := passes.OverKeys(in, e.size, borders[helpers], e.size.Prefix+e.size.Tokens)
	e.s.decidedBy("mux", "schedule.mux")
	if n.Op == ir.Attention {
		e.shareAttention(e.block.Values[n.Args[0].Value].Name, in, own, helpers)
	} else {
		e.shareAttentionGrad(in, own, helpers)
	}
	e.s.decidedBy("lower", e.key())
	return true
}

// setArg and setAttr change an instruction by name.
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

// shareAttention sends the queries, computes its own part, and joins it with the helpers', in the order of the keys.
func (e *env) shareAttention(name string, in, own ir.Instr, helpers int) {
	s, o, lse, q := e.s, in.Arg("o"), in.Arg("lse"), in.Arg("q")
	for j := range helpers {
		s.swap(ir.Send, j, q)
	}
	parts := s.fresh(s.label(e.task, e.layer, name+".parts"), planes(o, helpers+1))
	lses := s.fresh(s.label(e.task, e.layer, name+".lses"), planes(lse, helpers+1))
	setArg(&own, "o", plane(parts, helpers))
	setArg(&own, "lse", plane(lses, helpers))
	s.emit(own)
	for j := range helpers {
		s.swap(ir.Recv, j, plane(parts, j), plane(lses, j))
	}
	s.op(ir.AttentionMerge, ir.Compute, []ir.View{o, lse, parts, lses}, in.Attr("heads"), in.Attr("head_dim"))
}

// shareAttentionGrad sends what helpers need, computes its own part, and adds the helpers' gradients of the queries to it, in the
// order of the keys. The helper whose last task of this stage this is returns the gradients of its keys. Nobody has touched
// those rows here, and the stage's next task will: what comes is where they begin.
func (e *env) shareAttentionGrad(in, own ir.Instr, helpers int) {
	s, dq := e.s, in.Arg("dq")
	delta := s.fresh(s.label(e.task, e.layer, "attn.delta"), in.Arg("lse"))
	s.op(ir.AttentionDelta, ir.Compute, []ir.View{delta, in.Arg("do"), in.Arg("o")}, in.Attr("heads"), in.Attr("head_dim"))
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
	s.emit(own)
	parts := make([]ir.View, helpers)
	for j := range helpers {
		parts[j] = s.fresh(s.label(e.task, e.layer, fmt.Sprintf("d.q.part%d", j)), dq)
		s.swap(ir.Recv, j, parts[j])
	}
	borders := s.plan.Mux.Stages[e.task.Stage].Blocks
	back := passes.OverKeys(in, e.size, borders[helpers-1], borders[helpers])
	for _, name := range []string{"dk", "dv"} {
		if lastOf(e.task) {
			s.op(ir.Recv, ir.RecvPrev, []ir.View{back.Arg(name)}, s.constRef(rankConst(helpers-1)))
		}
	}
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

// lastOf says whether a backward is the last of its subsequence.
func lastOf(t passes.Task) bool { return t.Piece <= 1 }

// help goes through the layers of other stages' tasks of a slot: it receives from all, computes for all, and sends to all.
func (s *stage) help(tasks []passes.Task) {
	layers := 0
	for _, t := range tasks {
		layers = max(layers, len(s.stages[t.Stage]))
	}
	for at := range layers {
		for _, op := range []ir.Op{ir.Attention, ir.AttentionGrad} {
			var parts []*helped
			for _, t := range tasks {
				if h := s.helped(t, at, op); h != nil {
					parts = append(parts, h)
				}
			}
			for _, h := range parts {
				h.receive()
			}
			for _, h := range parts {
				h.compute()
			}
			for _, h := range parts {
				h.send()
			}
			for _, h := range parts {
				h.giveBack()
			}
		}
	}
}

// helped is this rank's part of the attention of a layer of another stage's task.
type helped struct {
	s     *stage
	task  passes.Task
	layer int
	in    ir.Instr // over the block
	block *lentBlock
}

// helped is the part in the layer that a task comes to as its at-th, or nil where it has no such instruction.
func (s *stage) helped(t passes.Task, at int, op ir.Op) *helped {
	layers := s.stages[t.Stage]
	if at >= len(layers) {
		return nil
	}
	k := at
	if t.Kind == passes.Backward {
		k = len(layers) - 1 - at
	}
	b, z := s.plan.LayerOf(s.model, t, k), s.plan.SizeOf(t)
	nodes := b.Forward
	if t.Kind == passes.Backward {
		nodes = b.Backward
	}
	found, in := attentionOf(b, nodes, op, z)
	if !found {
		return nil
	}
	borders := s.plan.Mux.Stages[t.Stage].Blocks
	h := &helped{s: s, task: t, layer: layers[k], in: passes.OverKeys(in, z, borders[s.index0], borders[s.index0+1])}
	h.block = s.lent[lentKey{t.Microbatch, h.layer}]
	setArg(&h.in, "k", h.block.k)
	setArg(&h.in, "v", h.block.v)
	return h
}

// begin sets the provenance of what follows.
func (h *helped) begin() {
	h.s.at(h.task)
	h.s.prov.Layer = int32(h.layer)
	h.s.decidedBy("mux", "schedule.mux")
}

// make gives an operand a place.
func (h *helped) make(name string) ir.View {
	suffix := ".part"
	switch {
	case h.in.Op == ir.AttentionGrad:
		suffix = ".grad.part"
	case h.task.Kind == passes.Backward:
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
		name := fmt.Sprintf("m%d.l%d", h.task.Microbatch, h.layer)
		h.block.dk = h.s.fresh(name+".d.k.lent", h.in.Arg("dk"))
		h.block.dv = h.s.fresh(name+".d.v.lent", h.in.Arg("dv"))
	}
	setArg(&h.in, "dk", h.block.dk)
	setArg(&h.in, "dv", h.block.dv)
	setAttr(&h.in, "accumulate", ir.Bool(h.block.begun))
	h.block.begun = true
	h.s.emit(h.in)
}

func (h *helped) send() {
	h.begin()
	if h.in.Op == ir.Attention {
		h.s.swap(ir.Send, h.task.Stage, h.in.Arg("o"), h.in.Arg("lse"))
		return
	}
	h.s.swap(ir.Send, h.task.Stage, h.in.Arg("dq"))
}

// giveBack returns the gradients of the keys behind the last task that the block is for.
func (h *helped) giveBack() {
	if h.in.Op != ir.AttentionGrad || h.s.plan.Helpers(h.task) != h.s.index0+1 || !lastOf(h.task) {
		return
	}
	h.begin()
	for _, v := range []ir.View{h.block.dk, h.block.dv} {
		h.s.op(ir.Send, ir.SendNext, []ir.View{v}, h.s.constRef(rankConst(h.task.Stage)))
	}
}

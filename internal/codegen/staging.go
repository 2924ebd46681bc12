package codegen

import (
	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/walk"
	"sppo.dev/internal/schedule"
	"sppo.dev/ir"
)

// This file emits the copies of tensors that a plan with order = layer keeps on the host: hidden states between
// layers, gradients between layers, and K and V of a layer between its forward and its backward tasks.

// flow holds the hidden rows that tasks of a section pass on, or their gradients.
type flow struct {
	*emitter
	rows    uint32               // of the running task
	inputs  map[plan.Task]uint32 // of tasks, if another task or rank has produced them
	host    map[plan.Task]uint32 // the same, on the host
	outputs map[plan.Task]uint32 // results that have not been sent yet
	lagging []uint32             // buffers whose messages may still be in transit: held until the end of the next task
	start   position             // of the previous task
}

// resultToHost copies the input of a later task to the host. Its device bytes are held until the end of the next task.
func (f *flow) resultToHost(reader plan.Task, x uint32) {
	size, _ := f.hidden(f.plan.SizeOf(reader))
	rows := asBytes(0, size)
	host := f.allocate(f.buffers.list[x].name+".host", ir.Host, size)
	f.decidedBy("offload", "schedule.offload")
	f.op(ir.CopyD2H, ir.D2H, []ir.View{in(host, rows), in(x, rows)})
	f.host[reader] = host
	f.lagging = append(f.lagging, x)
}

// inputFromHost begins to load the input of the next task, if it is on the host.
func (f *flow) inputFromHost(next plan.Task) {
	f.at(next)
	f.decidedBy("offload", "schedule.offload")
	if host, ok := f.host[next]; ok {
		x := f.allocateInput(next)
		rows := asBytes(0, f.buffers.list[x].size)
		f.op(ir.CopyH2D, ir.H2D, []ir.View{in(x, rows), in(host, rows)})
		f.inputs[next] = x
	}
}

// kvToHost copies the rows of K and V that a forward node has written to the host, where they stay until
// the layer's backward pass, or until tasks stream them.
func (e *env) kvToHost(n *graph.Node) {
	s := e.s
	for i, a := range n.Args {
		if a.Value == graph.Missing || e.block.Values[a.Value].Kind != graph.Cache || ir.Ops[n.Op].Operands[i].Dir == ir.Read {
			continue
		}
		if !e.block.Finishes(n, a.Value) {
			continue
		}
		v, by := &e.block.Values[a.Value], "schedule.keep"
		a.Span = graph.Tail // a ring writes the halves of these rows one after the other
		first, end := e.size.Prefix, e.size.Prefix+e.size.Tokens
		if v.Spans() {
			if by = "schedule.order"; !s.trains() || !s.plan.HoldsKVOnHost(e.task.Stage) || !e.block.Attends {
				continue
			}
		} else if !s.trains() || !e.block.Attends {
			if first = e.readLater(); first == end {
				continue
			}
		}
		from := e.view(a, e.block.View(a, e.size))
		from.Offset += from.Bytes() / ir.Bytes(e.size.Tokens) * ir.Bytes(first-e.size.Prefix)
		s.decidedBy("offload", by)
		host := s.kv.hostRows(e.task.Microbatch, e.layer, v, first, end)
		s.op(ir.CopyD2H, ir.D2H, []ir.View{host, in(from.Buffer, asBytes(from.Offset, host.Bytes()))})
		s.decidedBy("lower", "model.layers")
	}
}

// readLater returns the first of this subsequence's tokens whose K and V later subsequences stream, or the end
// of the subsequence if there is none.
func (e *env) readLater() int64 {
	end, next := e.size.Prefix+e.size.Tokens, e.task.Subsequence+1
	if next == e.s.plan.Subsequences.N {
		return end
	}
	blocks := walk.Blocks(e.s.plan.Stream.Block, e.s.model.OfLayer(e.s.plan.Size(next), e.layer))
	if len(blocks) == 0 {
		return end
	}
	return max(e.size.Prefix, blocks[0].First)
}

// kvFromHost loads K and V of a layer for its first backward task, if they are on the host.
func (k *kv) kvFromHost(t plan.Task, layer int) {
	if !k.plan.HoldsKVOnHost(t.Stage) || !k.layerOfModel(layer).Attends {
		return
	}
	k.at(t)
	k.decidedBy("offload", "schedule.order")
	k.prov.Layer = int32(layer)
	values := k.layerOfModel(layer).Values
	for v := range values {
		if values[v].Kind != graph.Cache || !values[v].Spans() {
			continue
		}
		key := kvKey{t.Microbatch, layer, values[v].Name}
		b := k.allocate(k.buffers.list[k.device[key]].name+".reload", ir.Device, k.buffers.list[k.host[key]].size)
		k.device[key] = b
		for i := range k.plan.Subsequences.N {
			z := k.plan.Size(i)
			rows := k.hostRows(key.microbatch, key.layer, &values[v], z.Prefix, z.Prefix+z.Tokens)
			k.op(ir.CopyH2D, ir.H2D, []ir.View{in(b, rows), rows})
		}
	}
}

// recompute emits an action that recomputes K and V: the load of a layer's input for a subsequence, or the computation of
// the subsequence's rows.
func (s *lowering) recompute(t plan.Task, a schedule.Action) {
	layer := s.layerOf(a)
	b := s.layerOfModel(layer)
	if !b.Attends {
		return
	}
	t.Subsequence = int(a.Of)
	s.prov.Layer, s.prov.Subsequence = int32(layer), a.Of
	s.decidedBy("offload", "schedule.recompute")
	if a.Op == schedule.Recompute {
		e := s.newEnv(b, s.paramsOf(t, layer), t, layer, s.sizeOf(t))
		e.suffix = ".kv"
		e.put(b.Input, s.kv.inputs[t.Subsequence], 0)
		e.run(b.KVNodes)
		return
	}
	for v := range b.Values {
		if b.Values[v].Kind == graph.Cache && a.Of == 0 {
			key := kvKey{t.Microbatch, layer, b.Values[v].Name}
			old := s.buffers.list[s.kv.device[key]]
			s.kv.device[key] = s.allocate(old.name+".again", ir.Device, old.size)
		}
	}
	s.kv.inputs[t.Subsequence] = s.loadInput(t, layer)
}

// loadInput returns the buffer of a layer's input, loaded from the host unless it is on the device.
func (s *lowering) loadInput(t plan.Task, layer int) uint32 {
	saved := s.saved[unitKey{t.Microbatch, t.Subsequence, t.Piece, layer, 0}]
	if !saved.onHost || saved.returned {
		return saved.device
	}
	size := s.buffers.list[saved.host].size
	x := s.allocate(s.label(t, layer, "ln1.in.kv"), ir.Device, size)
	rows := asBytes(0, size)
	s.op(ir.CopyH2D, ir.H2D, []ir.View{in(x, rows), in(saved.host, rows)})
	return x
}

package codegen

import (
	"sppo/graph"
	"sppo/ir"
	"sppo/passes"
)

// What waits on the host in layer order: hidden states between layers, gradients between layers, K and V of a layer between
// its forwards and its backwards.

func (s *stage) findDetours(tasks []passes.Task) {
	s.detours = map[passes.Task]bool{}
	for i, detour := range s.plan.Detours(tasks) {
		s.detours[tasks[i]] = detour
	}
}

// sendAway copies what a later task starts from to the host. Its device bytes are held until the end of the next task.
func (s *stage) sendAway(reader passes.Task, x uint32) {
	size, _ := s.hidden(s.plan.SizeOf(reader))
	rows := asBytes(0, size)
	host := s.allocate(s.buffers[x].name+".host", ir.Host, size)
	s.decidedBy("offload", "schedule.offload")
	s.op(ir.CopyD2H, ir.D2H, []ir.View{in(host, rows), in(x, rows)})
	s.away[reader] = host
	s.lagging = append(s.lagging, x)
}

// fetch begins to bring back what the next task starts from: its input, and K and V of its layers where it is the first
// backward through them.
func (s *stage) fetch(next *passes.Task) {
	if next == nil {
		return
	}
	prov := s.prov
	s.at(*next)
	s.decidedBy("offload", "schedule.offload")
	if host, ok := s.away[*next]; ok {
		x := s.allocateInput(*next)
		rows := asBytes(0, s.buffers[x].size)
		s.op(ir.CopyH2D, ir.H2D, []ir.View{in(x, rows), in(host, rows)})
		s.inputs[*next] = x
	}
	if s.plan.Unparks(*next) {
		s.unpark(*next)
	}
	s.prov = prov
}

// park copies the rows of K and V that a forward node has written to the host, where the layer's wait for its backward.
func (e *env) park(n *graph.Node) {
	s := e.s
	if e.layer < 0 || !s.training || !s.plan.Parks(e.task.Stage) {
		return
	}
	for i, a := range n.Args {
		if a.Value == graph.Missing || e.block.Values[a.Value].Kind != graph.Cache || ir.Ops[n.Op].Operands[i].Dir == ir.Read {
			continue
		}
		key := e.cacheKey(a.Value)
		host, ok := s.parked[key]
		if !ok {
			b := s.buffers[s.caches[key]]
			host = s.allocate(b.name+".host", ir.Host, b.size)
			s.parked[key] = host
		}
		v := e.view(a, e.block.View(a, e.size))
		rows := asBytes(v.Offset, v.Bytes())
		s.decidedBy("offload", "schedule.order")
		s.op(ir.CopyD2H, ir.D2H, []ir.View{in(host, rows), in(v.Buffer, rows)})
		s.decidedBy("lower", "model.layers")
	}
}

// unpark brings K and V of a stage's layers back, in the order of need.
func (s *stage) unpark(t passes.Task) {
	s.decidedBy("offload", "schedule.order")
	layers, values := s.stages[t.Stage], s.model.Layer.Values
	for k := range layers {
		s.prov.Layer = int32(layers[len(layers)-1-k])
		for v := range values {
			if values[v].Kind != graph.Cache {
				continue
			}
			key := cacheKey{t.Microbatch, layers[len(layers)-1-k], values[v].Name}
			host := s.parked[key]
			b := s.allocate(s.buffers[s.caches[key]].name+".reload", ir.Device, s.buffers[host].size)
			s.caches[key] = b
			for i := range s.plan.Subsequences.N {
				tail := s.model.Layer.View(graph.Arg{Value: v, Span: graph.Tail}, s.plan.Size(i))
				rows := asBytes(tail.Offset, tail.Bytes())
				s.op(ir.CopyH2D, ir.H2D, []ir.View{in(b, rows), in(host, rows)})
			}
		}
	}
}

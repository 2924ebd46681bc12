package codegen

import (
	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
)

// This file handles saved tensors between the forward and the backward pass: where they are kept, when they
// leave the device, and when they return. A unit is the smallest group of saved tensors that is offloaded or
// recomputed as one.

// saveUnits makes a forward env store the values of each unit together. The block's input already has a buffer.
func (e *env) saveUnits() {
	e.unitOf = make([]int, len(e.block.Values))
	for v := range e.unitOf {
		e.unitOf[v] = -1
	}
	for u := range e.block.Units {
		unit := &e.block.Units[u]
		if unit.Producer < 0 {
			e.saveInput(u)
			continue
		}
		for _, v := range unit.Values {
			e.unitOf[v] = u
		}
	}
}

// saveInput saves the block's input. If the input came from the host, it is still there and is not copied
// again.
func (e *env) saveInput(u int) {
	input := savedUnit{device: e.at[e.block.Input].buffer}
	if e.layer == e.s.stages[e.task.Stage][0] {
		input.host, input.onHost = e.s.flow.host[e.task]
		delete(e.s.flow.host, e.task)
	}
	e.s.saved[e.unitKey(u)] = input
	if !input.onHost {
		e.offloadUnit(u)
	}
}

func (e *env) unitKey(u int) unitKey {
	return unitKey{e.task.Microbatch, e.task.Subsequence, e.task.Piece, e.layer, u}
}

// makeUnit allocates the buffer of a unit and lays out its values in it one after another.
func (e *env) makeUnit(u int) {
	unit := &e.block.Units[u]
	b := e.s.allocate(e.s.label(e.task, e.layer, unit.Name), ir.Device, e.block.UnitBytes(unit, e.size))
	e.placeUnit(u, b)
	e.s.saved[e.unitKey(u)] = savedUnit{device: b}
}

func (e *env) placeUnit(u int, b uint32) {
	unit := &e.block.Units[u]
	offsets, _ := e.block.UnitLayout(unit, e.size)
	for i, v := range unit.Values {
		e.put(v, b, offsets[i])
	}
}

// offload copies a unit to the host as soon as its producer has been emitted. Copying only reads, so the copy
// need not wait for later readers.
func (e *env) offload(n *graph.Node) {
	if e.unitOf == nil {
		return
	}
	for u := range e.block.Units {
		if p := e.block.Units[u].Producer; p >= 0 && n == &e.block.Forward[p] {
			e.offloadUnit(u)
		}
	}
}

func (e *env) offloadUnit(u int) {
	s := e.s
	k := e.layer - s.stages[e.task.Stage][0]
	if s.plan.PlacementOf(e.task, k)[e.block.Units[u].Number] != plan.PlacementOffload {
		return
	}
	saved := s.saved[e.unitKey(u)]
	size := s.buffers.list[saved.device].size
	saved.host = s.allocate(s.buffers.list[saved.device].name+".host", ir.Host, size)
	saved.onHost = true
	s.decidedBy("offload", "schedule.offload")
	for _, v := range s.unitViews(e.block, u, e.task) {
		s.op(ir.CopyD2H, ir.D2H, []ir.View{in(saved.host, v), in(saved.device, v)})
	}
	s.decidedBy("lower", "model.layers")
	s.saved[e.unitKey(u)] = saved
}

// unitViews returns the bytes of a unit's values within its buffer. Padding between values is not copied.
func (e *emitter) unitViews(b *graph.Block, u int, t plan.Task) []ir.View {
	z := e.plan.SizeOf(t)
	unit := &b.Units[u]
	offsets, _ := b.UnitLayout(unit, z)
	views := make([]ir.View, len(unit.Values))
	for i, v := range unit.Values {
		views[i] = asBytes(offsets[i], b.Values[v].Bytes(z))
	}
	return views
}

// asBytes returns a view of n bytes at an offset, as copies use it; the caller sets its buffer.
func asBytes(offset, n ir.Bytes) ir.View {
	v := vector(0, ir.U8, int64(n))
	v.Offset = offset
	return v
}

// in returns the view v, but of buffer b.
func in(b uint32, v ir.View) ir.View {
	v.Buffer = b
	return v
}

// releaseOffloaded frees the device bytes of a layer's units whose copies to the host were issued earlier. An
// instruction that reuses the bytes waits for the copies. Units that are already being reloaded are skipped,
// because they have new buffers.
func (s *lowering) releaseOffloaded(t plan.Task, layer int) {
	for u := range s.block(t, layer).Units {
		key := unitKey{t.Microbatch, t.Subsequence, t.Piece, layer, u}
		if saved := s.saved[key]; saved.onHost && !saved.left && !saved.returned {
			s.hold(saved.device)
			saved.left = true
			s.saved[key] = saved
		}
	}
}

// reload issues the copies that bring a layer's units back for a backward task, in the order of their first
// use, unless they have been issued.
func (s *lowering) reload(t plan.Task, layer int) {
	b := s.block(t, layer)
	units := b.Units
	for _, u := range byReader(units) {
		key := unitKey{t.Microbatch, t.Subsequence, t.Piece, layer, u}
		saved := s.saved[key]
		if !saved.onHost || saved.returned {
			continue
		}
		out := s.buffers.list[saved.host]
		saved.device = s.allocate(s.label(t, layer, units[u].Name)+".reload", ir.Device, out.size)
		saved.returned = true
		s.prov.Microbatch, s.prov.Subsequence, s.prov.Layer = int32(t.Microbatch), int32(t.Subsequence), int32(layer)
		s.decidedBy("offload", "schedule.offload")
		for _, v := range s.unitViews(b, u, t) {
			s.op(ir.CopyH2D, ir.H2D, []ir.View{in(saved.device, v), in(saved.host, v)})
		}
		s.saved[key] = saved
	}
}

// byReader orders units by their first reader in the backward pass.
func byReader(units []graph.Unit) []int {
	order := make([]int, len(units))
	for i := range order {
		order[i] = i
		for j := i; j > 0 && units[order[j]].Reader < units[order[j-1]].Reader; j-- {
			order[j], order[j-1] = order[j-1], order[j]
		}
	}
	return order
}

// loadUnits sets the buffers of a backward env's saved values.
func (e *env) loadUnits() {
	for u := range e.block.Units {
		e.placeUnit(u, e.s.saved[e.unitKey(u)].device)
	}
}

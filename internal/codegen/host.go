package codegen

import (
	"fmt"

	"sppo.dev/internal/graph"
	"sppo.dev/ir"
)

// Optimizer state in host memory passes through the device in blocks: while one block is updated, the next is
// being loaded and the previous one stored.

// stateBlock is a range of rows of a parameter's optimizer states and, if weights are bf16, of its f32 master.
type stateBlock struct {
	p           *param
	first, rows int64
	states      []hostState
}

// hostState is the part of a state or master that belongs to a block.
type hostState struct {
	name         string // as in the update
	host, device uint32
	dtype        ir.DType
}

// passing is the queue of the blocks of optimizer state that a step updates.
type passing struct {
	s      *lowering
	blocks []stateBlock // not yet updated
	loaded int          // number of these whose load has been issued
	last   []hostState  // states of the last updated block
}

// newPassing lists the blocks in the order of the updates.
func (s *lowering) newPassing() *passing {
	q := &passing{s: s}
	for _, p := range s.params() {
		if p.shared != nil || !p.onHost {
			continue
		}
		each := s.plan.HostBlock(p.block, p.Param)
		for first := int64(0); first < p.stateRows(); first += each {
			q.blocks = append(q.blocks, stateBlock{p: p, first: first, rows: min(each, p.stateRows()-first)})
		}
	}
	return q
}

// load issues the copy of the next block that is not yet loaded, if there is one.
func (q *passing) load() {
	if q.loaded == len(q.blocks) {
		return
	}
	b := &q.blocks[q.loaded]
	q.loaded++
	p, s := b.p, q.s
	if s.model.DType() != ir.F32 {
		b.states = append(b.states, hostState{name: graph.UpdateWeight, host: p.master, dtype: ir.F32})
	}
	for i, state := range p.optimizer.States {
		b.states = append(b.states, hostState{name: state.Name, host: p.states[i], dtype: state.DType})
	}
	s.decidedBy("solve", "schedule.optimizer_offload")
	for i := range b.states {
		x := &b.states[i]
		bytes := ir.Bytes(b.rows*p.Local[1]) * x.dtype.Bytes()
		x.device = s.allocate(fmt.Sprintf("%s.%d", s.buffers.list[x.host].name, b.first), ir.Device, bytes)
		s.op(ir.CopyH2D, ir.H2D, []ir.View{in(x.device, asBytes(0, bytes)), b.onHost(x, bytes)})
	}
	s.decidedBy("lower", "train.optimizer")
}

// onHost returns the host bytes of a state that belong to the block.
func (b *stateBlock) onHost(x *hostState, bytes ir.Bytes) ir.View {
	return in(x.host, asBytes(ir.Bytes(b.first*b.p.Local[1])*x.dtype.Bytes(), bytes))
}

// store issues the copies of the first block in the queue back to the host, and frees the device bytes of the
// block stored before it.
func (q *passing) store() {
	b, s := &q.blocks[0], q.s
	s.decidedBy("solve", "schedule.optimizer_offload")
	for i := range b.states {
		x := &b.states[i]
		bytes := ir.Bytes(b.rows*b.p.Local[1]) * x.dtype.Bytes()
		s.op(ir.CopyD2H, ir.D2H, []ir.View{b.onHost(x, bytes), in(x.device, asBytes(0, bytes))})
	}
	s.decidedBy("lower", "train.optimizer")
	for _, x := range q.last {
		s.hold(x.device)
	}
	q.last, q.blocks, q.loaded = b.states, q.blocks[1:], q.loaded-1
}

// update updates a parameter block by block. weight is a view of the matrix that the forward pass reads.
// It covers only the rows whose optimizer state this rank holds.
func (q *passing) update(p *param, weight ir.View) {
	for len(q.blocks) > 0 && q.blocks[0].p == p {
		b := &q.blocks[0]
		q.load()
		cols := p.Local[1]
		given := map[string]ir.View{
			graph.UpdateWeight: rowsOf(weight, b.first, b.rows, cols), graph.UpdateCopy: rowsOf(weight, b.first, b.rows, cols),
			graph.UpdateGrad: rowsOf(p.sum, b.first, b.rows, cols),
		}
		for _, x := range b.states {
			given[x.name] = matrix(x.device, x.dtype, b.rows, cols)
		}
		q.s.applyUpdate(p, given)
		q.store()
	}
}

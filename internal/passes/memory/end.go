package memory

import (
	"slices"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
)

// This file tracks memory at the end of a step, in the same order as codegen. Gradients are reduced,
// parameter by parameter, over the ranks of a stage and then over replicas. Then their norm is
// computed. Finally every parameter is updated, and new weights are sent while the next parameter
// is updated.

// ending describes a parameter at the end of a step, with the bytes of its tensors.
type ending struct {
	zero                    int
	cut                     plan.Slicing
	whole, half, slice      ir.Bytes   // the gradient as it is summed; its part after division among a stage's ranks; that part after division among replicas
	own, wide               ir.Bytes   // if sums are rounded: the gradient before, the sum in f32 after; 0: it is in f32
	halfWeight, sliceWeight ir.Bytes   // gathered tensors: after the first of two steps; own slice; 0: none
	summed                  ir.Bytes   // what is freed once the backward pass has ended, if the gradient has been summed during it
	update                  ir.Bytes   // temporaries of the optimizer
	blocks                  []ir.Bytes // blocks of its optimizer state that pass through the device
	beside                  bool       // its gradient has been summed during the backward pass
}

// endings returns the parameters that a stage's ranks update.
func (r *tracker) endings() (list []ending) {
	add := func(b *graph.Block, layers int) {
		var of []ending
		for i := range b.Params {
			if b.Params[i].Frozen || b.Params[i].Tied && r.hasEmbedding() {
				continue // frozen: no gradient; tied: its gradient is added to the embedding's
			}
			of = append(of, r.ending(b, &b.Params[i]))
		}
		list = append(list, slices.Repeat(of, layers)...)
	}
	if r.hasEmbedding() {
		add(r.graph.Embedding, 1)
	}
	for kind, n := range r.plan.KindsOf(r.graph, r.plan.StagesOf(r.rank)...) {
		add(r.graph.LayerOf(kind), n)
	}
	if r.hasHead() {
		add(r.graph.Head, 1)
	}
	return list
}

func (r *tracker) ending(b *graph.Block, param *graph.Param) ending {
	e := ending{zero: r.plan.ZeroOf(b, param), cut: r.plan.Slicing(param), beside: r.plan.SumsBeside(b, param)}
	of := func(rows int64, d ir.DType) ir.Bytes { return graph.Align(ir.Bytes(rows*param.Local[1]) * d.Bytes()) }
	reduced := r.plan.ReducedType(param)
	e.whole, e.half, e.slice = of(e.cut.Whole(), reduced), of(e.cut.Part(), reduced), of(e.cut.Rows, reduced)
	if reduced != ir.F32 {
		e.own, e.wide = of(e.cut.Whole(), ir.F32), of(r.widened(param, &e), ir.F32)
	}
	twice := e.cut.SP > 1 && e.cut.DP > 1 // collectives have two steps
	sent := reduced                       // type of the gradients that are sent without ZeRO
	sliced := r.plan.KeepsSlice(b, param)
	if e.zero > 0 && !sliced {
		if sent = r.graph.DType(); sent != ir.F32 {
			e.sliceWeight = of(e.cut.Rows, sent)
		}
	}
	if twice && !sliced && !(e.beside && e.zero == 0) {
		e.halfWeight = of(e.cut.Part(), sent)
	}
	if e.beside && e.cut.Slices() > 1 {
		e.summed = e.letGo() + halvesBeside(e.zero, e.cut, param, reduced)
	}
	slices := r.plan.StateSlices(b, param)
	e.update = r.meter.blocks.updating(r.graph.Update(&r.plan.Train.Optimizer, b, param, slices))
	if slices > 1 && twice && r.plan.OptimizerOf(b, param).Whole {
		e.update += of(e.cut.Part(), r.graph.DType())
	}
	e.blocks = r.stateBlocks(b, param)
	return e
}

// widened returns the rows of a rounded sum that becomes one in f32 at the end of the step.
func (r *tracker) widened(param *graph.Param, e *ending) int64 {
	switch {
	case e.zero == 0:
		return param.Local[0]
	case e.zero >= plan.ZeroGradients && slices.ContainsFunc(r.gradients.reduced, func(s reduced) bool { return s.twice != 0 }): // sums of several visits are in f32
		return 0
	}
	return e.cut.Rows
}

// stateBlocks returns the bytes of the blocks in which a parameter's optimizer state passes through the device.
func (r *tracker) stateBlocks(b *graph.Block, param *graph.Param) (blocks []ir.Bytes) {
	types := r.plan.HostStates(r.graph, b, param)
	if len(types) == 0 {
		return nil
	}
	rows, each := r.plan.StateRows(b, param), r.plan.HostBlock(b, param)
	for first := int64(0); first < rows; first += each {
		n := ir.Bytes(0)
		for _, d := range types {
			n += graph.Align(ir.Bytes(min(each, rows-first)*param.Local[1]) * d.Bytes())
		}
		blocks = append(blocks, n)
	}
	return blocks
}

// passing tracks the blocks of optimizer state on the device: the block being updated, the next and the previous one.
type passing struct {
	waiting []ir.Bytes
	now     []ir.Bytes
}

// load adds the next block to those on the device and returns its bytes.
func (q *passing) load() (n ir.Bytes) {
	if len(q.waiting) > 0 {
		n = q.waiting[0]
		q.now, q.waiting = append(q.now, n), q.waiting[1:]
	}
	return n
}

// optimizer tracks the end of the step. Tensors computed from whole gradients are counted as working memory.
func (r *tracker) optimizer() {
	r.note(plan.Task{}, r.hidden(r.sizes[0])) // the result that the last backward passes on
	r.gradients.settle(plan.Task{})
	list := r.endings()
	for _, e := range list {
		r.now[TermGradients] -= e.summed
	}
	var queue passing
	for _, e := range list {
		queue.waiting = append(queue.waiting, e.blocks...)
	}
	running, last := queue.load(), ir.Bytes(0)
	step := func(more, less ir.Bytes) {
		running += more
		r.note(plan.Task{}, running)
		running -= less
	}
	completeLate(list, step)
	r.norm(running)
	for _, e := range list {
		if e.beside && e.gathers() {
			running -= e.slice
		}
	}
	lagging := ir.Bytes(0)
	for _, e := range list {
		e.widen(step)
		more := max(e.halfWeight, e.update)
		if len(e.blocks) > 0 {
			running += e.sliceWeight
			for range e.blocks {
				step(queue.load()+e.update, e.update+last)
				last, queue.now = queue.now[0], queue.now[1:]
			}
			running -= e.sliceWeight
		}
		step(e.sliceWeight+more, more+lagging)
		if lagging = e.sliceWeight; e.gathers() && !e.beside {
			running -= e.slice // the slices have been gathered into the whole gradient
		}
	}
}

// widen tracks how a rounded sum of gradients becomes one in f32.
func (e *ending) widen(step func(more, less ir.Bytes)) {
	if e.wide == 0 {
		return
	}
	if !e.gathers() {
		step(e.wide, e.slice)
		return
	}
	if !e.beside { // its slices are gathered first
		step(e.halfWeight, e.halfWeight+e.slice)
		e.halfWeight, e.slice = 0, 0
	}
	step(e.wide, e.whole)
}

// completeLate tracks the sums of the gradients that have not been summed earlier.
func completeLate(list []ending, step func(more, less ir.Bytes)) {
	late := slices.DeleteFunc(slices.Clone(list), func(e ending) bool { return e.zero >= plan.ZeroGradients || e.beside })
	for _, e := range late {
		if e.own > 0 {
			step(e.whole, e.own)
		}
	}
	for _, e := range late {
		if e.cut.SP > 1 {
			step(e.half, e.letGo())
		}
	}
	for _, e := range late {
		switch {
		case e.cut.DP == 1:
		case e.cut.SP > 1:
			step(e.slice, e.half)
		default:
			step(e.slice, e.letGo())
		}
	}
}

// gathers reports whether the slices of the summed gradient are gathered into the whole gradient.
func (e *ending) gathers() bool { return e.zero == 0 && e.cut.Slices() > 1 }

// letGo returns the bytes that are freed once the whole gradient has been sliced: none if the slices are
// gathered into it again.
func (e *ending) letGo() ir.Bytes {
	if e.zero == 0 {
		return 0
	}
	return e.whole
}

// norm tracks the sums of squares of all gradients, which are gathered from the replicas and then from the
// ranks of a stage.
func (r *tracker) norm(running ir.Bytes) {
	n := len(r.graph.Embedding.Params)
	for kind := range r.graph.Kinds() {
		n += r.graph.LayersOf(kind) * len(r.graph.LayerOf(kind).Params)
	}
	for i := range r.graph.Head.Params {
		if !r.graph.Head.Params[i].Tied {
			n++
		}
	}
	before := ir.Bytes(0)
	for _, ranks := range []int{1, r.plan.Parallel.DP, r.plan.Parallel.SP} {
		if n *= ranks; ranks > 1 || before == 0 {
			after := graph.Align(ir.Bytes(n) * ir.F32.Bytes())
			r.note(plan.Task{}, running+before+after)
			before = after
		}
	}
}

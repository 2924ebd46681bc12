package memory

import (
	"slices"

	"sppo.dev/graph"
	"sppo.dev/ir"
	"sppo.dev/passes/plan"
	"sppo.dev/passes/walk"
)

// loadsHeld are the loads of K and V on a rank's device, as codegen issues them and lets them go: those that come early, the one
// in use, and dK and dV of the last two, which may not have left. Own rows in use are counted with the layer that runs.
type loadsHeld struct {
	queue  *walk.LoadQueue // nil: nothing streams
	coming []walk.Load     // issued and not taken
	early  ir.Bytes        // of these
	sent   [2]ir.Bytes     // dK and dV of the last load but one, of the last
}

// bytes are those held between two visits.
func (l *loadsHeld) bytes() ir.Bytes { return l.early + l.sent[0] + l.sent[1] }

// take returns the next load. Those that the plan wants under way by then come, and what was sent off before the last has left.
func (r *tracker) take() walk.Load {
	h := &r.loads
	h.sent = [2]ir.Bytes{h.sent[1], 0}
	for l, ok := h.queue.Next(); ok; l, ok = h.queue.Next() {
		h.coming, h.early = append(h.coming, l), h.early+r.loadBytes(l)
	}
	l := h.coming[0]
	h.coming, h.early = slices.Delete(h.coming, 0, 1), h.early-r.loadBytes(l)
	h.queue.Take()
	return l
}

// loadBytes are those that a load brings.
func (r *tracker) loadBytes(l walk.Load) ir.Bytes {
	n := r.streamed(graph.Cache, l.End-l.First)
	if l.Grads {
		n += r.streamed(graph.CacheGrad, l.End-l.First)
	}
	return n
}

// noteOwn notes a backward of a layer up to where it takes its own rows of K and V, and takes them.
func (r *tracker) noteOwn(t plan.Task, working ir.Bytes) {
	h := &r.loads
	r.now[TermLoads] = h.bytes()
	if len(h.coming) > 0 { // the layer that runs holds them
		r.now[TermLoads] -= r.loadBytes(h.coming[0])
	}
	r.note(t, working)
	r.take()
	r.now[TermLoads] = h.bytes()
}

// attend takes the blocks of a visit of the k-th layer of a task, and gives the most bytes of loads that are held meanwhile.
func (r *tracker) attend(t plan.Task, k int, b *graph.Block) (most ir.Bytes) {
	h := &r.loads
	if h.queue == nil {
		return 0
	}
	most = h.bytes()
	layer := r.plan.Layers(t.Stage)[k]
	blocks := len(walk.Blocks(r.plan.Stream.Block, r.graph.OfLayer(r.Sizes[t.Subsequence], layer)))
	if t.Kind == plan.Forward || walk.MakesAttention(b) {
		for range blocks {
			l := r.take()
			most = max(most, h.bytes()+r.loadBytes(l))
		}
	}
	if t.Kind == plan.Forward {
		h.queue.SentRows(t, layer)
		return most
	}
	for range blocks {
		l := r.take()
		h.sent[1] = r.streamed(graph.CacheGrad, l.End-l.First) // whether it has brought them or begins them
		most = max(most, h.bytes()+r.streamed(graph.Cache, l.End-l.First))
		h.queue.SentGrads(l)
	}
	return most
}

package memory

import (
	"slices"

	"sppo.dev/graph"
	"sppo.dev/ir"
	"sppo.dev/passes/plan"
	"sppo.dev/passes/walk"
)

// loadsHeld tracks the loads of K and V on a rank's device as codegen issues and frees them: the
// loads in transit, the one in use, and the last two blocks of dK and dV, whose copies to the host
// may still be running. The rows of the current subsequence are counted with the layer that uses
// them.
type loadsHeld struct {
	queue  *walk.LoadQueue // nil: nothing is streamed
	coming []walk.Load     // issued and not yet used
	early  ir.Bytes        // the bytes of coming
	sent   [2]ir.Bytes     // dK and dV of the last two loads, in this order
}

// bytes returns the bytes held between two visits.
func (l *loadsHeld) bytes() ir.Bytes { return l.early + l.sent[0] + l.sent[1] }

// take returns the next load. It issues the loads that should be in transit by then, and frees the gradients of
// the load before the last.
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

// loadBytes returns the bytes of a load.
func (r *tracker) loadBytes(l walk.Load) ir.Bytes {
	n := r.streamed(graph.Cache, l.End-l.First)
	if l.Grads {
		n += r.streamed(graph.CacheGrad, l.End-l.First)
	}
	return n
}

// noteOwn tracks the bytes of a layer's backward until its own rows of K and V have been loaded, and then
// counts that load as used.
func (r *tracker) noteOwn(t plan.Task, working ir.Bytes) {
	h := &r.loads
	r.now[TermLoads] = h.bytes()
	if len(h.coming) > 0 { // counted with the running layer
		r.now[TermLoads] -= r.loadBytes(h.coming[0])
	}
	r.note(t, working)
	r.take()
	r.now[TermLoads] = h.bytes()
}

// attend takes the blocks of a visit to the k-th layer of a task, and returns the maximum number of bytes of loads
// held during the visit.
func (r *tracker) attend(t plan.Task, k int, b *graph.Block) (most ir.Bytes) {
	h := &r.loads
	if h.queue == nil {
		return 0
	}
	most = h.bytes()
	layer := r.plan.Layers(t.Stage)[k]
	blocks := walk.CountBlocks(r.plan.Stream.Block, r.graph.OfLayer(r.Sizes[t.Subsequence], layer))
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
		h.sent[1] = r.streamed(graph.CacheGrad, l.End-l.First) // loaded with the block, or created for it
		most = max(most, h.bytes()+r.streamed(graph.Cache, l.End-l.First))
		h.queue.SentGrads(l)
	}
	return most
}

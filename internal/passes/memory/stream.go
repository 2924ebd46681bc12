package memory

import (
	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/walk"
	"sppo.dev/ir"
)

// loadBytes returns the bytes of a load.
func (r *tracker) loadBytes(l *walk.Load) ir.Bytes {
	n := r.streamed(graph.Cache, l.End-l.First)
	if l.Grads {
		n += r.streamed(graph.CacheGrad, l.End-l.First)
	}
	return n
}

// attend tracks the transfers of the next visit, and returns the maximum number of bytes held for
// them from the beginning of attention on. The rows of the current subsequence are counted with the layer.
func (r *tracker) attend() (most ir.Bytes) {
	for _, x := range r.queue.Visit() {
		tokens := x.End - x.First
		switch x.Op {
		case walk.Attend:
			most = max(most, r.held)
		case walk.Issue:
			r.held += r.loadBytes(x.Load)
		case walk.Use:
			if !x.Own {
				most = max(most, r.held)
			}
			r.held -= r.loadBytes(x.Load)
		case walk.Send:
			r.held += r.streamed(graph.CacheGrad, tokens) // loaded with the block, or created for it
			most = max(most, r.held+r.streamed(graph.Cache, tokens))
		case walk.Free:
			r.held -= r.streamed(graph.CacheGrad, tokens)
		}
	}
	return most
}

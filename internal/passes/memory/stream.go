package memory

import (
	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/walk"
	"sppo.dev/ir"
)

// kv holds the sizes of K, V and their gradients, and the transfers that are in progress if they are streamed.
type kv struct {
	*gauge
	values    []graph.Value // of a layer that has K and V
	streaming []int         // those with the rows of only one subsequence
	spans     spansOf       // last result of the method spanning
	rows      [2]rowsOf     // last results of the method streamed: for K and V, and for their gradients
	queue     *walk.LoadQueue
	held      ir.Bytes // loads that have been issued and are not used yet, and blocks of dK and dV that are being copied to the host
}

func newKV(g *gauge) kv {
	c := kv{gauge: g, values: g.graph.WithKV().Values, queue: walk.NewLoadQueue(g.plan, g.graph, g.plan.Tasks[g.rank], g.meter.Schedule(g.rank))}
	for i := range c.values {
		if v := &c.values[i]; v.Rows == graph.Full && (v.Kind == graph.Cache || v.Kind == graph.CacheGrad) {
			c.streaming = append(c.streaming, i)
		}
	}
	return c
}

// spansOf holds the values of a block that span an entire sequence.
type spansOf struct {
	block  *graph.Block
	values []int
}

// rowsOf holds the bytes that a given number of streamed tokens take.
type rowsOf struct {
	tokens int64
	bytes  ir.Bytes
}

// bytes returns the bytes of K and V of a layer, or of their gradients.
func (c *kv) bytes(b *graph.Block, kind graph.Kind, z graph.Size) (n ir.Bytes) {
	for _, v := range c.spanning(b) {
		if b.Values[v].Kind == kind {
			n += graph.Align(b.Values[v].Bytes(z))
		}
	}
	return n
}

// carried returns the bytes of what a layer passes from a subsequence to the next, or of its gradient.
func (c *kv) carried(b *graph.Block, kind graph.Kind, z graph.Size) (n ir.Bytes) {
	for i := range b.Values {
		if v := &b.Values[i]; v.Kind == kind {
			n += graph.Align(v.Bytes(z))
		}
	}
	return n
}

// spanning returns the values of a block that span an entire sequence. It keeps the last result, because a layer
// of a ring has many values.
func (c *kv) spanning(b *graph.Block) []int {
	if c.spans.block != b {
		c.spans = spansOf{block: b}
		for v := range b.Values {
			if b.Values[v].Spans() {
				c.spans.values = append(c.spans.values, v)
			}
		}
	}
	return c.spans.values
}

// gradsBetween returns the bytes of the gradients of K and V that the second half reads.
func (c *kv) gradsBetween(b *graph.Block, z graph.Size) (n ir.Bytes) {
	for _, v := range b.Between {
		if b.Values[v].Kind == graph.CacheGrad {
			n += graph.Align(b.Values[v].Bytes(z))
		}
	}
	return n
}

// streamed returns the bytes of the given number of streamed tokens. It keeps the last result, because most
// blocks have the same length.
func (c *kv) streamed(kind graph.Kind, tokens int64) ir.Bytes {
	if len(c.streaming) == 0 {
		return 0
	}
	of := &c.rows[0]
	if kind == graph.CacheGrad {
		of = &c.rows[1]
	}
	if of.tokens == tokens {
		return of.bytes
	}
	z := c.sizes[0]
	z.Tokens = tokens
	*of = rowsOf{tokens: tokens}
	for _, i := range c.streaming {
		if v := &c.values[i]; v.Kind == kind {
			of.bytes += graph.Align(v.Bytes(z))
		}
	}
	return of.bytes
}

// onHost returns the host bytes of the given number of streamed tokens of a layer's K and V.
func (c *kv) onHost(b *graph.Block, tokens int64) ir.Bytes {
	if len(b.KVNodes) == 0 {
		return 0
	}
	return c.streamed(graph.Cache, tokens)
}

// gradsOnHost returns the bytes of dK and dV that a layer of a task keeps on the host for
// streaming: those of all tokens before the last subsequence, or none if no subsequence attends to
// earlier tokens.
func (c *kv) gradsOnHost(t plan.Task, k int) ir.Bytes {
	last := c.graph.OfLayer(c.sizes[len(c.sizes)-1], c.plan.Layers(t.Stage)[k])
	if last.Earliest() == last.Prefix {
		return 0
	}
	return c.streamed(graph.CacheGrad, last.Prefix)
}

// loadBytes returns the bytes of a load.
func (c *kv) loadBytes(l *walk.Load) ir.Bytes {
	n := c.streamed(graph.Cache, l.End-l.First)
	if l.Grads {
		n += c.streamed(graph.CacheGrad, l.End-l.First)
	}
	return n
}

// attend tracks the transfers of the next visit, and returns the maximum number of bytes held for
// them from the beginning of attention on. The rows of the current subsequence are counted with the layer.
func (c *kv) attend() (most ir.Bytes) {
	for _, x := range c.queue.Visit() {
		tokens := x.End - x.First
		switch x.Op {
		case walk.Attend:
			most = max(most, c.held)
		case walk.Issue:
			c.held += c.loadBytes(x.Load)
		case walk.Use:
			if !x.Own {
				most = max(most, c.held)
			}
			c.held -= c.loadBytes(x.Load)
		case walk.Send:
			c.held += c.streamed(graph.CacheGrad, tokens) // loaded with the block, or created for it
			most = max(most, c.held+c.streamed(graph.Cache, tokens))
		case walk.Free:
			c.held -= c.streamed(graph.CacheGrad, tokens)
		}
	}
	return most
}

package memory

import (
	"slices"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/strategy"
	"sppo.dev/ir"
)

// Unmuxed returns the plan with no tasks shared at the start: every task is undivided and runs on the rank that
// holds its stage.
func Unmuxed(p *plan.Plan) *plan.Plan {
	q := *p
	q.Decisions = nil
	q.Mux.Left, q.Mux.Pieces = false, nil
	strategy.Order(&q)
	return &q
}

// leftFootprint bounds the arenas of a plan whose ranks share tasks at the start. The bound is the peak of each
// rank without sharing plus all the bytes that the rank borrows, as if it held them all at its peak.
func (m *Meter) leftFootprint(limit plan.Memory) (f Footprint, fits bool) {
	p := m.Plan
	if f, fits = m.Of(Unmuxed(p)).Within(limit); !fits {
		return f, false
	}
	for rank := range f.Device {
		f.Device[rank], f.Host[rank] = WithBorrowed(p, m.Model, rank, f.Device[rank], f.Host[rank])
	}
	return f, f.Fits(limit.DeviceCapacityBytes, limit.HostCapacityBytes)
}

// WithBorrowed adds the bytes that a rank borrows to those that it holds without sharing.
func WithBorrowed(p *plan.Plan, g *graph.Model, rank int, peak Peak, host ir.Bytes) (Peak, ir.Bytes) {
	was := peak.Bytes
	host += borrowed(p, g, rank, &peak.Terms)
	peak.Bytes = 0
	for _, n := range peak.Terms {
		peak.Bytes += n
	}
	peak.Bytes = max(peak.Bytes, was)
	return peak, host
}

// borrowed adds to the terms the bytes that a rank holds on the device, during a sequence, for the stages that
// it helps: their weights and gradients, K and V up to the rank's last piece, and the tensors that its pieces
// save for their backward passes. It returns the bytes on the host.
func borrowed(p *plan.Plan, g *graph.Model, rank int, terms *[numTerms]ir.Bytes) (host ir.Bytes) {
	var visited, largest ir.Bytes
	for kind := range g.Kinds() {
		n := visitBytesOf(p, g, g.Plain(kind), everything)
		visited, largest = max(visited, n.gradients+n.halfSums+n.sums), max(largest, largestGradient(p, g.Plain(kind)))
	}
	terms[TermGradients] += visited // sharing keeps one more layer in progress at a time
	seen := map[int]int64{}         // [stage]: tokens up to the end of the rank's last piece
	for _, t := range p.Tasks[rank] {
		if t.Kind != plan.Forward || t.Microbatch > 0 {
			continue
		}
		if p.Home(t.Stage) == rank { // its own stage: the units of each piece are rounded up
			if t.Piece > 0 {
				n := ir.Bytes(p.LayersPerStage[t.Stage]*len(g.UnitNames)) * ir.Alignment
				host, terms[TermKept] = host+n, terms[TermKept]+n
			}
			continue
		}
		z := p.SizeOf(t)
		seen[t.Stage] = max(seen[t.Stage], z.Prefix+z.Tokens)
		sizes := plan.UnitSizes(g, z)
		for k, layer := range p.Layers(t.Stage) {
			sizes := sizes[g.KindOf(layer)]
			for u, letter := range []byte(p.PlacementOf(t, k)) {
				switch letter {
				case plan.PlacementOffload:
					host += graph.Align(sizes[u]) + ir.Alignment
					terms[TermCopies] += graph.Align(sizes[u]) // an upper bound: few are in transit at a time
				case plan.PlacementKeep:
					terms[TermKept] += graph.Align(sizes[u])
				}
			}
		}
	}
	for stage, tokens := range seen {
		for _, layer := range p.Layers(stage) {
			borrowedLayer(p, g, g.Plain(g.KindOf(layer)), tokens, terms)
		}
	}
	terms[TermMessages] += gradientParts(p, g, rank)
	if rank+1 < p.Parallel.PP { // the next rank sends summed weight gradients one by one
		terms[TermMessages] += largest
	}
	return host
}

// borrowedLayer adds the bytes of a borrowed layer's weights and gradients, and of its K and V for the given number of
// tokens.
func borrowedLayer(p *plan.Plan, g *graph.Model, b *graph.Block, tokens int64, terms *[numTerms]ir.Bytes) {
	whole, z := *p, p.Size(0)
	whole.Parallel.Zero = 0 // undivided, even if their own rank divides them
	z.Sequence = tokens
	weights, gradients, _ := whole.StateBytes(g, b)
	terms[TermWeights] += weights
	terms[TermGradients] += gradients
	for v := range b.Values {
		switch n := graph.Align(b.Values[v].Bytes(z)); b.Values[v].Kind {
		case graph.Cache:
			terms[TermKV] += n
		case graph.CacheGrad:
			terms[TermKVGrads] += n
		}
	}
}

// largestGradient returns the bytes of the whole gradient of a block's largest parameter.
func largestGradient(p *plan.Plan, b *graph.Block) (most ir.Bytes) {
	for i := range b.Params {
		most = max(most, wholeGradients(p, b, 1<<i))
	}
	return most
}

// gradientParts returns the bytes of contributions to the gradients of K and V that a rank receives, in the
// slot with the most of them. In each slot, they are for one layer of every task that the rank runs.
func gradientParts(p *plan.Plan, g *graph.Model, rank int) (most ir.Bytes) {
	slots := make([]ir.Bytes, p.Parallel.PP-1)
	for _, t := range p.Tasks[rank] {
		if t.Kind != plan.Backward || t.Microbatch > 0 || !p.Shared(t) {
			continue
		}
		z, senders := p.SizeOf(t), ir.Bytes(len(p.Sharing().Readers(t)))
		z.Sequence = z.Tokens
		b := g.WithKV()
		for v := range b.Values {
			if value := &b.Values[v]; value.Kind == graph.CacheGrad {
				slots[t.Slot()] += senders * graph.Align(value.Bytes(z))
			}
		}
	}
	return slices.Max(slots)
}

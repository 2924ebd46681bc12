package memory

import (
	"testing"

	"sppo.dev/internal/passes/plantest"
	"sppo.dev/internal/passes/walk"
	"sppo.dev/ir"
)

// TestFootprintTerms checks the terms at the peak of a job that offloads nothing.
func TestFootprintTerms(t *testing.T) {
	p := plantest.Plan(t, "paper/gpt-7b-512k.sppo", "schedule.offload=none")
	for s, peak := range FootprintOf(p).Device {
		var sum ir.Bytes
		for _, n := range peak.Terms {
			sum += n
		}
		if sum != peak.Bytes {
			t.Errorf("stage %d: terms sum to %d of %d", s, sum, peak.Bytes)
		}
		cache := ir.Bytes(p.LayersOf(s)) * 2 * ir.Bytes(p.Train.Sequence) * ir.Bytes(p.Model.Hidden/p.Parallel.SP) * 2
		if peak.Terms[TermKV] != cache || peak.Terms[TermKVGrads] > 2*cache || peak.Terms[TermKept] < peak.Bytes/2 || peak.Terms[TermCopies] != 0 {
			t.Errorf("stage %d: %s of K and V, %s of their gradients, %s under way: want %s, at most twice that, none",
				s, peak.Terms[TermKV], peak.Terms[TermKVGrads], peak.Terms[TermCopies], cache)
		}
	}
}

func BenchmarkFootprint(b *testing.B) {
	p := plantest.Plan(b, "paper/gpt-65b-1m.sppo")
	m := NewMeter(walk.Must(p), walk.NewShapes(p, p.Graph()), Blocks{}, nil)
	for b.Loop() {
		m.Footprint()
	}
}

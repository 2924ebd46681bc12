package cost

import (
	"math/rand/v2"
	"testing"

	"sppo.dev/ir"
)

// Copies requested in both directions at once run at the same time on a full-duplex machine, and one after the
// other on a half-duplex one.
func TestHostLink(t *testing.T) {
	type copied struct {
		way        Way
		ready, d   ir.Seconds
		full, half ir.Seconds // ends
	}
	for name, copies := range map[string][]copied{
		"at once":          {{Out, 0, 4, 4, 4}, {Back, 0, 3, 3, 7}, {Out, 0, 1, 5, 8}},
		"one way alone":    {{Out, 1, 2, 3, 3}, {Out, 0, 2, 5, 5}, {Out, 9, 2, 11, 11}},
		"into a gap":       {{Out, 10, 5, 15, 15}, {Back, 0, 10, 10, 10}, {Back, 0, 1, 11, 16}},
		"behind a gap":     {{Out, 10, 5, 15, 15}, {Back, 6, 5, 11, 20}, {Out, 0, 1, 16, 21}},
		"nothing to copy":  {{Out, 0, 4, 4, 4}, {Back, 2, 0, 2, 4}},
		"what lies behind": {{Out, 0, 1, 1, 1}, {Back, 3, 1, 4, 4}, {Out, 0, 1, 2, 2}, {Out, 0, 2, 4, 6}},
	} {
		for _, duplex := range []string{"full", "half"} {
			l := New(ir.Machine{CopyDuplex: duplex}, 1).HostLink()
			for i, c := range copies {
				want := c.full
				if duplex == "half" {
					want = c.half
				}
				if got := l.Copy(c.way, c.ready, c.d); got != want {
					t.Errorf("%s, %s duplex: copy %d ends at %g, want %g", name, duplex, i, got, want)
				}
			}
		}
	}
}

// Many small copies fill gaps first.
func TestHostLinkFillsGaps(t *testing.T) {
	l := New(ir.Machine{CopyDuplex: "half"}, 1).HostLink()
	l.Copy(Out, 2, 3)
	l.Copy(Out, 7, 1)
	if got := l.Copies(Back, 1, 4); got != 9 { // they run from 1 to 2, 5 to 7 and 8 to 9
		t.Errorf("they end at %g, want 9", got)
	}
	if got := l.Copy(Out, 0, 1); got != 10 {
		t.Errorf("the next ends at %g, want 10", got)
	}
}

// Copies on a half-duplex machine never overlap, none begins before it is ready, and both directions keep their
// order.
func TestHostLinkTakesTurns(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 0))
	for range 200 {
		l := New(ir.Machine{CopyDuplex: "half"}, 1).HostLink()
		var all []interval
		var last [numWays]ir.Seconds
		for range 100 {
			w, ready, d := Way(rng.IntN(2)), ir.Seconds(rng.IntN(300)), ir.Seconds(1+rng.IntN(5))
			end := l.Copy(w, ready, d)
			if end-d < max(ready, last[w]) {
				t.Fatalf("a copy that is ready at %g behind one until %g begins at %g", ready, last[w], end-d)
			}
			for _, x := range all {
				if end-d < x.end && end > x.begin {
					t.Fatalf("%g to %g overlaps %g to %g", end-d, end, x.begin, x.end)
				}
			}
			all, last[w] = append(all, interval{end - d, end}), end
		}
	}
}

package cost

import (
	"math"
	"testing"

	"sppo.dev/ir"
)

// Kernels keep half of their speed beside a collective. A collective that turns out to have begun earlier delays the kernels
// that are known; two collectives within a node share its link.
func TestBeside(t *testing.T) {
	within, across := Link{Ranks: 8, Nodes: 1}, Link{Ranks: 16, Nodes: 2}
	for name, c := range map[string]struct {
		collectives     []Link // each from 2 to 6 alone, on a stream of its own
		known           ir.Seconds
		end, late, last ir.Seconds // of the last collective; of the kernels known; of a kernel of 3 s from then on
	}{
		"no collective":          {nil, 1, 0, 0, 4},
		"a collective later on":  {[]Link{within}, 1, 6, 0, 6},           // 1 s alone, 4 s at half speed
		"a collective long ago":  {[]Link{within}, 6, 6, 2, 11},          // 2 s more for the 4 s from 2 to 6
		"a collective that runs": {[]Link{within}, 4, 6, 2, 9},           // the 2 s from 2 to 4 took 4 s
		"two on two links":       {[]Link{within, across}, 2, 6, 0, 9},   // nothing until 6
		"two on one link":        {[]Link{within, within}, 2, 10, 0, 13}, // nothing until 10
	} {
		var b Beside
		end, late := ir.Seconds(0), ir.Seconds(0)
		for i, l := range c.collectives {
			stream := ir.Stream(i + 1)
			x := Collective{Stream: stream, Link: l, Share: 0.5, Begin: 2, D: 4}
			takes := b.Takes(&x)
			end = x.Begin + takes
			b.Add(&x, takes, c.known, func(s ir.Stream, by ir.Seconds) {
				if s == ir.Compute {
					late += by
				}
			})
		}
		last := c.known + late + b.Kernel(c.known+late, 3)
		for _, x := range [][2]ir.Seconds{{end, c.end}, {late, c.late}, {last, c.last}} {
			if math.Abs(float64(x[0]-x[1])) > 1e-9 {
				t.Errorf("%s: ends at %g, kernels are %g late, the last ends at %g", name, end, late, last)
			}
		}
	}
}

// A slower link takes less.
func TestShare(t *testing.T) {
	m := machine
	m.Contention = 0.4
	for _, c := range []struct {
		l    Link
		want float64
	}{{Link{Ranks: 4, Nodes: 1}, 0.4}, {Link{Ranks: 8, Nodes: 2}, 0.16}, {Link{Ranks: 2, Nodes: 2}, 0.04}} {
		if got := New(m, 8).Share(c.l); math.Abs(got-c.want) > 1e-12 {
			t.Errorf("%v: %g, want %g", c.l, got, c.want)
		}
	}
	if got := New(machine, 8).Share(Link{Ranks: 4, Nodes: 1}); got != 0 {
		t.Errorf("%g without contention", got)
	}
}

// Of one processor, a collective takes all; of two for a rank, half.
func TestShareOfProcessors(t *testing.T) {
	m := machine
	for processors, want := range map[float64]float64{2: 1, 4: 1, 5: 0.6, 6: 1.0 / 3, 8: 0.5, 16: 0.25} {
		m.Parallelism = processors
		if got := New(m, 4).Share(Link{Ranks: 4, Nodes: 1}); math.Abs(got-want) > 1e-12 {
			t.Errorf("4 ranks on %g processors: %g, want %g", processors, got, want)
		}
	}
}

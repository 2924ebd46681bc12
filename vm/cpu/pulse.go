package cpu

import (
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"sppo.dev/vm/cpu/simd"
)

// pulseSide is the side of the products that a pulse is of: operands and result stay in a core's own cache.
const pulseSide = 128

// pulseProducts is how many products there are to a pulse, which take a few milliseconds.
const pulseProducts = 100

// Pulse tells how fast the processors are at the moment: they are slower while somebody else has the other half of a core, or
// its clock is lower, and take longer where others have their turn. It does arithmetic on all of them at once and needs no memory
// that others could be in the way of.
type Pulse struct {
	operands [][]float32 // of a processor: one for all three
}

// NewPulse is one for so many processors.
func NewPulse(processors int) *Pulse {
	p := &Pulse{}
	for range processors {
		x := simd.Alloc(3 * pulseSide * pulseSide)
		simd.Fill(x, 0.5)
		p.operands = append(p.operands, x)
	}
	return p
}

// Take is how long the slowest processor takes.
func (p *Pulse) Take() time.Duration {
	var all sync.WaitGroup
	var there atomic.Int32
	slowest := make([]time.Duration, len(p.operands))
	for i, x := range p.operands {
		all.Go(func() {
			for there.Add(1); there.Load() < int32(len(p.operands)); {
				runtime.Gosched() // one that ran later would find the others' processors free
			}
			slowest[i] = products(x)
		})
	}
	all.Wait()
	return slices.Max(slowest)
}

func products(x []float32) time.Duration {
	const n = pulseSide * pulseSide
	start := time.Now()
	for range pulseProducts {
		simd.Gemm(nil, false, false, pulseSide, pulseSide, pulseSide, x[:n], pulseSide, x[n:2*n], pulseSide, false, nil, x[2*n:], pulseSide)
	}
	return time.Since(start)
}

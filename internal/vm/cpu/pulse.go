package cpu

import (
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"sppo.dev/internal/vm/cpu/simd"
)

// pulseSide is the size of the square matrices in a pulse. The operands and the result fit into a core's private
// cache.
const pulseSide = 128

// pulseProducts is the number of products in a pulse. Together, the products take a few milliseconds.
const pulseProducts = 100

// Pulse measures the current speed of the processors. Processors are slower at a lower clock, while another
// hyperthread uses the core, and while other programs run. Take uses all processors at the same time; each works
// in its own memory.
type Pulse struct {
	operands [][]float32 // by processor: one buffer for both operands and the result
}

// NewPulse returns a pulse for the given number of processors.
func NewPulse(processors int) *Pulse {
	p := &Pulse{}
	for range processors {
		x := simd.Alloc(3 * pulseSide * pulseSide)
		simd.Fill(x, 0.5)
		p.operands = append(p.operands, x)
	}
	return p
}

// Take returns the time of the slowest processor.
func (p *Pulse) Take() time.Duration {
	var all sync.WaitGroup
	var there atomic.Int32
	slowest := make([]time.Duration, len(p.operands))
	for i, x := range p.operands {
		all.Go(func() {
			for there.Add(1); there.Load() < int32(len(p.operands)); {
				runtime.Gosched() // wait until all goroutines run
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

package simd

import (
	"sync"
	"sync/atomic"
	"testing"
)

func TestPoolRunsEachPartOnce(t *testing.T) {
	for _, threads := range []int{1, 2, 5} {
		p := NewPool(threads)
		var callers sync.WaitGroup
		for range 6 {
			callers.Go(func() {
				for parts := range 40 {
					counts := make([]atomic.Int32, parts)
					p.Run(parts, func(i int) { counts[i].Add(1) })
					for i := range counts {
						if n := counts[i].Load(); n != 1 {
							t.Errorf("threads %d, parts %d: part %d ran %d times", threads, parts, i, n)
						}
					}
				}
			})
		}
		callers.Wait()
		p.Close()
		ran := 0
		p.Run(3, func(int) { ran++ })
		if ran != 3 {
			t.Errorf("a closed pool ran %d of 3 parts", ran)
		}
	}
}

// A worker that is busy when a Run begins joins the Run later. Otherwise the second Run below would wait for
// itself.
func TestPoolWorkerJoinsLater(t *testing.T) {
	p := NewPool(2)
	defer p.Close()
	for range 100 {
		held, letGo, joined := make(chan struct{}), make(chan struct{}), make(chan struct{})
		var callers sync.WaitGroup
		callers.Go(func() {
			var begun atomic.Int32
			p.Run(2, func(int) {
				if begun.Add(1) == 2 { // the worker has one of the parts, the caller the other
					close(held)
				}
				<-letGo
			})
		})
		<-held
		callers.Go(func() {
			var begun atomic.Int32
			p.Run(2, func(int) {
				switch begun.Add(1) {
				case 1:
					close(letGo)
					<-joined
				case 2:
					close(joined)
				}
			})
		})
		callers.Wait()
	}
}

func TestPoolRunAllocatesNothing(t *testing.T) {
	p := NewPool(2)
	defer p.Close()
	var sum atomic.Int64
	f := func(i int) { sum.Add(int64(i)) }
	p.Run(4, f)
	if n := testing.AllocsPerRun(200, func() { p.Run(4, f) }); n > 0.5 {
		t.Errorf("Run allocates %v times", n)
	}
}

func BenchmarkPoolRun(b *testing.B) {
	p := NewPool(2)
	defer p.Close()
	f := func(int) {}
	for b.Loop() {
		p.Run(2, f)
	}
}

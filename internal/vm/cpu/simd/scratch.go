package simd

import (
	"math/bits"
	"sync"
	"sync/atomic"
)

// scratch is a set of working buffers for one part of a call. They grow to the largest size requested and are
// reused, so that calls stop allocating.
type scratch struct {
	buf    [8][]float32
	packed packed // contents of the first buffer, left by the previous product
	tile   tile
	ahead  lookAhead
	taken  atomic.Bool
}

// scratches holds all scratches. A processor reuses the one that it used last, which is in its own cache.
var scratches struct {
	recent sync.Pool // by processor; the list below keeps scratches that the pool drops
	sync.Mutex
	all []*scratch
}

func takeScratch() *scratch {
	s := takePacked()
	s.packed = packed{}
	return s
}

// takePacked returns a scratch without discarding its packed contents.
func takePacked() *scratch {
	for {
		s, _ := scratches.recent.Get().(*scratch)
		if s == nil {
			return freeScratch()
		}
		if s.taken.CompareAndSwap(false, true) {
			return s
		}
	}
}

// freeScratch returns a scratch that the pool has dropped, or a new one.
func freeScratch() *scratch {
	scratches.Lock()
	defer scratches.Unlock()
	for _, s := range scratches.all {
		if s.taken.CompareAndSwap(false, true) {
			return s
		}
	}
	s := new(scratch)
	s.taken.Store(true)
	scratches.all = append(scratches.all, s)
	return s
}

func (s *scratch) release() {
	s.taken.Store(false)
	scratches.recent.Put(s)
}

// floats returns buffer number i with n elements, whose contents are undefined. Buffers grow by
// doubling.
func (s *scratch) floats(i, n int) []float32 {
	if cap(s.buf[i]) < n {
		s.packed = packed{}
		s.buf[i] = Alloc(1 << bits.Len(uint(max(n, 1024)-1)))
	}
	return s.buf[i][:n]
}

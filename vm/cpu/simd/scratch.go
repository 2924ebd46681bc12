package simd

import (
	"math/bits"
	"sync"
	"sync/atomic"
)

// scratch is a set of buffers that one part of a call works in. They grow to what was ever asked for and are used
// again, so that no call allocates in the long run.
type scratch struct {
	buf    [8][]float32
	packed packed // what a product has left in the first, if nobody else had the scratch since
	tile   tile
	ahead  lookAhead
	taken  atomic.Bool
}

// scratches are all that there are. A processor takes again what it had last, which lies in its cache and in no other's.
var scratches struct {
	recent sync.Pool // by processor; what it forgets is found in all
	sync.Mutex
	all []*scratch
}

func takeScratch() *scratch {
	s := takePacked()
	s.packed = packed{}
	return s
}

// takePacked leaves what is packed.
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

// freeScratch returns one that the pool has forgotten, or a new one.
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

// floats returns buffer number i with n elements of any content. It grows by doubling: what it leaves behind is lost.
func (s *scratch) floats(i, n int) []float32 {
	if cap(s.buf[i]) < n {
		s.packed = packed{}
		s.buf[i] = Alloc(1 << bits.Len(uint(max(n, 1024)-1)))
	}
	return s.buf[i][:n]
}

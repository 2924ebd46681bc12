package simd

import (
	"math/bits"
	"sync"
)

// scratch is a set of buffers that one part of a call works in. They grow to what was ever asked for and are used
// again, so that no call allocates in the long run.
type scratch struct {
	buf   [8][]float32
	tile  tile
	ahead lookAhead
}

var freeScratch struct {
	sync.Mutex
	list []*scratch
}

func takeScratch() *scratch {
	f := &freeScratch
	f.Lock()
	defer f.Unlock()
	if n := len(f.list); n > 0 {
		s := f.list[n-1]
		f.list = f.list[:n-1]
		return s
	}
	return new(scratch)
}

func (s *scratch) release() {
	f := &freeScratch
	f.Lock()
	f.list = append(f.list, s)
	f.Unlock()
}

// floats returns buffer number i with n elements of any content. It grows by doubling: what it leaves behind is lost.
func (s *scratch) floats(i, n int) []float32 {
	if cap(s.buf[i]) < n {
		s.buf[i] = Alloc(1 << bits.Len(uint(max(n, 1024)-1)))
	}
	return s.buf[i][:n]
}

//go:build linux && !race

package simd

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// hugePage is the size of a huge page. Alloc requests huge pages for buffers of at least half that size.
const hugePage = 2 << 20

// Alloc returns zeroed floats aligned to a cache line, for buffers that live as long as the process. Large buffers
// are outside the heap, on huge pages if available, and are never freed.
func Alloc(n int) []float32 {
	if bytes := 4 * n; bytes >= hugePage/2 {
		bytes = (bytes + hugePage - 1) &^ (hugePage - 1)
		if mem, err := unix.Mmap(-1, 0, bytes+hugePage, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE); err == nil {
			at := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
			mem = mem[-at&(hugePage-1):][:bytes]
			_ = unix.Madvise(mem, unix.MADV_HUGEPAGE) // optional: without it, pages are small
			return unsafe.Slice((*float32)(unsafe.Pointer(unsafe.SliceData(mem))), n)
		}
	}
	x := make([]float32, n+16)
	at := uintptr(unsafe.Pointer(unsafe.SliceData(x)))
	return x[(-at&63)/4:][:n:n]
}

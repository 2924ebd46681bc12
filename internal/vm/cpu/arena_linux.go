//go:build linux && !race

package cpu

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

const hugePage = 2 << 20

// newArena returns zeroed memory outside the Go heap, on huge pages if available, and a function that frees
// it.
func newArena(size int) ([]byte, func(), error) {
	if size == 0 {
		return nil, func() {}, nil
	}
	memory, err := unix.Mmap(-1, 0, size+hugePage, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, nil, err
	}
	_ = unix.Madvise(memory, unix.MADV_HUGEPAGE) // optional: without it, pages are small
	skip := int(-uintptr(unsafe.Pointer(&memory[0])) & (hugePage - 1))
	return memory[skip : skip+size : skip+size], func() { _ = unix.Munmap(memory) }, nil
}

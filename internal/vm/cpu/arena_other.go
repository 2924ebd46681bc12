//go:build !linux || race

package cpu

import "unsafe"

// newArena returns memory from the Go heap, aligned to a cache line. The race detector does not watch any other
// memory.
func newArena(size int) ([]byte, func(), error) {
	memory := make([]byte, size+64)
	skip := int(-uintptr(unsafe.Pointer(&memory[0])) & 63)
	return memory[skip : skip+size : skip+size], func() {}, nil
}

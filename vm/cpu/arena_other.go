//go:build !linux || race

package cpu

import "unsafe"

// newArena returns memory of the Go heap, the only kind that the race detector watches, aligned to a cache
// line.
func newArena(size int) ([]byte, func(), error) {
	memory := make([]byte, size+64)
	skip := int(-uintptr(unsafe.Pointer(&memory[0])) & 63)
	return memory[skip : skip+size : skip+size], func() {}, nil
}

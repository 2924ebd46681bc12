//go:build !linux || race

package simd

// Alloc returns zeroed floats from the heap.
func Alloc(n int) []float32 { return make([]float32, n) }

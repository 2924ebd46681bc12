//go:build race

package simd

// rounds shortens random tests under the race detector.
func rounds(n int) int { return 1 + n/20 }

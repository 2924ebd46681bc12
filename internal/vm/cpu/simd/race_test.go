//go:build race

package simd

// rounds reduces the number of rounds of random tests under the race detector.
func rounds(n int) int { return 1 + n/20 }

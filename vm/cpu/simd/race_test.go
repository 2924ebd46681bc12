//go:build race

package simd

// rounds makes random tests shorter where every access is watched.
func rounds(n int) int { return 1 + n/20 }

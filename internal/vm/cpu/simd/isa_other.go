//go:build !amd64 || race

package simd

// detect finds only the portable set.
func detect() []*kernelSet { return nil }

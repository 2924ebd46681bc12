//go:build !amd64 || race

package simd

// detect finds nothing beyond the portable set.
func detect() []*kernelSet { return nil }

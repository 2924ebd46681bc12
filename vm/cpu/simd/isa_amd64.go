//go:build amd64 && !race

package simd

// detect returns the sets that this processor and operating system support, slowest first.
func detect() []*kernelSet { return nil }

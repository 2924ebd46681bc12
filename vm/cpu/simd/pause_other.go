//go:build !amd64 || race

package simd

// pause does nothing where there is no instruction for it.
func pause() {}

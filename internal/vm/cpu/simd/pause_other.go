//go:build !amd64 || race

package simd

// pause does nothing: these processors have no instruction for it.
func pause() {}

//go:build amd64 && !race

package simd

// pause rests the core for some tens of nanoseconds.
//
//go:noescape
func pause()

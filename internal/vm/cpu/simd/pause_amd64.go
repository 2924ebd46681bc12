//go:build amd64 && !race

package simd

// pause idles the core for a few tens of nanoseconds.
//
//go:noescape
func pause()

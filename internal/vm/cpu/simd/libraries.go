//go:build !static

package simd

import "github.com/ebitengine/purego"

func openLibrary(name string) (uintptr, error) {
	return purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_LOCAL)
}

func symbol(library uintptr, name string) (uintptr, error) { return purego.Dlsym(library, name) }

// callC calls a C function. Memory that the arguments point to must not move.
//
//go:uintptrescapes
func callC(function uintptr, args ...uintptr) { purego.SyscallN(function, args...) }

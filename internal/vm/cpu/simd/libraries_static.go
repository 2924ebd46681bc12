//go:build static

package simd

import "errors"

func openLibrary(string) (uintptr, error) {
	return 0, errors.New("this build is static and opens no libraries")
}

func symbol(uintptr, string) (uintptr, error) { panic("internal: a static build has opened a library") }

func callC(uintptr, ...uintptr) { panic("internal: a static build has opened a library") }

//go:build static

package main

import (
	"errors"

	"sppo.dev/ir"
	"sppo.dev/vm/world"
)

// errStatic is why a static build has no GPUs: the libraries that reach them need the loader of the C library.
var errStatic = errors.New("this build of sppovm is static and cannot open NVIDIA's libraries: take the one that is not")

func (f *runFlags) openGPUs(*ir.Program, *world.World) (*computer, error) { return nil, errStatic }

func (f *probeFlags) openCUDA(*bench) error { return errStatic }

func reportGPUs() []string { return []string{errStatic.Error()} }

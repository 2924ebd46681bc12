//go:build static

package main

import (
	"errors"

	"sppo.dev/internal/train/world"
	"sppo.dev/ir"
)

// errStatic explains why a static build has no GPUs: NVIDIA's libraries need the C library's loader.
var errStatic = errors.New("this build of sppovm is static and cannot open NVIDIA's libraries; use the dynamic build")

func (f *runFlags) openGPUs(*ir.Program, *world.World) (*computer, error) { return nil, errStatic }

func (f *probeFlags) openCUDA(*bench) error { return errStatic }

func reportGPUs() []string { return []string{errStatic.Error()} }

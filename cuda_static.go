//go:build static

package sppo

import (
	"errors"

	"sppo.dev/ir"
)

// CUDA is not available in static builds, because NVIDIA's libraries need the C library's loader.
func CUDA() Devices {
	return Devices{func(*ir.Program) (*machine, error) {
		return nil, errors.New("a static build cannot open NVIDIA's libraries; build without the tag static")
	}}
}

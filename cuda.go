//go:build !static

package sppo

import (
	"sppo.dev/internal/cuda"
	"sppo.dev/internal/train"
	"sppo.dev/ir"
)

// CUDA computes on the NVIDIA GPUs of this computer. If there are more ranks than GPUs, ranks share them. Open refuses a
// program that needs more memory than they have. This has not been run on a GPU yet, only on emulated ones.
func CUDA() Devices {
	return Devices{func(p *ir.Program) (*machine, error) {
		m, err := cuda.Open(cuda.Options{})
		if err != nil {
			return nil, err
		}
		if err := m.Check(p); err != nil {
			return nil, err
		}
		return &machine{device: m.New, options: train.Options{Transport: m, Kind: m.Kind()}, close: func() {}}, nil
	}}
}

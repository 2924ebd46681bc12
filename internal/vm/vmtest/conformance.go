package vmtest

import (
	"math/rand/v2"
	"testing"

	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// Conformance runs every case on a device and returns a digest of each case's results, keyed by the case's
// name, so that two configurations of a device can be compared bit for bit.
func Conformance(t *testing.T, newDevice func() vm.Device) map[string]uint64 {
	return run(t, suite{newDevice: newDevice})
}

// ShortConformance is Conformance without attention over many tiles, which takes most of the time on emulated
// kernels: it omits rings with chunks longer than a tile, and shapes with more queries than two tiles hold; for each
// other shape, gradients either overwrite or accumulate. It is for devices whose kernels pass the whole suite in
// another test.
func ShortConformance(t *testing.T, newDevice func() vm.Device) {
	run(t, suite{newDevice: newDevice, short: true})
}

func run(t *testing.T, common suite) map[string]uint64 {
	digests := map[string]uint64{}
	for op := range ir.NumOps {
		class := ir.Ops[op].Class
		if class == ir.ClassComm || class == ir.ClassSync {
			continue
		}
		t.Run(ir.Ops[op].Name, func(t *testing.T) {
			check := cases[op]
			if check == nil {
				check = elementwise(op)
			}
			if check == nil {
				t.Fatal("the suite has no case for this opcode")
			}
			for _, dtype := range []ir.DType{ir.F32, ir.BF16} {
				t.Run(dtype.String(), func(t *testing.T) {
					s := common
					s.T, s.rng, s.dtype, s.digests = t, rand.New(rand.NewPCG(seed, uint64(op))), dtype, digests
					check(&s)
				})
			}
		})
	}
	return digests
}

// sub runs a variant of a case under its own name.
func (s *suite) sub(name string, f func(s *suite)) {
	s.Run(name, func(t *testing.T) {
		inner := *s
		inner.T = t
		f(&inner)
	})
}

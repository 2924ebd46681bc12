package vmtest

import (
	"math/rand/v2"
	"testing"

	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// Conformance runs every case on a device, in each of the given configurations, which must give the same bits.
func Conformance(t *testing.T, devices ...func() vm.Device) { run(t, suite{devices: devices}) }

// ShortConformance is Conformance without attention over many tiles, which takes most of the time on emulated
// kernels: it omits rings with chunks longer than a tile, and shapes with more queries than two tiles hold; for each
// other shape, gradients either overwrite or accumulate. Opcodes take turns with the two element types, except products, for
// which libraries have kernels. It is for devices whose kernels pass the whole suite in another test.
func ShortConformance(t *testing.T, newDevice func() vm.Device) {
	run(t, suite{devices: []func() vm.Device{newDevice}, short: true})
}

func run(t *testing.T, common suite) {
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
			for i, dtype := range []ir.DType{ir.F32, ir.BF16} {
				if rule := ir.Ops[op].Rule; common.short && class == ir.ClassKernel && rule != ir.RuleMatmul && rule != ir.RuleGrouped && (int(op)+i)%2 == 0 {
					continue
				}
				t.Run(dtype.String(), func(t *testing.T) {
					s := common
					s.T, s.rng, s.dtype = t, rand.New(rand.NewPCG(seed, uint64(op))), dtype
					check(&s)
				})
			}
		})
	}
}

// sub runs a variant of a case under its own name.
func (s *suite) sub(name string, f func(s *suite)) {
	s.Run(name, func(t *testing.T) {
		inner := *s
		inner.T = t
		f(&inner)
	})
}

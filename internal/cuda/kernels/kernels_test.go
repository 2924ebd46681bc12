package kernels_test

import (
	"testing"

	"sppo.dev/internal/cuda/emu"
	"sppo.dev/internal/cuda/kernels"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/vmtest"
	"sppo.dev/ir"
)

// Every kernel opcode passes the conformance suite for devices, with the kernels' own sources compiled for the
// CPU. A second run with lanes and warps in another order must give the same results bit for bit; a missing
// barrier would change them.
func TestConformance(t *testing.T) {
	library := emu.Need(t)
	digests := vmtest.Conformance(t, func() vm.Device { return &device{library: library} })
	t.Run("permuted", func(t *testing.T) {
		permuted := vmtest.Conformance(t, func() vm.Device { return &device{library: library, seed: 12345} })
		for name, digest := range digests {
			if other, ok := permuted["TestConformance/permuted"+name[len("TestConformance"):]]; !ok || other != digest {
				t.Errorf("%s: another order of lanes and warps gives another result", name)
			}
		}
	})
}

// The table of launches has a row for every kernel opcode, and for no other.
func TestTable(t *testing.T) {
	for op := range ir.NumOps {
		_, err := kernels.Bind(kernels.Card{}, &ir.Program{Ranks: []ir.Rank{{}}}, 0, &ir.Instr{Op: op, Args: []ir.View{{}}})
		if isKernel := ir.Ops[op].Class == ir.ClassKernel; isKernel != (err == nil) {
			t.Errorf("%s: a kernel: %v; the table of launches says: %v", ir.Ops[op].Name, isKernel, err)
		}
	}
}

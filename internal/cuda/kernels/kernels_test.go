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
// CPU. Lanes and warps in another order must give the same results bit for bit; a missing barrier would change
// them.
func TestConformance(t *testing.T) {
	library := emu.Need(t)
	vmtest.Conformance(t, func() vm.Device { return &device{library: library} },
		func() vm.Device { return &device{library: library, seed: 12345} })
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

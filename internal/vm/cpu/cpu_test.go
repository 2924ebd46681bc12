package cpu

import (
	"testing"

	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/internal/vm/vmtest"
	"sppo.dev/ir"
)

func TestEveryOpcodeHasItsKernel(t *testing.T) {
	for op := range ir.NumOps {
		class := ir.Ops[op].Class
		if want := class == ir.ClassKernel; want != (kernels[op] != nil || checkedKernels[op] != nil) {
			t.Errorf("%s, of class %s: kernel there: %v", ir.Ops[op].Name, class, kernels[op] != nil)
		}
		if want := class != ir.ClassKernel && class != ir.ClassSync && op.Collective() == nil; want != (actions[op] != nil) {
			t.Errorf("%s, of class %s: action there: %v", ir.Ops[op].Name, class, actions[op] != nil)
		}
	}
}

// TestConformance runs the conformance tests with several numbers of threads, and checks that the results are
// bitwise equal.
func TestConformance(t *testing.T) {
	if raceEnabled {
		t.Skip("under the race detector there is one thread, and each program has one instruction")
	}
	var devices []func() vm.Device
	for _, threads := range []int{1, 2, 3, 5} {
		pool := simd.NewPool(threads)
		defer pool.Close()
		devices = append(devices, func() vm.Device { return New(pool) })
	}
	vmtest.Conformance(t, devices...)
}

func TestPulse(t *testing.T) {
	for _, processors := range []int{1, 3} {
		if took := NewPulse(processors).Take(); took <= 0 {
			t.Errorf("a pulse of %d processors takes %v", processors, took)
		}
	}
}

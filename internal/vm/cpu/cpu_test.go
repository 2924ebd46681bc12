package cpu

import (
	"strings"
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
	var want map[string]uint64
	for _, threads := range []int{1, 2, 3, 5} {
		pool := simd.NewPool(threads)
		defer pool.Close()
		t.Run("", func(t *testing.T) {
			got := vmtest.Conformance(t, func() vm.Device { return New(pool) })
			got = stripParent(got)
			if want == nil {
				want = got
			}
			for name, digest := range got {
				if want[name] != digest {
					t.Errorf("%s differs between 1 and %d threads", name, threads)
				}
			}
			if len(got) != len(want) {
				t.Errorf("%d results with %d threads, %d with 1", len(got), threads, len(want))
			}
		})
	}
}

// stripParent removes, from the names of tests, the part that differs between runs of the suite.
func stripParent(digests map[string]uint64) map[string]uint64 {
	out := map[string]uint64{}
	for name, digest := range digests {
		parts := strings.SplitN(name, "/", 3)
		out[parts[len(parts)-1]] = digest
	}
	return out
}

func TestPulse(t *testing.T) {
	for _, processors := range []int{1, 3} {
		if took := NewPulse(processors).Take(); took <= 0 {
			t.Errorf("a pulse of %d processors takes %v", processors, took)
		}
	}
}

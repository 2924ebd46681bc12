package cuda

import (
	"os"
	"testing"

	"sppo.dev/internal/cuda/emu"
	"sppo.dev/internal/train/probe"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/vmtest"
	"sppo.dev/ir"
)

// TestConformance tests the whole device on the stand-in driver: the kernels' own sources run on the CPU, and
// products come from the stand-in for cuBLASLt. TestTrainingIsThatOfTheCPU covers our own kernels for products.
func TestConformance(t *testing.T) {
	if raceEnabled {
		t.Skip("each program has one instruction and one rank, and the race detector does not see the kernels")
	}
	fake, kernels := useFake(t), emu.Need(t)
	m := fake.open(t, Options{})
	m.code = fixedCode(kernels.Path)
	if m.blas == nil {
		t.Fatal("the stand-in for cuBLASLt was not found")
	}
	if newDevice := func() vm.Device { return m.New(0) }; os.Getenv("SPPO_LONG") != "" {
		vmtest.Conformance(t, newDevice)
	} else { // the tests of package kernels always run the whole suite
		vmtest.ShortConformance(t, newDevice)
	}
	if n, b := fake.live(), fake.products(); n != 0 || b != 0 {
		t.Errorf("%d things and %d of products were not given back", n, b)
	}
}

// Tuning times the algorithms that cuBLASLt proposes, once for all ranks, skips those that fail, and finds the
// fastest. Without tuning, the first proposal is used.
func TestTune(t *testing.T) {
	fake, kernels := useFake(t), emu.Need(t)
	for _, tune := range []bool{false, true} {
		m := fake.open(t, Options{Tune: tune, CacheDir: t.TempDir()})
		m.code = fixedCode(kernels.Path)
		bench := probe.Bench{Open: func(*ir.Program) (func(int) vm.Device, vm.Transport, error) {
			again, err := m.Again()
			return again.New, again, err
		}}
		before := fake.fast()
		timing, err := bench.Measure(t.Context(), probe.Matmul(8, 8, 8, ir.BF16), 2)
		if err != nil {
			t.Fatal(err)
		}
		if ran := fake.fast() - before; ran > 0 != tune {
			t.Errorf("tune %v: %d products by the fast algorithm, each took %g s", tune, ran, timing.Seconds)
		}
		if n := m.gpus[0].choices.Len(); n != 1 {
			t.Errorf("tune %v: %d choices for one shape", tune, n)
		}
		if n, b := fake.live(), fake.products(); n != 0 || b != 0 {
			t.Errorf("%d things and %d of products were not given back", n, b)
		}
	}
}

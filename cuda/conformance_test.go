package cuda

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"sppo/cuda/emu"
	"sppo/vm"
	"sppo/vm/vmtest"
)

// emulator compiles the kernels for the processor once, into the user's cache.
var emulator = sync.OnceValues(func() (*emu.Library, error) {
	folder, err := os.UserCacheDir()
	if err != nil {
		folder = os.TempDir()
	}
	folder = filepath.Join(folder, "sppo-emu")
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return nil, err
	}
	return emu.Build(folder, nil)
})

func needEmulator(t *testing.T) *emu.Library {
	t.Helper()
	l, err := emulator()
	if errors.Is(err, emu.ErrNoCompiler) {
		t.Skip("SKIPPED: ", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// The device as a whole, on the stand-in driver, with the kernels' own sources on the processor.
func TestConformance(t *testing.T) {
	fake, kernels := useFake(t), needEmulator(t)
	m := fake.open(t, Options{OwnProducts: true})
	m.code = fixedCode(kernels.Path)
	vmtest.Conformance(t, func() vm.Device { return m.New(0) })
	if n := fake.live(); n != 0 {
		t.Errorf("%d things were not given back", n)
	}
}

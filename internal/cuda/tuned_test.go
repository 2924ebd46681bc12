package cuda

import (
	"os"
	"path/filepath"
	"testing"

	"sppo.dev/internal/cuda/emu"
	"sppo.dev/internal/train/probe"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// Timing results are stored for the next process, keyed by everything that they depend on. If a file is
// damaged, timing is repeated.
func TestTunedIsKept(t *testing.T) {
	fake, kernels := useFake(t), emu.Need(t)
	dir := t.TempDir()
	machine := func() *Machine {
		m := fake.open(t, Options{Tune: true, CacheDir: dir})
		m.code, m.timed, m.tried = fixedCode(kernels.Path), attentionShape{n: 20, heads: 1, kvHeads: 1}, smallTrial
		return m
	}
	product := func() (fast bool) {
		m, before := machine(), fake.fast()
		bench := probe.Bench{Open: func(*ir.Program) (func(int) vm.Device, vm.Transport, error) {
			again, err := m.Again()
			return again.New, again, err
		}}
		if _, err := bench.Measure(t.Context(), probe.Matmul(8, 8, 8, ir.BF16), 1); err != nil {
			t.Fatal(err)
		}
		return fake.fast() > before
	}
	kept := func(want int) []string {
		t.Helper()
		files, err := filepath.Glob(filepath.Join(dir, "*"))
		if err != nil || len(files) != want {
			t.Fatalf("%d files are kept, want %d: %v", len(files), want, err)
		}
		return files
	}
	if !product() {
		t.Error("the fastest was not taken")
	}
	file := kept(1)[0]
	slow, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	slow[56], slow[57] = 0x05, 0x51 // the algorithm that the stand-in proposes first
	for _, c := range []struct {
		name  string
		bytes []byte
		fast  bool
	}{{"what is kept", slow, false}, {"half of it", slow[:32], true}, {"what was measured anew", nil, true}} {
		if c.bytes != nil {
			if err := os.WriteFile(file, c.bytes, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if got := product(); got != c.fast {
			t.Errorf("%s: the fast algorithm: %v", c.name, got)
		}
	}
	kept(1)

	if testing.Short() {
		return
	}
	item := attentionCases[0].items()[0]
	m := machine()
	compare(t, m, item)
	for _, name := range kept(2) {
		if name == file {
			continue
		}
		for way, want := range map[string]bool{byEngine: true, byThreads: false} {
			if err := os.WriteFile(name, []byte(way), 0o644); err != nil {
				t.Fatal(err)
			}
			m := machine()
			if got, err := m.engine(m.gpus[0], ir.Attention, 128); err != nil || got != want {
				t.Errorf("%s is kept, but the copy engine brings tiles: %v %v", way, got, err)
			}
		}
	}
	if n, b := fake.live(), fake.products(); n != 0 || b != 0 {
		t.Errorf("%d things and %d of products were not given back", n, b)
	}
}

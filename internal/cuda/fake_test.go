package cuda

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/ebitengine/purego"

	"sppo.dev/internal/cuda/library"
	"sppo.dev/internal/cuda/nvtx"
)

// fake is the stand-in driver, built once and found on the search path like a real one.
type fake struct {
	reset func(gpus int32, memory int64, delayMicros int32)
	fail  func(at int64, code int32)
	seed  func(seed uint64)
	plant func(mistake int32) // one of fake.c
	calls func() int64
	live  func() int64
	stubs string // a library of kernels

	failPoll func(poll int64) // this and comms are functions of the stand-in for NCCL
	comms    func() int64

	heard  func() string // by the profiler
	forget func()

	products func() int64 // live objects in the stand-in for cuBLASLt
	fast     func() int64 // number of products that its fast algorithm has computed
}

var (
	fakeOnce sync.Once
	fakeLib  *fake
	fakeWhy  string
)

// useFake opens the stand-in, or skips the test if there is no compiler to build it.
func useFake(t *testing.T) *fake {
	t.Helper()
	fakeOnce.Do(func() { fakeLib, fakeWhy = buildFake() })
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("SKIPPED: the stand-in driver was not built: " + err.Error())
	}
	if fakeLib == nil {
		t.Fatal("the stand-in driver was not built: " + fakeWhy)
	}
	fakeLib.reset(1, 1<<30, 0)
	fakeLib.failPoll(0)
	return fakeLib
}

var fakeFolder string

func buildFake() (*fake, string) {
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		return nil, err.Error()
	}
	if fakeFolder = os.Getenv(asProcess); fakeFolder != "" {
		return bindFake()
	}
	if fakeFolder, err = os.MkdirTemp("", "sppo-fake-"); err != nil {
		return nil, err.Error()
	}
	driver, stubs, nccl, blas, profiler := fakePaths()
	for _, build := range [][]string{{driver, "fake/fake.c", "-ldl"}, {stubs, "fake/stubs.c"}, {nccl, "fake/nccl.c", driver}, {blas, "fake/cublaslt.c", driver},
		{profiler, "fake/profiler.c"}} {
		args := append([]string{"-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", "-o"}, build...)
		if text, err := exec.Command(gcc, args...).CombinedOutput(); err != nil {
			return nil, string(text)
		}
	}
	return bindFake()
}

func fakePaths() (driver, stubs, nccl, blas, profiler string) {
	in := func(name string) string { return filepath.Join(fakeFolder, name) }
	return in("libcuda.so.1"), in("stubs.so"), in("libnccl.so.2"), in("libcublasLt.so.12"), in("profiler.so")
}

// bindFake opens the libraries of the stand-ins.
func bindFake() (*fake, string) {
	driver, stubs, nccl, blas, profiler := fakePaths()
	os.Setenv(library.PathVariable, fakeFolder+string(os.PathListSeparator)+os.Getenv(library.PathVariable))
	os.Setenv(nvtx.Variable, profiler)
	handle, err := purego.Dlopen(driver, purego.RTLD_NOW)
	if err != nil {
		return nil, err.Error()
	}
	f := &fake{stubs: stubs}
	purego.RegisterLibFunc(&f.reset, handle, "fake_reset")
	purego.RegisterLibFunc(&f.fail, handle, "fake_fail")
	purego.RegisterLibFunc(&f.calls, handle, "fake_calls")
	purego.RegisterLibFunc(&f.seed, handle, "fake_seed")
	purego.RegisterLibFunc(&f.plant, handle, "fake_plant")
	purego.RegisterLibFunc(&f.live, handle, "fake_live")
	if handle, err = purego.Dlopen(nccl, purego.RTLD_NOW); err != nil {
		return nil, err.Error()
	}
	purego.RegisterLibFunc(&f.comms, handle, "fake_nccl_live")
	purego.RegisterLibFunc(&f.failPoll, handle, "fake_nccl_fail")
	if handle, err = purego.Dlopen(profiler, purego.RTLD_NOW); err != nil {
		return nil, err.Error()
	}
	purego.RegisterLibFunc(&f.heard, handle, "fake_heard")
	purego.RegisterLibFunc(&f.forget, handle, "fake_forget")
	if handle, err = purego.Dlopen(blas, purego.RTLD_NOW); err != nil {
		return nil, err.Error()
	}
	purego.RegisterLibFunc(&f.products, handle, "fake_blas_live")
	purego.RegisterLibFunc(&f.fast, handle, "fake_blas_fast")
	return f, ""
}

func TestMain(m *testing.M) {
	if os.Getenv(asProcess) != "" {
		os.Exit(beProcess())
	}
	code := m.Run()
	if fakeFolder != "" {
		os.RemoveAll(fakeFolder)
	}
	os.Exit(code)
}

// fixedCode gives the stand-in driver, instead of machine code, the path of a library to load.
type fixedCode string

func (c fixedCode) image(string, int) ([]byte, error) { return []byte(c), nil }

func (c fixedCode) compiled(string, int) ([]byte, error) {
	return nil, errors.New("there is no compiler")
}

func (c fixedCode) knowsHopper() bool { return true }

// open opens a machine on the stand-in, whose kernels are stubs.
func (f *fake) open(t *testing.T, options Options) *Machine {
	t.Helper()
	m, err := open(options, fixedCode(f.stubs))
	if err != nil {
		t.Fatal(err)
	}
	return m
}

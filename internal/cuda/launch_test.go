package cuda

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sppo.dev/internal/cuda/cublas"
	"sppo.dev/internal/cuda/emu"
	"sppo.dev/internal/cuda/library"
	"sppo.dev/internal/cuda/nccl"
	"sppo.dev/internal/cuda/nvrtc"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

func TestArchitecture(t *testing.T) {
	for _, c := range []struct {
		known []int
		arch  int
		want  string
	}{
		{[]int{75, 80, 90}, 90, "--gpu-architecture=sm_90"},
		{[]int{75, 80, 90}, 100, "--gpu-architecture=compute_90"},
		{[]int{75, 80, 90}, 86, "--gpu-architecture=compute_80"},
		{[]int{70, 75}, 90, ""},
		{[]int{80, 90}, 75, ""},
	} {
		got, err := architecture(c.known, c.arch)
		if got != c.want || (err != nil) != (c.want == "") {
			t.Errorf("architecture(%v, %d) = %q, %v, want %q", c.known, c.arch, got, err, c.want)
		}
	}
}

// The compiler needs no GPU. Later processes reuse its output unless the source or the options differ.
func TestCompiledKernelsAreKept(t *testing.T) {
	dir := t.TempDir()
	first := &compiler{folder: dir}
	var missing *library.MissingError
	if err := first.open(); errors.As(err, &missing) {
		t.Skip("SKIPPED: ", err)
	}
	if asked := (&compiler{folder: dir}); asked.knowsHopper() != first.knowsHopper() {
		t.Errorf("whether release %s of the compiler knows Hopper is answered otherwise when that is asked first", first.version)
	}
	image, err := first.image(sumSource, 90)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.HasPrefix(image, []byte("\x7fELF")) {
		t.Errorf("a cubin begins with %q", image[:8])
	}
	files, err := os.ReadDir(dir)
	if err != nil || len(files) != 1 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	src := sourceOf(sumSource)
	options := first.options(sumSource, "--gpu-architecture=sm_90")
	name := first.file(src, options)
	src.Headers["common.cuh"] += " "
	if name == first.file(src, options) || name == first.file(sourceOf(sumSource), first.options(sumSource, "--gpu-architecture=sm_80")) {
		t.Error("images of different sources have one name")
	}
	if err := os.WriteFile(name, []byte("kept"), 0o644); err != nil {
		t.Fatal(err)
	}
	second := &compiler{folder: dir}
	if image, err := second.image(sumSource, 90); err != nil || string(image) != "kept" {
		t.Errorf("the next process has %q, %v", image, err)
	}
}

func TestCompilerTellsItsLog(t *testing.T) {
	api, err := nvrtc.Open()
	if err != nil {
		t.Skip("SKIPPED: ", err)
	}
	_, err = api.Compile(nvrtc.Source{Name: "bad.cu", Text: "int x = y;"}, "--gpu-architecture=compute_80")
	var e *nvrtc.Error
	if !errors.As(err, &e) || e.Call != "nvrtcCompileProgram" || !bytes.Contains([]byte(e.Log), []byte("bad.cu(1): error")) {
		t.Errorf("%v", err)
	}
}

// Precompiled images are preferred. If the driver refuses one, its source is compiled here, and a note says so.
func TestCarriedKernels(t *testing.T) {
	fake, folder := useFake(t), t.TempDir()
	if err := KeepKernels(folder, []string{"90", "90a"}, func(source string, options []string) ([]byte, error) {
		return []byte(strings.Join(options, " ")), nil
	}); err != nil {
		t.Fatal(err)
	}
	for _, check := range []bool{false, true} {
		c := &compiler{carried: folder, check: check}
		if image, err := c.image("attention_hopper.cu", 90); err != nil || strings.Contains(string(image), "BOUNDED") != check {
			t.Errorf("check %t: %q, %v", check, image, err)
		}
		if image, err := c.image(sumSource, 90); err != nil || strings.Contains(string(image), "BOUNDED") || !c.knowsHopper() {
			t.Errorf("check %t: %q, %v", check, image, err)
		}
	}
	m := fake.open(t, Options{OwnProducts: true})
	m.code = refusedCode{fixedCode(fake.stubs)}
	within(t, func() {
		if _, err := runSteps(meeting(), 1, m.New, m); err != nil {
			t.Error(err)
		}
	})
	if notes := m.Notes(); len(notes) != 1 || !strings.Contains(notes[0], sumSource+" was compiled here, because the driver refused") {
		t.Errorf("notes: %q", notes)
	}
	if n := fake.live(); n != 0 {
		t.Errorf("%d things were not given back", n)
	}
}

// Loading takes at most two seconds of processor time, although kernels' images are precompiled and compressed: 5,000
// instructions of one kernel, and the program of the bundle with the most instructions, which has four ranks.
func TestLoadingIsFast(t *testing.T) {
	fake, emulated, folder := useFake(t), emu.Need(t), t.TempDir()
	library := []byte(emulated.Path + "\x00")
	for rng := rand.New(rand.NewPCG(1, 2)); len(library) < 200<<10; { // the size of an image
		library = append(library, byte(rng.Uint32N(64)))
	}
	if err := KeepKernels(folder, []string{"90", "90a"}, func(string, []string) ([]byte, error) { return library, nil }); err != nil {
		t.Fatal(err)
	}
	b := &builder{}
	a, y := b.buffer(ir.Device, ir.F32, 64), b.buffer(ir.Device, ir.F32, 64)
	for range 5000 {
		b.put(ir.Add, ir.Compute, []ir.View{y, a, a})
	}
	text, err := os.ReadFile("../../examples/gpt-docs.sppo")
	if err != nil {
		t.Fatal(err)
	}
	docs, err := compiled(string(text), `train.data=text("words.txt")`)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range []*ir.Program{{Name: "long", Codes: []ir.Code{b.code}, Ranks: []ir.Rank{{}}, Lines: []string{""}}, docs} {
		m := fake.open(t, Options{OwnProducts: true})
		m.code = &compiler{carried: folder}
		instructions := 0
		for _, rank := range p.Ranks {
			for _, section := range p.Codes[rank.Code].Sections {
				instructions += len(section)
			}
		}
		took := loadingTime(t, m, p)
		if t.Logf("%s: %v of processor time for %d instructions", p.Name, took, instructions); took > 2*time.Second {
			t.Errorf("loading %s took %v of processor time", p.Name, took)
		}
	}
	if n := fake.live(); n != 0 {
		t.Errorf("%d things were not given back", n)
	}
}

// loadingTime loads every rank of a program, one after another, and returns the processor time.
func loadingTime(t *testing.T, m *Machine, p *ir.Program) (took time.Duration) {
	t.Helper()
	for rank := range p.Ranks {
		d := m.New(rank)
		before := processorTime(t)
		if err := d.Load(p, rank, &vm.Env{Transport: m}); err != nil {
			t.Fatal(err)
		}
		took += processorTime(t) - before
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
	return took
}

// processorTime returns the processor time that this process has used.
func processorTime(t *testing.T) time.Duration {
	t.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// refusedCode has precompiled images that no driver accepts, and a compiler whose images are accepted.
type refusedCode struct{ fixedCode }

func (c refusedCode) image(string, int) ([]byte, error) { return []byte("of another release"), nil }

func (c refusedCode) compiled(string, int) ([]byte, error) { return []byte(c.fixedCode), nil }

// A missing library's message names a package for each release of CUDA whose library would be opened.
func TestMissingLibrariesNameTheirPackages(t *testing.T) {
	for want, packages := range map[*library.Wanted][]string{
		&nvrtc.Wanted:  {"nvidia-cuda-nvrtc ", "nvidia-cuda-nvrtc-cu12 "},
		&cublas.Wanted: {"nvidia-cublas ", "nvidia-cublas-cu12 "},
		&nccl.Wanted:   {"nvidia-nccl-cu13 ", "nvidia-nccl-cu12 "},
	} {
		for i, name := range packages {
			if release := fmt.Sprintf("(CUDA %d", 13-i); !strings.Contains(want.Get, name+release) {
				t.Errorf("%s: %q does not name %s%s", want.Name, want.Get, name, release)
			}
		}
	}
}

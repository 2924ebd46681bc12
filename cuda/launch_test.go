package cuda

import (
	"bytes"
	"errors"
	"os"
	"testing"

	"sppo.dev/cuda/library"
	"sppo.dev/cuda/nvrtc"
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

// The compiler needs no GPU. What it made is found by the next process, and by none whose source differs.
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
	name := first.file(src, "--gpu-architecture=sm_90")
	src.Headers["common.cuh"] += " "
	if name == first.file(src, "--gpu-architecture=sm_90") || name == first.file(sourceOf(sumSource), "--gpu-architecture=sm_80") {
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

package library

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// touch creates empty files.
func touch(t *testing.T, paths ...string) {
	t.Helper()
	for _, path := range paths {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func TestCandidatesStandInOrder(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	touch(t, in("ours/libx.so.1"), in("ours/lib64/libx.so.2"), in("ours/x_wheel/lib/libx.so.1"), in("ours/cu13/lib/libx.so.1"),
		in("toolkit/lib64/libx.so.1"),
		in("venv/lib/python3.11/site-packages/nvidia/x_wheel/lib/libx.so.1"),
		in("venv/lib/python3.11/site-packages/nvidia/cu13/lib/libx.so.2"))
	t.Setenv(PathVariable, in("ours"))
	t.Setenv("CUDA_HOME", in("toolkit"))
	t.Setenv("VIRTUAL_ENV", in("venv"))
	want := []string{
		in("ours/libx.so.1"), in("ours/lib64/libx.so.2"), in("ours/x_wheel/lib/libx.so.1"), in("ours/cu13/lib/libx.so.1"), "libx.so.2", "libx.so.1", in("toolkit/lib64/libx.so.1"),
		in("venv/lib/python3.11/site-packages/nvidia/x_wheel/lib/libx.so.1"),
		in("venv/lib/python3.11/site-packages/nvidia/cu13/lib/libx.so.2"),
	}
	got := Candidates(&Wanted{Files: []string{"libx.so.2", "libx.so.1"}, Wheel: "x_wheel"})
	if !slices.Equal(got, want) {
		t.Errorf("%q\nwant %q", got, want)
	}
}

// The patterns cover folders that container images and their virtual environments use.
func TestPatternsCoverContainers(t *testing.T) {
	for _, folder := range []string{
		"/opt/torch/.venv/lib/python3.12/site-packages", "/opt/conda/lib/python3.11/site-packages",
		"/opt/ml/torch/lib/python3.12/site-packages", "/usr/local/lib/python3.12/dist-packages",
	} {
		if !slices.ContainsFunc(pythons, func(p string) bool { ok, _ := filepath.Match(p, folder); return ok }) {
			t.Errorf("no pattern matches %s", folder)
		}
	}
	if !slices.Contains(toolkits, "/usr/local/nvidia") || !slices.Contains(inside, "lib64") {
		t.Error("/usr/local/nvidia/lib64 is not searched")
	}
}

func TestMissing(t *testing.T) {
	w := &Wanted{Name: "a library", Files: []string{"libsppo-none.so"}, Get: "write it"}
	_, err := Open(w, nil)
	var missing *MissingError
	if !errors.As(err, &missing) || !strings.HasPrefix(err.Error(), "a library is missing (libsppo-none.so: ") || !strings.HasSuffix(err.Error(), ": write it") {
		t.Errorf("%v", err)
	}
}

// A library that lacks a function is skipped, and reported as too old if there is no better one.
func TestFunctions(t *testing.T) {
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skip("SKIPPED: ", err)
	}
	dir := t.TempDir()
	build := func(file, source string) {
		cmd := exec.Command(gcc, "-shared", "-fPIC", "-x", "c", "-o", filepath.Join(dir, file), "-")
		cmd.Stdin = strings.NewReader(source)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	build("libx.so.2", "int one(void) { return 1; }")
	build("libx.so.1", "int one(void) { return 1; } int two(void) { return 2; }")
	t.Setenv(PathVariable, dir)
	w := &Wanted{Name: "x", Files: []string{"libx.so.2", "libx.so.1"}}
	l, err := Open(w, []Function{{Name: "one"}, {Name: "two"}, {Name: "three", Optional: true}})
	if err != nil || filepath.Base(l.Path) != "libx.so.1" || l.Addrs[0] == 0 || l.Addrs[1] == 0 || l.Addrs[2] != 0 {
		t.Errorf("%+v, %v", l, err)
	}
	if _, err := Open(w, []Function{{Name: "three"}}); err == nil || !strings.Contains(err.Error(), "libx.so.2 is too old: it lacks three") {
		t.Errorf("%v", err)
	}
}

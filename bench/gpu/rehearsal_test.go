package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"sppo.dev/internal/cuda"
	"sppo.dev/internal/cuda/emu"
	"sppo.dev/ir"
)

// tinyModel replaces the models whose layers are timed.
const tinyModel = `import "cluster.sppo"
model tiny { family = llama layers = 1 hidden = 64 heads = 2 vocab = 64 dtype = bf16 }
cluster here = measured()
train { sequence = 32 batch = 1 steps = 3 data = random() }
schedule one { sp = 1 pp = 1 dp = 1 }
`

// rehearsal builds the bundle with the real programs, stand-ins for NVIDIA's libraries, and kernels compiled
// for the CPU.
func rehearsal(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	do := func(argv ...string) {
		cmd := exec.Command(argv[0], argv[1:]...)
		cmd.Dir = "../.."
		if text, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", argv, err, text)
		}
	}
	libcuda := in("libcuda.so.1")
	for _, c := range [][]string{{libcuda, "fake.c", "-ldl"}, {in("libnccl.so.2"), "nccl.c", libcuda}, {in("libcublasLt.so.12"), "cublaslt.c", libcuda}} {
		do(append([]string{"gcc", "-O1", "-shared", "-fPIC", "-pthread", "-o", c[0], "internal/cuda/fake/" + c[1]}, c[2:]...)...)
	}
	do("go", "test", "-c", "-o", in("cuda.test"), "./internal/cuda")
	do("go", "test", "-c", "-o", in("e2e.test"), "./internal/e2e")
	do("go", "build", "-o", dir+"/", "./cmd/sppovm", "./bench/gpu")
	folder, err := emu.Folder()
	if err != nil {
		t.Fatal(err)
	}
	kernels, err := emu.Build(folder, nil)
	if err != nil {
		t.Skip("SKIPPED: ", err)
	}
	image := func(string, []string) ([]byte, error) { return []byte(kernels.Path), nil }
	if err := cuda.KeepKernels(in("kernels"), []string{"80", "90", "90a"}, image); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"7b.sppo", "8b.sppo"} {
		if err := os.WriteFile(in(name), []byte(tinyModel), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	shipped, err := os.ReadFile("../../internal/shipped/clusters/h200.sppo")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(in("cluster.sppo"), clusterName.ReplaceAll(shipped, []byte("cluster measured")), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(in(referenceText), []byte(tinyModel), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, r := range references {
		do(in("gpu"), "compile", in("7b.sppo"), in(r.name+".sppb"))
		p, err := ir.ReadFile(in(r.name + ".sppb"))
		if err != nil {
			t.Fatal(err)
		}
		if err := writeSteps(dir, r.name, p); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// rehearsed lists stages, each with the number of a driver call in its middle. The probe measures shapes too
// large for a CPU, so it is only started.
var rehearsed = []struct {
	args []string
	call int
}{
	{[]string{"devices"}, 4}, {[]string{"nccl"}, 60}, {[]string{"primitives"}, 150}, {[]string{"attention"}, 150}, {[]string{"products"}, 400}, {[]string{"memory"}, 400},
	{[]string{"probe"}, 300}, {[]string{"layers", "8b-128k"}, 150}, {[]string{"trial"}, 150}, {[]string{"conformance"}, 1500}, {[]string{"training"}, 2000},
}

// TestRehearsal runs the whole check with real programs on the stand-in driver: each stage first without
// faults, then with one driver call that fails, never returns, or kills the process. Stages that run tests
// must keep at least two thirds of their results.
func TestRehearsal(t *testing.T) {
	if os.Getenv("SPPO_LONG") == "" {
		t.Skip("SPPO_LONG=1 rehearses the check over the stand-in driver: kernels on the processor take their time")
	}
	files := rehearsal(t)
	t.Setenv("SPPO_CUDA_PATH", files)
	t.Setenv("SPPO_CUDA_KERNELS", filepath.Join(files, "kernels"))
	t.Setenv("SPPO_GPU_FIGURES", "small")
	only := os.Getenv("SPPO_REHEARSE")
	for _, c := range rehearsed {
		name := strings.Join(c.args, " ")
		if only != "" && !slices.Contains(strings.Split(only, ","), c.args[0]) {
			continue
		}
		t.Run(name, func(t *testing.T) {
			run := func(fault string) (int, string, time.Duration, bool) {
				dir := t.TempDir()
				began, flag := time.Now(), filepath.Join(dir, "fault")
				cmd := exec.Command(filepath.Join(files, "gpu"), c.args...)
				cmd.Env = append(os.Environ(), outVariable+"="+dir, quietVariable+"=90s", factorVariable+"=30")
				if fault != "" {
					cmd.Env = append(cmd.Env, fmt.Sprintf("SPPO_FAKE_FAULT=%s %d %s", fault, c.call, flag), quietVariable+"=60s")
				}
				out, _ := cmd.CombinedOutput() // its status is in the report
				_, err := os.Stat(flag)
				return len(resultsOf(t, dir)), string(out), time.Since(began), err == nil
			}
			all, out, took, _ := run("")
			t.Logf("%d results in %v\n%s", all, took, out)
			if all == 0 || c.args[0] != "probe" && strings.Contains(out, "\nfailed") {
				t.Errorf("as it should be: %d results\n%s", all, out)
			}
			for _, fault := range []string{"fail", "hang", "die"} {
				got, out, took, happened := run(fault)
				t.Logf("%s: %d of %d results in %v\n%s", fault, got, all, took, out)
				tests := c.call > 100 && c.args[0] != "probe" && c.args[0] != "layers"
				if !happened || !strings.Contains(out, "failed") || !strings.Contains(out, ".json") || tests && got < all*2/3 {
					t.Errorf("%s at call %d (it happened: %t): %d of %d results\n%s", fault, c.call, happened, got, all, out)
				}
			}
		})
	}
}

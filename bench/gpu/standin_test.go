package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"sppo.dev/internal/cuda"
	"sppo.dev/ir"
)

// This binary imitates the output of every program of the bundle, so that each can be made to fail, hang or
// die at each of its results.
const (
	roleVariable  = "SPPO_STAND_IN"
	faultVariable = "SPPO_STAND_IN_FAULT" // a fault, and where it happens: "hang TestGPUFigures/attention/b"
)

// programs are the executable files of the bundle.
var programs = []string{"compute-sanitizer", "ncu", "cuda.test", "e2e.test", "sppovm", "python3", "gpu"}

func TestMain(m *testing.M) {
	if role := os.Getenv(roleVariable); role != "" {
		os.Exit(standIn(role, os.Args[1:]))
	}
	flag.Parse()
	if err := flag.Set("test.parallel", "6"); err != nil { // parallel tests wait more than they compute
		panic(err)
	}
	os.Exit(m.Run())
}

// bundle creates a folder with all stand-ins.
func bundle(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	files := map[string]string{"7b.sppo": "", "8b.sppo": "", "torch_layers.py": ""}
	for _, name := range programs {
		files[name] = fmt.Sprintf("#!/bin/sh\n%s=%s exec %s \"$@\"\n", roleVariable, name, self)
	}
	for _, job := range []string{"gpt-docs", "llama-docs"} {
		for i := range 3 {
			files[job+".cpu.jsonl"] += fmt.Sprintf(`{"step":%d,"loss":5,"grad_norm":1}`+"\n", i+1)
		}
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// stuck is set if the process hangs after a failure, like one whose GPU does not answer.
var stuck bool

// reached is called before each result, and causes the fault that is requested there. It reports whether the
// caller must fail.
func reached(result string) bool {
	mode, at, _ := strings.Cut(os.Getenv(faultVariable), " ")
	if at == "" || !strings.Contains(result, at) {
		return false
	}
	switch mode {
	case "stick":
		stuck = true
	case "hang":
		child := exec.Command("sleep", "20") // with its own child process, which must not outlive it
		child.Stdout = os.Stdout
		_ = child.Start() // even without the child, this is a hang
		select {}
	case "die":
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
	return true
}

func standIn(role string, args []string) int {
	say := func(result, line string) {
		if reached(result) {
			fmt.Println("it goes wrong")
			os.Exit(1)
		}
		fmt.Println(line)
	}
	switch {
	case role == "gpu" && len(args) > 2 && args[0] == "compile":
		p := &ir.Program{Name: "p", Codes: []ir.Code{{Name: "c"}}, Ranks: []ir.Rank{{}}, Lines: []string{""}, Run: ir.Run{Sequence: 8, Batch: 1, Vocab: 148}} // its logarithm is 5
		say("build", "built "+strings.Join(args, " "))
		if err := ir.WriteFile(args[2], p); err != nil {
			return 1
		}
	case role == "gpu":
		if len(args) == 2 && args[0] == "touch" { // without using that much memory
			say("touch", "bytes of host memory touched: "+args[1])
			return 0
		}
		return command(context.Background(), args, os.Stdout, os.Stderr)
	case strings.HasSuffix(role, ".test"):
		testing.Main(regexp.MatchString, standInTests[role], nil, nil) // it ends the process
	case role == "compute-sanitizer":
		say("sanitizer 1", "========= COMPUTE-SANITIZER")
		if strings.Contains(os.Getenv(faultVariable), "unsupported") {
			fmt.Println("========= Error: Device not supported. Please refer to the documentation")
			return 1
		}
		summary := map[string]string{"racecheck": "RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)"}[args[1]]
		say("sanitizer 2", "========= "+cmp.Or(summary, "ERROR SUMMARY: 0 errors"))
	case role == "ncu":
		kernel := args[slices.Index(args, "-k")+1]
		say("ncu 1", "  "+strings.Trim(kernel, "regx:^$")+" (128, 16, 1)x(384, 1, 1)")
		say("ncu 2", "    Duration   us   512.3")
	case role == "python3" && !slices.Contains(args, "sppo_torch"):
		say("peer", `{"name":"7b-128k","by":"PyTorch","way":"plain","step_s":2}`)
	case args[0] == "devices":
		if strings.Contains(os.Getenv(faultVariable), "no GPU") {
			fmt.Println("cuda  the driver is missing: install it\n      looked in: /opt")
			return 0
		}
		say("devices 1", "cuda  a driver")
		say("devices 2", "GPU 0: NVIDIA H200, sm_90")
	case args[0] == "probe":
		say("probe 1", `{"item":"a","seconds":1}`)
		share := map[bool]string{false: "0.71", true: "1.42"}[strings.Contains(os.Getenv(faultVariable), "fast clock")]
		say("probe 2", `{"done":true,"machine":{"name":"measured","matmul_efficiency":[[4096,`+share+`]]}}`)
		return map[bool]int{true: 1}[os.WriteFile(args[slices.Index(args, "-o")+1], []byte("cluster measured {}\n"), 0o644) != nil]
	default:
		device := args[slices.Index(args, "--device")+1]
		if dims := os.Getenv(cuda.PortableVariable); dims != "" {
			fmt.Printf("{\"portable\":%q}\n", dims)
		}
		for i := range 3 {
			say(fmt.Sprint(device, " step ", i+1), fmt.Sprintf(`{"step":%d,"loss":5,"grad_norm":1,"step_s":1,"step_s_median":1}`, i+1))
		}
	}
	return 0
}

// standInTests are the tests that stages request, each with subtests.
var standInTests = map[string][]testing.InternalTest{
	"cuda.test": {
		{Name: "TestGPUAttention", F: within("for the card a, 2 heads of 96", "for the card b", "portable a")},
		{Name: "TestGPUAttentionOfManyTokens", F: within("a", "b", "c")},
		{Name: "TestGPUPrimitives", F: within("primitive_ring", "primitive_rows_64_128")},
		{Name: "TestGPUBits", F: within("attention, heads of 64", "attention_grad, heads of 64")},
		{Name: "TestGPUConformance", F: within("cuBLASLt/matmul", "cuBLASLt/gelu", "own products/matmul", "own products/bias_grad", "own products/adamw")},
		{Name: "TestGPUTrainingIsThatOfTheCPU", F: within("a", "b", "c")},
		{Name: "TestGPUGraphs", F: within("a")}, {Name: "TestGPUPeaks", F: within("b")}, {Name: "TestGPUNCCL", F: within("a", "b")},
		{Name: "TestGPUFigures", F: within("attention/for the card/attention bf16, 8", "attention/for the card/attention_grad bf16, 32768",
			"attention/for the card, copied by threads/a", "attention/for the card, copied by threads/b", "attention/portable/a", "attention/portable/b",
			"products/a", "products/b", "products/c", "memory/a", "memory/b", "issue/a", "issue/b")},
	},
	"e2e.test": {{Name: "TestGPUSchedulesAreEqual", F: within("a", "b", "c")}, {Name: "TestGPUResume", F: within("a", "b")}},
}

// within returns a test that runs the subtests with the given paths. Those of TestGPUFigures write one figure
// each.
func within(paths ...string) func(t *testing.T) {
	return func(t *testing.T) {
		heads := []string{}
		for _, path := range paths {
			if head, _, _ := strings.Cut(path, "/"); !slices.Contains(heads, head) {
				heads = append(heads, head)
			}
		}
		for _, head := range heads {
			var below []string
			for _, path := range paths {
				if name, rest, deeper := strings.Cut(path, "/"); name == head && deeper {
					below = append(below, rest)
				}
			}
			t.Run(head, func(t *testing.T) {
				if len(below) > 0 {
					within(below...)(t)
					return
				}
				if reached(t.Name()) {
					t.Fatal("it goes wrong")
				}
				if strings.HasPrefix(t.Name(), "TestGPUFigures") {
					fmt.Printf("{\"kind\":\"figure\",\"name\":%q,\"seconds\":1}\n", t.Name())
				}
			})
			if stuck {
				time.Sleep(time.Hour)
			}
		}
	}
}

// measured runs stages on the stand-ins. It returns the results in the journal as text, except those of kind
// kindEnd and kindClocks.
func measured(t *testing.T, files, fault string, args ...string) (got []string, out string, status int) {
	t.Helper()
	dir := t.TempDir()
	for _, variable := range environment(dir, files, fault) {
		name, value, _ := strings.Cut(variable, "=")
		t.Setenv(name, value)
	}
	text := strings.Builder{}
	status = command(t.Context(), args, &text, io.Discard)
	return resultsOf(t, dir), text.String(), status
}

// measuredApart is measured in another process, so that tests can run at the same time.
func measuredApart(t *testing.T, files, fault string, args ...string) (got []string, out string, status int) {
	t.Helper()
	dir := t.TempDir()
	cmd := exec.Command(filepath.Join(files, "gpu"), args...)
	cmd.Env = append(os.Environ(), environment(dir, files, fault)...)
	text, err := cmd.Output()
	if err != nil && !errors.As(err, new(*exec.ExitError)) {
		t.Fatal(err)
	}
	return resultsOf(t, dir), string(text), cmd.ProcessState.ExitCode()
}

// environment returns the variables for a run on stand-ins with a fault.
func environment(out, files, fault string) []string {
	quiet := "1m"
	if strings.HasPrefix(fault, "hang") || strings.HasPrefix(fault, "stick") {
		quiet = "1500ms" // on a busy machine, a stand-in needs half a second to start
	}
	return []string{outVariable + "=" + out, filesVariable + "=" + files, quietVariable + "=" + quiet, faultVariable + "=" + fault}
}

func resultsOf(t *testing.T, dir string) (got []string) {
	t.Helper()
	results, broken, err := readJournal(dir)
	if err != nil || broken > 0 {
		t.Fatalf("%d broken lines, %v", broken, err)
	}
	for _, r := range results {
		if r.Kind != kindEnd && r.Kind != kindClocks {
			got = append(got, fmt.Sprintf("%s, %s: %s", r.Stage, r.Task, r.Data))
		}
	}
	return got
}

// A fault at one result costs no other result: earlier ones, those of later tests, and those of other tasks are
// all present.
func TestFaultsCostOneResult(t *testing.T) {
	t.Parallel()
	files := bundle(t)
	for _, c := range []struct{ at, stage, name, lost string }{
		{"devices 2", "devices", "", "GPU 0"},
		{"TestGPUAttention/for_the_card_b", "trial", "", "TestGPUAttention/for_the_card_b"},
		{"card/attention_grad", "first", "", "attention_grad"},
		{"copied_by_threads/a", "attention", "", "copied_by_threads/a"},
		{"cuBLASLt/matmul", "conformance", "", "cuBLASLt/matmul"},
		{"products/b", "products", "", "products/b"},
		{"memory/a", "memory", "", "memory/a"},
		{"issue/a", "memory", "", "issue/a"},
		{"TrainingIsThatOfTheCPU/a", "training", "", "OfTheCPU/a"},
		{"cuda step 3", "training", "", `"step":3`},
		{"Equal/c", "schedules", "", "Equal/c"},
		{"cuda step 3", "torch", "training", `"step":3`},
		{"probe 2", "probe", "", "done"},
		{"cuda step 2", "layers", "7b-128k", `training|7b-128k: {"step":(2|3)`},
		{"sim step 2", "layers", "7b-128k", `simulated: {"step":(2|3)`},
		{"peer", "peers", "7b-128k", "PyTorch"},
		{"NCCL/a", "nccl", "", "NCCL/a"},
		{"Bits/attention_grad", "bits", "", "Bits/attention_grad"},
		{"Primitives/primitive_rows", "primitives", "", "Primitives/primitive_rows"},
		{"touch", "grow", "", "host memory"},
		{"sanitizer 2", "tools", "", "SUMMARY"},
		{"ncu 2", "tools", "", "Duration"},
	} {
		t.Run(c.at, func(t *testing.T) {
			t.Parallel()
			args := slices.DeleteFunc([]string{c.stage, c.name}, func(s string) bool { return s == "" })
			right, out, status := measuredApart(t, files, "", args...)
			if status != 0 || len(right) == 0 {
				t.Fatalf("%s: status %d\n%s", c.stage, status, out)
			}
			modes := []string{"fail", "hang", "die"}
			if strings.Contains(c.at, "/") {
				modes = append(modes, "stick")
			}
			for _, mode := range modes {
				began := time.Now()
				got, out, status := measuredApart(t, files, mode+" "+c.at, args...)
				for _, want := range right {
					if !slices.Contains(got, want) && !regexp.MustCompile(c.lost).MatchString(want) {
						t.Errorf("%s: lost %s\n%s", mode, want, out)
					}
				}
				told := slices.ContainsFunc(got, func(g string) bool { return regexp.MustCompile(`"(fail|hang|crash)"`).MatchString(g) })
				if status != 1 || !strings.Contains(out, "failed") || strings.Contains(c.at, "/") && !told || !strings.Contains(out, ".json") {
					t.Errorf("%s: status %d, results %v\n%s", mode, status, got, out)
				}
				if took := time.Since(began); took > 20*time.Second {
					t.Errorf("%s took %v", mode, took)
				}
			}
		})
	}
}

// A killed check loses only the current measurement and leaves no process running; the report covers the rest.
func TestKillCostsOneResult(t *testing.T) {
	files := bundle(t)
	for _, c := range []struct {
		at   string
		args []string
	}{
		{"devices 2", []string{"first"}}, {"card/attention_grad", []string{"first"}}, {"own_products/bias_grad", []string{"conformance"}},
		{"products/c", []string{"products"}}, {"issue/b", []string{"memory"}}, {"cuda step 3", []string{"training"}}, {"Resume/b", []string{"schedules"}},
		{"probe 2", []string{"probe"}}, {"sim step 3", []string{"layers", "8b-128k"}}, {"peer", []string{"peers", "7b-128k"}}, {"NCCL/b", []string{"nccl"}},
	} {
		right, _, _ := measured(t, files, "", c.args...)
		dir := t.TempDir()
		cmd := exec.Command(filepath.Join(files, "gpu"), c.args...)
		cmd.Env = append(os.Environ(), outVariable+"="+dir, quietVariable+"=1m", faultVariable+"=hang "+c.at)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		// The first missing result is the one at which the check hangs.
		at := slices.IndexFunc(right, func(s string) bool { return strings.Contains(s, wordOf[c.at]) })
		if at < 0 {
			t.Fatalf("%s: no result is %q among %v", c.at, wordOf[c.at], right)
		}
		deadline := time.Now().Add(20 * time.Second)
		for len(resultsOf(t, dir)) < at && time.Now().Before(deadline) {
			time.Sleep(10 * time.Millisecond)
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if got := resultsOf(t, dir); !slices.Equal(got, right[:at]) {
			t.Errorf("%s: %v\nwant %v", c.at, got, right[:at])
		}
		for left := alive(dir); len(left) > 0; left = alive(dir) {
			if time.Now().After(deadline) {
				t.Errorf("%s: processes %v are left", c.at, left)
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
		t.Setenv(outVariable, dir)
		if status := command(t.Context(), []string{"report"}, io.Discard, io.Discard); status != 0 {
			t.Errorf("%s: the report's status is %d", c.at, status)
		}
		if made, _ := filepath.Glob(filepath.Join(dir, "20*.json")); len(made) != 1 {
			t.Errorf("%s: reports %v", c.at, made)
		}
	}
}

// Layers are planned for the host memory that the user specifies.
func TestHostMemoryOfLayers(t *testing.T) {
	for size, want := range map[string]bool{"": false, "100GiB": true} {
		t.Setenv(memoryVariable, size)
		if argv := layerTasks("7b-32k-full")[0].argv; slices.Contains(argv, "cluster.host_memory=100GiB") != want {
			t.Errorf("%q: %v", size, argv)
		}
	}
}

// If the kernels for the card fail a test, later stages run with portable ones and record that, until the test
// passes.
func TestPortableAfterAFailure(t *testing.T) {
	files := bundle(t)
	for _, c := range []struct{ fault, portable string }{
		{"", ""}, {"fail TestGPUAttention/portable_a", ""}, {"fail TestGPUAttention/for_the_card_b", "1"},
		{"fail TestGPUAttention/for_the_card_a", "96"}, {"hang ManyTokens/a", "1"},
	} {
		got, out, _ := measured(t, files, c.fault, "trial", "layers", "7b-128k")
		said := strings.Contains(out, "with portable kernels (SPPO_CUDA_PORTABLE="+c.portable+"), because those for the card failed TestGPUAttention")
		seen := slices.Contains(got, fmt.Sprintf(`layers, 7b-128k: {"portable":%q}`, c.portable))
		if seen != (c.portable != "") || said != (c.portable != "") {
			t.Errorf("%q: portable kernels %t, said so %t\n%s\n%s", c.fault, seen, said, out, got)
		}
	}
	dir := t.TempDir()
	j, err := openJournal(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer j.close()
	c := &check{folder: dir}
	for _, result := range []string{"crash", "pass", "hang", "pass"} {
		j.add("trial", "attention", kindTest, Test{"TestGPUAttention/for_the_card_a", result})
		if test, _ := c.failedKernels(); (test != "") == (result == "pass") {
			t.Errorf("after %s: failed: %q", result, test)
		}
	}
}

// Results are carried from one folder to the next, in which the failures of kernels are still known.
func TestResultsAreCarried(t *testing.T) {
	files, first := bundle(t), t.TempDir()
	t.Setenv(outVariable, first)
	t.Setenv(filesVariable, files)
	t.Setenv(faultVariable, "fail TestGPUAttention/for_the_card_a")
	command(t.Context(), []string{"trial", "probe"}, io.Discard, io.Discard)
	t.Setenv(beforeVariable, first)
	got, out, status := measured(t, files, "", "layers", "7b-128k")
	if status != 0 || !slices.Contains(got, `layers, 7b-128k: {"portable":"96"}`) || strings.Contains(out, "there is no cluster.sppo") {
		t.Errorf("status %d\n%s\n%s", status, out, got)
	}
	t.Setenv(beforeVariable, filepath.Join(first, "nowhere"))
	t.Setenv(outVariable, t.TempDir())
	if status := command(t.Context(), []string{"report"}, io.Discard, io.Discard); status != 2 {
		t.Errorf("without a journal, the status is %d", status)
	}
}

// Memory is touched, and sizes that are none are refused.
func TestTouch(t *testing.T) {
	var out strings.Builder
	if err := touch("0.01GiB", &out); err != nil || !strings.HasPrefix(out.String(), "8589934 bytes of host memory touched; available: ") {
		t.Errorf("%s, %v", out.String(), err)
	}
	for _, size := range []string{"", "100", "GiB", "-1GiB", "1GiBs", "1e99GiB"} {
		if err := touch(size, io.Discard); err == nil {
			t.Errorf("%q is taken for a size", size)
		}
	}
}

// wordOf maps the place of a fault to a part of the result that the fault prevents.
var wordOf = map[string]string{
	"devices 2": "GPU 0", "card/attention_grad": "card/attention_grad", "own_products/bias_grad": "own_products/bias_grad", "products/c": "products/c",
	"issue/b": "issue/b", "cuda step 3": `"step":3,"loss":5,"grad_norm":1,"step_s"`, "Resume/b": "Resume/b", "probe 2": "done", "sim step 3": `simulated: {"step":3`, "peer": "PyTorch", "NCCL/b": "NCCL/b",
}

// alive returns the stand-ins that are running for a results folder.
func alive(dir string) (pids []string) {
	self, _ := os.Executable() // it has been found before
	environments, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, path := range environments {
		environment, _ := os.ReadFile(path) // a process may have ended
		program, _ := os.Readlink(filepath.Join(filepath.Dir(path), "exe"))
		if program == self && strings.Contains(string(environment), outVariable+"="+dir) {
			pids = append(pids, path)
		}
	}
	return pids
}

// No stage exceeds its limit, every stage of the usual order exists, and unknown names are reported.
func TestStages(t *testing.T) {
	for _, s := range stages {
		if s.tasks == nil {
			continue
		}
		all := time.Duration(0)
		for _, task := range s.tasks(append(slices.Clone(s.names), "")[0]) {
			all += task.limit
		}
		if most := map[bool]time.Duration{true: mostFirst, false: mostStage}[s.name == "first"]; all > most || all == 0 {
			t.Errorf("%s takes %v, more than %v", s.name, all, most)
		}
	}
	if plan, err := choose(nil); err != nil || plan[1].stage.name != "first" || len(plan) < len(stages)-3 {
		t.Errorf("%v, %v", plan, err)
	}
	var told strings.Builder
	if status := command(t.Context(), []string{"help"}, &told, io.Discard); status != 0 || !strings.Contains(told.String(), "\n  schedules ") {
		t.Errorf("help: status %d, %s", status, told.String())
	}
	for _, args := range [][]string{{"nothing"}, {"layers"}, {"layers", "nobody"}} {
		var errs strings.Builder
		if status := command(t.Context(), args, io.Discard, &errs); status != 2 || errs.Len() == 0 {
			t.Errorf("%v: status %d, %s", args, status, errs.String())
		}
	}
}

// Without a GPU, the last lines say why and name the report.
func TestWithoutGPU(t *testing.T) {
	_, out, status := measured(t, bundle(t), "no GPU", "devices")
	want := regexp.MustCompile(`failed +\S+ s  devices  no line contains "GPU 0: "; cuda  the driver is missing: install it\n.*\.json\nfailed: devices: devices\n$`)
	if status != 1 || !want.MatchString(out) {
		t.Errorf("status %d\n%s", status, out)
	}
}

// A tool that finds errors fails the check; one that the machine does not have, or does not support, is skipped, and the
// report says why.
func TestTools(t *testing.T) {
	files := bundle(t)
	got, out, status := measured(t, files, "unsupported", "tools")
	if status != 0 || strings.Count(out, "skipped ") != 3 || !strings.Contains(out, "memcheck  skipped: ========= Error: Device not supported") ||
		!slices.Contains(got, `tools, ncu, dq: "Duration   us   512.3"`) {
		t.Errorf("status %d\n%s\n%s", status, out, got)
	}
	for _, name := range []string{"compute-sanitizer", "ncu"} {
		if err := os.Remove(filepath.Join(files, name)); err != nil {
			t.Fatal(err)
		}
	}
	if findTool("ncu") != "ncu" || findTool("compute-sanitizer") != "compute-sanitizer" {
		t.Skip("SKIPPED: this machine has the tools")
	}
	_, out, status = measured(t, files, "", "tools")
	if status != 0 || strings.Count(out, "skipped ") != 6 || !strings.Contains(out, "skipped: ncu is neither in PATH nor in /usr/local/cuda") {
		t.Errorf("status %d\n%s", status, out)
	}
}

// Stages for which no time is left are skipped and reported.
func TestLimitOfAll(t *testing.T) {
	t.Setenv(limitVariable, "1ns")
	got, out, status := measured(t, bundle(t), "", "devices", "nccl")
	if len(got) > 0 || status != 1 || strings.Count(out, "out of time") != 2 {
		t.Errorf("%v, status %d\n%s", got, status, out)
	}
}

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/cmd/internal/clitest"
	"sppo.dev/internal/passes"
)

var update = flag.Bool("update", false, "rewrite the transcripts")

// asCommand names the environment variable that makes the test binary act as sppovm, for tests that need a
// separate process.
const asCommand = "SPPOVM_TEST_AS_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(asCommand) != "" {
		main()
	}
	os.Exit(m.Run())
}

func TestTranscripts(t *testing.T) {
	clitest.Run(t, "testdata/transcripts/*.txt", "testdata/base", &app, *update)
}

// inBase changes to a new folder with copies of the files in testdata/base.
func inBase(t *testing.T) {
	t.Helper()
	base := os.DirFS("testdata/base")
	dir := t.TempDir()
	if err := os.CopyFS(dir, base); err != nil {
		t.Fatal(err)
	}
	t.Chdir(dir)
}

// sppovm runs the command in this process.
func sppovm(t *testing.T, ctx context.Context, args ...string) (stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	if code := app.Main(&cli.Env{Context: ctx, Stdout: &out, Stderr: &errs}, args); code != cli.Done {
		t.Fatalf("sppovm %v: exit %d\n%s", args, code, errs.String())
	}
	return out.String(), errs.String()
}

// objects parses the lines that --json prints.
func objects(t *testing.T, text string) []map[string]any {
	t.Helper()
	var out []map[string]any
	for _, line := range strings.Split(strings.TrimSuffix(text, "\n"), "\n") {
		var o map[string]any
		if err := json.Unmarshal([]byte(line), &o); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		out = append(out, o)
	}
	return out
}

func keys(o map[string]any) []string {
	var names []string
	for k := range o {
		names = append(names, k)
	}
	slices.Sort(names)
	return names
}

// The lines that --json prints and their keys are a stable interface.
func TestJSONLines(t *testing.T) {
	inBase(t)
	out, _ := sppovm(t, t.Context(), "run", "tiny.sppo", "--json")
	step := []string{"grad_norm", "loss", "lr", "split", "step", "step_s", "tokens_per_s"}
	validation := []string{"eval_loss", "step"}
	done := []string{"bubble_ratio", "device_peak_bytes", "done", "final_loss", "host_peak_bytes", "steps"}
	var got [][]string
	all := objects(t, out)
	for _, o := range all {
		got = append(got, keys(o))
	}
	want := [][]string{validation, step, step, validation, step, step, validation, done}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	last, before := all[len(all)-1], all[len(all)-3]
	if last["steps"] != 4.0 || last["final_loss"] != before["loss"] || before["step"] != 4.0 {
		t.Errorf("the last lines are %v and %v", before, last)
	}
	if first := all[1]["loss"].(float64); first < 5 || first > 6.5 {
		t.Errorf("the first loss is %v, far from that of 256 equally likely bytes", first)
	}
}

// TestExpertLoads checks that a step of a model with experts has the load of each layer with experts: with two of four experts for each
// token, at least the mean, and at most twice the mean. With all four, it is the mean.
func TestExpertLoads(t *testing.T) {
	inBase(t)
	for top, most := range map[int]float64{2: 2, 4: 1} {
		set := []string{"model.family=qwen3_moe", "model.ffn=32", "model.num_experts=4", fmt.Sprintf("model.num_experts_per_tok=%d", top),
			"model.moe_intermediate_size=16", "model.mlp_only_layers=[0]", "schedule.expert_parallel=on", "train.steps=2"}
		args := []string{"run", "tiny.sppo", "--json"}
		for _, s := range set {
			args = append(args, "--set", s)
		}
		out, _ := sppovm(t, t.Context(), args...)
		steps := 0
		for _, o := range objects(t, out) {
			if _, step := o["loss"]; !step {
				continue
			}
			steps++
			load, _ := o["expert_load"].(map[string]any)
			if x, ok := load["layer.1"].(float64); len(load) != 1 || !ok || x < 1 || x > most {
				t.Errorf("top %d: expert_load is %v, not that of layer.1, from 1 to %g", top, o["expert_load"], most)
			}
		}
		if steps != 2 {
			t.Errorf("top %d: %d steps", top, steps)
		}
	}
}

// Every object of a simulation is marked as simulated, and none has a loss.
func TestSimulatedJSON(t *testing.T) {
	inBase(t)
	out, _ := sppovm(t, t.Context(), "run", "tiny.sppo", "--device", "sim", "--steps", "2", "--json")
	all := objects(t, out)
	step := []string{"simulated", "step", "step_s", "tokens_per_s"}
	done := []string{
		"bubble_ratio", "device_peak_bytes", "done", "exposed_transfer_s", "host_peak_bytes", "mfu", "simulated", "step_s_max",
		"step_s_median", "step_s_min", "steps", "tgs",
	}
	var got [][]string
	for _, o := range all {
		got = append(got, keys(o))
		if o["simulated"] != true {
			t.Errorf("%v does not say that it is simulated", o)
		}
	}
	if diff := cmp.Diff([][]string{step, step, done}, got); diff != "" {
		t.Error(diff)
	}
	real, _ := sppovm(t, t.Context(), "run", "tiny.sppo", "--steps", "1", "--json")
	measured := objects(t, real)
	last, run := all[len(all)-1], measured[len(measured)-1]
	if last["device_peak_bytes"] != run["device_peak_bytes"] || last["host_peak_bytes"] != run["host_peak_bytes"] {
		t.Errorf("simulated peaks %v and %v, measured %v and %v", last["device_peak_bytes"], last["host_peak_bytes"], run["device_peak_bytes"], run["host_peak_bytes"])
	}
}

// A job with documents and masks can be simulated, and a step takes as long as in the plan of the same spec.
func TestSimulatesDocuments(t *testing.T) {
	inBase(t)
	writeDocuments(t, "all", strings.Repeat("to be, or not to be: that is the question. aye.", 50))
	data := `train.data=tokens("all",documents=index,masks=on)`
	out, messages := sppovm(t, t.Context(), "run", "tiny.sppo", "--device", "sim", "--json", "--set", data)
	all := objects(t, out)
	if len(all) != 2 {
		t.Fatalf("%s\n%s", out, messages)
	}
	job, err := cli.OpenPlan("tiny.sppo", []string{data}, passes.Options{})
	if err == nil {
		err = job.Simulate()
	}
	if err != nil {
		t.Fatal(err)
	}
	if got, want := all[0]["step_s"].(float64), float64(job.Plan.Time.StepS); math.Abs(got-want) > 1e-9 {
		t.Errorf("a simulated step takes %g s, and the plan says %g s", got, want)
	}
}

// A run reports the memory peaks that the plan of the same spec predicts.
func TestPeaksArePlanned(t *testing.T) {
	inBase(t)
	out, _ := sppovm(t, t.Context(), "run", "tiny.sppo", "--json", "--steps", "1")
	all := objects(t, out)
	job, err := cli.OpenProgram(nil, "tiny.sppo", nil)
	if err != nil {
		t.Fatal(err)
	}
	device, host := cli.Peaks(&job.Plan.Memory)
	last := all[len(all)-1]
	if last["device_peak_bytes"] != float64(device) || last["host_peak_bytes"] != float64(host) {
		t.Errorf("run touched %v and %v bytes, planned are %d and %d", last["device_peak_bytes"], last["host_peak_bytes"], device, host)
	}
}

// losses returns the losses of the steps from the lines that --json prints.
func losses(t *testing.T, text string) []float64 {
	t.Helper()
	var out []float64
	for _, o := range objects(t, text) {
		if l, ok := o["loss"]; ok {
			out = append(out, l.(float64))
		}
	}
	return out
}

func TestResume(t *testing.T) {
	inBase(t)
	whole, _ := sppovm(t, t.Context(), "run", "tiny.sppo", "--json")
	first, _ := sppovm(t, t.Context(), "run", "tiny.sppo", "--json", "--steps", "2", "--save", "half.ckpt")
	second, _ := sppovm(t, t.Context(), "run", "tiny.sppo", "--json", "--resume", "half.ckpt")
	got := append(losses(t, first), losses(t, second)...)
	if diff := cmp.Diff(losses(t, whole), got); diff != "" {
		t.Errorf("two halves are not the whole:\n%s", diff)
	}
}

func TestSeed(t *testing.T) {
	inBase(t)
	run := func(args ...string) []float64 {
		out, _ := sppovm(t, t.Context(), append([]string{"run", "tiny.sppo", "--json", "--steps", "1"}, args...)...)
		return losses(t, out)
	}
	if diff := cmp.Diff(run("--seed", "7"), run("--set", "train.seed=7")); diff != "" {
		t.Errorf("--seed is not the spec's seed:\n%s", diff)
	}
	if cmp.Equal(run("--seed", "7"), run("--seed", "8")) {
		t.Error("two seeds give one loss")
	}
}

// A run that is asked to stop ends with a summary and a checkpoint.
func TestStop(t *testing.T) {
	inBase(t)
	ctx, cancel := context.WithCancel(t.Context())
	r, w := io.Pipe()
	go func() { // stops the run after its second step
		lines := bufio.NewScanner(r)
		for n := 0; lines.Scan(); n++ {
			if n == 2 {
				cancel()
			}
		}
	}()
	var errs bytes.Buffer
	code := app.Main(&cli.Env{Context: ctx, Stdout: w, Stderr: &errs}, []string{"run", "tiny.sppo", "--set", "train.steps=100000", "--json", "--save", "stop.ckpt"})
	w.Close()
	if code != cli.Done || !strings.Contains(errs.String(), "stopped after step ") {
		t.Errorf("exit %d\n%s", code, errs.String())
	}
	if _, err := os.Stat("stop.ckpt"); err != nil {
		t.Error(err)
	}
}

func TestInterrupt(t *testing.T) {
	inBase(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(self, "run", filepath.Join(".", "tiny.sppo"), "--set", "train.steps=1000000", "--json", "-q")
	c.Env = append(os.Environ(), asCommand+"=1")
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(time.Minute, func() { c.Process.Kill() })
	defer timer.Stop()
	lines := bufio.NewScanner(out)
	last := ""
	for n := 0; lines.Scan(); n++ {
		if last = lines.Text(); n == 3 {
			if err := c.Process.Signal(syscall.SIGINT); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := c.Wait(); c.ProcessState.ExitCode() != cli.Interrupted {
		t.Errorf("an interrupted run ends with %v", err)
	}
	if !strings.Contains(last, `"done":true`) {
		t.Errorf("the last line is %q", last)
	}
}

package main

import (
	"bytes"
	"math"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/cmd/internal/clitest"
)

// logged runs tiny.sppo with a log and returns its records.
func logged(t *testing.T, args ...string) []map[string]any {
	t.Helper()
	sppovm(t, t.Context(), append([]string{"run", "tiny.sppo", "-q", "--record", "run.jsonl"}, args...)...)
	text, err := os.ReadFile("run.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	return objects(t, string(text))
}

// A log starts with a record of the run; a resumed run appends another such record. The log contains every step
// once.
func TestLog(t *testing.T) {
	inBase(t)
	logged(t, "--steps", "2", "--save", "two.ckpt", "--tensorboard", "board")
	all := logged(t, "--resume", "two.ckpt", "--tensorboard", "board")
	run := []string{
		"batch", "device", "device_memory", "dp", "first", "host_memory", "machine", "parameters", "pp", "predicted", "ranks", "run",
		"sequence", "sp", "steps", "time", "version",
	}
	step := []string{"grad_norm", "loss", "lr", "split", "step", "step_s", "tokens_per_s"}
	var got [][]string
	var steps []any
	for _, o := range all {
		switch {
		case o["note"] != nil:
			continue // notes may change
		case o["loss"] != nil:
			steps = append(steps, o["step"])
		}
		got = append(got, keys(o))
	}
	validation, done := []string{"eval_loss", "step"}, []string{"bubble_ratio", "device_peak_bytes", "done", "final_loss", "host_peak_bytes", "steps"}
	if diff := cmp.Diff([][]string{run, validation, step, step, validation, done, run, step, step, validation, done}, got); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]any{1.0, 2.0, 3.0, 4.0}, steps); diff != "" {
		t.Error(diff)
	}
	if files, err := filepath.Glob("board/events.out.tfevents.*"); err != nil || len(files) != 2 {
		t.Errorf("event files %v: %v", files, err)
	}
	split := all[2]["split"].(map[string]any)
	sum := 0.0
	for _, share := range split {
		sum += share.(float64)
	}
	if len(split) != 4 || math.Abs(sum-1) > 1e-9 || split["compute"].(float64) <= 0 {
		t.Errorf("the split is %v", split)
	}
}

// The squared gradient norms of the layers add up to the squared norm of the whole gradient, however the job is
// divided.
func TestGradNorms(t *testing.T) {
	inBase(t)
	for _, set := range []string{"", "schedule.dp=2 schedule.sp=1 schedule.zero=3", "schedule.sp_mode=ulysses schedule.dp=2 schedule.pp=1", "model.tied=true model.dtype=bf16"} {
		os.Remove("run.jsonl")
		n := 0
		for _, o := range logged(t, append([]string{"--grad-norms", "2"}, sets(set)...)...) {
			norms, ok := o["grad_norms"].(map[string]any)
			if !ok {
				continue
			}
			n++
			sum := 0.0
			for _, v := range norms {
				sum += v.(float64) * v.(float64)
			}
			if want := o["grad_norm"].(float64); norms["layer.1"] == nil || math.Abs(math.Sqrt(sum)/want-1) > 1e-5 || o["step"] != float64(2*n) {
				t.Errorf("%s: step %v: %v make %g, and the norm is %g", set, o["step"], norms, math.Sqrt(sum), want)
			}
		}
		if n != 2 {
			t.Errorf("%s: norms of %d steps, want 2", set, n)
		}
	}
}

// The mean of the losses by position is the validation loss, however the job is divided.
func TestPositionLosses(t *testing.T) {
	inBase(t)
	for _, set := range []string{"", "schedule.dp=2 schedule.sp=1", "schedule.sp_mode=ring schedule.dp=1"} {
		os.Remove("run.jsonl")
		n := 0
		for _, o := range logged(t, append([]string{"--position-losses"}, sets(set)...)...) {
			buckets, ok := o["loss_by_position"].([]any)
			if !ok {
				continue
			}
			n++
			sum, tokens, next := 0.0, 0.0, 0.0
			for _, b := range buckets {
				bucket := b.(map[string]any)
				if bucket["first"] != next {
					t.Errorf("%s: a bucket begins at %v, want %v", set, bucket["first"], next)
				}
				next = bucket["last"].(float64) + 1
				sum += bucket["loss"].(float64) * bucket["tokens"].(float64)
				tokens += bucket["tokens"].(float64)
			}
			if want := o["eval_loss"].(float64); math.Abs(sum/tokens-want) > 1e-5 || next != 64 || len(buckets) != 7 {
				t.Errorf("%s: %d buckets up to %v make %g, and the loss is %g", set, len(buckets), next, sum/tokens, want)
			}
		}
		if n != 3 {
			t.Errorf("%s: %d validations, want 3", set, n)
		}
	}
}

func TestWatchFlags(t *testing.T) {
	inBase(t)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	_, port, _ := net.SplitHostPort(taken.Addr().String())
	for _, c := range []struct {
		args string
		code int
		want string
	}{
		{"--prometheus " + port, cli.Failed, "--prometheus: listen tcp 127.0.0.1:" + port},
		{"--prometheus 70000", cli.BadInput, "--prometheus 70000: ports end at 65535"},
		{"--record none/run.jsonl", cli.BadInput, "there is no folder none"},
		{"--tensorboard tiny.sppo", cli.BadInput, "--tensorboard: mkdir tiny.sppo: not a directory"},
		{"--grad-norms 1", cli.BadInput, "--grad-norms and --position-losses need --json"},
		{"--device sim --record run.jsonl", cli.BadInput, "which --device sim does not do"},
	} {
		var errs bytes.Buffer
		code := app.Main(&cli.Env{Context: t.Context(), Stdout: &bytes.Buffer{}, Stderr: &errs}, append([]string{"run", "tiny.sppo", "-q"}, strings.Fields(c.args)...))
		if code != c.code || !strings.Contains(errs.String(), c.want) {
			t.Errorf("%s: exit %d, %s", c.args, code, strconv.Quote(errs.String()))
		}
	}
	_, text := sppovm(t, t.Context(), "run", "tiny.sppo", "--steps", "1", "--prometheus", "0")
	if !strings.Contains(text, "metrics for Prometheus: http://127.0.0.1:") {
		t.Error(text)
	}
}

// report draws a page from the log of a run, and also from the output of run --json.
func TestReport(t *testing.T) {
	inBase(t)
	logged(t, "--steps", "3", "--grad-norms", "1")
	out, _ := sppovm(t, t.Context(), "run", "tiny.sppo", "-q", "--steps", "3", "--json")
	if err := os.WriteFile("lines.jsonl", []byte(out), 0o644); err != nil {
		t.Fatal(err)
	}
	for file, wants := range map[string][]string{
		"run.jsonl":   {"<h1>tiny</h1>", "done after step 3", "layer.1, step 3", "simulated on four"},
		"lines.jsonl": {"<h1>lines</h1>", "done after step 3", "Where the time of a step goes"},
	} {
		sppovm(t, t.Context(), "report", file, "-o", "page.html")
		page, err := os.ReadFile("page.html")
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range wants {
			if !strings.Contains(string(page), want) {
				t.Errorf("%s: no %q", file, want)
			}
		}
	}
	clitest.Hostile(t, &app, "x.jsonl", nil, "sppovm report x.jsonl -o none.html")
	var errs bytes.Buffer
	code := app.Main(&cli.Env{Context: t.Context(), Stdout: &bytes.Buffer{}, Stderr: &errs}, []string{"report", "run.jsonl", "-o", "run.jsonl"})
	if code != cli.BadInput || !strings.Contains(errs.String(), "it is also an input") {
		t.Errorf("exit %d: %s", code, errs.String())
	}
}

// A resumed run names the checkpoint that it continues from, and each note has the step that it is about.
func TestNotesHaveSteps(t *testing.T) {
	inBase(t)
	logged(t, "--steps", "2", "--save", "run1", "--save-every", "1")
	if _, text := sppovm(t, t.Context(), "run", "tiny.sppo", "--steps", "3", "--resume", "run1", "--record", "run.jsonl"); !strings.Contains(text, "resumed from run1/step-2\n") {
		t.Errorf("no checkpoint is named:\n%s", text)
	}
	text, err := os.ReadFile("run.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	steps := map[string]float64{}
	for _, o := range objects(t, string(text)) {
		if note, ok := o["note"].(string); ok {
			name, _, _ := strings.Cut(note, ":")
			steps[name] = o["step"].(float64)
		}
	}
	for name, want := range map[string]float64{"saved run1/step-1": 1, "saved run1/step-2": 2, "resumed from run1/step-2": 2} {
		if steps[name] != want {
			t.Errorf("the note %q has step %v, want %v: %v", name, steps[name], want, steps)
		}
	}
}

// If a killed run left an incomplete line at the end of a log, the next record still gets a line of its own.
func TestLogAfterKill(t *testing.T) {
	inBase(t)
	logged(t, "--steps", "2", "--save", "two.ckpt")
	info, err := os.Stat("run.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate("run.jsonl", info.Size()-20); err != nil {
		t.Fatal(err)
	}
	sppovm(t, t.Context(), "run", "tiny.sppo", "-q", "--record", "run.jsonl", "--resume", "two.ckpt")
	sppovm(t, t.Context(), "report", "run.jsonl", "-o", "page.html")
	if page, err := os.ReadFile("page.html"); err != nil || !strings.Contains(string(page), "continued after step 2") {
		t.Error("the page does not show that the run went on", err)
	}
}

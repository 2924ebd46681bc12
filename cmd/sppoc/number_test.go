package main

import (
	"bytes"
	"encoding/json"
	"io"
	"math"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/lang"
)

// answer runs a command and returns its output.
func answer(t *testing.T, args ...string) []byte {
	t.Helper()
	var out bytes.Buffer
	env := &cli.Env{Context: t.Context(), Stdout: &out, Stderr: io.Discard}
	if code := app.Main(env, args); code != cli.Done {
		t.Fatalf("%v: exit %d", args, code)
	}
	return out.Bytes()
}

// The commands plan and compare report the same figures for a job. The parts of the critical path add up to the
// time of the step.
func TestOneNumber(t *testing.T) {
	for _, job := range [][]string{
		{"../../examples/tiny.sppo"},
		{"../../examples/tiny.sppo", "schedule.strategy=zb-h1", "schedule.mux=off"},
		{"../../examples/llama-docs.sppo"},
		{"../../examples/paper/gpt-7b-512k.sppo", "model.layers=8"},
		{"../../examples/paper/gpt-7b-512k.sppo", "model.layers=8", "schedule.offload=full", "cluster.d2h_bandwidth=3GB/s"},
	} {
		var set []string
		for _, s := range job[1:] {
			set = append(set, "--set", s)
		}
		var plan plan.Plan
		if err := json.Unmarshal(answer(t, append([]string{"plan", job[0], "--json"}, set...)...), &plan); err != nil {
			t.Fatal(err)
		}
		var table struct{ Rows []result }
		if err := json.Unmarshal(answer(t, append([]string{"compare", job[0], "--format", "json"}, set...)...), &table); err != nil {
			t.Fatal(err)
		}
		r := table.Rows[0]
		for _, x := range []struct {
			what      string
			plan, row float64
		}{
			{"step", float64(plan.Time.StepS), r.StepS}, {"bubble", plan.Time.BubbleRatio, r.BubbleRatio},
			{"exposed", float64(plan.Time.ExposedTransferS), r.ExposedS}, {"TGS", plan.Throughput.TGS, r.TGS}, {"MFU", plan.Throughput.MFU, r.MFU},
		} {
			if x.plan != x.row {
				t.Errorf("%v: plan says %s %g, compare %g", job, x.what, x.plan, x.row)
			}
		}
		path := 0.0
		for _, c := range plan.Time.CriticalPath {
			path += float64(c.Seconds)
		}
		if step := float64(plan.Time.StepS); !plan.Time.Simulated || math.Abs(path/step-1) > 1e-9 || plan.Time.EstimateS <= 0 {
			t.Errorf("%v: simulated %v: a path of %g s in a step of %g s, estimated as %s", job, plan.Time.Simulated, path, step, plan.Time.EstimateS)
		}
		idle := plan.Time.BubbleRatio / (1 + plan.Time.BubbleRatio)
		if exposed := plan.Time.IdleShare - idle; exposed > 1e-9 || plan.Time.ExposedTransferS == 0 && exposed < -1e-9 {
			t.Errorf("%v: a bubble of %g and an idle share of %g", job, plan.Time.BubbleRatio, plan.Time.IdleShare)
		}
	}
}

// The output of plan --why-idle names ranks, streams, instructions and tasks, and what would shorten a step.
func TestWhyIdle(t *testing.T) {
	text := string(answer(t, "plan", "../../examples/tiny.sppo", "--why-idle"))
	for _, want := range []string{
		"What would shorten a step of 4.24 ms", "collectives ", "\n  --set schedule.sp=1: ",
		"rank 0 compute 339: wait in B0.3@0 layer 0", "rank 0 recv_next 310: recv in B0.3@0 of m0.s3.l0.d.out", "which waited for\n    rank 2 compute",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("there is no %q in\n%s", want, text[strings.Index(text, "Why:"):])
		}
	}
	searched := string(answer(t, "plan", "../../examples/tiny.sppo", "--why-idle", "--set", "schedule.sp=auto", "--set", "schedule.subsequences=auto", "--set", "schedule.pp=auto", "--set", "schedule.offload=auto"))
	if want := "None of the settings that were tried is faster: the search has chosen"; !strings.Contains(searched, want) {
		t.Errorf("there is no %q in\n%s", want, searched)
	}
	alone := string(answer(t, "plan", "../../examples/tiny.sppo", "--why-idle", "--set", "schedule.pp=1", "--set", "schedule.sp=1", "--set", "schedule.offload=none", "--set", "schedule.dp=1"))
	if !strings.Contains(alone, "No rank waits.") {
		t.Errorf("a single rank waits:\n%s", alone[strings.Index(alone, "Why:"):])
	}
}

// All keys that affect work exist.
func TestKeysOfWork(t *testing.T) {
	keys := 0
	for sort := range sim.NumSorts {
		for _, name := range sort.Keys() {
			keys++
			if lang.FindKey("schedule."+name) == nil {
				t.Errorf("%s: a schedule has no key %s", sort, name)
			}
		}
	}
	if keys < 8 {
		t.Errorf("only %d keys", keys)
	}
}

// TestTimePasses checks that --time-passes lists the passes of each command in their order after the unchanged output.
func TestTimePasses(t *testing.T) {
	const tiny = "../../examples/tiny.sppo"
	row := regexp.MustCompile(`(?m)^ +\d+\.\d{3} +\d+\.\d% +(\S+)$`)
	for command, want := range map[string]string{
		"check " + tiny: "read total",
		"plan " + tiny:  "read solve partition schedule lifespan offload mux lower place sync simulate hints total",
		"build " + tiny + " -o " + filepath.Join(t.TempDir(), "tiny.sppb"): "read solve partition schedule lifespan offload mux lower place sync verify total",
		"plan " + tiny + " --min-gpus":                                     "search total",
	} {
		var out, times bytes.Buffer
		args := strings.Fields(command)
		if code := app.Main(&cli.Env{Context: t.Context(), Stdout: &out, Stderr: &times}, append(args, "--time-passes")); code != cli.Done {
			t.Fatalf("%s: exit %d: %s", command, code, &times)
		}
		if plain := answer(t, args...); !bytes.Equal(plain, out.Bytes()) {
			t.Errorf("%s prints\n%swith --time-passes, and otherwise\n%s", command, &out, plain)
		}
		var names []string
		for _, m := range row.FindAllStringSubmatch(times.String(), -1) {
			names = append(names, m[1])
		}
		if got := strings.Join(names, " "); got != want {
			t.Errorf("%s lists %s, want %s\n%s", command, got, want, &times)
		}
	}
}

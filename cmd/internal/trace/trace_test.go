package trace_test

import (
	"bytes"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/cmd/internal/trace"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

func open(t *testing.T, set ...string) *ir.Program {
	t.Helper()
	job, err := cli.OpenProgram(nil, "../../../examples/tiny.sppo", set)
	if err != nil {
		t.Fatal(err)
	}
	return job.Program
}

func run(t *testing.T, p *ir.Program) *sim.Timeline {
	t.Helper()
	timeline, err := sim.Run(p, ir.SectionStep, sim.Options{Spans: true, NoFold: true})
	if err != nil {
		t.Fatal(err)
	}
	return timeline
}

// A measured timeline is read back accurately to the nanosecond, even if the program has since been compiled for a
// different cluster. Simulated timelines, and those of other programs, are refused.
func TestReadIsTheInverseOfWrite(t *testing.T) {
	p := open(t)
	timeline := run(t, p)
	var simulated, measured bytes.Buffer
	ranks := []int{0, 1, 2, 3}
	if err := trace.Write(&simulated, p, timeline, ranks); err != nil {
		t.Fatal(err)
	}
	timeline.Measured, timeline.Round = "a device", 7
	if err := trace.Write(&measured, p, timeline, ranks); err != nil {
		t.Fatal(err)
	}
	for _, other := range []*ir.Program{p, open(t, "cluster.nvlink_bandwidth=1GB/s", "train.steps=3")} {
		got, err := trace.Read(bytes.NewReader(measured.Bytes()), other)
		if err != nil {
			t.Fatal(err)
		}
		if got.Measured != "a device" || got.Round != 7 || math.Abs(float64(got.Makespan-timeline.Makespan)) > 2e-9 {
			t.Errorf("%q, step %d of %v, not %v", got.Measured, got.Round, got.Makespan, timeline.Makespan)
		}
		for r := range p.Ranks {
			for pc, span := range timeline.Rank(r).Spans {
				if s := got.Rank(r).Spans[pc]; math.Abs(float64(s.Begin-span.Begin)) > 2e-9 || math.Abs(float64(s.End-span.End)) > 2e-9 {
					t.Fatalf("rank %d, pc %d: %v, not %v", r, pc, s, span)
				}
			}
		}
	}
	for want, read := range map[string]func() (*sim.Timeline, error){
		"it is a simulated":  func() (*sim.Timeline, error) { return trace.Read(&simulated, p) },
		"on another program": func() (*sim.Timeline, error) { return trace.Read(&measured, open(t, "schedule.offload=none")) },
		"not a trace":        func() (*sim.Timeline, error) { return trace.Read(strings.NewReader("[1, 2]"), p) },
	} {
		if _, err := read(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// Traces are distinguished from plans, which are also JSON.
func TestIs(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"trace.json": `{"displayTimeUnit":"ms","otherData":{}`, "plan.json": `{"name": "tiny"}`, "empty.json": ""} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if got := trace.Is(path); got != (name == "trace.json") {
			t.Errorf("%s: %v", name, got)
		}
	}
	if trace.Is(filepath.Join(dir, "none")) {
		t.Error("what is not there is no trace")
	}
}

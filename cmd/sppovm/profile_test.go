package main

import (
	"os"
	"strings"
	"testing"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/cmd/internal/trace"
	"sppo.dev/internal/train"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// readProfile reads the profile that a run of a spec wrote.
func readProfile(t *testing.T, spec, file string) (*ir.Program, *sim.Timeline) {
	t.Helper()
	job, err := cli.OpenProgram(nil, spec, nil)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	got, err := trace.Read(f, job.Program)
	if err != nil {
		t.Fatal(err)
	}
	return job.Program, got
}

// A profile holds every instruction of the last step, and the instructions of a stream do not overlap.
func TestProfile(t *testing.T) {
	inBase(t)
	_, stderr := sppovm(t, t.Context(), "run", "tiny.sppo", "--steps", "2", "--profile", "tiny.json")
	if !strings.Contains(stderr, "tiny.json: step 2 took ") || strings.Count(stderr, " simulated  ") != mostOpcodes || !strings.Contains(stderr, "\n  matmul ") {
		t.Error(stderr)
	}
	program, got := readProfile(t, "tiny.sppo", "tiny.json")
	if got.Round != 2 || !strings.HasPrefix(got.Measured, "cpu, ") || got.Makespan <= 0 {
		t.Errorf("step %d on %s took %s", got.Round, got.Measured, got.Makespan)
	}
	for r := range program.Ranks {
		var ends [ir.NumStreams]ir.Seconds
		for pc, span := range got.Rank(r).Spans {
			in := &program.Codes[program.Ranks[r].Code].Sections[ir.SectionStep][pc]
			if span.End < span.Begin || span.End > got.Makespan || in.Info().Class != ir.ClassSync && span.End == 0 {
				t.Fatalf("rank %d, pc %d: %v", r, pc, span)
			}
			if span.Begin < ends[in.Stream]-2e-9 {
				t.Fatalf("rank %d, pc %d begins at %v, the one before ends at %v", r, pc, span.Begin, ends[in.Stream])
			}
			ends[in.Stream] = span.End
		}
	}
}

// If measuring slows steps down, only a few steps and the profiled one are measured.
func TestSampled(t *testing.T) {
	wanted := sampled(7)
	for step, want := range map[int64]bool{1: false, 2: true, 3: false, 7: true, 99: false, 100: true, 300: true} {
		if wanted(ir.SectionStep, step) != want || wanted(ir.SectionEval, step) {
			t.Errorf("step %d: measured %v, want %v", step, !want, want)
		}
	}
}

// If only some steps are measured, the meter counts only these, and keeps the timelines of the last measured step.
func TestMeterOfSomeSteps(t *testing.T) {
	inBase(t)
	job, err := cli.OpenProgram(nil, "tiny.sppo", nil)
	if err != nil {
		t.Fatal(err)
	}
	meter := newBubbleMeter(job.Program)
	meter.wanted = sampled(0)
	j, err := train.Open(job.Program, func(rank int) (vm.Device, error) { return meter.wrap(rank, cpu.New(nil)), nil }, train.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := j.Init(t.Context()); err != nil {
		t.Fatal(err)
	}
	for step := range 3 {
		if _, err := j.Step(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := meter.add(); err != nil {
			t.Fatal(err)
		}
		if measured := step+1 >= 2; measured != (meter.ratio() > 0) || measured != (len(meter.last) > 0 && meter.last[0].Round == 2) {
			t.Errorf("behind step %d: ratio %g of %d timelines", step+1, meter.ratio(), len(meter.last))
		}
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
}

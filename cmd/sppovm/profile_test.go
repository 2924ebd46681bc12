package main

import (
	"os"
	"strings"
	"testing"

	"sppo/cmd/internal/cli"
	"sppo/cmd/internal/trace"
	"sppo/ir"
)

// A profile holds every instruction of the last step, in the order of its stream.
func TestProfile(t *testing.T) {
	inBase(t)
	_, stderr := sppovm(t, t.Context(), "run", "tiny.sppo", "--steps", "2", "--profile", "tiny.json")
	if !strings.Contains(stderr, "tiny.json: step 2 took ") {
		t.Error(stderr)
	}
	job, err := cli.OpenProgram("tiny.sppo", nil)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open("tiny.json")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	got, err := trace.Read(f, job.Program)
	if err != nil {
		t.Fatal(err)
	}
	if got.Round != 2 || !strings.HasPrefix(got.Measured, "cpu, ") || got.Makespan <= 0 {
		t.Errorf("step %d on %s took %s", got.Round, got.Measured, got.Makespan)
	}
	for r := range job.Program.Ranks {
		var ends [ir.NumStreams]ir.Seconds
		for pc, span := range got.Rank(r).Spans {
			in := &job.Program.Codes[job.Program.Ranks[r].Code].Sections[ir.SectionStep][pc]
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

package main

import (
	"encoding/json"
	"io"
	"math"
	"os"
	"testing"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/ir"
)

// Viewers can read a trace: the slices of a thread do not overlap, every arrow has a start and an end, and no
// instruction that does work is missing.
func TestTrace(t *testing.T) {
	out := t.TempDir() + "/trace.json"
	env := &cli.Env{Context: t.Context(), Stdout: io.Discard, Stderr: io.Discard}
	if code := app.Main(env, []string{"trace", "testdata/base/tiny.sppo", "-o", out}); code != cli.Done {
		t.Fatalf("exit %d", code)
	}
	data, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	var trace struct {
		OtherData struct{ Simulated bool }
		Events    []struct {
			Phase    string `json:"ph"`
			Process  int    `json:"pid"`
			Thread   int    `json:"tid"`
			Name, ID string
			TS, Dur  float64
			Args     struct {
				Bytes int64
				Spec  string
			}
		} `json:"traceEvents"`
	}
	if err := json.Unmarshal(data, &trace); err != nil {
		t.Fatal(err)
	}
	job, err := cli.OpenProgram(nil, "testdata/base/tiny.sppo", nil)
	if err != nil {
		t.Fatal(err)
	}
	working, slices := 0, 0
	for _, r := range job.Program.Ranks {
		for _, in := range job.Program.Codes[r.Code].Sections[ir.SectionStep] {
			if in.Info().Class != ir.ClassSync {
				working++
			}
		}
	}
	ends := map[[2]int]int64{}
	nanos := func(micros float64) int64 { return int64(math.Round(1000 * micros)) }
	arrows := map[string]int{}
	for _, e := range trace.Events {
		switch e.Phase {
		case "X":
			at := [2]int{e.Process, e.Thread}
			if nanos(e.TS) < ends[at] {
				t.Fatalf("%s begins at %d ns before %d on %v", e.Name, nanos(e.TS), ends[at], at)
			}
			ends[at] = nanos(e.TS) + nanos(e.Dur)
			if e.Name[:4] != "wait" {
				slices++
			}
			if e.Args.Spec == "" {
				t.Fatalf("%s has no spec line", e.Name)
			}
		case "s":
			arrows[e.ID]++
		case "f":
			arrows[e.ID] += 100
		}
	}
	if !trace.OtherData.Simulated || slices != working || len(arrows) == 0 {
		t.Errorf("simulated %v, %d slices of %d, %d arrows", trace.OtherData.Simulated, slices, working, len(arrows))
	}
	for id, n := range arrows {
		if n != 101 {
			t.Errorf("arrow %s: %d", id, n)
		}
	}
}

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"sppo.dev/internal/vm/vmtest"
	"sppo.dev/ir"
)

// told logs a row of the table that make gpu-planted prints.
func told(t *testing.T, stage, mistake, report string) {
	t.Helper()
	t.Logf("PLANTED| %s | %s | %s |", stage, mistake, report)
}

// The comparison of a reference with its steps on the CPU detects attention with a wrong output, dq, dk or dv, and a
// GPU that computes the same in another run does not fail it.
func TestPlantedReferences(t *testing.T) {
	dir := t.TempDir()
	text, err := os.ReadFile("../../LICENSE") // a text that does not change
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, referenceText), text, 0o644); err != nil {
		t.Fatal(err)
	}
	steps := 2
	if os.Getenv("SPPO_LONG") != "" {
		steps = 100
	}
	for _, r := range references {
		run := func(change int) []stepLine {
			p, err := r.program("../../examples")
			if err != nil {
				t.Fatal(err)
			}
			if change >= 0 {
				vmtest.Zero(p, vmtest.AttentionResults[change].Op, vmtest.AttentionResults[change].Operand)
			}
			out, err := cpuSteps(p, dir, steps)
			if err != nil {
				t.Fatal(err)
			}
			return out
		}
		want := run(-1)
		if worst, err := r.same(want, want); err != nil {
			t.Errorf("%s: %g, %v", r.name, worst, err)
		}
		for i, m := range vmtest.AttentionResults {
			worst, err := r.same(run(i), want)
			if err == nil || worst < 1.5 {
				t.Errorf("%s: %s = 0 is within %.2g of the tolerance", r.name, m.Operand, worst)
				continue
			}
			told(t, "training", fmt.Sprintf("%s of %s is 0 on the cpu device", m.Operand, ir.Ops[m.Op].Name), fmt.Sprintf("%s: %v", r.name, err))
		}
	}
}

package main

import (
	"math"
	"os"
	"regexp"
	"testing"

	"sppo.dev/internal/compile"
	"sppo.dev/internal/irtest"
	"sppo.dev/internal/passes"
)

func TestMain(m *testing.M) {
	if err := os.Chdir("../.."); err != nil { // all paths are relative to the root of the repository
		panic(err)
	}
	irtest.Main(m)
}

// The page matches the program's output. The test predicts one row again, or all rows if SPPO_LONG is set.
func TestPage(t *testing.T) {
	old, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	for i := range records {
		if _, ok := rowOf(string(old), &records[i]); !ok {
			t.Fatalf("%s has no row of %s: make records", page, records[i].name)
		}
	}
	wanted := regexp.MustCompile("^TRL$")
	if os.Getenv("SPPO_LONG") != "" {
		wanted = regexp.MustCompile("")
	}
	text, err := render(string(old), wanted)
	if err != nil {
		t.Fatal(err)
	}
	irtest.Golden(t, page, []byte(text))
}

// The ceiling counts the same FLOPs as the plan of the same job, and the plan's speed does not exceed the ceiling.
func TestCeiling(t *testing.T) {
	for _, r := range records {
		if r.name != "TRL" && r.name != "Memo" { // a llama and a gpt, which take only a second to plan
			continue
		}
		spec, err := r.spec(r.sequence)
		if err != nil {
			t.Fatal(err)
		}
		plan, err := compile.Plan(spec, passes.Options{Fitting: true})
		if err != nil {
			t.Fatal(err)
		}
		c, planned := ceilingOf(spec), plan.Throughput
		if got, want := c.mfu/c.tgs*spec.Cluster.PeakBF16, planned.ModelFlops/float64(r.sequence); math.Abs(got-want) > 1e-6*want {
			t.Errorf("%s: %g FLOPs a token, %g in the plan", r.name, got, want)
		}
		if planned.TGS > c.tgs || planned.TGS < c.tgs/2 {
			t.Errorf("%s: %g tokens/s per GPU are planned, and %g are the ceiling", r.name, planned.TGS, c.tgs)
		}
	}
}

package main

import (
	"math"
	"os"
	"regexp"
	"strings"
	"testing"

	"sppo.dev/internal/irtest"
)

func TestMain(m *testing.M) {
	if err := os.Chdir("../.."); err != nil { // all paths are relative to the root of the repository
		panic(err)
	}
	irtest.Main(m)
}

// The page and its charts match the stored results.
func TestPage(t *testing.T) {
	r, err := readResults()
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	files, err := r.render(string(text))
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range files {
		if strings.HasSuffix(name, ".svg") && strings.Contains(want, "NaN") {
			t.Errorf("%s has a coordinate that is not a number", name)
		}
		irtest.Golden(t, name, []byte(want))
	}
	if list, err := jobs(); err != nil || len(list) != len(r.Jobs) {
		t.Errorf("there are %d jobs and %d results (%v): make paper", len(list), len(r.Jobs), err)
	}
}

// In no row is the solver's choice slower than another schedule that fits.
func TestFreeIsFastest(t *testing.T) {
	r, err := readResults()
	if err != nil {
		t.Fatal(err)
	}
	for key, o := range r.Jobs {
		row, system, _ := strings.Cut(key, ", ")
		if best := r.Jobs[row+", "+free]; o.Fits && o.TGS > best.TGS && !strings.HasSuffix(system, "GB/s") {
			t.Errorf("%s: %.4g tokens/s per GPU, and %.4g left alone", key, o.TGS, best.TGS)
		}
	}
}

// Simulated figures are within 3% of those computed by hand.
func TestFiguresByHand(t *testing.T) {
	r, err := readResults()
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range worked {
		if o := r.Jobs["gpt-7b-512k, "+w.system]; o.Error != "" || math.Abs(o.StepS-w.byHand) > 0.03*w.byHand {
			t.Errorf("%s: %.1f s are simulated and %.1f s worked out by hand %s", w.system, o.StepS, w.byHand, o.Error)
		}
	}
}

// The stored results are within 2% of those of today's compiler and cost model. The test checks the quick jobs, or
// all jobs if SPPO_LONG is set.
func TestResults(t *testing.T) {
	wanted := regexp.MustCompile(`^gpt-7b-512k, (megatron, m = 8|deepspeed-ulysses|fpdt|sppo|sppo interleaved)$|^longest, (megatron tuned|sppo), 32 GPUs$`)
	if os.Getenv("SPPO_LONG") != "" {
		wanted = regexp.MustCompile("")
	}
	known, err := readResults()
	if err != nil {
		t.Fatal(err)
	}
	today := &results{}
	if err := today.fill(wanted); err != nil {
		t.Fatal(err)
	}
	near := func(a, b float64) bool { return math.Abs(a-b) <= 0.02*math.Abs(b) }
	for key, o := range today.Jobs {
		if was := known.Jobs[key]; !near(was.TGS, o.TGS) || !near(float64(was.Device), float64(o.Device)) || was.Fits != o.Fits || was.Error != o.Error {
			t.Errorf("%s: %+v is written, %+v comes out: make paper", key, was, o)
		}
	}
	for key, n := range today.Longest {
		if was := known.Longest[key]; !near(float64(was), float64(n)) && was-n != searchStep && n-was != searchStep {
			t.Errorf("%s: %d is written, %d comes out: make paper", key, was, n)
		}
	}
}

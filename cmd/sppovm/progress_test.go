package main

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"sppo.dev/cmd/sppovm/internal/watch"
	"sppo.dev/internal/train/probe"
	"sppo.dev/ir"
)

// On a terminal, the line of a step overwrites that of the previous step; a permanent line is printed below the
// line of the last step.
func TestProgressOnATerminal(t *testing.T) {
	var out strings.Builder
	s := progress{text: &out, rewrite: true, steps: 3}
	s.begin(0)
	for step := 1; step <= 3; step++ {
		s.step(&watch.Step{Step: step, Loss: 5})
	}
	s.validation(&watch.Validation{Step: 3, Loss: 4})
	got := out.String()
	if strings.Count(got, "\r") != 3 || strings.Count(got, "\n") != 2 || !strings.HasSuffix(got, "\x1b[K\nstep 3  validation loss 4.0000\n") {
		t.Errorf("%q", got)
	}
}

// If the output is not a terminal, every line is permanent: at most one line per second for steps, but always
// one for the last step.
func TestProgressInAFile(t *testing.T) {
	var out strings.Builder
	s := progress{text: &out, steps: 1000}
	s.begin(0)
	s.shown = time.Now()
	for step := 1; step <= 1000; step++ {
		s.step(&watch.Step{Step: step, Loss: 5})
	}
	if got := out.String(); strings.Contains(got, "\r") || strings.Count(got, "\n") > 3 || !strings.Contains(got, "step 1000/1000  loss 5.0000") {
		t.Errorf("%q", got)
	}
}

// On a terminal, a line says what is measured now, and is replaced by the next one and by results. Elsewhere, there is at most one
// such line per second.
func TestProgressOfMeasurements(t *testing.T) {
	item := probe.Item{Name: "matmul " + strings.Repeat("x", 80)}
	for _, terminal := range []bool{true, false} {
		var out strings.Builder
		s := progress{text: &out, rewrite: terminal}
		for i := range 3 {
			s.measuring(item, 2, i+1, 9)
			s.shown = time.Now()
		}
		sayTiming(&s, probe.Timing{Item: probe.Item{Name: "copy"}, Ranks: 1, Works: []ir.Work{{}}})
		text := "measurement 1 of 9: " + item.Name + " on 2 ranks\n"
		got, lines := out.String(), []string{text, "copy on 1 rank: "}
		if terminal {
			lines = nil
			for i := range 3 {
				lines = append(lines, fmt.Sprintf("\rmeasurement %d of 9: %s...\x1b[K", i+1, item.Name[:79-3-20]))
			}
			lines = append(lines, "\r\x1b[Kcopy on 1 rank: ")
		}
		if want := strings.Join(lines, ""); !strings.HasPrefix(got, want) {
			t.Errorf("terminal %t: %q\nwant %q", terminal, got, want)
		}
	}
}

// JSON cannot express NaN or infinities; they become null.
func TestNumbersThatAreNone(t *testing.T) {
	var out strings.Builder
	s := progress{text: &strings.Builder{}, steps: 1}
	s.watchers.Add("--json", &watch.Lines{W: &out, Results: true})
	s.begin(0)
	s.step(&watch.Step{Step: 1, Loss: number(math.NaN()), GradNorm: number(math.Inf(1)), Seconds: 0.5, TokensPerSecond: 2, LR: 1})
	if want := `{"step":1,"loss":null,"tokens_per_s":2,"step_s":0.5,"grad_norm":null,"lr":1}` + "\n"; out.String() != want {
		t.Errorf("%q, want %q", out.String(), want)
	}
}

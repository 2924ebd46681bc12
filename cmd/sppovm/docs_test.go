package main

import (
	"bytes"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/ir"
)

// The output of a run in README.md is what a run now prints, except for times and tiny differences in losses.
// -update replaces the output in README.md.
func TestRunInREADME(t *testing.T) {
	t.Chdir("../..")
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	const begin = "    $ sppovm run out/tiny.sppb\n"
	_, shown, found := strings.Cut(string(text), begin)
	shown, _, ended := strings.Cut(shown, "\n\n")
	if !found || !ended {
		t.Fatalf("README.md has no run behind %q", begin)
	}
	job, err := cli.OpenProgram(nil, "examples/tiny.sppo", nil)
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(t.TempDir(), "tiny.sppb")
	var errs bytes.Buffer
	env := &cli.Env{Context: t.Context(), Stdout: io.Discard, Stderr: &errs}
	if err := ir.WriteFile(program, job.Program); err != nil {
		t.Fatal(err)
	}
	if code := app.Main(env, []string{"run", program}); code != cli.Done {
		t.Fatalf("exit %d: %s", code, &errs)
	}
	if *update {
		now := begin + "    " + strings.ReplaceAll(strings.TrimSpace(errs.String()), "\n", "\n    ")
		if err := os.WriteFile("README.md", []byte(strings.Replace(string(text), begin+shown, now, 1)), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, wantLosses := withoutTimes(strings.ReplaceAll(shown, "\n    ", "\n"))
	got, losses := withoutTimes(errs.String())
	if strings.TrimSpace(want) != strings.TrimSpace(got) {
		t.Errorf("README.md shows\n%s\nand a run says\n%s", want, got)
	}
	for i := range min(len(losses), len(wantLosses)) {
		if math.Abs(losses[i]-wantLosses[i]) > 1e-3 {
			t.Errorf("README.md shows the losses %v, and those of a run are %v", wantLosses, losses)
			break
		}
	}
}

var (
	lossShown = regexp.MustCompile(`loss [0-9.]+`)
	timeShown = regexp.MustCompile(`[0-9.]+( [KM])? tokens/s|[0-9hms.]+s left|steps in [0-9hms.]+s|bubble [0-9]+%|device cpu, .*`)
)

// withoutTimes replaces everything that varies between runs or machines with a dash, or drops the line. It also
// returns the losses.
func withoutTimes(text string) (string, []float64) {
	var lines []string
	var losses []float64
	for line := range strings.Lines(text) {
		if step, _, ok := strings.Cut(strings.TrimSpace(line), "/"); ok && strings.HasPrefix(step, "step ") && step != "step 1" && step != "step 10" {
			continue // which other steps are printed depends on timing
		}
		for _, m := range lossShown.FindAllString(line, -1) {
			v, _ := strconv.ParseFloat(strings.TrimPrefix(m, "loss "), 64)
			losses = append(losses, v)
		}
		lines = append(lines, strings.TrimSpace(timeShown.ReplaceAllString(lossShown.ReplaceAllString(line, "loss -"), "-")))
	}
	return strings.Join(lines, "\n"), losses
}

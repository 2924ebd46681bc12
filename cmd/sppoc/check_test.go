package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// withInput runs sppoc with a text as standard input.
func withInput(t *testing.T, text string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "in")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	in, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	before := os.Stdin
	os.Stdin = in
	defer func() { os.Stdin = before }()
	var out, errs bytes.Buffer
	code = app.Main(&cli.Env{Context: t.Context(), Stdout: &out, Stderr: &errs}, args)
	return code, out.String(), errs.String()
}

// A spec can be read from standard input. Without a terminal, success prints nothing.
func TestCheckReadsStandardInput(t *testing.T) {
	spec, err := os.ReadFile("../../examples/tiny.sppo")
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir("../../examples") // imports and data are relative to this folder
	for text, want := range map[string]string{string(spec): "", strings.Replace(string(spec), "train {", "train { stepps = 1", 1): "standard input:"} {
		code, out, errs := withInput(t, text, "check", "-")
		if out != "" || (code == cli.Done) != (want == "") || !strings.Contains(errs, want) {
			t.Errorf("exit %d\n%s%s", code, out, errs)
		}
	}
}

func TestFmtReadsStandardInput(t *testing.T) {
	if code, out, errs := withInput(t, "train {\nsteps=1 }\n", "fmt", "-"); code != cli.Done || out != "train {\n  steps = 1\n}\n" || errs != "" {
		t.Errorf("exit %d\n%s%s", code, out, errs)
	}
	if code, out, _ := withInput(t, "train {\nsteps=1 }\n", "fmt", "-l", "-"); code != cli.Failed || out != "standard input\n" {
		t.Errorf("exit %d\n%s", code, out)
	}
	if code, _, errs := withInput(t, "train {\n", "fmt", "-"); code != cli.BadInput || !strings.HasPrefix(errs, "standard input:1:7: error: ") {
		t.Errorf("exit %d\n%s", code, errs)
	}
}

// Every label and heading of a report is explained.
func TestReportWordsAreExplained(t *testing.T) {
	labels := []string{"N", "device memory", "host memory", "candidates", "order", "K and V", "recompute", "checkpoints", "training", "exposed copies", "critical path"}
	for part := range ir.NumParts {
		labels = append(labels, part.String())
	}
	for sort := range sim.NumSorts {
		labels = append(labels, sim.Sort(sort).String())
	}
	var out bytes.Buffer
	if code := app.Main(&cli.Env{Context: t.Context(), Stdout: &out, Stderr: &out}, []string{"plan", "testdata/base/tiny.sppo", "--long"}); code != cli.Done {
		t.Fatal(out.String())
	}
	text, _, _ := strings.Cut(out.String(), "Largest buffers")
	columns := regexp.MustCompile(`  +`)
	for _, line := range strings.Split(text, "\n") {
		if cells := columns.Split(strings.TrimSpace(line), -1); strings.HasPrefix(line, "  ") && regexp.MustCompile(`^[A-Za-z]`).MatchString(cells[0]) {
			labels = append(labels, cells[0])
			if cells[0] == "stage" {
				labels = append(labels, slices.DeleteFunc(cells[1:], func(cell string) bool { return len(cell) < 2 })...)
			}
		}
	}
	if len(labels) < 40 {
		t.Errorf("only %d labels were found: %q", len(labels), labels)
	}
	for _, label := range labels {
		if _, err := explanation(label); err != nil && label != "total" && label != "share" && label != "other" {
			t.Error(err)
		}
	}
}

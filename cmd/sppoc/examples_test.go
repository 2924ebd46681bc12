package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/codegen"
	"sppo.dev/internal/irtest"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

const examplesReport = "../../examples/REPORT.md"

// The plans of the shipped examples are recorded in a report, so that the effect of every change to a pass,
// formula or placement is visible.
func TestExamplesReport(t *testing.T) {
	var b bytes.Buffer
	b.WriteString("# Plans of the examples\n\n" +
		"This page is written by `go test ./cmd/sppoc -update`. `sppoc plan FILE` prints each plan with its reasons. Peaks are those of the\n" +
		"fullest stage, exact to the byte. Times are those of the simulated program.\n\n" +
		"| spec | dp x pp x sp | N | lengths | device peak | host peak of a rank | fits | step | bubble | tokens/s per rank | MFU |\n" +
		"| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n")
	old, err := os.ReadFile(examplesReport)
	if err != nil && !irtest.Update() {
		t.Fatal(err)
	}
	rows := strings.SplitAfter(string(old), "\n")
	for _, file := range exampleSpecs(t) {
		name := "| " + strings.TrimPrefix(file, "../../examples/") + " |"
		written := slices.IndexFunc(rows, func(r string) bool { return strings.HasPrefix(r, name) })
		if written < 0 || quick(file) {
			b.WriteString(exampleRow(t, file))
		} else {
			b.WriteString(rows[written])
			checkScreen(t, file, quickPlan(t, file))
		}
	}
	if irtest.Update() {
		if err := os.WriteFile(examplesReport, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if !irtest.Update() && !bytes.Equal(old, b.Bytes()) {
		t.Errorf("%s is stale; -update rewrites it\n%s", examplesReport,
			unified("written", "today", strings.Split(string(old), "\n"), strings.Split(b.String(), "\n"), 0))
	}
}

// quick reports whether this test run computes the row of a file. Rows with many subsequences take seconds, and the
// slowest take up to a minute. Some of them are computed only by the long tests, and others also with -update.
func quick(file string) bool {
	switch {
	case os.Getenv("SPPO_LONG") != "":
		return true
	case strings.Contains(file, "/paper/"):
		return irtest.Update() || strings.Contains(file, "512k")
	case strings.Contains(file, "llama-8b-1m"):
		return true
	case strings.Contains(file, "/long/"):
		return irtest.Update() && strings.Contains(file, "13b-2m")
	case strings.Contains(file, "-70b-"):
		return irtest.Update()
	}
	return true
}

// exampleSpecs lists the files with a schedule; files that others import have none.
func exampleSpecs(t *testing.T) []string {
	t.Helper()
	var specs []string
	for _, pattern := range []string{"../../examples/*.sppo", "../../examples/paper/*.sppo", "../../examples/long/*.sppo", "../../examples/today/*.sppo"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if bytes.Contains(text, []byte("\nschedule ")) {
				specs = append(specs, file)
			}
		}
	}
	if len(specs) < 25 {
		t.Fatalf("only %d examples: %v", len(specs), specs)
	}
	return specs
}

func exampleRow(t *testing.T, file string) string {
	t.Helper()
	job, err := cli.OpenPlan(file, nil, passes.Options{})
	if err != nil {
		t.Fatal(err)
	}
	p := job.Plan
	if err := job.Measure(); err != nil {
		t.Fatal(err)
	}
	if err := job.Simulate(); err != nil {
		t.Fatal(err)
	}
	memoryWithinPlaced(t, file, job)
	checkScreen(t, file, p)
	device, host := cli.Peaks(&p.Memory)
	lengths := p.Subsequences.Lengths
	return fmt.Sprintf("| %s | %d x %d x %s | %d | %d ... %d | %s of %s | %s of %s | %s | %s | %.1f%% | %.4g | %.1f%% |\n",
		strings.TrimPrefix(file, "../../examples/"), p.Parallel.DP, p.Parallel.PP, p.Parallel.SPText(), p.Subsequences.N,
		lengths[0], lengths[len(lengths)-1], device, p.Memory.DeviceCapacityBytes, host, p.Memory.HostCapacityBytes,
		map[bool]string{true: "yes", false: "no"}[p.Memory.Fits], p.Time.StepS, 100*p.Time.BubbleRatio, p.Throughput.TGS, 100*p.Throughput.MFU)
}

// memoryWithinPlaced checks that no rank of the simulated step ever holds more bytes than its plan has placed.
func memoryWithinPlaced(t *testing.T, file string, job *cli.Job) {
	t.Helper()
	program := job.Program
	if program == nil {
		var err error
		if program, err = codegen.Build(job.Plan); err != nil {
			t.Fatal(err)
		}
	}
	step, err := sim.Run(program, ir.SectionStep, sim.Options{Spans: true})
	if err != nil {
		t.Fatal(err)
	}
	for i := range step.Ranks {
		r := step.Ranks[i].Index
		for a := range ir.NumArenas {
			placed := program.Codes[program.Ranks[r].Code].Arenas[a]
			for _, l := range step.Memory(r, a) {
				if n := l.Bytes(); n > placed || slices.Min(l.Parts[:]) < 0 {
					t.Fatalf("%s: rank %d holds %s of %s memory at %s, placed are %s: %v", file, r, n, a, l.At, placed, l.Parts)
				}
			}
		}
	}
}

// checkScreen checks that the report of a plan has at most 12 lines of at most 120 columns.
func checkScreen(t *testing.T, file string, p *plan.Plan) {
	t.Helper()
	var screen strings.Builder
	if err := writeReport(&screen, p, true, false, nil); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(screen.String(), "\n"); n > 12 {
		t.Errorf("%s: the first screen of the plan has %d lines:\n%s", file, n, &screen)
	}
	for line := range strings.Lines(screen.String()) {
		if n := utf8.RuneCountInString(line) - 1; n > 120 {
			t.Errorf("%s: a line of the first screen has %d columns: %s", file, n, line)
		}
	}
}

// quickPlan returns the first plan of a file that a short search finds, with upper bounds on its memory.
func quickPlan(t *testing.T, file string) *plan.Plan {
	t.Helper()
	job, err := cli.OpenPlan(file, nil, passes.Options{Fitting: true, Patience: probePatience})
	if err != nil {
		t.Fatal(err)
	}
	p := job.Plan
	p.Memory = *bounded(p)
	p.Memory.Placed = true
	return p
}

// TestDumpRejected checks that the reasons for rejected values name the plans tried or say that a time is a bound, both after the
// last pass and before a step has been simulated.
func TestDumpRejected(t *testing.T) {
	said := regexp.MustCompile(`^(\S+ \S*s, best of \d+|(not tried, |none of \d+ tried fits, others )?at least \S+ \S*s|stage \d+ .*|not possible)$`)
	entry := regexp.MustCompile(`\S+ \(([^()]*)\)`)
	for _, pass := range []string{"solve", "offload"} {
		text := string(answer(t, "dump", "../../examples/paper/gpt-7b-512k.sppo", "--after", pass, "--set", "model.layers=8", "--set", "schedule.sp=auto",
			"--set", "schedule.pp=auto", "--set", "schedule.strategy=auto", "--set", "schedule.offload=auto", "--set", "cluster.device_memory=24GiB"))
		_, rejected, _ := strings.Cut(text, "\nRejected, ")
		rejected, _, _ = strings.Cut(rejected, "\n\n")
		_, rejected, _ = strings.Cut(rejected, "\n")
		entries := entry.FindAllStringSubmatch(rejected, -1)
		if len(entries) < 5 || strings.Contains(text, "0.00 s") {
			t.Errorf("after %s: no rejected values, or a time that is not known:\n%s", pass, text)
		}
		for _, e := range entries {
			if !said.MatchString(e[1]) {
				t.Errorf("after %s: %s neither names the plans tried nor says that it is a bound", pass, e[0])
			}
		}
	}
}

// TestSavedOnDevice checks that saved activations on the device are explained although all of them go to the host.
func TestSavedOnDevice(t *testing.T) {
	text := string(answer(t, "plan", "../../examples/paper/gpt-7b-512k.sppo", "--set", "schedule.offload=full"))
	said := regexp.MustCompile(`offload +100% to host memory, 0% kept on the device; up to \S+ GiB there before and after the copies\n`)
	if !said.MatchString(text) {
		t.Errorf("saved activations on the device are not explained:\n%s", text)
	}
}

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/passes/pass"
)

// TestLongestFits checks that the plan that --max-sequence finds still fits once it is placed. The long form of
// the test also checks Llama-3.1-8B on eight H100s, where at least 6M tokens must fit.
func TestLongestFits(t *testing.T) {
	jobs := []struct {
		file  string
		least int64
	}{{"../../examples/tiny.sppo", 1 << 10}}
	if os.Getenv("SPPO_LONG") != "" {
		jobs = append(jobs, jobs[0])
		jobs[1].file, jobs[1].least = "../../examples/long/llama-8b-1m.sppo", 6<<20
	}
	for _, j := range jobs {
		before := processorTime()
		text, _, err := longestSequence(nil, j.file, nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: %.1f CPU seconds\n%s", j.file, (processorTime() - before).Seconds(), text)
		set := longestIn(text)
		if set == nil {
			t.Fatalf("no answer in %q", text)
		}
		var tokens int64
		if fmt.Sscanf(set[0], "train.sequence=%d", &tokens); tokens < j.least {
			t.Errorf("%s: %d tokens fit, want at least %d", j.file, tokens, j.least)
		}
		job, err := cli.OpenPlan(j.file, set, pass.Options{})
		if err == nil {
			err = job.Measure()
		}
		if err != nil || !job.Plan.Memory.Fits {
			t.Errorf("%s with %s: it does not fit: %v", j.file, set, err)
		}
	}
}

// TestAnswerFile checks that the specs that --max-sequence and --min-gpus write plan to exactly the answers that they print.
func TestAnswerFile(t *testing.T) {
	config, err := os.ReadFile("../../internal/hf/testdata/configs/Qwen3-0.6B.json")
	folder := filepath.Join(t.TempDir(), "Qwen3-0.6B")
	if err := errors.Join(err, os.Mkdir(folder, 0o755), os.WriteFile(filepath.Join(folder, "config.json"), config, 0o644)); err != nil {
		t.Fatal(err)
	}
	numbers := regexp.MustCompile(`(\S+ \S*s) a step.*?, (\S+ \S+) of device memory, (\S+ \S+) of host memory`)
	for _, command := range [][]string{
		{"../../examples/tiny.sppo", "--max-sequence"},
		{"../../examples/tiny.sppo", "--min-gpus", "--set", "cluster.device_memory=200KiB", "--set", "schedule.pp=auto", "--set", "schedule.sp=auto"},
		{"../../examples/tiny.sppo", "--max-sequence", "--set", "cluster.device_memory=500KiB", "--set", "schedule=alst()", "--set", "schedule.zero=auto"},
		{folder, "--min-gpus", "--cluster", "h100", "--sequence", "256K"},
	} {
		out := filepath.Join(t.TempDir(), "new.sppo")
		text := string(answer(t, append([]string{"plan", "-o", out}, command...)...))
		want := numbers.FindStringSubmatch(text)
		if want == nil {
			t.Fatalf("%v: no answer in\n%s", command, text)
		}
		job, err := cli.OpenPlan(out, nil, pass.Options{})
		if err == nil {
			err = errors.Join(job.Measure(), job.Simulate())
		}
		if err != nil {
			t.Fatal(err)
		}
		device, host := cli.Peaks(&job.Plan.Memory)
		if got := []string{job.Plan.Time.StepS.String(), device.String(), host.String()}; !slices.Equal(got, want[1:]) {
			t.Errorf("%v: the file plans to %v, printed are %v", command, got, want[1:])
		}
		if tokens := regexp.MustCompile(`tokens fit \((\d+)\)`).FindStringSubmatch(text); tokens != nil && tokens[1] != fmt.Sprint(job.Plan.Train.Sequence) {
			t.Errorf("%v: the file has sequences of %d tokens, printed are %s", command, job.Plan.Train.Sequence, tokens[1])
		}
	}
}

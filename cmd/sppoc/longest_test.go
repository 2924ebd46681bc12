package main

import (
	"fmt"
	"os"
	"testing"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/passes/pass"
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
		text, err := longestSequence(nil, j.file, nil)
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

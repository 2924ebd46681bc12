package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"sppo.dev/cmd/internal/cli"
)

// A run with an absurd learning rate keeps the checkpoint that it started from, and ends with an error.
func TestRuinedStateIsNotSaved(t *testing.T) {
	for _, c := range []struct {
		steps, want string
		left        []string
	}{
		{"3", "sppovm: no checkpoint after step 3: the validation loss after step 3 is NaN\n", []string{"step-2"}},
		// Step 3 is not validated and all later steps are skipped, so nothing shows that its checkpoint is
		// good, and the older one stays.
		{"50", "10 steps skipped in a row", []string{"step-2", "step-3"}},
	} {
		t.Run(c.steps, func(t *testing.T) {
			inBase(t)
			alone(t, "tiny.sppo", "-q", "--steps", "2", "--save", "dir", "--set", "train.steps=100")
			code, _, text := runs(t, "tiny.sppo", "--set", "train.steps=100", "--steps", c.steps, "--set", "train.optimizer.lr=1e9", "--set", "train.optimizer.weight_decay=0",
				"--save", "dir", "--save-every", "1", "--keep", "1", "--resume", "dir")
			if code != cli.Failed || !strings.Contains(text, c.want) {
				t.Errorf("exit %d\n%s", code, text)
			}
			if diff := cmp.Diff(c.left, namesIn(t, "dir")); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// Skipped steps are reported, and a job skips the same steps in several processes as in one.
func TestSkippedSteps(t *testing.T) {
	inBase(t)
	args := []string{"tiny.sppo", "--set", "train.steps=30", "--set", "train.guard.spikes=1.02", "--json"}
	one := alone(t, args...)
	all := launchAll(t, 4, inWorld(t, 4, args...))
	many := end(t, all)
	if diff := cmp.Diff(numbersOf(t, one), numbersOf(t, many[0])); diff != "" {
		t.Error(diff)
	}
	if skipped := strings.Count(one, `"skipped":true`); skipped == 0 || strings.Count(all[0].errs.String(), "; the weights are unchanged\n") != skipped {
		t.Errorf("%d lines say that a step was skipped:\n%s", skipped, all[0].errs.String())
	}
	code, _, text := runs(t, append(args, "--set", "train.guard.spikes=0.001", "--set", "train.guard.stop=3")...)
	if code != cli.Failed || !strings.Contains(text, "sppovm: step 13: 3 steps skipped in a row") {
		t.Errorf("exit %d\n%s", code, text)
	}
}

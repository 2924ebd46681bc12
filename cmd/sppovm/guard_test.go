package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/train"
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

// A skipped step leaves the weights as they were, so a run that ends with one saves its state and succeeds. Continuing from there
// gives the results of a run without interruption.
func TestSavedAfterSkippedStep(t *testing.T) {
	inBase(t)
	args := []string{"tiny.sppo", "--set", "train.steps=30", "--set", "train.guard.spikes=1.02", "--json"}
	whole, last := alone(t, append(args, "--save", "whole")...), ""
	for _, o := range objects(t, whole) {
		if o["skipped"] == true {
			last = fmt.Sprint(o["step"])
		}
	}
	if last == "" {
		t.Fatal("no step was skipped")
	}
	step, err := strconv.Atoi(last)
	if err != nil {
		t.Fatal(err)
	}
	alone(t, append(args, "-q", "--steps", fmt.Sprint(step-1), "--save", "dir", "--keep", "1")...)
	code, _, text := runs(t, append(args, "-q", "--steps", last, "--save", "dir", "--keep", "1", "--resume", "auto")...) // a single step
	if code != cli.Done || !strings.Contains(text, "step "+last+" skipped: ") {
		t.Errorf("exit %d\n%s", code, text)
	}
	if diff := cmp.Diff([]string{"step-" + last}, namesIn(t, "dir")); diff != "" {
		t.Error(diff)
	}
	alone(t, append(args, "--save", "dir", "--resume", "auto")...)
	same(t, "whole", "dir")
}

// A run that is asked to stop after skipped steps saves its state.
func TestStoppedAfterSkippedSteps(t *testing.T) {
	inBase(t)
	all := launchAll(t, 1, func(int) []string {
		return []string{"tiny.sppo", "-q", "--json", "--set", "train.steps=1000000", "--set", "train.guard.spikes=0.001", "--set", "train.guard.stop=1000000", "--save", "dir"}
	})
	afterLines(t, all[0], 40) // the first ten steps are not skipped
	all[0].Process.Signal(syscall.SIGTERM)
	end(t, all)
	if names := namesIn(t, "dir"); all[0].code != cli.Done || len(names) != 1 {
		t.Errorf("exit %d, the folder has %v\n%s", all[0].code, names, all[0].errs.String())
	}
}

// Only a finite loss shows that weights are good.
func TestProvenWeights(t *testing.T) {
	nan := math.NaN()
	for _, c := range []struct {
		steps  []train.StepResult
		proven int
		sick   bool
	}{
		{[]train.StepResult{{Step: 1, Loss: nan, Skipped: true}}, -1, true},
		{[]train.StepResult{{Step: 1, Loss: 3, Skipped: true}}, 1, false},
		{[]train.StepResult{{Step: 1, Loss: 3, Skipped: true}, {Step: 2, Loss: nan, Skipped: true}}, 2, false},
		{[]train.StepResult{{Step: 1, Loss: 3}, {Step: 2, Loss: nan, Skipped: true}}, 0, true},
		{[]train.StepResult{{Step: 1, Loss: 3}, {Step: 2, Loss: 3, GradNorm: nan, Skipped: true}}, 2, false},
		{[]train.StepResult{{Step: 1, Loss: nan, Skipped: true}, {Step: 2, Loss: 3}}, 1, false},
	} {
		r := newTraining(&runFlags{})
		for _, result := range c.steps {
			r.prove(result)
		}
		if r.proven != c.proven || r.sick != "" != c.sick {
			t.Errorf("%+v: proven %d, sick %q", c.steps, r.proven, r.sick)
		}
	}
}

// Weights that the last update makes NaN or infinite are not saved, and the run fails, although no loss shows it. This holds in
// several processes, too.
func TestRuinedByLastUpdate(t *testing.T) {
	inBase(t)
	args := []string{"tiny.sppo", "-q", "--set", "train.steps=30", "--set", "train.optimizer.lr=1e21", "--set", "train.optimizer.weight_decay=1e20", "--set", "train.warmup=0",
		"--set", "train.eval_batch=0", "--steps", "1"}
	code, _, text := runs(t, args...)
	if code != cli.Failed || !strings.Contains(text, "sppovm: the run ends with weights that may not be finite: after step 1, the ") || !strings.Contains(text, " is not finite; try") {
		t.Errorf("exit %d\n%s", code, text)
	}
	args = append(args, "--save", "dir")
	all := launchAll(t, 2, inWorld(t, 2, args...))
	end(t, all)
	if text := all[0].errs.String(); all[0].code != cli.Failed || !strings.Contains(text, "sppovm: no checkpoint after step 1: after step 1, the ") || len(namesIn(t, "dir")) > 0 {
		t.Errorf("exit %d, %v\n%s", all[0].code, namesIn(t, "dir"), text)
	}
}

// A run that trains nothing, or that ruins its weights, fails even if it is short and saves nothing.
func TestNothingTrained(t *testing.T) {
	inBase(t)
	alone(t, "tiny.sppo", "-q", "--set", "train.steps=30", "--steps", "15", "--save", "dir")
	for range 2 { // the second time as after a restart
		code, _, text := runs(t, "tiny.sppo", "-q", "--set", "train.steps=30", "--steps", "18", "--set", "train.guard.spikes=0.0001", "--save", "dir", "--resume", "auto")
		if code != cli.Failed || !strings.Contains(text, "sppovm: every step was skipped (3), so nothing was trained") {
			t.Errorf("exit %d\n%s", code, text)
		}
	}
	code, _, text := runs(t, "tiny.sppo", "-q", "--set", "train.steps=30", "--steps", "6", "--set", "train.optimizer.lr=1e9", "--set", "train.optimizer.weight_decay=0", "--set", "train.eval_batch=0")
	if code != cli.Failed || !strings.Contains(text, "sppovm: the run ends with weights that may not be finite: the loss of step 6 is NaN") {
		t.Errorf("exit %d\n%s", code, text)
	}
}

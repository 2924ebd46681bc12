package sppo_test

import (
	"context"
	"errors"
	"testing"

	"sppo.dev"
	"sppo.dev/ir"
)

// A search whose context is cancelled returns the context's error; so do building, simulating and training, and a job that
// was only cancelled can go on.
func TestCancel(t *testing.T) {
	spec, err := sppo.Load("examples/tiny.sppo", "schedule.sp=auto", "schedule.pp=auto", "schedule.subsequences=auto", "train.steps=4")
	if err != nil {
		t.Fatal(err)
	}
	why := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	seen := 0
	_, err = sppo.Compile(ctx, spec, sppo.Options{Progress: func(candidates int, step ir.Seconds) {
		if seen = candidates; step > 0 {
			cancel(why)
		}
	}})
	if !errors.Is(err, why) || seen == 0 {
		t.Fatalf("after %d candidates, the error is %v", seen, err)
	}
	plan, err := sppo.NewPlan(t.Context(), spec, sppo.Options{FirstFit: true})
	if err != nil || !plan.Memory.Fits {
		t.Fatal(plan, err)
	}
	if _, err := plan.Build(ctx); !errors.Is(err, why) {
		t.Errorf("building: the error is %v", err)
	}
	program, err := plan.Build(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := sppo.Simulate(ctx, program); !errors.Is(err, why) {
		t.Errorf("simulating: the error is %v", err)
	}
	job, err := sppo.Open(program, sppo.Devices{})
	if err != nil {
		t.Fatal(err)
	}
	defer job.Close()
	half, stop := context.WithCancel(t.Context())
	defer stop()
	var last error
	for step, err := range job.Train(half) {
		if last = err; step.Step == 2 {
			stop()
		}
	}
	if !errors.Is(last, context.Canceled) || job.Steps() != 2 {
		t.Errorf("after %d steps, training ends with %v", job.Steps(), last)
	}
	for _, err := range job.Train(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
	}
	if job.Steps() != 4 {
		t.Errorf("%d steps are done, want 4", job.Steps())
	}
}

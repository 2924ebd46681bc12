package order_test

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/plantest"
	_ "sppo.dev/internal/passes/plantest/wired"
	"sppo.dev/internal/passes/words"
)

func TestScheduleOfOneSequence(t *testing.T) {
	p := plantest.Plan(t, "tiny.sppo", "train.batch=1")
	for s, tasks := range p.Tasks {
		want := strings.ReplaceAll("F0.0@s F0.1@s F0.2@s F0.3@s B0.3@s B0.2@s B0.1@s B0.0@s", "s", strconv.Itoa(s))
		if got := words.List(tasks); got != want {
			t.Errorf("stage %d: %s, want %s", s, got, want)
		}
	}
}

func TestScheduleOfABatch(t *testing.T) {
	p := plantest.Plan(t, "tiny.sppo", "schedule.subsequences=2")
	if got, want := words.List(p.Tasks[0]), "F0.0@0 F0.1@0 B0.1@0 B0.0@0 F1.0@0 F1.1@0 B1.1@0 B1.0@0"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestTaskText(t *testing.T) {
	for _, task := range []plan.Task{{Kind: plan.WeightGrad, Subsequence: 3, Stage: 2}, {Kind: plan.Forward, Subsequence: 3}, {Kind: plan.Backward, Microbatch: 12, Subsequence: 345}, {Kind: plan.Forward, Microbatch: 1, Subsequence: 2, Stage: 3, Piece: 4}} {
		text, _ := task.MarshalText()
		var back plan.Task
		if err := back.UnmarshalText(text); err != nil || back != task {
			t.Errorf("%s came back as %s, %v", text, back, err)
		}
	}
	for _, bad := range []string{"", "F", "F1", "X0.0", "F0.a@0", "B.1@0", "F0.1", "F0.1@1x", "F0.01@1"} {
		if err := new(plan.Task).UnmarshalText([]byte(bad)); err == nil {
			t.Errorf("%q passed for a task", bad)
		}
	}
}

// TestBrokenSchedules edits a valid plan and expects Verify to report the error.
func TestBrokenSchedules(t *testing.T) {
	for _, c := range []struct {
		name, want string
		edit       func(p *plan.Plan)
	}{
		{"a stage less", "for 1 of 2 stages", func(p *plan.Plan) { p.Tasks = p.Tasks[:1] }},
		{"a task less", "the list has 15 tasks", func(p *plan.Plan) { p.Tasks[1] = p.Tasks[1][:15] }},
		{"twice the same", "F0.0@0: it is repeated", func(p *plan.Plan) { p.Tasks[0][1] = p.Tasks[0][0] }},
		{"forward out of order", "F0.1@0 comes before F0.0@0: a forward reads K and V", func(p *plan.Plan) { swap(p.Tasks[0], 0, 1) }},
		{"backward out of order", "B0.2@0 comes before B0.3@0: gradients of K and V", func(p *plan.Plan) { swap(p.Tasks[0], 4, 5) }},
		{"backward too early", "B0.3@0 comes before F0.3@0: a backward needs the forwards", func(p *plan.Plan) { swap(p.Tasks[0], 3, 4) }},
		{"no such microbatch", "no such microbatch", func(p *plan.Plan) { p.Tasks[0][0].Microbatch = 2 }},
		{"a piece of what is whole", "no such microbatch", func(p *plan.Plan) { p.Tasks[0][0].Piece = 1 }},
		{"no such virtual stage", "no such microbatch", func(p *plan.Plan) { p.Tasks[0][0].Stage = 2 }},
		{"another rank's virtual stage", "virtual stage 1 belongs to stage 1", func(p *plan.Plan) { p.Tasks[0][0].Stage = 1 }},
		{"gradients of weights too early", "W0.3@0 comes before B0.3@0", func(p *plan.Plan) {
			p.Tasks[0] = slices.Insert(p.Tasks[0], 4, plan.Task{Kind: plan.WeightGrad, Subsequence: 3})
		}},
		{"gradients of weights twice", "the list has 17 tasks", func(p *plan.Plan) {
			p.Tasks[0] = append(p.Tasks[0], plan.Task{Kind: plan.WeightGrad, Subsequence: 3}, plan.Task{Kind: plan.WeightGrad, Subsequence: 3})
		}},
		{"gradients of no such weights", "no such microbatch", func(p *plan.Plan) { p.Tasks[0] = append(p.Tasks[0], plan.Task{Kind: plan.WeightGrad, Subsequence: 4}) }},
		{"microbatches cross", "waits forever", func(p *plan.Plan) { exchangeMicrobatches(p.Tasks[1]) }},
	} {
		p := plantest.Plan(t, "tiny.sppo")
		c.edit(p)
		if err := passes.Verify(p); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want it to say %q", c.name, err, c.want)
		}
	}
}

func swap(tasks []plan.Task, i, j int) { tasks[i], tasks[j] = tasks[j], tasks[i] }

func exchangeMicrobatches(tasks []plan.Task) {
	for i := range tasks {
		tasks[i].Microbatch = 1 - tasks[i].Microbatch
	}
}

// TestStagesThatWaitForEachOther checks that a deadlock is found: stage 0 needs the gradient of microbatch 0
// before it sends microbatch 1, which stage 1 needs before its first backward.
func TestStagesThatWaitForEachOther(t *testing.T) {
	p := plantest.Plan(t, "tiny.sppo", "schedule.subsequences=1")
	allForward := func(stage int) []plan.Task {
		return []plan.Task{{Kind: plan.Forward, Stage: stage}, {Kind: plan.Forward, Microbatch: 1, Stage: stage}, {Kind: plan.Backward, Stage: stage}, {Kind: plan.Backward, Microbatch: 1, Stage: stage}}
	}
	p.Tasks[1] = allForward(1)
	if err := passes.Verify(p); err == nil || !strings.Contains(err.Error(), "waits forever") {
		t.Errorf("%v, want a deadlock", err)
	}
	p.Tasks[0] = allForward(0)
	if err := passes.Verify(p); err != nil {
		t.Errorf("two microbatches forward, then backward, on both stages: %v", err)
	}
}

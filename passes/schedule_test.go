package passes

import (
	"strings"
	"testing"
)

func TestScheduleOfOneSequence(t *testing.T) {
	p := planOf(t, "tiny.sppo", "train.batch=1")
	want := "F0.0 F0.1 F0.2 F0.3 B0.3 B0.2 B0.1 B0.0"
	for s, tasks := range p.Tasks {
		if got := list(tasks); got != want {
			t.Errorf("stage %d: %s, want %s", s, got, want)
		}
	}
}

func TestScheduleOfABatch(t *testing.T) {
	p := planOf(t, "tiny.sppo", "schedule.subsequences=2")
	if got, want := list(p.Tasks[0]), "F0.0 F0.1 B0.1 B0.0 F1.0 F1.1 B1.1 B1.0"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestTaskText(t *testing.T) {
	for _, task := range []Task{{Forward, 0, 3, 0}, {Backward, 12, 345, 0}, {Forward, 1, 2, 3}} {
		text, _ := task.MarshalText()
		var back Task
		if err := back.UnmarshalText(text); err != nil || back != task {
			t.Errorf("%s came back as %s, %v", text, back, err)
		}
	}
	for _, bad := range []string{"", "F", "F1", "X0.0", "F0.a", "B.1"} {
		if err := new(Task).UnmarshalText([]byte(bad)); err == nil {
			t.Errorf("%q passed for a task", bad)
		}
	}
}

// TestBrokenSchedules edits a good plan and expects Verify to say what is wrong.
func TestBrokenSchedules(t *testing.T) {
	for _, c := range []struct {
		name, want string
		edit       func(p *Plan)
	}{
		{"a stage less", "for 1 stages of 2", func(p *Plan) { p.Tasks = p.Tasks[:1] }},
		{"a task less", "there are 15", func(p *Plan) { p.Tasks[1] = p.Tasks[1][:15] }},
		{"twice the same", "F0.0 comes where F0.1 is due", func(p *Plan) { p.Tasks[0][1] = p.Tasks[0][0] }},
		{"forward out of order", "F0.1 comes where F0.0 is due", func(p *Plan) { swap(p.Tasks[0], 0, 1) }},
		{"backward out of order", "B0.2 comes too early", func(p *Plan) { swap(p.Tasks[0], 4, 5) }},
		{"backward too early", "B0.3 comes too early", func(p *Plan) { swap(p.Tasks[0], 3, 4) }},
		{"no such microbatch", "no such microbatch", func(p *Plan) { p.Tasks[0][0].Microbatch = 2 }},
		{"messages cross", "messages between stages keep their order", func(p *Plan) { exchangeMicrobatches(p.Tasks[1]) }},
	} {
		p := planOf(t, "tiny.sppo")
		c.edit(p)
		if err := Verify(p); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want it to say %q", c.name, err, c.want)
		}
	}
}

func swap(tasks []Task, i, j int) { tasks[i], tasks[j] = tasks[j], tasks[i] }

func exchangeMicrobatches(tasks []Task) {
	for i := range tasks {
		tasks[i].Microbatch = 1 - tasks[i].Microbatch
	}
}

// TestStagesThatWaitForEachOther: stage 0 wants the gradient of microbatch 0 before it sends microbatch 1, which
// stage 1 wants before it goes backward.
func TestStagesThatWaitForEachOther(t *testing.T) {
	p := planOf(t, "tiny.sppo", "schedule.subsequences=1")
	p.Tasks[1] = []Task{{Forward, 0, 0, 0}, {Forward, 1, 0, 0}, {Backward, 0, 0, 0}, {Backward, 1, 0, 0}}
	if err := Verify(p); err == nil || !strings.Contains(err.Error(), "waits for ever") {
		t.Errorf("%v, want a deadlock", err)
	}
	p.Tasks[0] = p.Tasks[1]
	if err := Verify(p); err != nil {
		t.Errorf("two microbatches forward, then backward, on both stages: %v", err)
	}
}

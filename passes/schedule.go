package passes

import (
	"fmt"
	"strconv"
	"strings"
)

// schedule orders the tasks of every stage.
//
// Input: Parallel, Subsequences. Output: Tasks. Paper: section 3; a stage forwards s_0 .. s_{N-1} and then goes
// backward from s_{N-1} to s_0, since gradients of K and V flow from later to earlier subsequences.
func schedule(_ *Context, p *Plan) error {
	n := p.Subsequences.N
	order := make([]Task, 0, 2*n*p.Parallel.Microbatches)
	for m := range p.Parallel.Microbatches {
		for i := range n {
			order = append(order, Task{Forward, m, i})
		}
		for i := range n {
			order = append(order, Task{Backward, m, n - 1 - i})
		}
	}
	p.Tasks = make([][]Task, p.Parallel.PP)
	for s := range p.Tasks {
		p.Tasks[s] = append([]Task(nil), order...)
	}
	p.decide("schedule", "order", "one sequence at a time", "all subsequences forward, then all backward in reverse: K and V of one microbatch live at a time")
	return nil
}

// MarshalText writes "F0.3": kind, microbatch, subsequence.
func (t Task) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

func (t Task) String() string {
	return string(t.Kind) + strconv.Itoa(t.Microbatch) + "." + strconv.Itoa(t.Subsequence)
}

// UnmarshalText reads what MarshalText writes.
func (t *Task) UnmarshalText(text []byte) error {
	word := string(text)
	for _, kind := range []TaskKind{Forward, Backward} {
		rest, ok := strings.CutPrefix(word, string(kind))
		if !ok {
			continue
		}
		m, i, _ := strings.Cut(rest, ".")
		microbatch, err1 := strconv.Atoi(m)
		subsequence, err2 := strconv.Atoi(i)
		if err1 == nil && err2 == nil {
			*t = Task{kind, microbatch, subsequence}
			return nil
		}
	}
	return fmt.Errorf("%q is no task: write F or B, microbatch, dot, subsequence, as in F0.3", word)
}

// checkSchedule: every task once on every stage, in an order that the dataflow allows, the same on all stages where
// messages pass between them.
func checkSchedule(_ *Context, p *Plan) error {
	if len(p.Tasks) != p.Parallel.PP {
		return fmt.Errorf("tasks are given for %d stages of %d", len(p.Tasks), p.Parallel.PP)
	}
	for s, tasks := range p.Tasks {
		if err := p.checkStage(tasks); err != nil {
			return fmt.Errorf("tasks of stage %d: %w", s, err)
		}
		if err := sameMessages(p.Tasks[0], tasks); err != nil {
			return fmt.Errorf("tasks of stages 0 and %d: %w", s, err)
		}
	}
	return p.walk(func(int, Task) {})
}

func (p *Plan) checkStage(tasks []Task) error {
	n, microbatches := p.Subsequences.N, p.Parallel.Microbatches
	if want := 2 * n * microbatches; len(tasks) != want {
		return fmt.Errorf("there are %d, and forward and backward of %d subsequences of %d microbatches are %d", len(tasks), n, microbatches, want)
	}
	forward, backward := make([]int, microbatches), make([]int, microbatches) // how many are done
	for _, t := range tasks {
		if t.Microbatch < 0 || t.Microbatch >= microbatches || t.Subsequence < 0 || t.Subsequence >= n {
			return fmt.Errorf("%s: there is no such microbatch or subsequence", t)
		}
		m := t.Microbatch
		if t.Kind == Forward {
			if t.Subsequence != forward[m] {
				return fmt.Errorf("%s comes where F%d.%d is due: it reads K and V of all before it", t, m, forward[m])
			}
			forward[m]++
			continue
		}
		if forward[m] < n || t.Subsequence != n-1-backward[m] {
			return fmt.Errorf("%s comes too early or twice: gradients of K and V flow from the last subsequence to the first", t)
		}
		backward[m]++
	}
	return nil
}

// sameMessages demands that two stages do tasks of each kind in the same order: messages are not reordered.
func sameMessages(a, b []Task) error {
	for _, kind := range []TaskKind{Forward, Backward} {
		j := 0
		for _, t := range a {
			if t.Kind != kind {
				continue
			}
			for b[j].Kind != kind {
				j++
			}
			if b[j] != t {
				return fmt.Errorf("%s and %s are out of order: messages between stages keep their order", t, b[j])
			}
			j++
		}
	}
	return nil
}

// walk visits the tasks of all stages in an order in which whatever a task waits for comes before it.
func (p *Plan) walk(visit func(stage int, t Task)) error {
	stages := len(p.Tasks)
	done := make([]int, stages)    // tasks of a stage that have been visited
	forward := make([]int, stages) // forwards among them; each kind has one order on all stages
	backward := make([]int, stages)
	ready := func(s int) bool {
		if p.Tasks[s][done[s]].Kind == Forward {
			return s == 0 || forward[s-1] > forward[s]
		}
		return s == stages-1 || backward[s+1] > backward[s]
	}
	for moved := true; moved; {
		moved = false
		for s := range p.Tasks {
			for done[s] < len(p.Tasks[s]) && ready(s) {
				t := p.Tasks[s][done[s]]
				visit(s, t)
				done[s]++
				if t.Kind == Forward {
					forward[s]++
				} else {
					backward[s]++
				}
				moved = true
			}
		}
	}
	for s := range p.Tasks {
		if done[s] < len(p.Tasks[s]) {
			return fmt.Errorf("stage %d waits for ever at %s: the orders of the stages do not fit together", s, p.Tasks[s][done[s]])
		}
	}
	return nil
}

package passes

import (
	"fmt"
	"strconv"
	"strings"
)

// schedule orders the tasks of every pipeline rank.
//
// Input: Parallel, Subsequences. Output: Tasks. Paper: section 3; a stage forwards s_0 .. s_{N-1} and then goes
// backward from s_{N-1} to s_0, since gradients of K and V flow from later to earlier subsequences. Other strategies
// differ in how they weave several sequences.
func schedule(_ *Context, p *Plan) error {
	p.decideOrder()
	return nil
}

// MarshalText writes "F0.3": kind, microbatch, subsequence, and the virtual stage where it is not the rank's first.
func (t Task) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

func (t Task) String() string {
	text := fmt.Sprintf("%s%d.%d", t.Kind, t.Microbatch, t.Subsequence)
	if t.Chunk != 0 {
		text += "." + strconv.Itoa(t.Chunk)
	}
	return text
}

// UnmarshalText reads what MarshalText writes.
func (t *Task) UnmarshalText(text []byte) error {
	word := string(text)
	for _, kind := range []TaskKind{Forward, Backward} {
		rest, ok := strings.CutPrefix(word, string(kind))
		if !ok {
			continue
		}
		var numbers [3]int
		fields := strings.Split(rest, ".")
		ok = len(fields) == 2 || len(fields) == 3
		for i := 0; ok && i < len(fields); i++ {
			n, err := strconv.Atoi(fields[i])
			numbers[i], ok = n, err == nil
		}
		if ok {
			*t = Task{kind, numbers[0], numbers[1], numbers[2]}
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
	return p.Walk(func(int, Task) {})
}

func (p *Plan) checkStage(tasks []Task) error {
	n, microbatches, v := p.Subsequences.N, p.Parallel.Microbatches, p.Parallel.VirtualStages
	if want := 2 * n * microbatches * v; len(tasks) != want {
		return fmt.Errorf("there are %d, and forward and backward of %d subsequences of %d microbatches on %d virtual stages are %d", len(tasks), n, microbatches, v, want)
	}
	type place struct{ microbatch, chunk int }
	forward, backward := map[place]int{}, map[place]int{} // how many are done
	for _, t := range tasks {
		if t.Microbatch < 0 || t.Microbatch >= microbatches || t.Subsequence < 0 || t.Subsequence >= n || t.Chunk < 0 || t.Chunk >= v {
			return fmt.Errorf("%s: there is no such microbatch, subsequence or virtual stage", t)
		}
		at := place{t.Microbatch, t.Chunk}
		if t.Kind == Forward {
			if t.Subsequence != forward[at] {
				return fmt.Errorf("%s comes where %s is due: it reads K and V of all before it", t, Task{Forward, t.Microbatch, forward[at], t.Chunk})
			}
			forward[at]++
			continue
		}
		if forward[at] < n || t.Subsequence != n-1-backward[at] {
			return fmt.Errorf("%s comes too early or twice: gradients of K and V flow from the last subsequence to the first", t)
		}
		backward[at]++
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

// Walk visits the tasks of all stages in an order in which whatever a task waits for comes before it.
func (p *Plan) Walk(visit func(stage int, t Task)) error {
	stages, v := len(p.Tasks), p.Parallel.VirtualStages
	next := make([]int, stages) // task that a stage does next
	done := map[TaskKind][]int{ // tasks of a kind and virtual stage that have been visited: they have one order on
		Forward:  make([]int, stages*v), // all stages
		Backward: make([]int, stages*v),
	}
	ready := func(s int, t Task) bool {
		from, source, fed := p.Source(s, t)
		return !fed || done[t.Kind][source.Chunk*stages+from] > done[t.Kind][t.Chunk*stages+s]
	}
	for moved := true; moved; {
		moved = false
		for s := range p.Tasks {
			for next[s] < len(p.Tasks[s]) && ready(s, p.Tasks[s][next[s]]) {
				t := p.Tasks[s][next[s]]
				visit(s, t)
				next[s]++
				done[t.Kind][t.Chunk*stages+s]++
				moved = true
			}
		}
	}
	for s := range p.Tasks {
		if next[s] < len(p.Tasks[s]) {
			return fmt.Errorf("stage %d waits for ever at %s: the orders of the stages do not fit together", s, p.Tasks[s][next[s]])
		}
	}
	return nil
}

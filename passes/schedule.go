package passes

import (
	"fmt"
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

// MarshalText writes "F0.3@1": kind, microbatch, subsequence, virtual stage.
func (t Task) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

func (t Task) String() string {
	return fmt.Sprintf("%s%d.%d@%d", t.Kind, t.Microbatch, t.Subsequence, t.Stage)
}

// UnmarshalText reads what MarshalText writes.
func (t *Task) UnmarshalText(text []byte) error {
	word := string(text)
	for _, kind := range []TaskKind{Forward, Backward} {
		rest, ok := strings.CutPrefix(word, string(kind))
		if !ok {
			continue
		}
		read := Task{Kind: kind}
		if n, err := fmt.Sscanf(rest, "%d.%d@%d", &read.Microbatch, &read.Subsequence, &read.Stage); err == nil && n == 3 && read.String() == word {
			*t = read
			return nil
		}
	}
	return fmt.Errorf("%q is no task: write F or B, microbatch, dot, subsequence, @, virtual stage, as in F0.3@1", word)
}

// checkSchedule: every task once on every stage, in an order that the dataflow allows, the same on all stages where
// messages pass between them.
func checkSchedule(_ *Context, p *Plan) error {
	if len(p.Tasks) != p.Parallel.PP {
		return fmt.Errorf("tasks are given for %d stages of %d", len(p.Tasks), p.Parallel.PP)
	}
	for rank, tasks := range p.Tasks {
		if err := p.checkStage(rank, tasks); err != nil {
			return fmt.Errorf("tasks of stage %d: %w", rank, err)
		}
	}
	return p.Walk(func(int, Task) {})
}

func (p *Plan) checkStage(rank int, tasks []Task) error {
	n, microbatches, v := p.Subsequences.N, p.Parallel.Microbatches, p.Parallel.VirtualStages
	if want := 2 * n * microbatches * v; len(tasks) != want {
		return fmt.Errorf("there are %d, and forward and backward of %d subsequences of %d microbatches on %d virtual stages are %d", len(tasks), n, microbatches, v, want)
	}
	type place struct{ microbatch, stage int }
	forward, backward := map[place]int{}, map[place]int{} // how many are done
	for _, t := range tasks {
		if t.Microbatch < 0 || t.Microbatch >= microbatches || t.Subsequence < 0 || t.Subsequence >= n || t.Stage < 0 || t.Stage >= p.Parallel.Stages() {
			return fmt.Errorf("%s: there is no such microbatch, subsequence or virtual stage", t)
		}
		if home := p.Home(t.Stage); home != rank {
			return fmt.Errorf("%s: virtual stage %d belongs to stage %d", t, t.Stage, home)
		}
		at := place{t.Microbatch, t.Stage}
		if t.Kind == Forward {
			if t.Subsequence != forward[at] {
				return fmt.Errorf("%s comes where %s is due: it reads K and V of all before it", t, Task{Forward, t.Microbatch, forward[at], t.Stage})
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

// Walk visits the tasks of all stages in an order in which whatever a task waits for comes before it.
func (p *Plan) Walk(visit func(rank int, t Task)) error {
	next := make([]int, len(p.Tasks)) // task that a rank does next
	n, stages := p.Subsequences.N, p.Parallel.Stages()
	done := map[TaskKind][]bool{}
	for _, kind := range []TaskKind{Forward, Backward} {
		done[kind] = make([]bool, p.Parallel.Microbatches*n*stages)
	}
	index := func(t Task) int { return (t.Microbatch*n+t.Subsequence)*stages + t.Stage }
	for moved := true; moved; {
		moved = false
		for rank, tasks := range p.Tasks {
			for ; next[rank] < len(tasks); next[rank]++ {
				t := tasks[next[rank]]
				if _, source, fed := p.Source(t); fed && !done[t.Kind][index(source)] {
					break
				}
				visit(rank, t)
				done[t.Kind][index(t)] = true
				moved = true
			}
		}
	}
	for rank, tasks := range p.Tasks {
		if next[rank] < len(tasks) {
			return fmt.Errorf("stage %d waits for ever at %s: the orders of the stages do not fit together", rank, tasks[next[rank]])
		}
	}
	return nil
}

// Times are when every task of every stage begins and ends in a run of the schedule in which a layer's forward takes one unit
// of time, its backward two, and messages none.
func (p *Plan) Times() (starts, ends [][]int) {
	starts, ends = make([][]int, p.Parallel.PP), make([][]int, p.Parallel.PP)
	arrives := make([]map[Task]int, p.Parallel.PP)
	for r := range arrives {
		arrives[r] = map[Task]int{}
	}
	err := p.Walk(func(rank int, t Task) {
		start := arrives[rank][t]
		if n := len(ends[rank]); n > 0 {
			start = max(start, ends[rank][n-1])
		}
		cost := p.LayersPerStage[t.Stage]
		if t.Kind == Backward {
			cost *= 2
		}
		starts[rank], ends[rank] = append(starts[rank], start), append(ends[rank], start+cost)
		if to, next, ok := p.Target(t); ok {
			arrives[to][next] = start + cost
		}
	})
	if err != nil {
		panic("internal: timing tasks that were not verified: " + err.Error())
	}
	return starts, ends
}

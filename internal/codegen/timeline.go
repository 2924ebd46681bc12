package codegen

import (
	"cmp"
	"slices"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/walk"
	"sppo.dev/internal/schedule"
)

// order is the order in which all ranks issue the tasks of a section, and their messages.
type order struct {
	plan     *plan.Plan // determines the tasks
	pipeline *schedule.Pipeline
	steps    [][]step // [rank]
}

// step is one item of a rank's issue order: a task, or a message with a task's input or result. With mux, it
// may also be help with other ranks' tasks, or a message that such help needs.
type step struct {
	kind   stepKind
	task   int         // index into the rank's tasks
	shared []plan.Task // helped tasks; for lending and borrowing, the task that completes the block of keys
	helper int         // for lending and borrowing: the rank that receives the block of keys
}

type stepKind uint8

const (
	receiving stepKind = iota // the task's input
	sending                   // the task's result
	running
	counting  // sums what layers have counted together, after the forwards of the task's microbatch
	sharing   // all of the rank's tasks in a shared slot; step.task is the first
	helping   // parts of other ranks' tasks
	lending   // sends a block of keys to a helper
	borrowing // receives a block of keys
)

// own reports whether a step belongs to one of the rank's own tasks.
func (k stepKind) own() bool { return k <= sharing }

// moment orders the steps of all ranks by time. Among steps at the same time, messages come first, in the order
// of their numbers, then tasks that start.
type moment struct {
	time    int
	running bool
	message int
}

func (a moment) compare(b moment) int {
	if c := cmp.Compare(a.time, b.time); c != 0 {
		return c
	}
	if a.running != b.running {
		if a.running {
			return 1
		}
		return -1
	}
	return cmp.Compare(a.message, b.message)
}

// item is a step with the moment at which it is issued.
type item struct {
	at moment
	step
}

// timeline returns the order in which every rank issues its tasks and messages: the order given by walk.Times.
// A message is placed at the end of its sender's task, both in the sender's order and in the receiver's. All
// orders are therefore parts of a single order of all steps of the job, in which every step comes after those
// that it waits for. The job cannot deadlock, even if each rank runs one step at a time.
func timeline(p *plan.Plan, g *graph.Model) [][]step {
	items := make([][]item, p.Parallel.PP)
	index := make([]map[plan.Task]int, p.Parallel.PP)
	for r, tasks := range p.Tasks {
		index[r] = make(map[plan.Task]int, len(tasks))
		for i, t := range tasks {
			index[r][t] = i
		}
	}
	starts, ends := walk.Times(p, g)
	for r := range p.Tasks {
		for i, start := range starts[r] {
			kind := running
			if t := p.Tasks[r][i]; p.Shared(t) {
				if i > 0 && schedule.SameSlot(p.Tasks[r][i-1], t) {
					continue
				}
				kind = sharing
			}
			items[r] = append(items[r], item{moment{start, true, 0}, step{kind: kind, task: i}})
		}
	}
	messages := 0
	for r, tasks := range p.Tasks {
		for i, t := range tasks {
			to, next, ok := p.Target(t)
			if !ok || to == r {
				continue
			}
			at := moment{time: ends[r][i], message: messages}
			messages++
			items[r] = append(items[r], item{at, step{kind: sending, task: i}})
			items[to] = append(items[to], item{at, step{kind: receiving, task: index[to][next]}})
		}
	}
	if g.TalliesJoint() {
		messages = count(p, items, ends, messages)
	}
	shareTimeline(p, items, starts, ends, messages)
	steps := make([][]step, len(items))
	for r := range items {
		slices.SortStableFunc(items[r], func(a, b item) int { return a.at.compare(b.at) })
		for _, it := range items[r] {
			steps[r] = append(steps[r], it.step)
		}
	}
	return steps
}

// count adds the steps in which all ranks sum what the layers of all stages have counted together: for each microbatch, at the end of the last
// of its forwards. It returns the number of messages with these.
func count(p *plan.Plan, items [][]item, ends [][]int, messages int) int {
	for m := range p.Parallel.Microbatches {
		last := 0
		for r, tasks := range p.Tasks {
			for i, t := range tasks {
				if t.Kind == plan.Forward && t.Microbatch == m {
					last = max(last, ends[r][i])
				}
			}
		}
		for r, tasks := range p.Tasks {
			i := slices.IndexFunc(tasks, func(t plan.Task) bool { return t.Kind == plan.Forward && t.Microbatch == m })
			if i >= 0 { // validations have one microbatch
				items[r] = append(items[r], item{moment{time: last, message: messages}, step{kind: counting, task: i}})
			}
		}
		messages++
	}
	return messages
}

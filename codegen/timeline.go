package codegen

import (
	"cmp"
	"slices"

	"sppo.dev/passes/plan"
	"sppo.dev/passes/walk"
	"sppo.dev/schedule"
)

// step is one thing that a rank issues: a task, or the message that brings a task's input or takes its result away. In lockstep
// also a part of others' tasks, and the messages that bring what it takes.
type step struct {
	kind   stepKind
	task   int         // index into the rank's tasks
	shared []plan.Task // of other ranks: those that are helped, beside an own one or not, or the one behind which a block of keys is whole
	helper int         // which block it is
}

type stepKind uint8

const (
	receiving stepKind = iota // the task's input
	sending                   // the task's result
	running
	sharing   // all of the rank's tasks of a slot that all ranks share, of which this is the first
	helping   // others' tasks
	lending   // a block of keys, to a helper
	borrowing // it
)

// own reports whether a step belongs to a task of the rank itself.
func (k stepKind) own() bool { return k <= sharing }

// moment orders the steps of all ranks: by time; messages before the tasks that begin when they end; messages of one
// moment by number.
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

// item is a step and when it is issued.
type item struct {
	at moment
	step
}

// timeline is the order in which every rank issues its tasks and messages. It follows a run of the schedule in which a
// layer's forward takes one unit of time, its backward two or each of its halves one, and messages none: a message stands where its sender's task ends, in
// the sender's order and in the receiver's. All orders are thus parts of one order of all steps of the job, in which whatever a
// step waits for comes before it: the job cannot deadlock, even where each rank runs one step at a time.
func timeline(p *plan.Plan) [][]step {
	items := make([][]item, p.Parallel.PP)
	index := make([]map[plan.Task]int, p.Parallel.PP)
	for r, tasks := range p.Tasks {
		index[r] = make(map[plan.Task]int, len(tasks))
		for i, t := range tasks {
			index[r][t] = i
		}
	}
	starts, ends := walk.Times(p)
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

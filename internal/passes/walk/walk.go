// Package walk prepares a plan for repeated passes over its tasks while copies are being decided. A
// Walk contains the numbered tasks of all ranks, an order in which they can run, and the list of
// actions of each rank. Shapes holds the sizes of subsequences and of the tensors that layers save.
package walk

import (
	"fmt"

	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/schedule"
)

// Walk contains the properties of a plan's tasks that do not depend on durations: an order in which
// they can be visited, and the task to which each passes its result. These properties are computed once,
// because a plan is simulated many times while its copies are being decided. Tasks are numbered rank by rank,
// in the order of each rank.
type Walk struct {
	Plan   *plan.Plan
	Tasks  [][]plan.Task // the plan's
	Firsts []int         // [rank]: number of its first task
	Nodes  []Node
	Order  []int32 // task numbers, each after the tasks that it waits for
	places []int32 // [placeOf]: 1 + number; 0: no such task
	ranges int     // pieces and whole subsequences
	Layers int     // number of layers of all tasks together

	pipeline *schedule.Pipeline // nil: no schedule has been written yet
	lists    []writtenList      // [rank]
}

// writtenList is the schedule of a rank for a timing.
type writtenList struct {
	schedule.Timing
	list *schedule.List
}

// Node is a task in a Walk.
type Node struct {
	Kind           plan.TaskKind
	fed, Feeds     bool     // whether its input comes from a task; whether its result goes to one
	Split          bool     // a backward whose weight gradients are a separate task
	Way            plan.Way // direction in which its result is sent
	Shared, Opens  bool     // in a shared slot; the first visited task of the slot
	Subsequence    int32    // of a microbatch
	Stage          int32    // virtual
	At             int32    // index of its tokens among pieces and whole subsequences
	Rank, Home     int32    // the rank that runs it; the rank that holds its stage
	First, End     int32    // range of the layers of its stage among all layers of its home rank
	from, To, Next int32    // previous task in the pipeline; rank of the next task; next task; -1: no such task
	Undone         int32    // the forward that a backward belongs to; -1: none
	Layers         int32    // number of layers of all tasks with smaller numbers
}

// Must is like New for a plan whose task order has been verified.
func Must(p *plan.Plan) *Walk {
	c, err := New(p)
	if err != nil {
		panic("internal: the order of tasks was not verified: " + err.Error())
	}
	return c
}

// New returns the walk of a plan. It fails if stages wait for each other forever.
func New(p *plan.Plan) (*Walk, error) {
	c := &Walk{Plan: p, Tasks: p.Tasks, ranges: RangeOf(p, plan.Task{Subsequence: p.Subsequences.N})}
	c.places = make([]int32, len(schedule.Kinds)*p.Parallel.Microbatches*c.ranges*p.Parallel.Stages())
	number := int32(0)
	for _, tasks := range p.Tasks {
		c.Firsts = append(c.Firsts, int(number))
		for _, t := range tasks {
			number++
			c.places[c.placeOf(t)] = number
		}
	}
	c.Nodes = make([]Node, 0, number)
	first, end, homes := make([]int32, p.Parallel.Stages()), make([]int32, p.Parallel.Stages()), make([]int32, p.Parallel.Stages())
	for j := range p.LayersPerStage {
		f, e := p.Span(j)
		first[j], end[j], homes[j] = int32(f), int32(e), int32(p.Home(j))
	}
	for rank, tasks := range p.Tasks {
		for _, t := range tasks {
			s := c.stopOf(rank, t, homes)
			s.First, s.End, s.Layers = first[t.Stage], end[t.Stage], int32(c.Layers)
			c.Layers += int(s.End - s.First)
			c.Nodes = append(c.Nodes, s)
		}
	}
	return c, c.arrange()
}

// placeOf maps each task to a distinct index.
func (c *Walk) placeOf(t plan.Task) int {
	par := &c.Plan.Parallel
	return ((int(t.Kind-plan.Forward)*par.Microbatches+t.Microbatch)*c.ranges+RangeOf(c.Plan, t))*par.Stages() + t.Stage
}

// NumberOf returns the number of a task, or -1 if there is no such task.
func (c *Walk) NumberOf(t plan.Task) int32 { return c.places[c.placeOf(t)] - 1 }

// Task returns the task with the given number.
func (c *Walk) Task(n int32) plan.Task {
	rank := int(c.Nodes[n].Rank)
	return c.Tasks[rank][int(n)-c.Firsts[rank]]
}

// Schedule returns the list of a rank's actions for the plan's current timing of copies. The list
// is rewritten when the timing changes.
func (c *Walk) Schedule(rank int) *schedule.List {
	if c.pipeline == nil {
		c.pipeline, c.lists = Pipeline(c.Plan), make([]writtenList, len(c.Tasks))
	}
	w, timing := &c.lists[rank], c.Plan.Timing()
	if w.list == nil || w.Timing != timing {
		*w = writtenList{timing, c.pipeline.Write(rank, timing, w.list)}
	}
	return w.list
}

// Pipeline returns the input from which the schedules of all ranks are written.
func Pipeline(p *plan.Plan) *schedule.Pipeline { return PipelineOf(p, p.Tasks, p.SharedSlots()) }

// PipelineOf returns the same input for the given tasks and number of shared slots.
func PipelineOf(p *plan.Plan, tasks [][]plan.Task, shared int) *schedule.Pipeline {
	of := schedule.New(tasks, p.LayersPerStage, p.Untrained)
	of.Shared, of.Staged = shared, p.LayerOrder() || p.Streams()
	of.Replicated = p.Parallel.DP > 1
	of.Gathers = p.Parallel.Zero >= plan.ZeroWeights || p.Parallel.Zero > 0 && of.Replicated
	of.Once = p.Parallel.Zero < plan.ZeroWeights
	if p.Parallel.Zero >= plan.ZeroGradients {
		of.Reduces, of.Early = p.Completes, p.Stream.Latents // those of weights that expand latents in a loop
	}
	return of
}

// stopOf returns the node of a task. The placeOf index of the same task on the next stage is one higher.
func (c *Walk) stopOf(rank int, t plan.Task, homes []int32) Node {
	p, place := c.Plan, c.placeOf(t)
	kinds := len(c.places) / len(schedule.Kinds)
	s := Node{
		Kind: t.Kind, Subsequence: int32(t.Subsequence), Stage: int32(t.Stage), At: int32(RangeOf(p, t)), Rank: int32(rank), Home: homes[t.Stage],
		from: -1, Next: -1, Undone: -1,
	}
	on := 1
	switch t.Kind {
	case plan.WeightGrad:
		return s
	case plan.Backward:
		on = -1
		s.Undone, s.Split = c.places[place-kinds]-1, c.places[place+kinds] > 0
	}
	s.Shared = p.Shared(t)
	passes := func(stage int) bool {
		return stage >= 0 && stage < len(homes) && (t.Kind == plan.Forward || p.Undone(stage) && p.Undone(t.Stage))
	}
	if source := t.Stage - on; passes(source) {
		s.fed, s.from = true, c.places[place-on]-1
	}
	if next := t.Stage + on; passes(next) {
		target := t
		target.Stage = next
		s.Feeds, s.To, s.Next, s.Way = true, int32(p.Runner(target)), c.places[place+on]-1, p.WayOf(t)
	}
	return s
}

// arrange finds an order in which every task comes after the tasks that it waits for.
func (c *Walk) arrange() error {
	next := make([]int, len(c.Tasks)) // next task of each rank
	done := make([]bool, len(c.Nodes))
	open := map[plan.Slot]bool{} // shared slots
	c.Order = make([]int32, 0, len(c.Nodes))
	for moved := true; moved; {
		moved = false
		for rank, tasks := range c.Tasks {
			for ; next[rank] < len(tasks); next[rank]++ {
				n := c.Firsts[rank] + next[rank]
				s := &c.Nodes[n]
				if t := tasks[next[rank]]; s.Shared && !open[plan.SlotOf(t)] {
					if !gathered(c.Plan, t, next) {
						break
					}
					open[plan.SlotOf(t)], s.Opens = true, true
				}
				if s.fed && (s.from < 0 || !done[s.from]) {
					break
				}
				c.Order, done[n], moved = append(c.Order, int32(n)), true, true
			}
		}
	}
	for rank, tasks := range c.Tasks {
		if next[rank] < len(tasks) {
			return fmt.Errorf("tasks of stage %d: %w", rank, c.deadlock(rank, next))
		}
	}
	return nil
}

// deadlock returns the error that a rank waits forever, given the task at which each rank is.
func (c *Walk) deadlock(rank int, next []int) error {
	wrong := &plan.Misplaced{Rank: rank, Index: next[rank], Task: c.Tasks[rank][next[rank]], Why: "it waits forever, because the task orders of the stages deadlock"}
	from, first, fed := c.Plan.Source(wrong.Task)
	if fed && next[from] < len(c.Tasks[from]) {
		wrong.First, wrong.Stuck, wrong.Why = first, c.Tasks[from][next[from]], "the task orders of the stages deadlock"
	}
	return wrong
}

// gathered reports whether every rank has reached a shared slot, which begins on all ranks at the same time.
func gathered(p *plan.Plan, t plan.Task, next []int) bool {
	for rank, tasks := range p.Tasks {
		if at := next[rank]; at == len(tasks) || plan.SlotOf(tasks[at]) != plan.SlotOf(t) {
			return false
		}
	}
	return true
}

// Visit visits the tasks of all stages, each after the tasks that it waits for.
func Visit(p *plan.Plan, visit func(rank int, t plan.Task)) error {
	c, err := New(p)
	if err != nil {
		return err
	}
	for _, n := range c.Order {
		visit(int(c.Nodes[n].Rank), c.Task(n))
	}
	return nil
}

// RangeOf returns the index of a task's tokens among pieces and whole subsequences.
func RangeOf(p *plan.Plan, t plan.Task) int {
	at := t.Subsequence + max(0, t.Piece-1)
	for _, pieces := range p.Mux.Pieces[:min(t.Subsequence, len(p.Mux.Pieces))] {
		at += len(pieces) - 1
	}
	return at
}

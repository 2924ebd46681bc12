package passes

import (
	"fmt"

	"sppo.dev/schedule"
)

// course is what of a run of a plan's tasks no time changes: in which order they may be visited, and what hands its result to
// what. A plan is run many times while its copies are decided, so this is worked out once, and tasks are numbers there: those of
// a rank follow each other, in the order in which it does them.
type course struct {
	plan   *Plan
	tasks  [][]Task // the plan's
	firsts []int    // [rank]: number of its first task
	stops  []stop
	order  []int32 // numbers, whatever a task waits for before it
	places []int32 // [placeOf]: 1 + number; 0: there is no such task
	ranges int     // pieces and whole subsequences
	layers int     // of all tasks together

	pipeline *schedule.Pipeline // nil: nothing is written yet
	lists    []writtenList      // [rank]
}

// writtenList is the schedule of a rank with a lag and an ahead.
type writtenList struct {
	lag, ahead int
	list       *schedule.List
}

// stop is a task in a course.
type stop struct {
	kind           TaskKind
	fed, feeds     bool  // there is a task that its input comes from; one that goes on with its result
	split          bool  // a backward whose gradients of weights are a task of their own
	aside          bool  // its result does not go along the ring
	backwards      bool  // its result goes to the rank before
	shared, opens  bool  // of a slot that ranks share in; the first of it that is visited
	subsequence    int32 // of a microbatch
	stage          int32 // virtual
	at             int32 // of its tokens among pieces and whole subsequences
	rank, home     int32 // who does it; who has its stage
	first, end     int32 // where the layers of its stage lie among all of its home's
	from, to, next int32 // tasks before and behind it in the pipeline, and who does the latter; -1: there is none
	undone         int32 // the forward that a backward undoes; -1: there is none
	layers         int32 // of all tasks with smaller numbers
}

func (p *Plan) mustCourse() *course {
	c, err := p.course()
	if err != nil {
		panic("internal: an order of tasks that was not verified: " + err.Error())
	}
	return c
}

// course fails where stages wait for each other for ever.
func (p *Plan) course() (*course, error) {
	c := &course{plan: p, tasks: p.Tasks, ranges: p.rangeOf(Task{Subsequence: p.Subsequences.N})}
	c.places = make([]int32, len(schedule.Kinds)*p.Parallel.Microbatches*c.ranges*p.Parallel.Stages())
	number := int32(0)
	for _, tasks := range p.Tasks {
		c.firsts = append(c.firsts, int(number))
		for _, t := range tasks {
			number++
			c.places[c.placeOf(t)] = number
		}
	}
	c.stops = make([]stop, 0, number)
	first, end, homes := make([]int32, p.Parallel.Stages()), make([]int32, p.Parallel.Stages()), make([]int32, p.Parallel.Stages())
	for j := range p.LayersPerStage {
		f, e := p.span(j)
		first[j], end[j], homes[j] = int32(f), int32(e), int32(p.Home(j))
	}
	for rank, tasks := range p.Tasks {
		for _, t := range tasks {
			s := c.stopOf(rank, t, homes)
			s.first, s.end, s.layers = first[t.Stage], end[t.Stage], int32(c.layers)
			c.layers += int(s.end - s.first)
			c.stops = append(c.stops, s)
		}
	}
	return c, c.arrange()
}

// placeOf tells all tasks apart.
func (c *course) placeOf(t Task) int {
	par := &c.plan.Parallel
	return ((int(t.Kind-Forward)*par.Microbatches+t.Microbatch)*c.ranges+c.plan.rangeOf(t))*par.Stages() + t.Stage
}

// numberOf is -1 where there is no such task.
func (c *course) numberOf(t Task) int32 { return c.places[c.placeOf(t)] - 1 }

// task is that of a number.
func (c *course) task(n int32) Task {
	rank := int(c.stops[n].rank)
	return c.tasks[rank][int(n)-c.firsts[rank]]
}

// schedule is the list of a rank's actions, with the timing of copies that the plan has now. It is written again when the
// timing has changed.
func (c *course) schedule(rank int) *schedule.List {
	if c.pipeline == nil {
		c.pipeline, c.lists = c.plan.Pipeline(), make([]writtenList, len(c.tasks))
	}
	w, o := &c.lists[rank], &c.plan.Offload
	if w.list == nil || w.lag != o.Lag || w.ahead != o.Ahead {
		*w = writtenList{o.Lag, o.Ahead, c.pipeline.Write(rank, o.Lag, o.Ahead, w.list)}
	}
	return w.list
}

// Pipeline is what the schedules of all ranks are written from.
func (p *Plan) Pipeline() *schedule.Pipeline { return p.PipelineOf(p.Tasks, p.sharedSlots()) }

// PipelineOf is the same for other tasks, of which ranks share the slots up to one.
func (p *Plan) PipelineOf(tasks [][]Task, shared int) *schedule.Pipeline {
	of := schedule.New(tasks, p.LayersPerStage)
	of.Shared, of.Staged = shared, p.layerOrder() || p.Streams()
	return of
}

// stopOf is a task's. The same task of the next stage has the next place.
func (c *course) stopOf(rank int, t Task, homes []int32) stop {
	p, place := c.plan, c.placeOf(t)
	kinds := len(c.places) / len(schedule.Kinds)
	s := stop{
		kind: t.Kind, subsequence: int32(t.Subsequence), stage: int32(t.Stage), at: int32(p.rangeOf(t)), rank: int32(rank), home: homes[t.Stage],
		from: -1, next: -1, undone: -1,
	}
	on := 1
	switch t.Kind {
	case WeightGrad:
		return s
	case Backward:
		on = -1
		s.undone, s.split = c.places[place-kinds]-1, c.places[place+kinds] > 0
	}
	s.shared = p.Shared(t)
	if source := t.Stage - on; source >= 0 && source < len(homes) {
		s.fed, s.from = true, c.places[place-on]-1
	}
	if next := t.Stage + on; next >= 0 && next < len(homes) {
		home := int(homes[next])
		s.feeds, s.to, s.next = true, int32(home), c.places[place+on]-1
		if t.Piece > 0 {
			s.to = int32(p.Runner(Task{Kind: t.Kind, Microbatch: t.Microbatch, Subsequence: t.Subsequence, Stage: next, Piece: t.Piece}))
			s.aside = s.rank != s.to && (s.rank != s.home || int(s.to) != home)
		}
		s.backwards = !p.Onwards(t.Kind, int(s.home), home)
	}
	return s
}

// arrange finds an order in which whatever a task waits for comes before it.
func (c *course) arrange() error {
	next := make([]int, len(c.tasks)) // task that a rank does next
	done := make([]bool, len(c.stops))
	open := map[slot]bool{} // that ranks share in
	c.order = make([]int32, 0, len(c.stops))
	for moved := true; moved; {
		moved = false
		for rank, tasks := range c.tasks {
			for ; next[rank] < len(tasks); next[rank]++ {
				n := c.firsts[rank] + next[rank]
				s := &c.stops[n]
				if t := tasks[next[rank]]; s.shared && !open[slotOf(t)] {
					if !c.plan.gathered(t, next) {
						break
					}
					open[slotOf(t)], s.opens = true, true
				}
				if s.fed && (s.from < 0 || !done[s.from]) {
					break
				}
				c.order, done[n], moved = append(c.order, int32(n)), true, true
			}
		}
	}
	for rank, tasks := range c.tasks {
		if next[rank] < len(tasks) {
			return fmt.Errorf("stage %d waits for ever at %s: the orders of the stages do not fit together", rank, tasks[next[rank]])
		}
	}
	return nil
}

// gathered reports whether every rank has come to a shared slot, which begins on all of them at once.
func (p *Plan) gathered(t Task, next []int) bool {
	for rank, tasks := range p.Tasks {
		if at := next[rank]; at == len(tasks) || slotOf(tasks[at]) != slotOf(t) {
			return false
		}
	}
	return true
}

// Walk visits the tasks of all stages in an order in which whatever a task waits for comes before it.
func (p *Plan) Walk(visit func(rank int, t Task)) error {
	c, err := p.course()
	if err != nil {
		return err
	}
	for _, n := range c.order {
		visit(int(c.stops[n].rank), c.task(n))
	}
	return nil
}

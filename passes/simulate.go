package passes

import (
	"sppo.dev/ir"
	"sppo.dev/ir/cost"
)

// simulation runs the tasks of all stages against each other in virtual time, layer by layer, with copies to and from
// the host beside them, in the order that the program will have: the copies of a layer leave once it has run; what
// takes their bytes, the same layer of the next task but one, waits for them; in the backward a layer of the next task
// comes back once this task has freed the bytes of the same layer. It can be run again after a change of fates or of when
// copies begin.
type simulation struct {
	*costs
	*course
	stages  []simStage
	work    *work
	outs    bool                     // something is copied to the host
	backs   bool                     // units come back
	streams bool                     // K and V do
	arrives []ir.Seconds             // inputs of tasks
	sent    []ir.Seconds             // of each layer of a forward: when its copies have left
	back    []ir.Seconds             // of each layer of a backward: when its units are back
	rest    []ir.Seconds             // what the rank of a task has to do behind it, once all has run
	lent    map[lentLayer]ir.Seconds // when the weights that ranks borrow are there
}

// simulate predicts how long a plan takes.
func (p *Plan) simulate(t *costs) { p.simulation(&Context{}, t).run().report(p) }

func (p *Plan) simulation(c *Context, t *costs) *simulation {
	s := &simulation{costs: t, course: c.course(p), streams: p.Streams(), work: c.work}
	s.arrives, s.rest = make([]ir.Seconds, len(s.stops)), make([]ir.Seconds, len(s.stops))
	s.sent, s.back = make([]ir.Seconds, s.layers), make([]ir.Seconds, s.layers)
	return s
}

type simStage struct {
	job        *simulation
	tasks      []Task
	done       int   // tasks
	leaving    []int // numbers of forwards whose copies the task sees leave
	behind     int   // backwards behind the task whose reloads may begin while it runs
	now        ir.Seconds
	busy       ir.Seconds
	exposed    ir.Seconds
	late       []ir.Seconds // [i]: part of exposed
	link       cost.HostLink
	sendFree   [2]ir.Seconds // towards the next and the previous stage
	muxOut     ir.Seconds    // messages between ranks that share tasks
	muxIn      ir.Seconds
	reloadedTo int // layers from the start of the task on whose reloads have begun; 0: not looked at
	simHost
	simStream
}

// reset goes back to the start of the step.
func (s *simulation) reset() {
	p := s.plan
	s.outs, s.backs = p.Offload.Park || s.streams || anyCopies(s.d2h), anyCopies(s.h2d)
	clear(s.arrives)
	s.lent = map[lentLayer]ir.Seconds{}
	if s.outs {
		clear(s.sent)
	}
	if s.backs {
		clear(s.back)
	}
	s.stages = make([]simStage, len(p.Tasks))
	for i := range s.stages {
		tasks := p.Tasks[i]
		s.stages[i] = simStage{job: s, link: s.link, tasks: tasks, late: make([]ir.Seconds, p.Subsequences.N)}
		if p.layerOrder() || s.streams {
			s.stages[i].simHost = newSimHost(p.Detours(tasks))
		}
		if s.streams {
			s.stages[i].simStream = newSimStream(NewLoadQueue(p, s.graph, tasks))
		}
	}
}

func anyCopies(copies [][][]ir.Seconds) bool {
	for _, stage := range copies {
		for _, layers := range stage {
			for _, t := range layers {
				if t > 0 {
					return true
				}
			}
		}
	}
	return false
}

func (s *simulation) run() *simulation {
	s.reset()
	s.work.spend(s.layers)
	for _, n := range s.order {
		s.visitTask(n)
		s.rest[n] = -s.stages[s.stops[n].rank].busy
	}
	for n := range s.rest {
		s.rest[n] += s.stages[s.stops[n].rank].busy
	}
	return s
}

// within says whether all is done by a time, and looks no further than it takes to know. What ranks have to do must be what they
// had when all was run.
func (s *simulation) within(limit ir.Seconds) bool {
	const rounding = 1 - 1e-9
	s.reset()
	s.work.spend(s.layers)
	for _, n := range s.order {
		s.visitTask(n)
		if s.stages[s.stops[n].rank].now+s.rest[n]*rounding > limit {
			return false
		}
	}
	return s.end() <= limit
}

func (s *simulation) end() (end ir.Seconds) {
	for i := range s.stages {
		end = max(end, s.stages[i].now)
	}
	return end
}

// late is how long each stage waits for the copies of each subsequence. Waits do not count twice: what waited for one copy has
// given the next ones time.
func (s *simulation) late() [][]ir.Seconds {
	late := make([][]ir.Seconds, len(s.stages))
	for i := range s.stages {
		late[i] = s.stages[i].late
	}
	return late
}

func (s *simulation) visitTask(n int32) {
	t := &s.stops[n]
	st := &s.stages[t.rank]
	st.reloadedTo = 0
	if t.shared {
		if t.opens {
			newSharedSlot(s, s.task(n)).run()
		}
		st.done++
		return
	}
	begin := st.now
	st.now = max(st.now, s.arrives[n])
	st.await()
	lagging := st.lagging
	switch t.kind {
	case Forward:
		s.forwardTask(st, n)
	case Backward:
		s.backwardTask(st, n, begin)
	case WeightGrad:
		s.weightTask(st, n)
	}
	st.waitFor(lagging)
	detours := st.detours != nil && st.detours[st.done]
	st.done++
	if detours {
		s.depart(st, n)
	} else if t.next >= 0 {
		s.deliver(t)
	}
}

// deliver brings a task's result to the rank that goes on with it, along the ring or aside; messages of a direction keep their
// order.
func (s *simulation) deliver(t *stop) {
	from, to := &s.stages[t.rank], &s.stages[t.to]
	switch {
	case from == to:
		s.arrives[t.next] = from.now
	case t.aside:
		s.arrives[t.next] = s.transfer(from, to, from.now, s.message[t.at])
	default:
		direction := 0
		if t.backwards {
			direction = 1
		}
		from.sendFree[direction] = max(from.sendFree[direction], from.now) + s.message[t.at]
		s.arrives[t.next] = from.sendFree[direction]
	}
}

func (st *simStage) run(d ir.Seconds) {
	st.now += d
	st.busy += d
}

// wait is for the copy of a unit of subsequence i.
func (st *simStage) wait(i int32, until ir.Seconds) {
	if until > st.now {
		st.late[i] += until - st.now
		st.waitFor(until)
	}
}

// waitFor is for any copy: what it costs is exposed.
func (st *simStage) waitFor(until ir.Seconds) {
	if until > st.now {
		st.exposed += until - st.now
		st.now = until
	}
}

// findLeaving lists the numbers of the forwards whose offloads end while a task runs.
func (s *simulation) findLeaving(st *simStage, at int, rank int32) []int {
	if st.leaving = st.leaving[:0]; s.outs {
		st.leaving = s.course.leaving(st.leaving, int(rank), at)
	}
	return st.leaving
}

// release waits for the k-th layer of all forwards that leave.
func (s *simulation) release(st *simStage, leaving []int, k int) {
	for _, n := range leaving {
		if f := &s.stops[n]; k < int(f.end-f.first) {
			st.wait(f.subsequence, s.sent[int(f.layers)+k])
		}
	}
}

func (s *simulation) forwardTask(st *simStage, n int32) {
	t := &s.stops[n]
	s.fetch(st)
	if !t.fed {
		st.run(s.embed[t.at])
	}
	leaving := s.findLeaving(st, st.done, t.rank)
	for k := range int(t.end - t.first) {
		begin := st.now
		s.visit(st, t, k, s.forward[t.at])
		if s.outs {
			s.sent[int(t.layers)+k] = s.leave(st, t, k, begin)
			s.sentRows(st, k, st.link.Until(cost.Out))
			s.release(st, leaving, k)
		}
		s.reloadUpTo(st, n, k+s.plan.Offload.Ahead)
	}
}

// leave is when the copies of a forward's k-th layer have left, which follow their producers through the layer; 0 where
// there are none.
func (s *simulation) leave(st *simStage, t *stop, k int, begin ir.Seconds) ir.Seconds {
	d := s.out(st, t, k)
	if d == 0 {
		return 0
	}
	left := max(st.link.Copies(cost.Out, begin, d), st.now)
	st.link.Hold(cost.Out, left)
	return left
}

// backwardTask begins its reloads, where it follows its own forward, before its gradient arrives.
func (s *simulation) backwardTask(st *simStage, n int32, begin ir.Seconds) {
	t := &s.stops[n]
	layers, ahead := int(t.end-t.first), s.plan.Offload.Ahead
	leaving := s.findLeaving(st, st.done, t.rank)
	for at := range min(ahead, layers) {
		s.reload(st, n, at, begin)
	}
	s.reloadUpTo(st, n, ahead-1)
	s.fetch(st)
	if !t.fed {
		st.run(s.head[t.at])
	}
	for at := range layers {
		k := layers - 1 - at
		if s.backs {
			st.wait(t.subsequence, s.back[int(t.layers)+k])
		}
		s.waitCaches(st, t, k)
		s.visit(st, t, k, s.backwardOf(t, k).of(t.split))
		s.release(st, leaving, at)
		s.reloadUpTo(st, n, at+ahead)
	}
	if !t.feeds {
		st.run(s.embedGrad[t.at].of(t.split))
	}
}

func (s *simulation) weightTask(st *simStage, n int32) {
	t := &s.stops[n]
	s.fetch(st)
	leaving := s.findLeaving(st, st.done, t.rank)
	layers := int(t.end - t.first)
	for at := range layers {
		st.run(s.backwardOf(t, layers-1-at).weights)
		s.release(st, leaving, at)
		s.reloadUpTo(st, n, at+s.plan.Offload.Ahead)
	}
	if t.stage == 0 {
		st.run(s.embedGrad[t.at].weights)
	}
}

// backwardOf is the time of the k-th layer of a backward.
func (s *simulation) backwardOf(t *stop, k int) backwardTime {
	if s.again == nil {
		return s.backward[t.at]
	}
	return s.backward[t.at].plus(s.again[t.home][t.at][int(t.first)+k], 1)
}

// reloadUpTo begins the reloads of backward layers up to the last-th from the start of a task on, counted through the backwards
// that come. What it has looked at for this task it does not look at again.
func (s *simulation) reloadUpTo(st *simStage, n int32, last int) {
	if !s.backs {
		return
	}
	if st.reloadedTo == 0 {
		st.behind = s.plan.coming(st.tasks, st.done)
	}
	first := 0 // layer of the task, from the start of the one that is looked at
	for m := int(n); m <= int(n)+st.behind && first <= last; m++ {
		t := &s.stops[m]
		layers := int(t.end - t.first)
		if t.kind == Backward {
			for at := max(0, st.reloadedTo-first); at < layers && first+at <= last; at++ {
				s.reload(st, int32(m), at, st.now)
			}
		}
		first += layers
	}
	st.reloadedTo = max(st.reloadedTo, last+1)
}

// reload begins the copies of the layer that a backward task comes to as its at-th, no earlier than from. What is on its
// way already stays so.
func (s *simulation) reload(st *simStage, n int32, at int, from ir.Seconds) {
	t := &s.stops[n]
	k := int(t.end-t.first) - 1 - at
	copies := s.h2d[t.home][t.at][int(t.first)+k]
	back := &s.back[int(t.layers)+k]
	if copies == 0 || *back > 0 {
		return
	}
	gone := s.sent[int(s.stops[t.undone].layers)+k]
	*back = st.link.Copies(cost.Back, max(from, gone), copies)
}

// exposed is how long the stage that waits longest waits for copies.
func (s *simulation) exposed() (most ir.Seconds) {
	for i := range s.stages {
		most = max(most, s.stages[i].exposed)
	}
	return most
}

func (s *simulation) report(p *Plan) {
	var busy, idle ir.Seconds
	end := s.end()
	p.Time = Time{StepS: end}
	for i := range s.stages {
		st := &s.stages[i]
		p.Time.BusyS = append(p.Time.BusyS, st.busy)
		busy += st.busy
		idle += end - st.busy - st.exposed
	}
	p.Time.ExposedTransferS = s.exposed()
	if busy > 0 {
		p.Time.BubbleRatio = float64(idle / busy)
		p.Time.IdleShare = float64(idle / (end * ir.Seconds(len(s.stages))))
	}
}

package passes

import (
	"sppo.dev/ir"
	"sppo.dev/ir/cost"
	"sppo.dev/schedule"
)

// simulation gives the actions of all ranks' schedules durations, and runs them against each other in virtual time, with
// copies to and from the host beside them. It can be run again after a change of placements or of when copies begin.
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

func newSimulation(r *course, t *costs, w *work) *simulation {
	s := &simulation{costs: t, course: r, streams: r.plan.Streams(), work: w}
	s.arrives, s.rest = make([]ir.Seconds, len(s.stops)), make([]ir.Seconds, len(s.stops))
	s.sent, s.back = make([]ir.Seconds, s.layers), make([]ir.Seconds, s.layers)
	return s
}

type simStage struct {
	job      *simulation
	tasks    []Task
	list     *schedule.List
	first    int32 // number of the first of the tasks
	done     int   // tasks
	now      ir.Seconds
	busy     ir.Seconds
	exposed  ir.Seconds
	late     []ir.Seconds // [i]: part of exposed
	link     cost.HostLink
	sendFree [2]ir.Seconds // towards the next and the previous stage
	muxOut   ir.Seconds    // messages between ranks that share tasks
	muxIn    ir.Seconds
	simStaging
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
		s.stages[i] = simStage{
			job: s, tasks: tasks, list: s.schedule(i), first: int32(s.firsts[i]), link: s.link, late: make([]ir.Seconds, p.Subsequences.N),
		}
		if p.layerOrder() || s.streams {
			s.stages[i].simStaging = newSimStaging(len(tasks))
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

// within reports whether all is done by a time, and looks no further than it takes to know. What ranks have to do must be what they
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
	if t.shared {
		if t.opens {
			newSharedSlot(s, s.task(n)).run()
		}
		return
	}
	for _, a := range st.list.Of(int(n - st.first)) {
		s.act(st, n, a)
	}
}

// act gives an action of a task that a rank runs alone its time.
func (s *simulation) act(st *simStage, n int32, a schedule.Action) {
	t := &s.stops[n]
	switch a.Op {
	case schedule.Begin:
		st.now = max(st.now, s.arrives[n])
		st.await()
	case schedule.StageIn:
		s.stageIn(st, int(a.Task))
	case schedule.CachesIn:
		s.cachesIn(st, int(a.Task))
	case schedule.Embedding:
		s.runEmbedding(st, t)
	case schedule.Head:
		st.run(s.head[t.at])
	case schedule.Visit:
		s.visit(st, t, a)
	case schedule.Release:
		s.release(st, t, a)
	case schedule.Reload:
		s.reload(st, a)
	case schedule.End, schedule.StageOut:
		s.endTask(st, n, a)
	}
}

// endTask passes the task's result on.
func (s *simulation) endTask(st *simStage, n int32, a schedule.Action) {
	st.waitFor(st.lagging)
	st.done++
	t := &s.stops[n]
	switch {
	case a.Op == schedule.StageOut && s.plan.StagesOut(s.task(n), st.tasks[a.Of]):
		s.stageOut(st, t, a.Of)
	case t.next >= 0:
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

func (s *simulation) runEmbedding(st *simStage, t *stop) {
	switch t.kind {
	case Forward:
		st.run(s.embed[t.at])
	case Backward:
		st.run(s.embedGrad[t.at].of(t.split))
	case WeightGrad:
		st.run(s.embedGrad[t.at].weights)
	}
}

func (s *simulation) visit(st *simStage, t *stop, a schedule.Action) {
	k := int(a.Layer)
	switch t.kind {
	case Forward:
		begin := st.now
		s.runLayer(st, t, k, s.forward[t.at])
		if s.outs {
			s.sent[int(t.layers)+k] = s.offload(st, t, k, begin)
			s.sentRows(st, k, st.link.Until(cost.Out))
		}
	case Backward:
		if s.backs {
			st.wait(t.subsequence, s.back[int(t.layers)+k])
		}
		s.waitCaches(st, t, k)
		s.runLayer(st, t, k, s.backwardOf(t, k).of(t.split))
	case WeightGrad:
		st.run(s.backwardOf(t, k).weights)
	}
}

// offload is when the copies of a forward's k-th layer have left, which follow their producers through the layer; 0 where
// there are none.
func (s *simulation) offload(st *simStage, t *stop, k int, begin ir.Seconds) ir.Seconds {
	d := s.out(st, t, k)
	if d == 0 {
		return 0
	}
	left := max(st.link.Copies(cost.Out, begin, d), st.now)
	st.link.Hold(cost.Out, left)
	return left
}

// release waits for the copies of a forward's layer. Where the forward's own backward follows it, reloads wait for them instead.
func (s *simulation) release(st *simStage, t *stop, a schedule.Action) {
	if n := st.first + a.Task; s.outs && t.undone != n {
		f := &s.stops[n]
		st.wait(f.subsequence, s.sent[f.layers+a.Layer])
	}
}

// backwardOf is the time of the k-th layer of a backward.
func (s *simulation) backwardOf(t *stop, k int) backwardTime {
	if s.again == nil {
		return s.backward[t.at]
	}
	return s.backward[t.at].plus(s.again[t.home][t.at][int(t.first)+k], 1)
}

// reload begins the copies that bring a layer back, which has to have left.
func (s *simulation) reload(st *simStage, a schedule.Action) {
	t := &s.stops[st.first+a.Task]
	if copies := s.h2d[t.home][t.at][t.first+a.Layer]; copies > 0 {
		gone := s.sent[s.stops[t.undone].layers+a.Layer]
		s.back[t.layers+a.Layer] = st.link.Copies(cost.Back, max(st.now, gone), copies)
	}
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

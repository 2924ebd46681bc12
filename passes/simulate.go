package passes

import (
	"slices"

	"sppo/ir"
	"sppo/ir/cost"
)

// simulate runs the tasks of all stages against each other in virtual time, layer by layer, with copies to and from
// the host beside them, in the order that the program will have: the copies of a layer leave once it has run; what
// takes their bytes, the same layer of the next task but one, waits for them; in the backward a layer of the next task
// comes back once this task has freed the bytes of the same layer.
func (p *Plan) simulate(t *costs) { p.run(t).report(p) }

func (p *Plan) run(t *costs) *simulation {
	s := &simulation{costs: t, plan: p, slots: map[slot]bool{}, stages: make([]simStage, len(p.Tasks))}
	for i := range s.stages {
		s.stages[i] = simStage{
			job: s, link: t.link, tasks: p.Tasks[i], split: p.Splits(i), spans: map[int]layerSpan{},
			late: make([]ir.Seconds, p.Subsequences.N), left: map[Task][]ir.Seconds{}, back: map[Task][]ir.Seconds{}, arrives: map[Task]ir.Seconds{},
			simHost: newSimHost(p.Detours(p.Tasks[i])), simStream: newSimStream(NewLoadQueue(p, t.graph, p.Tasks[i])),
		}
		for j := range p.LayersPerStage {
			first, end := p.span(j)
			s.stages[i].spans[j] = layerSpan{first, end}
		}
	}
	if err := p.Walk(s.task); err != nil {
		panic("internal: simulating an order that was not verified: " + err.Error())
	}
	return s
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

type simulation struct {
	*costs
	plan   *Plan
	stages []simStage
	slots  map[slot]bool // shared ones that have run
}

type layerSpan struct{ first, end int }

type simStage struct {
	job   *simulation
	tasks []Task
	split map[Task]bool
	spans map[int]layerSpan // of each virtual stage, its layers among all of its rank
	done  int               // tasks

	now, busy, exposed ir.Seconds
	late               []ir.Seconds // [i]: part of exposed
	link               cost.HostLink
	sendFree           [2]ir.Seconds         // towards the next and the previous stage
	muxOut, muxIn      ir.Seconds            // messages between ranks that share tasks
	arrives            map[Task]ir.Seconds   // inputs of tasks
	left               map[Task][]ir.Seconds // [k]: when the copies of a forward have left
	back               map[Task][]ir.Seconds // [k]: when the units of a backward are back
	simHost
	simStream
}

func (s *simulation) task(stage int, t Task) {
	st := &s.stages[stage]
	if s.plan.Shared(t) {
		s.sharedTask(st, t)
		return
	}
	begin := st.now
	st.now = max(st.now, st.arrives[t])
	delete(st.arrives, t)
	st.waitFor(st.fetched[t])
	lagging := st.lagging
	_, _, fed := s.plan.Source(t)
	to, next, feeds := s.plan.Target(t)
	switch t.Kind {
	case Forward:
		s.forwardTask(st, t, !fed)
	case Backward:
		s.backwardTask(st, t, !fed, !feeds, begin)
	case WeightGrad:
		s.weightTask(st, t, t.Stage == 0)
	}
	st.waitFor(lagging)
	detours := st.detours[st.done]
	st.done++
	if detours {
		s.depart(st, t)
	} else if feeds {
		s.deliver(st, &s.stages[to], t, next)
	}
}

// deliver brings a task's result to the rank that goes on with it, along the ring or aside.
func (s *simulation) deliver(from, to *simStage, t, next Task) {
	if from != to && (s.plan.Runner(t) != s.plan.Home(t.Stage) || s.plan.Runner(next) != s.plan.Home(next.Stage)) {
		to.arrives[next] = s.transfer(from, to, from.now, s.message[s.plan.rangeOf(t)])
		return
	}
	s.send(from, to, t, next)
}

// send brings a task's result to the rank that goes on with it; messages of a direction keep their order.
func (s *simulation) send(from, to *simStage, t, next Task) {
	if from == to {
		to.arrives[next] = from.now
		return
	}
	direction := 0
	if !s.plan.Onwards(t.Kind, s.plan.Home(t.Stage), s.plan.Home(next.Stage)) {
		direction = 1
	}
	from.sendFree[direction] = max(from.sendFree[direction], from.now) + s.message[s.plan.rangeOf(t)]
	to.arrives[next] = from.sendFree[direction]
}

func (st *simStage) run(d ir.Seconds) {
	st.now += d
	st.busy += d
}

// wait is for the copy of a unit of subsequence i.
func (st *simStage) wait(i int, until ir.Seconds) {
	st.late[i] += max(0, until-st.now)
	st.waitFor(until)
}

// waitFor is for any copy: what it costs is exposed.
func (st *simStage) waitFor(until ir.Seconds) {
	if until > st.now {
		st.exposed += until - st.now
		st.now = until
	}
}

// span is where the layers of a task's virtual stage lie among all layers of its rank.
func (st *simStage) span(t Task) (first, end int) {
	span := st.spans[t.Stage]
	return span.first, span.end
}

// Leaving are the forwards whose offloads end while this task runs, layer by layer: the one that lies Lag tasks back, and at
// the first backward behind forwards all that are left, but for the forward that it undoes, which ends before.
func (p *Plan) Leaving(tasks []Task, i int) []Task {
	if p.mostPieces() > 0 {
		return p.leavingTurns(tasks, i)
	}
	first, last := i-p.Offload.Lag, i-p.Offload.Lag
	if tasks[i].Kind == Backward {
		last = i - 1
	}
	var out []Task
	for j := i - 1; j >= max(first, 0) && tasks[j].Kind != Backward; j-- {
		if j <= last && tasks[j].Kind == Forward && !tasks[i].Undoes(tasks[j]) {
			out = append(out, tasks[j])
		}
	}
	slices.Reverse(out)
	return out
}

// release waits for the k-th layer of all forwards that leave.
func (st *simStage) release(leaving []Task, k int) {
	for _, t := range leaving {
		if left := st.left[t]; k < len(left) {
			st.wait(t.Subsequence, left[k])
		}
	}
}

func (s *simulation) forwardTask(st *simStage, t Task, embeds bool) {
	i := s.plan.rangeOf(t)
	s.fetch(st)
	if embeds {
		st.run(s.embed[i])
	}
	leaving := s.plan.Leaving(st.tasks, st.done)
	first, end := st.span(t)
	left := make([]ir.Seconds, end-first)
	for k := range left {
		begin := st.now
		s.visit(st, t, k, s.forward[i])
		left[k] = s.leave(st, t, k, begin)
		s.sentRows(st, t, k, st.link.Until(cost.Out))
		st.release(leaving, k)
		s.reloadUpTo(st, t, k+s.plan.Offload.Ahead)
	}
	st.left[t] = left
}

// leave is when the copies of a forward's k-th layer have left, which follow their producers through the layer; 0 where
// there are none.
func (s *simulation) leave(st *simStage, t Task, k int, begin ir.Seconds) ir.Seconds {
	d := s.out(st, t, k)
	if d == 0 {
		return 0
	}
	left := max(st.link.Copies(cost.Out, begin, d), st.now)
	st.link.Hold(cost.Out, left)
	return left
}

// backwardTask begins its reloads, where it follows its own forward, before its gradient arrives.
func (s *simulation) backwardTask(st *simStage, t Task, loses, embeds bool, begin ir.Seconds) {
	i := s.plan.rangeOf(t)
	first, end := st.span(t)
	leaving := s.plan.Leaving(st.tasks, st.done)
	for at := range s.plan.Offload.Ahead {
		st.reload(t, at, begin)
	}
	s.reloadUpTo(st, t, s.plan.Offload.Ahead-1)
	s.fetch(st)
	if loses {
		st.run(s.head[i])
	}
	for k := range end - first {
		if back := st.back[t]; back != nil {
			st.wait(t.Subsequence, back[end-1-k])
		}
		s.waitCaches(st, t, end-first-1-k)
		s.visit(st, t, end-first-1-k, s.backwardOf(s.plan.Home(t.Stage), i, end-1-k).of(st.split[t]))
		st.release(leaving, k)
		s.reloadUpTo(st, t, k+s.plan.Offload.Ahead)
	}
	delete(st.left, t.As(Forward))
	delete(st.back, t)
	if embeds {
		st.run(s.embedGrad[i].of(st.split[t]))
	}
}

func (s *simulation) weightTask(st *simStage, t Task, embeds bool) {
	s.fetch(st)
	leaving := s.plan.Leaving(st.tasks, st.done)
	first, end := st.span(t)
	for k := range end - first {
		st.run(s.backwardOf(s.plan.Home(t.Stage), t.Subsequence, end-1-k).weights)
		st.release(leaving, k)
		s.reloadUpTo(st, t, k+s.plan.Offload.Ahead)
	}
	if embeds {
		st.run(s.embedGrad[t.Subsequence].weights)
	}
}

// backwardOf is the time of the k-th layer of a rank.
func (c *costs) backwardOf(rank, i, k int) backwardTime {
	if c.again == nil {
		return c.backward[i]
	}
	return c.backward[i].plus(c.again[rank][i][k], 1)
}

// reloadUpTo begins the reloads of backward layers up to the last-th from the start of a task on, counted through the backwards
// that come.
func (s *simulation) reloadUpTo(st *simStage, t Task, last int) {
	next := s.plan.Coming(st.tasks, st.done)
	for {
		first, end := st.span(t)
		for at := 0; at <= last && at < end-first && t.Kind == Backward; at++ {
			st.reload(t, at, st.now)
		}
		if last -= end - first; last < 0 || len(next) == 0 {
			return
		}
		t, next = next[0], next[1:]
	}
}

// reload begins the copies of the layer that a backward task comes to as its at-th, no earlier than from. What is on its
// way already stays so.
func (st *simStage) reload(t Task, at int, from ir.Seconds) {
	first, end := st.span(t)
	k := end - 1 - at
	copies := st.job.h2d[st.job.plan.Home(t.Stage)][st.job.plan.rangeOf(t)]
	if k < first || copies[k] == 0 {
		return
	}
	if st.back[t] == nil {
		st.back[t] = make([]ir.Seconds, len(copies))
	}
	if st.back[t][k] > 0 {
		return
	}
	gone := st.left[t.As(Forward)][k-first]
	st.back[t][k] = st.link.Copies(cost.Back, max(from, gone), copies[k])
}

func (s *simulation) report(p *Plan) {
	var end, busy, idle, exposed ir.Seconds
	for i := range s.stages {
		end = max(end, s.stages[i].now)
	}
	p.Time = Time{StepS: end}
	for i := range s.stages {
		st := &s.stages[i]
		p.Time.BusyS = append(p.Time.BusyS, st.busy)
		busy += st.busy
		idle += end - st.busy - st.exposed
		exposed = max(exposed, st.exposed)
	}
	p.Time.ExposedTransferS = exposed
	if busy > 0 {
		p.Time.BubbleRatio = float64(idle / busy)
		p.Time.IdleShare = float64(idle / (end * ir.Seconds(len(s.stages))))
	}
}

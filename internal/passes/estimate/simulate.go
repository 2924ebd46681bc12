package estimate

import (
	"sppo.dev/internal/cost"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/walk"
	"sppo.dev/internal/schedule"
	"sppo.dev/ir"
)

// Simulation runs the schedules of all ranks in virtual time, with concurrent copies to and from the host.
// It can run again after placements or the timing of copies have changed.
type Simulation struct {
	*Costs
	*walk.Walk
	stages  []simStage
	work    *walk.Work
	outs    bool                     // whether anything is copied to the host
	backs   bool                     // whether saved tensors are reloaded
	streams bool                     // whether K and V are streamed
	arrives []ir.Seconds             // [task]: when its input arrives
	sent    []ir.Seconds             // [layer of a task]: when a forward's copies to the host are done
	back    []ir.Seconds             // [layer of a task]: when a backward's saved tensors are reloaded
	rest    []ir.Seconds             // [task]: its rank's work after it; known after the first run
	loads   int                      // number of blocks of K and V that all ranks load
	lent    map[lentLayer]ir.Seconds // when the weights that ranks borrow have arrived
}

func newSimulation(r *walk.Walk, t *Costs, w *walk.Work) *Simulation {
	s := &Simulation{Costs: t, Walk: r, streams: r.Plan.Streams(), work: w, loads: walk.CountLoads(r.Plan, r.Plan.Model.Layers)}
	s.arrives, s.rest = make([]ir.Seconds, len(s.Nodes)), make([]ir.Seconds, len(s.Nodes))
	s.sent, s.back = make([]ir.Seconds, s.Layers), make([]ir.Seconds, s.Layers)
	return s
}

type simStage struct {
	job      *Simulation
	tasks    []plan.Task
	list     *schedule.List
	first    int32 // index of the first task in Nodes
	done     int   // number of tasks done
	now      ir.Seconds
	busy     ir.Seconds
	alone    ir.Seconds // busy time if nothing ran beside kernels
	exposed  ir.Seconds
	late     []ir.Seconds // [i]: part of the exposed time: waits for copies of subsequence i
	link     cost.HostLink
	sendFree [2]ir.Seconds // when the links to the next and to the previous stage are free
	muxOut   ir.Seconds    // when the last messages to and from ranks that share tasks end
	muxIn    ir.Seconds
	whole    ir.Seconds // when the weights and gradients of layers that were being gathered or reduced in a shared slot are complete
	simStaging
	simStream
	simParams
}

// reset returns to the start of the step.
func (s *Simulation) reset() {
	p := s.Plan
	s.outs, s.backs = p.Offload.Caches == plan.KVOnHost || s.streams || anyCopies(s.d2h), anyCopies(s.h2d)
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
			job: s, tasks: tasks, list: s.Schedule(i), first: int32(s.Firsts[i]), link: s.link, late: make([]ir.Seconds, p.Subsequences.N),
		}
		if p.LayerOrder() || s.streams {
			s.stages[i].simStaging = newSimStaging(len(tasks), p.Subsequences.N)
		}
		if s.streams {
			s.stages[i].simStream = newSimStream(p, walk.NewLoadQueue(p, s.graph, tasks, s.Schedule(i)))
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

// Run simulates all tasks from the start of the step, with the plan's current placements and timing of copies.
func (s *Simulation) Run() *Simulation {
	s.reset()
	s.work.Spend(s.Layers + s.loads)
	for _, n := range s.Order {
		s.visitTask(n)
		s.rest[n] = -s.stages[s.Nodes[n].Rank].alone
	}
	for n := range s.rest {
		s.rest[n] += s.stages[s.Nodes[n].Rank].alone
	}
	return s
}

// Within reports whether the step ends within a limit, and stops simulating as soon as this is impossible.
// Every task must take as much computing time as in the last complete run.
func (s *Simulation) Within(limit ir.Seconds) bool {
	const rounding = 1 - 1e-9
	s.reset()
	s.work.Spend(s.Layers + s.loads)
	for _, n := range s.Order {
		s.visitTask(n)
		if s.stages[s.Nodes[n].Rank].now+s.rest[n]*rounding > limit {
			return false
		}
	}
	return s.End() <= limit
}

// End returns the time at which the last rank finishes.
func (s *Simulation) End() (end ir.Seconds) {
	for i := range s.stages {
		end = max(end, s.stages[i].now, s.stages[i].through)
	}
	return end
}

// Late returns how long each stage waits for the copies of each subsequence. Waits are not counted
// twice: the time spent waiting for one copy is not part of the wait for the next.
func (s *Simulation) Late() [][]ir.Seconds {
	late := make([][]ir.Seconds, len(s.stages))
	for i := range s.stages {
		late[i] = s.stages[i].late
	}
	return late
}

func (s *Simulation) visitTask(n int32) {
	t := &s.Nodes[n]
	st := &s.stages[t.Rank]
	if t.Shared {
		if t.Opens {
			newSharedSlot(s, s.Task(n)).run()
		}
		return
	}
	for _, a := range st.list.Of(int(n - st.first)) {
		s.act(st, n, a)
	}
}

// act simulates an action of a task that a rank runs alone.
func (s *Simulation) act(st *simStage, n int32, a schedule.Action) {
	t := &s.Nodes[n]
	switch a.Op {
	case schedule.Begin:
		st.now = max(st.now, s.arrives[n])
		st.await()
	case schedule.InputFromHost:
		s.inputFromHost(st, int(a.Task))
	case schedule.KVFromHost:
		s.kvFromHost(st, a)
	case schedule.Embedding:
		s.runEmbedding(st, t)
	case schedule.Head:
		st.run(s.head[t.At])
	case schedule.LoadInput:
		s.loadInput(st, a)
	case schedule.Recompute:
		st.waitFor(st.inputs[a.Of])
		st.run(s.layer(t.Stage, int(a.Layer)).kvRecompute[a.Of])
	case schedule.Visit:
		s.visit(st, t, a)
	case schedule.Release:
		s.release(st, t, a)
	case schedule.Reload:
		s.reload(st, a)
	case schedule.End, schedule.EndOnHost:
		s.endTask(st, n, a)
	case schedule.Gather, schedule.Reduce, schedule.Sum:
		s.actOnParams(st, n, a)
	case schedule.Enter, schedule.Complete, schedule.Free: // take no time
	default:
		panic("estimate: an action without a duration: " + schedule.Ops[a.Op].Name)
	}
}

// endTask passes the task's result on.
func (s *Simulation) endTask(st *simStage, n int32, a schedule.Action) {
	st.waitFor(st.lagging)
	st.done++
	t := &s.Nodes[n]
	switch {
	case a.Op == schedule.EndOnHost && s.Plan.ResultOnHost(s.Task(n), st.tasks[a.Of]):
		s.resultToHost(st, t, a.Of)
	case t.Next >= 0:
		s.deliver(t)
	}
}

// deliver passes a task's result to the rank that continues with it: the same rank, a neighbour, or a rank that
// shares the tasks of a stage. Messages in one direction are sent one after another.
func (s *Simulation) deliver(t *walk.Node) {
	from, to := &s.stages[t.Rank], &s.stages[t.To]
	switch t.Way {
	case plan.Stays:
		s.arrives[t.Next] = from.now
	case plan.Aside:
		s.arrives[t.Next] = s.transfer(from, to, from.now, s.message[t.At])
	default:
		direction := 0
		if t.Way == plan.Back {
			direction = 1
		}
		from.sendFree[direction] = max(from.sendFree[direction], from.now) + s.message[t.At]
		s.arrives[t.Next] = from.sendFree[direction]
	}
}

// copies requests copies that can begin at time ready and take d in total, and returns the end of the last. If ranks share processors,
// kernels beside them slow down.
func (st *simStage) copies(w cost.Way, ready, d ir.Seconds) ir.Seconds {
	end := st.link.Copies(w, ready, d)
	if share := st.job.shareOfCopies; share > 0 {
		streams := [...]ir.Stream{cost.Out: ir.D2H, cost.Back: ir.H2D}
		c := cost.Collective{Stream: streams[w], Share: share, Begin: end - d, D: d}
		st.beside.Add(&c, d, st.now, func(s ir.Stream, late ir.Seconds) {
			if s == ir.Compute {
				st.now, st.busy = st.now+late, st.busy+late
			}
		})
	}
	return end
}

func (st *simStage) run(d ir.Seconds) {
	st.alone += d
	d = st.beside.Kernel(st.now, d)
	st.now += d
	st.busy += d
}

// wait simulates a wait for the copy of a saved tensor of subsequence i.
func (st *simStage) wait(i int32, until ir.Seconds) {
	if until > st.now {
		st.late[i] += until - st.now
		st.waitFor(until)
	}
}

// waitFor simulates a wait for any copy, and adds it to the exposed time.
func (st *simStage) waitFor(until ir.Seconds) {
	if until > st.now {
		st.exposed += until - st.now
		st.now = until
	}
}

func (s *Simulation) runEmbedding(st *simStage, t *walk.Node) {
	switch t.Kind {
	case plan.Forward:
		st.run(s.embed[t.At])
	case plan.Backward:
		st.run(s.embedGrad[t.At].of(t.Split))
	case plan.WeightGrad:
		st.run(s.embedGrad[t.At].weights)
	}
}

func (s *Simulation) visit(st *simStage, t *walk.Node, a schedule.Action) {
	k := int(a.Layer)
	st.now = max(st.now, st.gathered[[2]int32{t.Stage, a.Layer}])
	switch t.Kind {
	case plan.Forward:
		begin := st.now
		s.runLayer(st, t, k, s.layer(t.Stage, k).Forward[t.At])
		if s.outs {
			s.sent[int(t.Layers)+k] = s.offload(st, t, k, begin)
			s.sentRows(st, k, st.link.Until(cost.Out))
		}
	case plan.Backward:
		if s.backs {
			st.wait(t.Subsequence, s.back[int(t.Layers)+k])
		}
		st.waitFor(st.kv[[2]int32{t.Stage, a.Layer}])
		s.runLayer(st, t, k, s.backwardOf(t, k).of(t.Split))
	case plan.WeightGrad:
		st.run(s.backwardOf(t, k).weights)
	}
}

// offload returns the time at which the copies of a forward's k-th layer are done, or 0 if there are none. Each
// copy begins once its tensor has been computed, so the copies end no earlier than the layer.
func (s *Simulation) offload(st *simStage, t *walk.Node, k int, begin ir.Seconds) ir.Seconds {
	d := s.out(st, t, k)
	if d == 0 {
		return 0
	}
	left := max(st.copies(cost.Out, begin, d), st.now)
	st.link.Hold(cost.Out, left)
	return left
}

// release waits until the saved tensors of a forward's layer have been copied to the host. If the forward is
// followed by its own backward, the reloads wait for these copies instead.
func (s *Simulation) release(st *simStage, t *walk.Node, a schedule.Action) {
	if n := st.first + a.Task; s.outs && t.Undone != n {
		f := &s.Nodes[n]
		st.wait(f.Subsequence, s.sent[f.Layers+a.Layer])
	}
}

// backwardOf returns the time of the k-th layer of a backward.
func (s *Simulation) backwardOf(t *walk.Node, k int) backwardTime {
	backward := s.layer(t.Stage, k).backward[t.At]
	if s.recompute == nil {
		return backward
	}
	return backward.plus(s.recompute[t.Home][t.At][int(t.First)+k], 1)
}

// reload issues the copies that reload a layer. They begin once its copies to the host are done.
func (s *Simulation) reload(st *simStage, a schedule.Action) {
	t := &s.Nodes[st.first+a.Task]
	if copies := s.h2d[t.Home][t.At][t.First+a.Layer]; copies > 0 {
		gone := s.sent[s.Nodes[t.Undone].Layers+a.Layer]
		s.back[t.Layers+a.Layer] = st.copies(cost.Back, max(st.now, gone), copies)
	}
}

// Exposed returns the total time that a stage waits for copies, for the stage that waits longest.
func (s *Simulation) Exposed() (most ir.Seconds) {
	for i := range s.stages {
		most = max(most, s.stages[i].exposed)
	}
	return most
}

// Report writes the results into the plan's Time.
func (s *Simulation) Report(p *plan.Plan) {
	var busy, idle ir.Seconds
	end := s.End()
	p.Time = plan.Time{StepS: end}
	for i := range s.stages {
		st := &s.stages[i]
		p.Time.BusyS = append(p.Time.BusyS, st.busy)
		busy += st.busy
		idle += end - st.busy - st.exposed
	}
	p.Time.ExposedTransferS = s.Exposed()
	if busy > 0 {
		p.Time.BubbleRatio = float64(idle / busy)
		p.Time.IdleShare = float64(idle / (end * ir.Seconds(len(s.stages))))
	}
}

package passes

import "sppo/ir"

// simulate runs the tasks of all stages against each other in virtual time, layer by layer, with copies to and from
// the host beside them, in the order that the program will have: the copies of a layer leave once it has run; what
// takes their bytes, the same layer of the next task but one, waits for them; in the backward a layer of the next task
// comes back once this task has freed the bytes of the same layer.
func (p *Plan) simulate(t *costs) {
	s := &simulation{costs: t, stages: make([]simStage, len(p.Tasks))}
	for i := range s.stages {
		s.stages[i] = simStage{
			tasks: p.Tasks[i], d2h: t.d2h[i], h2d: t.h2d[i], first: i == 0, last: i == len(p.Tasks)-1,
			left: map[Task][]ir.Seconds{}, back: map[Task][]ir.Seconds{}, arrives: map[Task]ir.Seconds{},
		}
	}
	if err := p.walk(s.task); err != nil {
		panic("internal: simulating an order that was not verified: " + err.Error())
	}
	s.report(p)
}

type simulation struct {
	*costs
	stages []simStage
}

type simStage struct {
	tasks       []Task
	d2h, h2d    [][]ir.Seconds // [i][k]
	first, last bool
	done        int // tasks

	now, busy, exposed ir.Seconds
	d2hFree, h2dFree   ir.Seconds
	sendFree           [2]ir.Seconds         // towards the next and the previous stage
	arrives            map[Task]ir.Seconds   // inputs of tasks
	left               map[Task][]ir.Seconds // [k]: when the copies of a forward have left
	back               map[Task][]ir.Seconds // [k]: when the units of a backward are back
}

func (s *simulation) task(stage int, t Task) {
	st := &s.stages[stage]
	begin := st.now
	st.now = max(st.now, st.arrives[t])
	delete(st.arrives, t)
	if t.Kind == Forward {
		s.forwardTask(st, t)
	} else {
		s.backwardTask(st, t, begin)
	}
	st.done++
	if t.Kind == Forward && !st.last {
		s.send(st, &s.stages[stage+1], 0, t)
	}
	if t.Kind == Backward && !st.first {
		s.send(st, &s.stages[stage-1], 1, t)
	}
}

// send brings a task's result to the neighbour that goes on with it; messages of a direction keep their order.
func (s *simulation) send(from, to *simStage, direction int, t Task) {
	from.sendFree[direction] = max(from.sendFree[direction], from.now) + s.message[t.Subsequence]
	to.arrives[t] = from.sendFree[direction]
}

func (st *simStage) run(d ir.Seconds) {
	st.now += d
	st.busy += d
}

// wait is for a copy: what it costs is exposed.
func (st *simStage) wait(until ir.Seconds) {
	if until > st.now {
		st.exposed += until - st.now
		st.now = until
	}
}

func (s *simulation) forwardTask(st *simStage, t Task) {
	i := t.Subsequence
	if st.first {
		st.run(s.embed[i])
	}
	var before []ir.Seconds
	if st.done > 0 && st.tasks[st.done-1].Kind == Forward {
		before = st.left[st.tasks[st.done-1]]
	}
	left := make([]ir.Seconds, len(st.d2h[i]))
	for k, d := range st.d2h[i] {
		begin := st.now
		st.run(s.forward[i])
		if d > 0 { // copies follow their producers through the layer
			st.d2hFree = max(st.d2hFree+d, begin+d, st.now)
			left[k] = st.d2hFree
		}
		if before != nil {
			st.wait(before[k])
		}
	}
	st.left[t] = left
}

// backwardTask begins its reloads, where it follows a forward, before its gradient arrives.
func (s *simulation) backwardTask(st *simStage, t Task, begin ir.Seconds) {
	i := t.Subsequence
	if st.done > 0 && st.tasks[st.done-1].Kind == Forward { // the turn
		for k := len(st.h2d[i]) - 1; k >= 0; k-- {
			st.reload(t, k, begin)
		}
	}
	if st.last {
		st.run(s.head[i])
	}
	var next Task
	if st.done+1 < len(st.tasks) {
		next = st.tasks[st.done+1]
	}
	for k := len(st.h2d[i]) - 1; k >= 0; k-- {
		if back := st.back[t]; back != nil {
			st.wait(back[k])
		}
		st.run(s.backward[i])
		if next.Kind == Backward {
			st.reload(next, k, st.now)
		}
	}
	delete(st.left, Task{Forward, t.Microbatch, i})
	delete(st.back, t)
	if st.first {
		st.run(s.embedGrad[i])
	}
}

// reload issues the copies of layer k of a backward task, no earlier than from.
func (st *simStage) reload(t Task, k int, from ir.Seconds) {
	d := st.h2d[t.Subsequence][k]
	if d == 0 {
		return
	}
	if st.back[t] == nil {
		st.back[t] = make([]ir.Seconds, len(st.h2d[t.Subsequence]))
	}
	gone := st.left[Task{Forward, t.Microbatch, t.Subsequence}][k]
	st.h2dFree = max(st.h2dFree, from, gone) + d
	st.back[t][k] = st.h2dFree
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

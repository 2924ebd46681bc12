package sim

import (
	"container/heap"
	"math"

	"sppo.dev/ir"
)

// This file simulates resources that the ranks of a node share: processors, if ranks are threads on one
// computer, and copies to and from the host. Every instruction uses one processor. If more processors are
// needed than exist, all instructions slow down equally. There is one worker for each processor beyond the
// first. One kernel at a time has the workers, which run parts of it while processors are idle. When it ends,
// the kernel that has run longest gets the workers. The duration of an instruction thus depends on everything
// that runs, including unrelated ranks. Clocks that run ahead independently cannot express that. Here all
// clocks advance together, from the end of one instruction to the next.

// sharing is a section being simulated in chronological order.
type sharing struct {
	*world
	now    float64
	pools  []pool
	queues [][ir.NumStreams]queue // by rank
	events [][]event              // by rank
	links  []link                 // by rank
	starts int
}

// queue is a stream of a rank: its instructions in order.
type queue struct {
	pcs   []int32
	at    int     // the current instruction
	ready float64 // when the current instruction could begin
	start float64 // when it began
}

// link is a rank's connection to its host if copies take turns: one copy is in progress, and one in
// the other direction may be waiting.
type link struct {
	taken, awaited bool
	next           ir.Stream // the stream that waits
}

// enter takes the link for a stream's copy if the link is free, and reports whether it was. If not, the copy's
// turn comes next.
func (l *link) enter(s ir.Stream) bool {
	if l.taken {
		l.awaited, l.next = true, s
		return false
	}
	l.taken = true
	return true
}

// leave ends a copy and returns the stream that waits for its turn, if there is one.
func (l *link) leave() (next ir.Stream, awaited bool) {
	awaited, l.taken, l.awaited = l.awaited, false, false
	return l.next, awaited
}

// event is an event that other streams of the rank may wait for.
type event struct {
	recorded bool
	waiting  []ir.Stream
}

// pool is a shared resource. Instructions run at full speed while together they take at most its
// width; beyond that, all are slowed down equally.
type pool struct {
	width      float64 // 0: unlimited
	efficiency float64 // efficiency of a kernel that workers help
	taken      float64 // part of the width that its instructions take
	work       float64 // work done per instruction since the start, in seconds at full speed
	since      float64 // time up to which work has been counted
	tasks      tasks   // all running tasks except the helped one
	helped     task    // the kernel that has the workers; its rank is nil if they are free
	left       float64 // seconds at full speed that the helped kernel still needs
}

// task is an instruction or a meeting, which ends when its pool has worked on it for long enough.
type task struct {
	until  float64 // value of pool.work at which it is done
	takes  float64 // part of the pool's width
	number int     // in order of starting: of two tasks that end together, the one that started first ends first
	spread bool    // a kernel that benefits from the workers
	rank   *rank
	pc     int32
	meet   *meeting
}

type tasks []task

func (t tasks) Len() int { return len(t) }
func (t tasks) Less(i, j int) bool {
	if t[i].until != t[j].until {
		return t[i].until < t[j].until
	}
	return t[i].number < t[j].number
}
func (t tasks) Swap(i, j int) { t[i], t[j] = t[j], t[i] }
func (t *tasks) Push(x any)   { *t = append(*t, x.(task)) }
func (t *tasks) Pop() any {
	last := (*t)[len(*t)-1]
	*t = (*t)[:len(*t)-1]
	return last
}

// speed returns the speed of each instruction in the pool.
func (p *pool) speed() float64 {
	if p.width > 0 && p.taken > p.width {
		return p.width / p.taken
	}
	return 1
}

// spreadSpeed returns the speed of the kernel with the workers.
func (p *pool) spreadSpeed() float64 {
	idle := math.Floor(p.width - p.taken)
	if idle < 1 {
		return p.speed()
	}
	return max(1, (1+idle)*p.efficiency)
}

func (p *pool) busy() bool { return len(p.tasks) > 0 || p.helped.rank != nil }

// ends returns the time at which the first of the pool's instructions ends if nothing else happens, and whether
// that instruction has the workers.
func (p *pool) ends() (at float64, helped bool) {
	at = math.Inf(1)
	if len(p.tasks) > 0 {
		at = p.since + (p.tasks[0].until-p.work)/p.speed()
	}
	if p.helped.rank != nil {
		if end := p.since + p.left/p.spreadSpeed(); end < at {
			return end, true
		}
	}
	return at, false
}

// advance counts the work of the pool up to a time.
func (p *pool) advance(now float64) {
	p.left = max(p.left-(now-p.since)*p.spreadSpeed(), 0)
	p.work += (now - p.since) * p.speed()
	p.since = now
}

// helpNext gives the workers to the kernel that started first among those that can use them.
func (p *pool) helpNext() {
	first := -1
	for i := range p.tasks {
		if t := &p.tasks[i]; t.spread && (first < 0 || t.number < p.tasks[first].number) {
			first = i
		}
	}
	if first >= 0 {
		p.helped = heap.Remove(&p.tasks, first).(task)
		p.left = max(p.helped.until-p.work, 0)
	}
}

// pop removes the instruction that ends first.
func (p *pool) pop(now float64, helped bool) (t task) {
	p.advance(now)
	if helped {
		t, p.helped = p.helped, task{}
		p.helpNext()
	} else {
		p.work = p.tasks[0].until
		t = heap.Pop(&p.tasks).(task)
	}
	p.taken -= t.takes
	return t
}

// Pools. The first is unlimited; each node has its own set of the others.
const (
	poolFree       = 0
	poolProcessors = 1
	poolD2H        = 2
	poolH2D        = 3
	poolsOfNode    = 3
)

// share simulates the section of all ranks. Every rank needs its own clock, so no rank represents others.
func (w *world) share() error {
	s := newSharing(w)
	for _, r := range w.ranks {
		for stream := range ir.NumStreams {
			if err := s.proceed(r, stream); err != nil {
				return err
			}
		}
	}
	for p := s.next(); p != nil; p = s.next() {
		if err := s.finish(p); err != nil {
			return err
		}
	}
	stuck := false
	for i, r := range w.ranks {
		r.pc = len(r.binding.steps)
		for stream := range s.queues[i] {
			q := &s.queues[i][stream]
			if q.at == len(q.pcs) {
				continue
			}
			stuck = true
			if st := &r.binding.steps[q.pcs[q.at]]; st.kind == kindMeet && r.blocked == nil {
				r.pc, r.blocked = int(q.pcs[q.at]), r.meetings[st.arg]
			}
		}
	}
	if stuck {
		return w.deadlock()
	}
	return nil
}

func newSharing(w *world) *sharing {
	s := &sharing{world: w, queues: make([][ir.NumStreams]queue, len(w.ranks)), events: make([][]event, len(w.ranks))}
	m := w.program.Machine
	per := max(1, m.GPUsPerNode)
	s.pools = make([]pool, 1+(len(w.ranks)+per-1)/per*poolsOfNode)
	for at := 1; at < len(s.pools); at += poolsOfNode {
		s.pools[at+poolProcessors-1].width, s.pools[at+poolProcessors-1].efficiency = m.Parallelism, m.SpreadEfficiency
		if node := m.NodeCopyBandwidth; node > 0 {
			s.pools[at+poolD2H-1].width = node / m.D2HBandwidth
			s.pools[at+poolH2D-1].width = node / m.H2DBandwidth
		}
	}
	s.links = make([]link, len(w.ranks))
	for i, r := range w.ranks {
		s.queues[i] = r.binding.queues()
		s.events[i] = make([]event, len(r.events))
	}
	return s
}

// queues returns the instructions of each stream.
func (b *binding) queues() (q [ir.NumStreams]queue) {
	for pc := range b.steps {
		list := &q[b.steps[pc].stream].pcs
		*list = append(*list, int32(pc))
	}
	return q
}

// pool returns the pool of a rank's instruction, and how much of the pool the instruction takes.
func (s *sharing) pool(r *rank, op ir.Op) (p *pool, takes float64) {
	m := &s.program.Machine
	node := 1 + r.index/max(1, m.GPUsPerNode)*poolsOfNode
	switch {
	case m.Parallelism > 0: // copies and messages also take processors
		return &s.pools[node+poolProcessors-1], 1
	case op == ir.CopyD2H:
		return &s.pools[node+poolD2H-1], 1
	case op == ir.CopyH2D && m.HalfDuplex():
		return &s.pools[node+poolD2H-1], m.H2DBandwidth / m.D2HBandwidth
	case op == ir.CopyH2D:
		return &s.pools[node+poolH2D-1], 1
	}
	return &s.pools[poolFree], 1
}

// next returns the pool in which an instruction ends first; nil: nothing is running.
func (s *sharing) next() (first *pool) {
	soonest := 0.0
	for i := range s.pools {
		p := &s.pools[i]
		if !p.busy() {
			continue
		}
		if end, _ := p.ends(); first == nil || end < soonest {
			first, soonest = p, end
		}
	}
	return first
}

// start puts an instruction into a pool, given the part of the pool that it takes and its time at full speed.
func (s *sharing) start(p *pool, takes, seconds float64, t task) {
	p.advance(s.now)
	t.until, t.takes, t.number = p.work+seconds, takes, s.starts
	p.taken += takes
	s.starts++
	heap.Push(&p.tasks, t)
}

// help starts a kernel with the workers, given its time on one processor. Waking the workers takes time, but
// only if a processor is idle.
func (s *sharing) help(p *pool, seconds float64, t task) {
	p.advance(s.now)
	t.takes, t.number = 1, s.starts
	p.taken += t.takes
	s.starts++
	p.helped, p.left = t, seconds
	if speed := p.spreadSpeed(); speed > 1 {
		p.left += s.program.Machine.KernelLatency * speed
	}
}

// work starts the current instruction of a stream, which involves no other rank, unless it must wait for its
// turn. A kernel gets the workers if they are free and it is large enough to benefit.
func (s *sharing) work(r *rank, stream ir.Stream) {
	q := &s.queues[r.class][stream]
	pc := int(q.pcs[q.at])
	st := &r.binding.steps[pc]
	if s.takesTurns(st) && !s.links[r.class].enter(stream) {
		return
	}
	q.start = s.now
	p, takes := s.pool(r, st.op)
	seconds, t := r.lasts(stream, s.now, s.own(r, pc, st.duration)), task{rank: r, pc: int32(pc)}
	t.spread = st.spreads && float64(s.prices.model.Spread(ir.Seconds(st.duration), math.Floor(p.width))) < st.duration
	if t.spread && p.helped.rank == nil {
		s.help(p, seconds, t)
		return
	}
	s.start(p, takes, seconds, t)
}

// finish advances to the end of the task that ends first in a pool, and continues the task's streams.
func (s *sharing) finish(p *pool) error {
	end, helped := p.ends()
	s.now = max(s.now, end)
	t := p.pop(s.now, helped)
	if t.meet == nil {
		return s.ended(arrival{t.rank, int(t.pc)})
	}
	all := t.meet.arrived
	t.meet.arrived = nil
	for _, a := range all {
		if err := s.ended(a); err != nil {
			return err
		}
	}
	return nil
}

// ended records an instruction's time and continues its stream.
func (s *sharing) ended(a arrival) error {
	stream := a.step().stream
	q := &s.queues[a.class][stream]
	q.at++
	if !s.takesTurns(a.step()) {
		a.occupy(a.pc, stream, q.start, s.now)
		return s.proceed(a.rank, stream)
	}
	a.copied(a.pc, stream, q.ready, q.start, s.now)
	if next, waits := s.links[a.class].leave(); waits {
		s.work(a.rank, next)
	}
	return s.proceed(a.rank, stream)
}

// proceed runs a stream until it starts work or must wait.
func (s *sharing) proceed(r *rank, stream ir.Stream) error {
	q := &s.queues[r.class][stream]
	for q.at < len(q.pcs) {
		pc := int(q.pcs[q.at])
		st := &r.binding.steps[pc]
		switch st.kind {
		case kindWork:
			q.ready = s.now
			s.work(r, stream)
			return nil
		case kindMeet:
			return s.join(arrival{r, pc})
		case kindRecord:
			if err := s.record(r, pc, st); err != nil {
				return err
			}
		case kindWait:
			if e := &s.events[r.class][st.arg]; !e.recorded {
				e.waiting = append(e.waiting, stream)
				return nil
			}
			r.wait(pc, st)
		}
		q.at++
	}
	return nil
}

// record records an event and continues the streams that wait for it.
func (s *sharing) record(r *rank, pc int, st *step) error {
	r.record(pc, st)
	e := &s.events[r.class][st.arg]
	e.recorded = true
	waiting := e.waiting
	e.waiting = nil
	for _, stream := range waiting {
		if err := s.proceed(r, stream); err != nil {
			return err
		}
	}
	return nil
}

// join makes a rank arrive at a meeting, which begins when the last rank arrives.
func (s *sharing) join(a arrival) error {
	m, err := s.arrive(a)
	if err != nil || len(m.arrived) < m.need {
		return err
	}
	for _, x := range m.arrived {
		s.queues[x.class][x.step().stream].start = s.now
	}
	first, takes := m.arrived[0], 1.0 // a message is a copy
	if first.binding.ports[first.step().arg].team {
		takes = float64(len(m.members))
	}
	p, _ := s.pool(first.rank, first.step().op)
	s.start(p, takes, s.lasts(m, s.now), task{meet: m})
	return nil
}

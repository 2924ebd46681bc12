package simd

import (
	"math"
	"runtime"
	"sync"
	"sync/atomic"
)

// Pool is a fixed set of workers that share the parts of a Run. Any number of goroutines may call Run at once; a
// caller does all its parts itself as long as every worker is busy, so nobody ever waits for a worker to come free.
// A nil Pool has no workers.
type Pool struct {
	workers []worker
	open    []atomic.Pointer[job] // may have parts left to take
	jobs    sync.Pool
}

// worker is one goroutine. It looks for jobs unless it is busy, sleeps, or has ended.
type worker struct {
	state  atomic.Int32
	errand atomic.Pointer[func()] // to run before it does anything else
	wake   chan struct{}
	_      [64]byte // keeps neighbours' states on different cache lines
}

const (
	workerLooking int32 = iota
	workerBusy
	workerParked
	workerClosed
)

// job is one Run. It goes back to the free list when caller and every worker that joined have let go of it.
type job struct {
	f       func(part int)
	parts   int32
	next    []share      // by thread: the next part to hand out of those that it begins with
	left    atomic.Int32 // parts not yet finished
	holders atomic.Int32
	waiting atomic.Bool // the caller sleeps on finish
	finish  chan struct{}
}

// share is the parts of one thread that nobody has taken yet. A thread does its own before those of others: the same rows of one kernel
// after another, which then lie in its processor's cache.
type share struct {
	part atomic.Int32
	_    [60]byte // keeps neighbours on different cache lines
}

// spinRounds is how long an idle worker, or a caller waiting for the last part, looks around before it sleeps: some hundred
// microseconds. The gaps between the kernels of a step that are worth sharing are shorter, as a rule, and to wake a sleeping thread
// takes as long as a small kernel.
const spinRounds = 500

// mostOpen is how many jobs workers look for: as many as ranks share a computer, as a rule. What is beyond is done without workers.
const mostOpen = 16

// NewPool makes a pool that runs at most threads parts of one Run at once, the caller's included. A number below one
// means GOMAXPROCS.
func NewPool(threads int) *Pool {
	if threads < 1 {
		threads = runtime.GOMAXPROCS(0)
	}
	p := &Pool{workers: make([]worker, threads-1), open: make([]atomic.Pointer[job], max(threads, mostOpen))}
	p.jobs.New = func() any { return &job{finish: make(chan struct{}, 1), next: make([]share, threads)} }
	for i := range p.workers {
		w := &p.workers[i]
		w.wake = make(chan struct{}, 1)
		go w.loop(p, i+1)
	}
	return p
}

// Threads returns the number of goroutines that can take part in one Run.
func (p *Pool) Threads() int {
	if p == nil {
		return 1
	}
	return len(p.workers) + 1
}

// Close ends the workers once they are idle. Run still works afterwards, on the caller alone.
func (p *Pool) Close() {
	for i := range p.workers {
		w := &p.workers[i]
		for {
			s := w.state.Load()
			if s == workerClosed {
				break
			}
			if s != workerBusy && w.state.CompareAndSwap(s, workerClosed) {
				if s == workerParked {
					w.wake <- struct{}{}
				}
				break
			}
			runtime.Gosched()
		}
	}
}

// Run calls f(0) to f(parts-1), each once, on the caller and on idle workers, and returns when all have returned.
// The parts must not depend on one another.
func (p *Pool) Run(parts int, f func(part int)) {
	if parts > math.MaxInt32 { // which a job counts with
		p.Run(parts/2, f)
		p.Run(parts-parts/2, func(part int) { f(parts/2 + part) })
		return
	}
	if p == nil || parts <= 1 || len(p.workers) == 0 {
		for i := range parts {
			f(i)
		}
		return
	}
	j := p.jobs.Get().(*job)
	j.f, j.parts = f, int32(parts)
	for thread := range j.next {
		j.next[thread].part.Store(j.first(thread))
	}
	j.left.Store(int32(parts))
	j.waiting.Store(false)
	j.holders.Store(1)
	place := p.publish(j)
	j.work(0)
	p.withdraw(place, j)
	j.wait()
	j.release(p)
}

// publish opens a job to workers and wakes as many as there are parts for, unless they are up. The place is negative where there is
// none.
func (p *Pool) publish(j *job) (place int) {
	for place = range p.open {
		if p.open[place].Load() == nil && p.open[place].CompareAndSwap(nil, j) {
			p.rouse(int(j.parts) - 1)
			return place
		}
	}
	return -1
}

// withdraw closes a job, which the caller holds, to workers.
func (p *Pool) withdraw(place int, j *job) {
	if place >= 0 {
		p.open[place].CompareAndSwap(j, nil)
	}
}

// rouse sees to it that n workers look for jobs.
func (p *Pool) rouse(n int) {
	for i := range p.workers {
		if n == 0 {
			return
		}
		w := &p.workers[i]
		switch w.state.Load() {
		case workerLooking:
			n--
		case workerParked:
			if w.state.CompareAndSwap(workerParked, workerLooking) {
				w.wake <- struct{}{}
				n--
			}
		}
	}
}

// Errand runs f, which must be short, on a spinning worker, and reports whether there is one. The worker is as free for a Run
// as it was.
func (p *Pool) Errand(f *func()) bool {
	if p == nil {
		return false
	}
	for i := range p.workers {
		w := &p.workers[i]
		if w.state.Load() != workerLooking || !w.errand.CompareAndSwap(nil, f) {
			continue
		}
		if w.state.Load() == workerLooking || !w.errand.CompareAndSwap(f, nil) { // otherwise it may not look for long
			return true
		}
	}
	return false
}

// runErrand is called by a spinning worker, and once more after it stops spinning.
func (w *worker) runErrand() {
	if f := w.errand.Load(); f != nil && w.errand.CompareAndSwap(f, nil) {
		(*f)()
	}
}

// first returns the first of a thread's parts, and the end of those of the thread before.
func (j *job) first(thread int) int32 { return int32(int(j.parts) * thread / len(j.next)) }

// work takes parts until none is left to take: a thread's own, then those of the threads behind it.
func (j *job) work(thread int) {
	for range j.next {
		for {
			part := j.next[thread].part.Add(1) - 1
			if part >= j.first(thread+1) {
				break
			}
			j.f(int(part))
			if j.left.Add(-1) == 0 && j.waiting.CompareAndSwap(true, false) {
				j.finish <- struct{}{}
			}
		}
		if thread++; thread == len(j.next) {
			thread = 0
		}
	}
}

// wait returns when every part is finished: soon, as a rule, so it looks for a while before it sleeps.
func (j *job) wait() {
	for range spinRounds {
		if j.left.Load() == 0 {
			return
		}
		relax()
	}
	j.waiting.Store(true)
	if j.left.Load() == 0 && j.waiting.CompareAndSwap(true, false) {
		return
	}
	<-j.finish
}

// join takes hold of a job that somebody holds: of another one than was looked for, perhaps, since it has been used again.
func (j *job) join() bool {
	for n := j.holders.Load(); n > 0; n = j.holders.Load() {
		if j.holders.CompareAndSwap(n, n+1) {
			return true
		}
	}
	return false
}

func (j *job) release(p *Pool) {
	if j.holders.Add(-1) == 0 {
		j.f = nil
		p.jobs.Put(j)
	}
}

// loop is a worker's life: look for a job, work, look again for a while, sleep.
func (w *worker) loop(p *Pool, thread int) {
	for {
		for idle := 0; idle < spinRounds; idle++ {
			closed := w.state.Load() == workerClosed
			w.runErrand()
			if closed {
				return
			}
			if w.help(p, thread) {
				idle = 0
				continue
			}
			relax()
		}
		w.park(p)
	}
}

// help joins an open job and reports whether there was one.
func (w *worker) help(p *Pool, thread int) bool {
	for place := range p.open {
		j := p.open[place].Load()
		if j == nil || !j.join() {
			continue
		}
		busy := w.state.CompareAndSwap(workerLooking, workerBusy)
		w.runErrand()
		if busy {
			j.work(thread)
			p.withdraw(place, j)
			w.state.Store(workerLooking)
		}
		j.release(p)
		return busy
	}
	return false
}

// park sleeps until there is a job. One that came before everybody saw that the worker is about to is not missed, nor is an errand.
func (w *worker) park(p *Pool) {
	if !w.state.CompareAndSwap(workerLooking, workerParked) {
		return
	}
	w.runErrand()
	for place := range p.open {
		if p.open[place].Load() != nil && w.state.CompareAndSwap(workerParked, workerLooking) {
			return
		}
	}
	<-w.wake
}

// relaxPauses is how many pauses there are to a round: threads that only gave way to each other would change processors, and leave
// what they work on in a cache behind.
const relaxPauses = 8

// relax passes half a microsecond, giving the processor to any goroutine that can use it.
func relax() {
	for range relaxPauses {
		pause()
	}
	runtime.Gosched()
}

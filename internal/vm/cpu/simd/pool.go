package simd

import (
	"math"
	"runtime"
	"sync"
	"sync/atomic"
)

// Pool is a fixed set of workers that share the parts of a Run. Any number of goroutines may call Run at the
// same time. A caller runs all its parts itself if every worker is busy, so no caller waits for a worker to
// become free. A nil Pool has no workers.
type Pool struct {
	workers []worker
	open    []atomic.Pointer[job] // jobs that may have remaining parts
	jobs    sync.Pool
}

// worker is one goroutine. It looks for jobs unless it is busy, parked or closed.
type worker struct {
	state  atomic.Int32
	errand atomic.Pointer[func()] // a function to run before anything else
	wake   chan struct{}
	_      [64]byte // keeps states of adjacent workers on different cache lines
}

const (
	workerLooking int32 = iota
	workerBusy
	workerParked
	workerClosed
)

// job is one call of Run. It is returned to the free list when the caller and every worker that
// joined have released it.
type job struct {
	f       func(part int)
	parts   int32
	next    []share      // by thread: remaining parts
	left    atomic.Int32 // parts not yet finished
	holders atomic.Int32
	waiting atomic.Bool // the caller is blocked on finish
	finish  chan struct{}
}

// share is the range of a thread's parts that have not been taken yet. A thread runs its own parts first, so that
// in successive kernels it processes the same rows while they are in its processor's cache.
type share struct {
	part atomic.Int32
	_    [60]byte // keeps adjacent shares on different cache lines
}

// spinRounds is the number of rounds that an idle worker, or a caller waiting for the last part, spins before it
// sleeps: a few hundred microseconds. Gaps between the shareable kernels of a step are usually shorter, and waking
// a sleeping thread takes as long as a small kernel.
const spinRounds = 500

// mostOpen is the minimum length of Pool.open. It is at least the usual number of ranks on a computer. Jobs that
// find no place in Pool.open run without workers.
const mostOpen = 16

// NewPool creates a pool that uses at most the given number of threads for one Run, including the caller's. A
// number below one means GOMAXPROCS.
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

// Close ends the workers once they are idle. Run still works afterwards, without workers.
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
	if parts > math.MaxInt32 { // a job stores numbers of parts in an int32
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

// publish makes a job visible to workers and rouses one worker for each part except the caller's first. It
// returns the job's place in open, or a negative number if none is free.
func (p *Pool) publish(j *job) (place int) {
	for place = range p.open {
		if p.open[place].Load() == nil && p.open[place].CompareAndSwap(nil, j) {
			p.rouse(int(j.parts) - 1)
			return place
		}
	}
	return -1
}

// withdraw hides a job, which the caller must hold, from workers.
func (p *Pool) withdraw(place int, j *job) {
	if place >= 0 {
		p.open[place].CompareAndSwap(j, nil)
	}
}

// rouse wakes parked workers until n workers are looking for jobs, or until no worker is parked.
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

// Errand runs the short function f on a spinning worker, and reports whether there is one. The
// worker remains available to Run.
func (p *Pool) Errand(f *func()) bool {
	if p == nil {
		return false
	}
	for i := range p.workers {
		w := &p.workers[i]
		if w.state.Load() != workerLooking || !w.errand.CompareAndSwap(nil, f) {
			continue
		}
		// A worker that has stopped looking may not notice the errand, which is then taken back.
		if w.state.Load() == workerLooking || !w.errand.CompareAndSwap(f, nil) {
			return true
		}
	}
	return false
}

// runErrand runs a pending errand. Workers call it while they spin, and once more when they stop spinning.
func (w *worker) runErrand() {
	if f := w.errand.Load(); f != nil && w.errand.CompareAndSwap(f, nil) {
		(*f)()
	}
}

// first returns the first of a thread's parts, which is also the end of the previous thread's parts.
func (j *job) first(thread int) int32 { return int32(int(j.parts) * thread / len(j.next)) }

// work runs parts until none is left: first the thread's own, then those of the next threads.
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

// wait returns when every part is finished. Usually that is soon, so it spins for a while before it blocks.
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

// join acquires a job that another goroutine holds. It fails if all holders have released the job.
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

// loop is the main loop of a worker: look for a job, work, spin for a while, sleep.
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

// park blocks until there is a job. After marking the worker as parked, it looks for an errand and a job once
// more, so it misses neither.
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

// relaxPauses is the number of pauses in a call of relax. Threads that only yield would move between processors
// and lose their caches.
const relaxPauses = 8

// relax waits for half a microsecond and yields the processor to other goroutines.
func relax() {
	for range relaxPauses {
		pause()
	}
	runtime.Gosched()
}

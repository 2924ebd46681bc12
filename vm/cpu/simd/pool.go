package simd

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// Pool is a fixed set of workers that share the parts of a Run. Any number of goroutines may call Run at once; a
// caller that finds every worker busy does all its parts itself, so nobody ever waits for a worker to come free.
// A nil Pool has no workers.
type Pool struct {
	workers []worker
	jobs    sync.Pool
}

// worker is one goroutine's mailbox. Whoever moves state from spinning or parked to busy owns the right to put a job.
type worker struct {
	state  atomic.Int32
	job    atomic.Pointer[job]
	errand atomic.Pointer[func()] // to run before the job
	wake   chan struct{}
	_      [64]byte // keeps neighbours' states on different cache lines
}

const (
	workerBusy int32 = iota
	workerSpinning
	workerParked
	workerClosed
)

// job is one Run. It goes back to the free list when caller and every invited worker have let go of it: a worker
// that wakes late finds no part left, and nobody has waited for it.
type job struct {
	f       func(part int)
	parts   int32
	next    []share      // by thread: the next part to hand out of those that it begins with
	left    atomic.Int32 // parts not yet finished
	holders atomic.Int32
	waiting atomic.Bool // the caller sleeps on finished
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

// NewPool makes a pool that runs at most threads parts of one Run at once, the caller's included. A number below one
// means GOMAXPROCS.
func NewPool(threads int) *Pool {
	if threads < 1 {
		threads = runtime.GOMAXPROCS(0)
	}
	p := &Pool{workers: make([]worker, threads-1)}
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
	j.holders.Store(1)
	j.waiting.Store(false)
	p.invite(j, parts-1)
	j.work(0)
	j.wait()
	j.release(p)
}

// invite gives the job to at most n idle workers.
func (p *Pool) invite(j *job, n int) {
	for i := range p.workers {
		if n == 0 {
			return
		}
		w := &p.workers[i]
		s := w.state.Load()
		if (s == workerSpinning || s == workerParked) && w.state.CompareAndSwap(s, workerBusy) {
			j.holders.Add(1)
			w.job.Store(j)
			if s == workerParked {
				w.wake <- struct{}{}
			}
			n--
		}
	}
}

// Errand has a worker that looks about call f, which must be short, and says whether there is one. The worker is as free for a Run
// as it was.
func (p *Pool) Errand(f *func()) bool {
	if p == nil {
		return false
	}
	for i := range p.workers {
		w := &p.workers[i]
		if w.state.Load() != workerSpinning || !w.errand.CompareAndSwap(nil, f) {
			continue
		}
		if w.state.Load() == workerSpinning || !w.errand.CompareAndSwap(f, nil) { // otherwise it may not look for long
			return true
		}
	}
	return false
}

// runErrand is for a worker that looks about, and once more behind its last look.
func (w *worker) runErrand() {
	if f := w.errand.Load(); f != nil && w.errand.CompareAndSwap(f, nil) {
		(*f)()
	}
}

// first is the first of a thread's parts, and the end of those of the thread before.
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

func (j *job) release(p *Pool) {
	if j.holders.Add(-1) == 0 {
		j.f = nil
		p.jobs.Put(j)
	}
}

// loop is a worker's life: offer itself, look for a while, sleep, work.
func (w *worker) loop(p *Pool, thread int) {
	for {
		w.state.Store(workerSpinning)
		again := w.await()
		w.runErrand()
		if !again {
			return
		}
		j := w.job.Swap(nil)
		j.work(thread)
		j.release(p)
	}
}

// await returns true once a job lies in the mailbox, false when the pool is closed.
func (w *worker) await() bool {
	for range spinRounds {
		if w.job.Load() != nil {
			return true
		}
		if w.state.Load() == workerClosed {
			return false
		}
		w.runErrand()
		relax()
	}
	if w.state.CompareAndSwap(workerSpinning, workerParked) {
		w.runErrand()
		<-w.wake
	}
	for w.job.Load() == nil {
		if w.state.Load() == workerClosed {
			return false
		}
		relax()
	}
	return true
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

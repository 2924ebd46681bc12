// Package world joins the processes of one job, on one host or on several, over TCP.
//
// The map:
//
//	world.go       World: which process has which ranks, how the job ends, and what is said when it cannot go on
//	rendezvous.go  how processes find each other, and what they must have alike
//	control.go     what the first process orders and the others answer; values that one makes for all
//	conn.go        messages of the control plane
//	wires.go       bytes between ranks of different processes: vm.Wires
//
// Every process has one connection to process 0: orders, answers and the reason of a failure go over it, and when it breaks the
// process at the other end is lost. Where ranks meet over TCP, every two processes have one more, for the bytes of messages.
//
// The package does not know what an order means, nor what is in the bytes.
package world

import (
	"cmp"
	"fmt"
	"net"
	"sync"
	"time"

	"sppo.dev/vm"
)

// Options of a world.
type Options struct {
	Process, Processes int
	Ranks              int               // of the program; every process has as many as the others, in a row
	Rendezvous         string            // HOST:PORT where process 0 is found
	Timeout            time.Duration     // until all must be there
	Job                string            // tells this job from others that try the same place
	Terms              []Term            // what all processes must have alike
	Local              int               // which one this is of the processes of its host; -1: by their order
	Wires              bool              // whether ranks meet over TCP, or have a network of their own
	Tell               func(what string) // whom process 0 waits for, and whom it has turned away
}

// Term is something that all processes must have alike.
type Term struct{ Name, Value string }

// Member is a process of a job.
type Member struct {
	Host    string
	Local   int    // which one of those on its host
	Address string // where others reach its wires; a host that is missing is the rendezvous's
}

// World is the processes of a job, as one of them sees them. It is the vm.Crew of their jobs.
type World struct {
	Members []Member

	options Options
	key     string  // of this one meeting, which nobody else can have
	conns   []*conn // of process 0: by process; of the others: the one to process 0
	wires   wires
	control control
	board   board

	mu      sync.Mutex
	cause   error // set once, before failed closes
	abort   []func(reason error)
	failed  chan struct{}
	ending  chan struct{} // closes when connections may close
	endOnce sync.Once
	gone    sync.WaitGroup
}

func newWorld(o Options) *World {
	w := &World{options: o, failed: make(chan struct{}), ending: make(chan struct{})}
	w.control = newControl(o.Processes)
	w.wires = wires{all: map[uint64]*wire{}, links: make([]*link, o.Processes)}
	return w
}

// Process is which one this is.
func (w *World) Process() int { return w.options.Process }

// Leads implements vm.Crew.
func (w *World) Leads() bool { return w.options.Process == 0 }

func (w *World) each() int { return w.options.Ranks / w.options.Processes }

// processOf is where a rank is.
func (w *World) processOf(rank int) int { return rank / w.each() }

// Here implements vm.Wires.
func (w *World) Here(rank int) bool { return w.processOf(rank) == w.options.Process }

// Ranks are those of this process: from the first to before the end.
func (w *World) Ranks() (first, end int) {
	return w.options.Process * w.each(), (w.options.Process + 1) * w.each()
}

// Local is which one this is of the processes on its host, and how many those are.
func (w *World) Local() (index, of int) {
	me := w.Members[w.options.Process]
	for _, m := range w.Members {
		if m.Host == me.Host {
			of++
		}
	}
	return me.Local, of
}

// Hosts is on how many the processes are.
func (w *World) Hosts() int {
	hosts := map[string]bool{}
	for _, m := range w.Members {
		hosts[m.Host] = true
	}
	return len(hosts)
}

// name is what people call a process.
func (w *World) name(process int) string {
	first, last := process*w.each(), (process+1)*w.each()-1
	ranks := fmt.Sprintf("ranks %d to %d", first, last)
	if first == last {
		ranks = fmt.Sprintf("rank %d", first)
	}
	return fmt.Sprintf("process %d (%s, on %s)", process, ranks, w.Members[process].Host)
}

// OnFailure has a function called, once, when a process cannot go on; now, if that has happened.
func (w *World) OnFailure(abort func(reason error)) {
	w.mu.Lock()
	cause := w.cause
	w.abort = append(w.abort, abort)
	w.mu.Unlock()
	if cause != nil {
		abort(cause)
	}
}

// Failed implements vm.Wires.
func (w *World) Failed(reason error) {
	if w.fail(fmt.Errorf("%s failed: %w", w.name(w.options.Process), reason)) && !w.Leads() {
		_ = w.conns[0].write(message{Kind: kindFailed, Text: reason.Error()}, nil) // if it is lost, everybody is told
	}
}

// fail stops everything in this process, and process 0 tells the others. It says whether the reason is the first.
func (w *World) fail(cause error) bool {
	w.mu.Lock()
	if w.cause != nil {
		w.mu.Unlock()
		return false
	}
	w.cause = cause
	abort := w.abort
	close(w.failed)
	w.mu.Unlock()
	w.wires.stop()
	for _, f := range abort {
		f(cause)
	}
	if w.Leads() {
		for _, c := range w.conns {
			if c != nil {
				_ = c.SetWriteDeadline(time.Now().Add(farewell))
				_ = c.write(message{Kind: kindAbort, Text: cause.Error()}, nil) // whoever is not there needs no telling
			}
		}
	}
	return true
}

// lost is a process whose connection broke: an error, unless the end has come.
func (w *World) lost(process int) {
	select {
	case <-w.ending:
	default:
		w.fail(fmt.Errorf("%s was lost: its connection closed", w.name(process)))
	}
}

// Cause implements vm.Crew.
func (w *World) Cause() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.cause
}

// aborted is the error of what a failure cut short.
func (w *World) aborted() error { return fmt.Errorf("%w: %w", vm.ErrAborted, w.Cause()) }

// farewell is how long a process waits for others to hear of its end.
const farewell = 3 * time.Second

// Close ends this process's part, with the error that it has of its own. The others end when process 0 does: theirs is the cause of
// a failure, or none.
func (w *World) Close(err error) error {
	if err != nil && w.Cause() == nil {
		w.Failed(err)
	}
	switch {
	case w.Cause() != nil:
		err = cmp.Or(err, w.Cause())
	case w.Leads():
		w.end()
		for _, c := range w.conns[1:] {
			_ = c.write(message{Kind: kindEnd}, nil) // whoever is gone has ended, too
		}
	default:
		err = w.awaitEnd()
	}
	w.leave()
	return err
}

// awaitEnd waits until process 0 says that all is done.
func (w *World) awaitEnd() error {
	select {
	case <-w.ending:
		return nil
	case <-w.failed:
		return w.Cause()
	}
}

// leave closes connections, from our side first, and waits a little for the other sides to have heard all.
func (w *World) leave() {
	for _, c := range w.conns {
		if c != nil {
			c.closeWrite()
		}
	}
	done := make(chan struct{})
	go func() { w.gone.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(farewell):
	}
	for _, c := range w.conns {
		if c != nil {
			c.Close()
		}
	}
	w.wires.close()
}

// end lets connections close.
func (w *World) end() { w.endOnce.Do(func() { close(w.ending) }) }

// keepAlive finds out within half a minute that a host is gone which closes nothing.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 10 * time.Second, Interval: 5 * time.Second, Count: 4}

// Package world connects the processes of one job, on one or more hosts, over TCP.
//
//	world.go       World: which process has which ranks, how the job ends, and errors
//	rendezvous.go  how processes find process 0 and introduce themselves
//	gather.go      how process 0 waits for the others, and what must be equal in all processes
//	control.go     orders from process 0 and answers from the others; values that one process creates for all
//	inspect.go     asks other processes what they are doing, during any order
//	conn.go        messages of the control plane
//	wires.go       bytes between ranks of different processes: vm.Wires
//
// Every process has one connection to process 0, for orders, answers and the reason for a failure. If the
// connection breaks, the process at the other end is lost. If ranks communicate over TCP, every pair of
// processes has another connection for the bytes of messages.
//
// The package does not interpret orders or the contents of messages.
package world

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	"sppo.dev/internal/vm"
)

// Options holds the settings of a World.
type Options struct {
	Process, Processes int
	Ranks              int               // number of ranks; each process runs a contiguous block of equal size
	Rendezvous         string            // HOST:PORT where process 0 listens
	Timeout            time.Duration     // time limit for all processes to connect
	Job                string            // name of the job, which distinguishes jobs at the same address
	Secret             string            // secret that all processes must know; empty: none
	Terms              []Term            // must be equal in all processes
	Local              int               // index among the processes of its host; -1: in order of arrival
	Wires              bool              // ranks communicate over TCP, not over a network of their own
	Tell               func(what string) // receives progress reports: processes that are missing or were rejected
}

// SecretVariable is the environment variable that sets Options.Secret.
const SecretVariable = "SPPO_JOB_SECRET"

// Term is a value that must be equal in all processes.
type Term struct{ Name, Value string }

// Member is a process of a job.
type Member struct {
	Host    string
	Local   int    // index on its host
	Address string // address of its wires; without a host, the host is that of the rendezvous
}

// World is the set of processes of a job, as seen by one of them. It is the train.Crew of the job.
type World struct {
	Members []Member

	options Options
	key     string  // unique to this job
	conns   []*conn // in process 0: by process; in the others: only the one to process 0
	wires   wires
	control control
	board   board

	inspections inspections

	mu      sync.Mutex
	cause   error // set once, before failed is closed
	abort   []func(reason error)
	failed  chan struct{}
	ending  chan struct{} // closed when connections may be closed
	endOnce sync.Once
	gone    sync.WaitGroup
}

func newWorld(o Options) *World {
	w := &World{options: o, failed: make(chan struct{}), ending: make(chan struct{})}
	w.control = newControl(o.Processes)
	w.wires = wires{all: map[uint64]*wire{}, links: make([]*link, o.Processes)}
	return w
}

// Process returns the index of this process.
func (w *World) Process() int { return w.options.Process }

// Leads implements train.Crew.
func (w *World) Leads() bool { return w.options.Process == 0 }

func (w *World) each() int { return w.options.Ranks / w.options.Processes }

// processOf returns the process of a rank.
func (w *World) processOf(rank int) int { return rank / w.each() }

// Here implements vm.Wires.
func (w *World) Here(rank int) bool { return w.processOf(rank) == w.options.Process }

// Ranks returns the ranks of this process as the range [first, end).
func (w *World) Ranks() (first, end int) {
	return w.options.Process * w.each(), (w.options.Process + 1) * w.each()
}

// Local returns the index of this process on its host, and the number of processes there.
func (w *World) Local() (index, of int) {
	me := w.Members[w.options.Process]
	for _, m := range w.Members {
		if m.Host == me.Host {
			of++
		}
	}
	return me.Local, of
}

// OnHost reports whether a rank runs on the host of this process.
func (w *World) OnHost(rank int) bool {
	return w.Members[w.processOf(rank)].Host == w.Members[w.options.Process].Host
}

// Hosts returns the number of hosts.
func (w *World) Hosts() int {
	hosts := map[string]bool{}
	for _, m := range w.Members {
		hosts[m.Host] = true
	}
	return len(hosts)
}

// name describes a process in messages.
func (w *World) name(process int) string {
	first, last := process*w.each(), (process+1)*w.each()-1
	ranks := fmt.Sprintf("ranks %d to %d", first, last)
	if first == last {
		ranks = fmt.Sprintf("rank %d", first)
	}
	return fmt.Sprintf("process %d (%s, on %s)", process, ranks, w.Members[process].Host)
}

// OnFailure registers a function to call once when a process cannot continue. If that has already
// happened, it is called immediately.
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
		_ = w.conns[0].write(message{Kind: kindFailed, Text: reason.Error()}, nil) // if the message is lost, process 0 notices and tells the others
	}
}

// fail stops everything in this process; in process 0, it also tells the others. It reports whether this is the
// first failure.
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
				_ = c.write(message{Kind: kindAbort, Text: cause.Error()}, nil) // lost processes need no message
			}
		}
	}
	return true
}

// lost handles the broken connection of a process, which is an error unless the job has ended.
func (w *World) lost(process int, err error) {
	select {
	case <-w.ending:
	default:
		w.fail(fmt.Errorf("%s was lost: %s", w.name(process), broke(err)))
	}
}

// received returns the error of bytes that a process sent and that arrived changed.
func (w *World) received(process int, err error) error {
	return fmt.Errorf("received from %s: %w", w.name(process), err)
}

// broke describes how a connection ended.
func broke(err error) string {
	if isSilence(err) {
		return fmt.Sprintf("timeout: its host has not answered for %s", silence)
	}
	return "its connection closed"
}

// isSilence reports whether a connection ended because a host does not answer. Such a connection fails with a
// timeout, or with another error that some networks report instead.
func isSilence(err error) bool {
	var timeout net.Error
	silent := errors.As(err, &timeout) && timeout.Timeout()
	for _, unreachable := range []error{syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.EHOSTDOWN} {
		silent = silent || errors.Is(err, unreachable)
	}
	return silent
}

// Cause implements train.Crew.
func (w *World) Cause() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.cause
}

// aborted returns the error of operations that a failure interrupted.
func (w *World) aborted() error { return fmt.Errorf("%w: %w", vm.ErrAborted, w.Cause()) }

// farewell is the time that a process waits for the others to learn that it has ended.
const farewell = 3 * time.Second

// Close ends this process's part of the job, which has failed if err is not nil. In processes other than 0, it
// waits until process 0 ends the job. It returns the cause of a failure, if there was one.
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
			_ = c.write(message{Kind: kindEnd}, nil) // lost processes have ended too
		}
	default:
		err = w.awaitEnd()
	}
	w.leave()
	return err
}

// awaitEnd waits until process 0 reports the end of the job.
func (w *World) awaitEnd() error {
	select {
	case <-w.ending:
		return nil
	case <-w.failed:
		return w.Cause()
	}
}

// leave closes connections for writing, waits briefly for the others to receive everything, and then closes the
// connections entirely.
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

// end marks the end of the job: connections may now be closed.
func (w *World) end() { w.endOnce.Do(func() { close(w.ending) }) }

// silence is how long a host may leave bytes unacknowledged before it is considered lost.
const silence = 20 * time.Second

// keepAlive detects the loss of a host within the duration `silence`, even if nothing is sent to the host.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 8 * time.Second, Interval: 4 * time.Second, Count: 3}

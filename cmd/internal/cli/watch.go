package cli

import (
	"context"
	"fmt"
	"io"
	"runtime/debug"
	"sync"
	"time"
	"unicode/utf8"

	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/pass"
)

// Watch shows the progress of a command on a terminal if the command takes a while, and stops the command at the
// user's request. A search that is stopped returns the best plan that it has found so far. A nil Watch shows and
// stops nothing.
type Watch struct {
	context context.Context
	out     io.Writer
	done    chan struct{}
	ended   sync.WaitGroup

	mutex     sync.Mutex
	doing     string
	searching bool
	best      pass.Progress
	shown     bool
	over      bool
}

// Timing of the progress line, and its maximum length. The line must not wrap, because only one line can be
// rewritten.
const (
	firstShown   = time.Second
	shownEvery   = time.Second / 4
	shownColumns = 79
)

// errStopped is the error of work that the user has stopped.
var errStopped = Stopped("stopped at the user's request")

// NewWatch returns a Watch for a command. End must be called before anything else is printed.
func NewWatch(env *Env) *Watch {
	w := &Watch{context: env.Context, out: env.Stderr, done: make(chan struct{})}
	if IsTerminal(env.Stderr) {
		w.ended.Add(1)
		go w.show()
	}
	return w
}

// show rewrites the progress line until End is called.
func (w *Watch) show() {
	defer w.ended.Done()
	next := time.NewTimer(firstShown)
	defer next.Stop()
	for {
		select {
		case <-w.done:
			return
		case <-next.C:
			w.mutex.Lock()
			w.shown = true
			Overwrite(w.out, w.line())
			w.mutex.Unlock()
			next.Reset(shownEvery)
		}
	}
}

// line describes the current work.
func (w *Watch) line() string {
	text, ctrlC := w.doing, "Ctrl-C stops"
	if w.searching {
		ctrlC = "Ctrl-C stops with the best so far"
	}
	if w.best.Planned > 0 {
		text += fmt.Sprintf(": %d candidates, %d planned", w.best.Candidates, w.best.Planned)
	}
	if w.best.StepS > 0 {
		text += fmt.Sprintf(", best %s", w.best.StepS)
	}
	if w.Stopped() {
		ctrlC = "stopping; Ctrl-C aborts"
	}
	rest := shownColumns - len("; ") - len(ctrlC)
	if utf8.RuneCountInString(text) > rest {
		text = string([]rune(text)[:rest-3]) + "..."
	}
	return text + "; " + ctrlC
}

// Say sets the description of the current work.
func (w *Watch) Say(format string, args ...any) {
	if w == nil {
		return
	}
	w.mutex.Lock()
	defer w.mutex.Unlock()
	w.doing, w.best, w.searching = fmt.Sprintf(format, args...), pass.Progress{}, false
}

// Options returns the options of a search, changed so that the Watch can show and stop the search. The search
// becomes the current work.
func (w *Watch) Options(o passes.Options) passes.Options {
	if w == nil {
		return o
	}
	w.mutex.Lock()
	w.searching = true
	w.mutex.Unlock()
	if w.context != nil {
		o.Stop = w.context.Done()
	}
	o.Progress = func(p pass.Progress) {
		w.mutex.Lock()
		defer w.mutex.Unlock()
		w.best = p
	}
	return o
}

// Do calls a function that has no partial results, and returns its error. If the user asks to stop meanwhile, Do
// immediately returns errStopped instead. The function then keeps running, at most until the process ends, so its
// results must not be read.
func (w *Watch) Do(f func() error) error {
	if w == nil || w.context == nil || w.Stopped() { // a stopped search still needs f for its result
		return f()
	}
	type result struct {
		err      error
		panicked string
	}
	done := make(chan result, 1)
	go func() {
		var r result
		defer func() {
			if p := recover(); p != nil {
				r.panicked = fmt.Sprintf("%v\n\n%s", p, debug.Stack())
			}
			done <- r
		}()
		r.err = f()
	}()
	select {
	case r := <-done:
		if r.panicked != "" {
			panic(r.panicked)
		}
		return r.err
	case <-w.context.Done():
		return errStopped
	}
}

// Stopped reports whether the user has asked to stop.
func (w *Watch) Stopped() bool { return w != nil && w.context != nil && w.context.Err() != nil }

// End removes the progress line. It may be called twice.
func (w *Watch) End() {
	if w == nil || w.over {
		return
	}
	w.over = true
	close(w.done)
	w.ended.Wait()
	if w.shown {
		Overwrite(w.out, "")
	}
}

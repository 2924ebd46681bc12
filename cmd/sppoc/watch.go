package main

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/passes"
	"sppo.dev/passes/pass"
)

// watch shows the progress of a command that searches on a terminal, once it takes a while. It also tells searches
// to stop at the user's request. A nil watch does neither.
type watch struct {
	context context.Context
	out     io.Writer
	done    chan struct{}
	ended   sync.WaitGroup

	mutex sync.Mutex
	doing string
	best  pass.Progress
	shown bool
}

// Times of the progress line.
const (
	firstShown = time.Second
	shownEvery = time.Second / 4
)

// watchFor returns a watch of a command. End must be called before anything else is printed.
func watchFor(env *cli.Env) *watch {
	w := &watch{context: env.Context, out: env.Stderr, done: make(chan struct{})}
	if cli.IsTerminal(env.Stderr) {
		w.ended.Add(1)
		go w.show()
	}
	return w
}

// show rewrites the progress line until the end.
func (w *watch) show() {
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
			fmt.Fprintf(w.out, "\r\x1b[K%s", w.line())
			w.mutex.Unlock()
			next.Reset(shownEvery)
		}
	}
}

// line describes the current work.
func (w *watch) line() string {
	text := w.doing
	if w.best.Planned > 0 {
		text += fmt.Sprintf(": %d candidates, %d planned in full", w.best.Candidates, w.best.Planned)
	}
	if w.best.StepS > 0 {
		text += fmt.Sprintf(", the best so far with %s a step", w.best.StepS)
	}
	return text + "; Ctrl-C ends the search with the best so far"
}

// say sets the description of the current work.
func (w *watch) say(format string, args ...any) {
	if w == nil {
		return
	}
	w.mutex.Lock()
	defer w.mutex.Unlock()
	w.doing, w.best = fmt.Sprintf(format, args...), pass.Progress{}
}

// options adds the functions that show and stop a search to its options.
func (w *watch) options(o passes.Options) passes.Options {
	if w == nil {
		return o
	}
	o.Context = w.context
	o.Progress = func(p pass.Progress) {
		w.mutex.Lock()
		defer w.mutex.Unlock()
		w.best = p
	}
	return o
}

// stopped reports whether the user has asked to stop.
func (w *watch) stopped() bool { return w != nil && w.context != nil && w.context.Err() != nil }

// end removes the progress line.
func (w *watch) end() {
	if w == nil {
		return
	}
	close(w.done)
	w.ended.Wait()
	if w.shown {
		fmt.Fprint(w.out, "\r\x1b[K")
	}
}

package sim

import (
	"errors"

	"sppo.dev/ir"
)

// Run simulates a section of all ranks and returns the timeline. It runs one rank at a time, each until it must
// wait for others.
func Run(p *ir.Program, section ir.Section, o Options) (*Timeline, error) {
	if err := o.Check(p); err != nil {
		return nil, err
	}
	pr := newPrices(p, o.shares(p), o.Scale)
	w, err := newWorld(p, section, pr, o)
	if err != nil {
		return nil, err
	}
	err = w.run()
	var d *DeadlockError
	if errors.As(err, &d) && len(w.ranks) < len(p.Ranks) { // simulate again, to report every rank's position
		o.NoFold = true
		if w, err = newWorld(p, section, pr, o); err == nil {
			err = w.run()
		}
	}
	if err != nil {
		return nil, err
	}
	return w.timeline(), nil
}

// run continues runnable ranks until all are done.
func (w *world) run() error {
	if w.options.shares(w.program) {
		return w.share()
	}
	ready := make([]*rank, len(w.ranks))
	for i, r := range w.ranks {
		ready[len(ready)-1-i] = r
	}
	release := func(r *rank) { ready = append(ready, r) }
	for len(ready) > 0 {
		r := ready[len(ready)-1]
		ready = ready[:len(ready)-1]
		if err := w.advance(r, release); err != nil {
			return err
		}
	}
	for _, r := range w.ranks {
		if r.blocked != nil {
			return w.deadlock()
		}
	}
	return nil
}

// advance runs a rank until it waits for others or is done.
func (w *world) advance(r *rank, release func(*rank)) error {
	steps := r.binding.steps
	for r.pc < len(steps) {
		st := &steps[r.pc]
		switch st.kind {
		case kindWork:
			w.work(r, r.pc, st)
		case kindRecord:
			r.record(r.pc, st)
		case kindWait:
			r.wait(r.pc, st)
		case kindMeet:
			if done, err := w.meet(r, release); err != nil || !done {
				return err
			}
			continue // the rank has already passed the meeting
		}
		r.pc++
	}
	return nil
}

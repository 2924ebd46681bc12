package passes

import (
	"slices"
	"strings"
)

// What is copied out and back holds bytes of the device on both ways. Copies begin and end beside layers, as codegen has them.

// copiesState is that of what a layer has offloaded: the device bytes are still held; they are on their way back or have come. Bytes are
// held for as long as the copy out may lag, unless it is hurried: the way back begins before that, and they are not held at all.
type copiesState struct{ leaving, back, hurried bool }

// copies are those of the k-th layer of a task.
func (r *residence) copies(t *stop, k int) *copiesState { return &r.away[int(t.layers)-r.begun+k] }

func (r *residence) findLeaving(n int) {
	r.leaving = r.course.leaving(r.leaving[:0], r.stage, n-r.firsts[r.stage])
}

// foresee runs the tasks with their copies alone, to find those that are hurried. With the shortest timing none is.
func (r *residence) foresee() {
	goes := func(fate string) bool { return strings.ContainsRune(fate, FateOffload) }
	if o := &r.plan.Offload; o.Lag == 1 && o.Ahead == 1 || !slices.ContainsFunc(o.Fate[r.stage], goes) {
		return
	}
	r.foreseeing = true
	for i, t := range r.plan.Tasks[r.stage] {
		n := r.firsts[r.stage] + i
		r.reloaded = 0
		if t.Kind == Backward {
			r.beginBackward(n)
		}
		r.findLeaving(n)
		for k := range r.layers[t.Stage] {
			if t.Kind == Forward {
				r.copies(&r.stops[n], k).leaving = true
			}
			r.copiesBeside(n, k)
		}
	}
	for i := range r.away {
		r.away[i] = copiesState{hurried: r.away[i].hurried}
	}
	r.foreseeing = false
}

// beginBackward ends and begins the copies that a backward does not begin without.
func (r *residence) beginBackward(n int) {
	t := &r.stops[n]
	if int(t.undone) == n-1 {
		for k := range int(t.end - t.first) {
			r.release(t.undone, k)
		}
	}
	r.reloadUpTo(n, r.plan.Offload.Ahead-1)
}

// copiesBeside follows codegen's: it ends and begins the copies that go along with the k-th layer that a task runs.
func (r *residence) copiesBeside(n, k int) {
	t := &r.stops[n]
	for _, f := range r.leaving {
		of := &r.stops[f]
		layers := int(of.end - of.first)
		if k < layers {
			r.release(int32(f), k)
		}
		for rest := k + 1; k == int(t.end-t.first)-1 && rest < layers; rest++ {
			r.release(int32(f), rest)
		}
	}
	r.reloadUpTo(n, k+r.plan.Offload.Ahead)
}

// reloadUpTo begins the reloads of the layers up to the last-th from the start of a task on, as codegen does.
func (r *residence) reloadUpTo(n, last int) {
	if r.reloaded == 0 {
		r.reloads = r.plan.coming(r.plan.Tasks[r.stage], n-r.firsts[r.stage])
	}
	first := 0 // layer of the task, from the start of the one that is looked at
	for m := n; m <= n+r.reloads && first <= last; m++ {
		t := &r.stops[m]
		layers := int(t.end - t.first)
		if t.kind == Backward {
			for at := max(0, r.reloaded-first); at < layers && first+at <= last; at++ {
				r.reload(t, layers-1-at)
			}
		}
		first += layers
	}
	r.reloaded = max(r.reloaded, last+1)
}

// release ends the copy of the k-th layer of a forward to the host.
func (r *residence) release(f int32, k int) {
	t := &r.stops[f]
	c := r.copies(t, k)
	if c.leaving && !r.foreseeing {
		r.now[TermCopies] -= r.units[t.subsequence].offloaded[int(t.first)+k]
	}
	c.leaving = false
}

// reload begins the copy back of the k-th layer of a backward.
func (r *residence) reload(t *stop, k int) {
	c := r.copies(&r.stops[t.undone], k)
	if c.back {
		return
	}
	c.back = true
	if r.foreseeing {
		c.hurried = c.leaving
		return
	}
	r.release(t.undone, k)
	n := r.units[t.subsequence].offloaded[int(t.first)+k]
	r.now[TermCopies] += n
	r.most = max(r.most, r.host)
	r.host -= n
}

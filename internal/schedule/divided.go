package schedule

import "slices"

// This file lists what ZeRO does before and after visits. A visit is the work of one task in one layer; in a slot
// that ranks share, it is the work of all of a rank's tasks on its own stage, and ends when the gradients of the
// helpers have been added. The second half of a backward reads no weights, so it is not counted.

// planVisits records the visits of a rank in order, if anything is divided. The rank's tasks have n layers.
func (w *writer) planVisits(n int) {
	if !w.Gathers && w.Reduces == nil {
		return
	}
	w.visits = make([]Action, 0, n)
	for i, t := range w.tasks {
		if t.Kind == WeightGrad || w.isShared(t) && (t.Stage != w.rank || t.Piece > 1) {
			continue
		}
		for at := range w.visited(i) {
			w.visits = append(w.visits, w.visit(Enter, i, at))
		}
	}
}

// WholeLayers is the number of layers whose weights are whole at a time under ZeRO: the current one and the next.
const WholeLayers = 2

// near returns the visits whose layers' weights are whole.
func (w *writer) near() []Action { return w.visits[:min(WholeLayers, len(w.visits))] }

// among reports whether any of the given visits is to the same layer as v.
func (w *writer) among(list []Action, v Action) bool {
	return slices.ContainsFunc(list, func(a Action) bool { return w.sameLayer(a, v) })
}

func (w *writer) sameLayer(a, b Action) bool {
	return a.Layer == b.Layer && w.tasks[a.Task].Stage == w.tasks[b.Task].Stage
}

// enter lists the beginning of the next visit. During the visit, the weights of its layer are whole, and those that the
// following visit reads are being gathered.
func (w *writer) enter() {
	if len(w.visits) == 0 {
		return
	}
	w.add(w.visits[0])
	if !w.Gathers {
		return
	}
	for _, v := range w.lent {
		w.free(v)
	}
	w.lent = w.lent[:0]
	for at, v := range w.near() {
		switch whole := w.among(w.whole, v); {
		case !whole:
			w.whole = append(w.whole, v)
			w.add(v.as(Gather))
		case at > 0:
			w.add(v.as(Complete))
		}
	}
}

// leave ends a visit for which everything is gathered. Its weights stay whole if one of the next two visits reads them.
func (w *writer) leave() {
	if len(w.visits) > 0 {
		v := w.visits[0]
		w.visits = w.visits[1:]
		w.free(v)
	}
}

// free lists that the weights of a visit are freed, unless a visit in the near future reads them.
func (w *writer) free(v Action) {
	if w.Gathers && !w.among(w.near(), v) {
		w.whole = slices.DeleteFunc(w.whole, func(a Action) bool { return w.sameLayer(a, v) })
		w.add(v.as(Free))
	}
}

// lend lists that the ranks which begin to work for other stages in a slot receive weights. A rank may have to gather its
// own for them, which then stay whole until its next visit.
func (w *writer) lend(place, k, slot int) {
	w.add(Action{Op: Lend, Task: int32(place), Layer: int32(k), Of: int32(slot)})
	own := slices.IndexFunc(w.visits, func(v Action) bool { return w.tasks[v.Task].Kind == w.tasks[place].Kind })
	if own >= 0 && w.rank <= slot && k < w.Layers[w.rank] {
		w.lent = append(w.lent, w.visit(Free, int(w.visits[own].Task), k))
	}
}

// reduce lists that a visit passes its gradients to collectives, if it completes them.
func (w *writer) reduce(i, at int) {
	t := w.tasks[i]
	if w.Reduces != nil && (t.Kind == WeightGrad || t.Kind == Backward && !w.links[i].split) && w.Reduces(t) {
		w.add(w.visit(Reduce, i, at))
	}
}

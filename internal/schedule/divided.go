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
func (w *writer) near() []Action {
	if w.Once {
		return w.visits
	}
	return w.visits[:min(WholeLayers, len(w.visits))]
}

// among reports whether any of the given visits is to the same layer as v.
func (w *writer) among(list []Action, v Action) bool {
	return slices.ContainsFunc(list, func(a Action) bool { return w.sameLayer(a, v) })
}

func (w *writer) sameLayer(a, b Action) bool {
	return a.Layer == b.Layer && w.tasks[a.Task].Stage == w.tasks[b.Task].Stage
}

// enter lists the beginning of the next visit. During the visit, the weights of its layer are whole, and those that the
// following visit reads are being gathered. If weights are gathered once, the first visit begins to gather all of them.
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
	if w.Once && len(w.whole) > 0 {
		return
	}
	for at, v := range w.near() {
		switch whole := w.among(w.whole, v); {
		case !whole:
			w.whole = append(w.whole, v)
			w.add(v.as(Gather))
		case at > 0 && !w.Once:
			w.add(v.as(Complete))
		}
	}
}

// leave ends a visit for which everything is gathered. Its weights stay whole if a visit in the near future reads them.
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
	t, split := w.tasks[i], w.links[i].split
	if t.Kind == Forward || split && !w.Early {
		return
	}
	if w.Reduces != nil && w.Reduces(t) {
		w.add(w.visit(Reduce, i, at))
	}
	if w.Replicated && !split && w.completes(i) {
		w.add(w.visit(Sum, i, at))
	}
}

// sumHead lists that the gradients of the head are summed, if a task completes them. The first layer comes before, because
// memory is scarcest during the first visit.
func (w *writer) sumHead(i int) {
	if t := w.tasks[i]; w.Replicated && t.Stage == len(w.Layers)-1 && w.links[i].finalHead {
		w.add(Action{Op: Sum, Task: int32(i), Layer: int32(w.layersOf(i))})
	}
}

// markFinal records, for each task, the last one of its stage that adds to the gradients of the stage's layers, and marks
// the last backward of each stage, which completes the gradients of a head.
func markFinal(tasks []Task, links []link) {
	lastBackward, lastAdds := map[int]int{}, map[int]int{}
	for i, t := range tasks {
		if t.Kind == Backward {
			lastBackward[t.Stage] = i
		}
		if t.Kind != Forward && !links[i].split {
			lastAdds[t.Stage] = i
		}
	}
	for i, t := range tasks {
		links[i].finalHead = t.Kind == Backward && lastBackward[t.Stage] == i
		links[i].adds = int32(lastAdds[t.Stage])
	}
}

// completes reports whether no later task adds to the gradients of a task's layers. The pieces of a shared slot add to them
// together.
func (w *writer) completes(i int) bool {
	t, last := w.tasks[i], int(w.links[i].adds)
	return i == last || w.isShared(t) && SameSlot(t, w.tasks[last])
}

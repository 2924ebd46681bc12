package schedule

import "slices"

// slot lists the actions of a shared slot. Codegen issues the messages of every rank in the order of the common
// actions, so the job cannot deadlock.
//
// A layer of a piece has two halves. The first is the part before attention or, in the backward pass, before the
// gradients of K and V are used. Then rows of K and V, or contributions to their gradients, are exchanged. The
// second half is the rest of the layer. Every rank alternates between the stages that it works for. For each
// stage it runs the second half of one layer and the first half of the next, so messages for one stage are in
// flight during the work for other stages.
//
// Weights are sent to helpers during the previous slot or, in the first slot of a pass, during the previous layer.
// In the last backward slot of a stage, helpers return their weight gradients after each layer.
func (w *writer) slot(first, end int) {
	t, place := w.tasks[first], int32(first)
	number, rounds := t.Slot(), slices.Max(w.Layers)
	if t.Kind == Forward {
		w.add(Action{Op: HandOut, Task: place})
	}
	for i := first; i < end; i++ {
		w.reloadUpTo(i, 0, w.Ahead-1)
	}
	next, opens := w.nextShared(t.Kind, number)
	if opens {
		w.lend(first, 0, number)
	}
	for k := range rounds + 1 {
		for at := range number + 1 {
			stage := at
			if t.Kind == Backward {
				stage = number - at
			}
			w.round(first, end, stage, k)
		}
		if opens {
			w.lend(first, k+1, number)
		}
		if next >= 0 {
			w.lend(first, k, next)
		}
		if k > 0 {
			w.copiesBesideSlot(end, k-1, rounds)
			w.endRound(first, end, k-1)
		}
	}
	for k := rounds; k < rounds+w.Shared-1-number; k++ {
		w.endRound(first, end, k)
	}
	for i := first; i < end; i++ {
		w.end(i)
	}
	if t.Kind == Backward {
		w.add(Action{Op: HandIn, Task: place})
	}
}

// nextShared returns the next shared slot in the order of its pass, or -1 if there is none. It also reports
// whether the given slot is the first of the pass.
func (w *writer) nextShared(kind Kind, slot int) (next int, first bool) {
	last := w.Shared - 1
	switch {
	case kind == Backward:
		return slot - 1, slot == last
	case slot == last:
		return -1, slot == 0
	}
	return slot + 1, slot == 0
}

// round lists round k of one stage: each piece runs the second half of layer k-1 and the first half of layer k.
// Layers are counted in the order of the pass.
func (w *writer) round(first, end, stage, k int) {
	layers := w.Layers[stage]
	for i := first; i < end && 0 < k && k <= layers; i++ {
		if w.tasks[i].Stage == stage {
			w.add(w.visit(SecondHalf, i, k-1))
			w.reloadUpTo(i, 0, k-1+w.Ahead)
		}
	}
	if stage == w.rank && 0 < k && k <= layers {
		w.leave()
	}
	if k >= layers {
		return
	}
	if stage == w.rank {
		w.enter()
	}
	for i := first; i < end; i++ {
		if w.tasks[i].Stage == stage {
			w.add(w.visit(FirstHalf, i, k))
		}
	}
	w.add(Action{Op: Exchange, Task: int32(first), Layer: int32(k), Of: int32(stage)})
}

// copiesBesideSlot lists the releases and reloads that take place during a round for tasks outside the slot.
func (w *writer) copiesBesideSlot(end, round, rounds int) {
	w.releaseBeside(round, false)
	if last := round + w.Ahead - rounds; last >= 0 && w.coming(end-1) > 0 {
		w.reloadUpTo(end, w.coming(end-1)-1, last)
	}
}

// endRound lists how the gradients of a round's layers become complete. Those of the stage whose last shared tasks are in
// the slot are complete once the gradients of all helpers have arrived.
func (w *writer) endRound(first, end, round int) {
	t := w.tasks[first]
	if t.Kind != Backward {
		return
	}
	w.add(Action{Op: Return, Task: int32(first), Layer: int32(round)})
	if w.rank == t.Slot() {
		round -= w.Shared - 1 - w.rank
	}
	own := slices.IndexFunc(w.tasks[first:end], func(t Task) bool { return t.Stage == w.rank })
	if own >= 0 && 0 <= round && round < w.Layers[w.rank] {
		w.reduce(first+own, round)
	}
}

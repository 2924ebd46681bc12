package schedule

import "slices"

// Sharing defines which rank runs which piece of a shared task, and what the ranks of a shared slot send to
// each other. Ranks share tasks only if each has one virtual stage, so ranks and stages have the same numbers.
//
// Slot t contains, for every stage i, the task of subsequence t-i. Each task is cut into one piece per rank.
// The stage's own rank runs the first t+1 pieces, and every rank j > t runs piece j+1. A helper thus keeps the
// same piece from stage to stage until its own stage has work.
type Sharing struct {
	Ranks  int
	Pieces [][]int64 // [subsequence]: tokens of each piece; subsequences that are not listed are not divided
}

// Runner returns the rank that runs a piece in a shared slot.
func (s Sharing) Runner(t Task) int {
	if helper := t.Piece - 1; helper > t.Slot() {
		return helper
	}
	return t.Stage
}

// helps reports whether a rank runs pieces of another rank's stage in a slot. Helpers are the last ranks,
// and their pieces come after those of the stage's own rank, in the order of ranks.
func (s Sharing) helps(rank, stage, slot int) bool {
	return rank > stage && rank > slot && slot < s.Ranks-1
}

// Reader is a rank that reads the rows of K and V that another rank computes in a piece. In the backward pass
// it instead computes contributions to the gradients of those rows, and sends them.
type Reader struct {
	Rank  int
	Waits bool // it runs a later piece in the same slot, so it waits for the rows
}

// Readers returns, in ascending order, the ranks that run later parts of the sequence on the stage of a piece.
// It omits the rank that runs the piece itself.
func (s Sharing) Readers(t Task) []Reader {
	var readers []Reader
	runner := s.Runner(t)
	for rank := range s.Ranks {
		waits := rank > runner && s.helps(rank, t.Stage, t.Slot())
		if rank != runner && (waits || rank == t.Stage || s.helps(rank, t.Stage, t.Slot()+1)) {
			readers = append(readers, Reader{rank, waits})
		}
	}
	return readers
}

// Borrowers returns the ranks that begin to help a stage in a slot of a pass. The stage's own rank
// sends the weights to the first of them, and each passes the weights on to the next.
func (s Sharing) Borrowers(kind Kind, stage, slot int) []int {
	before := slot - 1
	if kind == Backward {
		before = slot + 1
	}
	var ranks []int
	for rank := range s.Ranks {
		if s.helps(rank, stage, slot) && (before < stage || !s.helps(rank, stage, before)) {
			ranks = append(ranks, rank)
		}
	}
	return ranks
}

// Hop is a message that carries the weight gradients of one layer from a rank to the previous rank, which adds
// its own.
type Hop struct {
	From  int
	Layer int // in the order in which the backward pass visits the layers of the stage
}

// Hops returns the messages that a Return sends in a round, for a stage with the given number of layers. The
// gradients of each layer start at the last rank and move on by one rank per round, so no rank waits for the
// whole chain.
func (s Sharing) Hops(stage, layers, round int) []Hop {
	var hops []Hop
	for from := stage + 1; from < s.Ranks; from++ {
		if k := round - (s.Ranks - 1 - from); 0 <= k && k < layers {
			hops = append(hops, Hop{from, k})
		}
	}
	return hops
}

// CutInto returns the pieces of a task, or the task itself if it is not divided.
func (s Sharing) CutInto(t Task) []Task {
	if t.Subsequence >= len(s.Pieces) {
		return []Task{t}
	}
	tasks := make([]Task, len(s.Pieces[t.Subsequence]))
	for k := range tasks {
		tasks[k] = t
		tasks[k].Piece = k + 1
	}
	return tasks
}

// Tasks returns the tasks of a shared slot on all stages, ordered by stage and by position in the
// sequence. In the backward pass, the order is reversed.
func (s Sharing) Tasks(kind Kind, microbatch, slot int) []Task {
	var tasks []Task
	for i := range slot + 1 {
		tasks = append(tasks, s.CutInto(Task{Kind: kind, Microbatch: microbatch, Subsequence: slot - i, Stage: i})...)
	}
	if kind == Backward {
		slices.Reverse(tasks)
	}
	return tasks
}

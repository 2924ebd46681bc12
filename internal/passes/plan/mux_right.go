package plan

// Helpers returns the number of stages, counted from the first, that share a task's attention. Each
// computes attention over one block of keys.
func (p *Plan) Helpers(t Task) int {
	if !p.Mux.Right {
		return 0
	}
	return max(0, t.Slot()-p.Subsequences.N+1)
}

// FirstHelped returns the first subsequence for which a helper shares the attention of a stage. The helper also
// shares it for all later subsequences.
func (p *Plan) FirstHelped(stage, helper int) int { return p.Subsequences.N - stage + helper }

// HelpedBlocks returns the boundaries of the blocks of keys that a task's helpers take.
func (p *Plan) HelpedBlocks(t Task) []int64 {
	return p.Mux.Stages[t.Stage].Blocks[t.Subsequence-p.FirstHelped(t.Stage, 0)]
}

// Lending describes the keys that a stage sends to a helper: the range from the start of the helper's first
// block to the end of its last block. The keys can be sent after Behind, the last subsequence that contains any
// of them. Blocks grow from one subsequence to the next.
type Lending struct {
	First, End int64
	Behind     int
}

// Lent returns the keys that a stage sends to a helper.
func (p *Plan) Lent(stage, helper int) Lending {
	blocks := p.Mux.Stages[stage].Blocks
	l := Lending{First: blocks[p.FirstHelped(stage, helper)-p.FirstHelped(stage, 0)][helper], End: blocks[len(blocks)-1][helper+1]}
	lengths := p.Subsequences.Lengths
	for at := lengths[0]; at < l.End; at += lengths[l.Behind] {
		l.Behind++
	}
	return l
}

// Returns lists the helpers that take part in a stage's backwards for the last time in the given task. They
// then return the gradients of the stage's keys.
func (p *Plan) Returns(t Task) (first, end int) {
	if t.Kind != Backward || t.Piece > 1 {
		return 0, 0
	}
	end = p.Helpers(t)
	for first = end; first > 0 && p.FirstHelped(t.Stage, first-1) == t.Subsequence; first-- {
	}
	return first, end
}

// HelpedTasks returns the tasks of a slot in the first microbatch that have helpers.
func (p *Plan) HelpedTasks(kind TaskKind, slot int) (tasks []Task) {
	for i := slot - p.Subsequences.N + 1; i < p.Parallel.PP; i++ {
		if t := (Task{Kind: kind, Subsequence: slot - i, Stage: i}); p.Helpers(t) > 0 {
			tasks = append(tasks, p.Pieces(t)...)
		}
	}
	return tasks
}

package passes

// What tasks of one rank hand to each other waits on the device, as a rule: the next but one task takes it. In layer order a
// layer's results wait for all other subsequences, and K and V of a layer for those of all layers behind it. These wait on the
// host, so that the device holds one layer's worth of a sequence.

// layerOrder says whether one stage takes all subsequences through a layer before the next layer.
func (p *Plan) layerOrder() bool { return p.Parallel.Order == OrderLayer }

// Orders inside a stage.
const (
	OrderSequence = "sequence" // all layers of a subsequence first; also where the plan says nothing
	OrderLayer    = "layer"    // all subsequences of a layer first
)

// inputUnit is a layer's input among its units, which stand in the order of their producers.
const inputUnit = 0

// nearby is how many tasks on a result is taken without having left: a task for the way out, one for the way back.
const nearby = 2

// Reader is the task that takes a task's result and the pipeline rank that does it: the same task of the next stage, or the
// backward of the last stage's forward, which begins with the head.
func (p *Plan) Reader(t Task) (to int, reader Task, ok bool) {
	if to, reader, ok = p.Target(t); ok || t.Kind != Forward {
		return to, reader, ok
	}
	return p.Home(t.Stage), t.As(Backward), true
}

// StagedOut says for each of some tasks of a rank whether its result waits for its reader on the host. It follows the input of
// the later of the two stages, which is the same rows: gradients go where what they are of went, and what the head reads with
// the input of the last stage.
func (p *Plan) StagedOut(tasks []Task) []bool {
	staged := make([]bool, len(tasks))
	if !p.layerOrder() && !p.Streams() {
		return staged
	}
	index := make(map[Task]int, len(tasks))
	for i, t := range tasks {
		index[t] = i
	}
	for i, t := range tasks {
		_, reader, ok := p.Reader(t)
		if !ok || index[reader] <= i+nearby { // or another rank's
			continue
		}
		later := t
		later.Stage = max(t.Stage, reader.Stage)
		staged[i] = p.FateOf(later, 0)[inputUnit] == FateOffload
	}
	return staged
}

// StagesCachesOut says whether K and V of a stage's layers wait on the host between its last forward and its first backward. Those of
// the last stage do not: its backward follows.
func (p *Plan) StagesCachesOut(stage int) bool {
	return p.Offload.Park && stage < p.Parallel.Stages()-1
}

// StagesCachesIn says whether K and V of a task's stage come back for it, while the task before it runs.
func (p *Plan) StagesCachesIn(t Task) bool {
	return t.Kind == Backward && t.Subsequence == p.Subsequences.N-1 && p.StagesCachesOut(t.Stage)
}

package plan

// What tasks of one rank hand to each other waits on the device, as a rule: the next but one task takes it. In layer order a
// layer's results wait for all other subsequences, and K and V of a layer for those of all layers behind it. These wait on the
// host, so that the device holds one layer's worth of a sequence.

// LayerOrder reports whether one stage takes all subsequences through a layer before the next layer.
func (p *Plan) LayerOrder() bool { return p.Parallel.Order == OrderLayer }

// Orders inside a stage.
const (
	OrderSequence = "sequence" // all layers of a subsequence first; also where the plan says nothing
	OrderLayer    = "layer"    // all subsequences of a layer first
)

// inputUnit is a layer's input among its units, which stand in the order of their producers.
const inputUnit = 0

// StagesOut reports whether a result that could wait on the host for its reader does. It follows the input of the later of the
// two stages, which is the same rows: gradients go where what they are of went, and what the head reads with the input of the
// last stage.
func (p *Plan) StagesOut(t, reader Task) bool {
	t.Stage = max(t.Stage, reader.Stage)
	return p.FateOf(t, 0)[inputUnit] == FateOffload
}

// StagesCaches reports whether K and V of a stage's layers wait on the host between its last forward and its first backward.
// Those of the last stage do not: its backward follows.
func (p *Plan) StagesCaches(stage int) bool {
	return p.Offload.Park && stage < p.Parallel.Stages()-1
}

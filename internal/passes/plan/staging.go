package plan

import "sppo.dev/internal/schedule"

// Tensors that one task of a rank passes to another usually stay on the device, because one of the next two
// tasks reads them. In layer order, the results of a layer are not read until all other subsequences have
// passed through the layer, and K and V of a layer are not read until all later layers are done. These tensors
// go to the host, so the device holds a sequence's worth of them for only one layer at a time.

// LayerOrder reports whether all subsequences pass through a layer before the next layer begins.
func (p *Plan) LayerOrder() bool { return p.Parallel.Order == OrderLayer }

// Orders inside a stage.
const (
	OrderSequence = "sequence" // all layers of a subsequence first; also the default
	OrderLayer    = "layer"    // all subsequences of a layer first
)

// InputUnit is the index of a layer's input among its units, which are in the order of their producers.
const InputUnit = 0

// ResultOnHost reports whether the result of a task stays on the host until another task reads it. The result is
// placed like the input of the later of the two stages, because that input has the same rows. Gradients are
// placed like their values, and the head's input is placed like the input of the last stage. Without layers, that stage keeps
// its input on the device.
func (p *Plan) ResultOnHost(t, reader Task) bool {
	t.Stage = max(t.Stage, reader.Stage)
	return p.LayersPerStage[t.Stage] > 0 && p.PlacementOf(t, 0)[InputUnit] == PlacementOffload
}

// Values of Offload.Caches: where K and V of a layer are kept between its last forward and its first backward.
const (
	KVOnDevice   = "device"
	KVOnHost     = "host"
	KVRecomputed = "recompute" // not kept: the first backward recomputes them from the layer's inputs
)

// HoldsKVOnHost reports whether K and V of a stage's layers are on the host between its last forward
// and its first backward. Those of the last stage are not, because its backward follows
// immediately.
func (p *Plan) HoldsKVOnHost(stage int) bool {
	return p.Offload.Caches == KVOnHost && stage < p.Parallel.Stages()-1
}

// RecomputesKV reports whether a task begins each layer by recomputing K and V of the whole
// sequence. The first backward of a stage does so if the stage has not kept them.
func (p *Plan) RecomputesKV(t Task) bool {
	return p.Offload.Caches == KVRecomputed && t.Kind == Backward && t.Subsequence == p.Subsequences.N-1 &&
		t.Stage < p.Parallel.Stages()-1
}

// Timing returns the timing of the plan's schedules.
func (p *Plan) Timing() schedule.Timing {
	return schedule.Timing{Lag: p.Offload.Lag, Ahead: p.Offload.Ahead, Recomputes: p.Offload.Caches == KVRecomputed}
}

// InputOffloaded reports whether the backward of a layer loads the layer's input from the host.
func (p *Plan) InputOffloaded(t Task, k int) bool {
	return p.PlacementOf(t, k)[InputUnit] == PlacementOffload
}

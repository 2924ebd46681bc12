package plan

// Tensors that one task of a rank passes to another usually stay on the device, because the next task but one
// reads them. In layer order the results of a layer stay until all other subsequences have passed, and K and V
// of a layer until all later layers have. These go to the host, so that the device holds one layer's worth of a
// sequence.

// LayerOrder reports whether one stage takes all subsequences through a layer before the next layer.
func (p *Plan) LayerOrder() bool { return p.Parallel.Order == OrderLayer }

// Orders inside a stage.
const (
	OrderSequence = "sequence" // all layers of a subsequence first; also the default
	OrderLayer    = "layer"    // all subsequences of a layer first
)

// InputUnit is the index of a layer's input among its units, which are in the order of their producers.
const InputUnit = 0

// StagesOut reports whether a result that could wait on the host for its reader does. It follows the input of
// the later of the two stages, which are the same rows: gradients follow their values, and the head's input
// follows the input of the last stage.
func (p *Plan) StagesOut(t, reader Task) bool {
	t.Stage = max(t.Stage, reader.Stage)
	return p.FateOf(t, 0)[InputUnit] == FateOffload
}

// Places of K and V of a layer between its last forward and its first backward: Offload.Caches.
const (
	CachesDevice    = "device"
	CachesHost      = "host"
	CachesRecompute = "recompute" // not kept: the first backward recomputes them from the layer's inputs
)

// StagesCaches reports whether K and V of a stage's layers wait on the host between its last forward and its
// first backward. Those of the last stage do not: its backward follows at once.
func (p *Plan) StagesCaches(stage int) bool {
	return p.Offload.Caches == CachesHost && stage < p.Parallel.Stages()-1
}

// RecomputesCaches reports whether a task begins each layer by computing K and V of the whole sequence: the first backward of a
// stage that has let them go.
func (p *Plan) RecomputesCaches(t Task) bool {
	return p.Offload.Caches == CachesRecompute && t.Kind == Backward && t.Subsequence == p.Subsequences.N-1 &&
		t.Stage < p.Parallel.Stages()-1
}

// CacheLoads is the number of layer inputs that are loaded from the host at a time to recompute K and V: one in
// use, and others in transfer.
const CacheLoads = 3

// InputOffloaded reports whether the input of a layer comes from the host for its backward.
func (p *Plan) InputOffloaded(t Task, k int) bool { return p.FateOf(t, k)[InputUnit] == FateOffload }

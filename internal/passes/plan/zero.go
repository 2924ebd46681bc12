package plan

import (
	"slices"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/schedule"
	"sppo.dev/ir"
)

// ZeRO (Rajbhandari et al. 2020) divides state among ranks that hold the same matrix. With or without ZeRO,
// these ranks reduce the gradient of the matrix in slices of its rows, so ZeRO stage 1 does not change any bit
// of the result.

// Stages of ZeRO. Each stage includes the previous one. The embedding and the head stay at ZeRO stage 1,
// because the ranks of a pipeline stage already divide them by vocabulary.
const (
	ZeroState     = 1 // the optimizer state
	ZeroGradients = 2 // a layer's gradients, which are whole only during a backward pass of that layer
	ZeroWeights   = 3 // a layer's weights, which are gathered for each visit to the layer
)

// noOptimizer is the optimizer of parameters that are not trained: it has no state.
var noOptimizer = &graph.Optimizer{}

// OptimizerOf returns the optimizer of a parameter of a block.
func (p *Plan) OptimizerOf(b *graph.Block, param *graph.Param) *graph.Optimizer {
	if param.Frozen {
		return noOptimizer
	}
	return graph.OptimizerOf(&p.Train.Optimizer, b, param)
}

// ZeroOf returns the ZeRO stage that applies to a parameter of a block.
func (p *Plan) ZeroOf(b *graph.Block, param *graph.Param) int {
	switch {
	case p.Slicing(param).Slices() == 1:
		return 0
	case b.Name != graph.BlockLayer:
		return min(p.Parallel.Zero, ZeroState)
	}
	return p.Parallel.Zero
}

// Completes reports whether, under ZeroGradients, a backward task sums the gradients of its layers over ranks.
// In sequence order every backward does, because the backward of another layer follows. In layer order only the
// backward of the first subsequence does, which is the last one of the microbatch.
func (p *Plan) Completes(t Task) bool { return !p.LayerOrder() || t.Subsequence == 0 }

// Overlaps reports whether all collectives run beside computation, on streams of their own.
func (p *Plan) Overlaps() bool { return p.Schedule.Overlap == "on" || p.Schedule.Overlap == "" }

// ReplicasOverlap reports whether at least those on weights and gradients among replicas do.
func (p *Plan) ReplicasOverlap() bool { return p.Schedule.Overlap != "off" }

// SumsBeside reports whether the gradient of a parameter is summed over ranks during the rest of the backward pass, rather than
// at the end of the step. A tied embedding has gradients on two stages, and nothing follows the backward of an embedding.
func (p *Plan) SumsBeside(b *graph.Block, param *graph.Param) bool {
	return p.Parallel.DP > 1 && b.Name != graph.BlockEmbedding && !param.Tied && !param.Frozen && p.ZeroOf(b, param) < ZeroGradients
}

// ReducedType returns the type in which ranks sum the gradient of a parameter. Only what they divide is worth rounding.
func (p *Plan) ReducedType(param *graph.Param) ir.DType {
	if p.Train.GradReduce == "bf16" && p.Slicing(param).Slices() > 1 {
		return ir.BF16
	}
	return ir.F32
}

// KeepsSlice reports whether a rank keeps only a slice of a weight from step to step. With replicas, ZeRO stages 1 and 2
// gather the weights of layers in the next step, where this takes place beside computation; they stay whole for the step.
func (p *Plan) KeepsSlice(b *graph.Block, param *graph.Param) bool {
	zero := p.ZeroOf(b, param)
	return zero >= ZeroWeights || zero >= ZeroState && p.Parallel.DP > 1 && b.Name == graph.BlockLayer && !param.Frozen
}

// GathersBeside reports whether, under ZeroWeights, the weights of other layers are gathered while
// a task visits its own layers. In layer order, a group of one or two layers stays whole while the
// sequence passes through it, and only its last task gathers the next group.
func (p *Plan) GathersBeside(t Task) bool {
	switch {
	case !p.LayerOrder() || slices.Max(p.LayersPerStage) > schedule.WholeLayers:
		return true
	case t.Kind == Backward:
		return t.Subsequence == 0
	}
	return t.Subsequence == p.Subsequences.N-1
}

// Slicing describes how the rows of a parameter are sliced: over the SP ranks of a stage that hold the parameter, and each
// of these parts over DP replicas. Of them, member k in replica d has slice k*DP + d. All slices have the same number of rows, so that collectives
// exchange equal parts: if the parameter's rows cannot be divided evenly, padding follows its last row, and the
// last slices consist partly or wholly of padding.
type Slicing struct {
	SP, DP int64
	Rows   int64 // of a slice
}

// Slices returns the number of slices; 1 means no slicing.
func (s Slicing) Slices() int64 { return s.SP * s.DP }

// Part returns the rows of a part, before it is sliced over replicas.
func (s Slicing) Part() int64 { return s.Rows * s.DP }

// Whole returns the rows of all slices together: those of the parameter, and padding.
func (s Slicing) Whole() int64 { return s.Rows * s.Slices() }

// Slicing returns how a parameter's gradient is sliced over ranks. Vectors, kernels of convolutions, and matrices with fewer rows
// than there are ranks are too small to slice.
func (p *Plan) Slicing(param *graph.Param) Slicing {
	if param.Shape[1] > 1 && !param.Small {
		sp, dp := int64(1), int64(p.Parallel.DP)
		switch param.Reduce {
		case graph.GroupNames[graph.GroupSP]:
			sp = int64(p.Parallel.SP)
		case graph.GroupNames[graph.GroupRing]:
			sp = int64(p.Parallel.Ring)
		}
		for _, s := range []Slicing{{SP: sp, DP: dp}, {SP: sp, DP: 1}, {SP: 1, DP: dp}} {
			if p.divides(param, s.Slices()) {
				s.Rows = param.SliceRows(s.Slices())
				return s
			}
		}
	}
	return Slicing{1, 1, param.Local[0]}
}

// divides reports whether a parameter can be cut into n slices. The position table of a stage with several ranks has
// one piece per subsequence, or two in zigzag order; a shared subsequence has one piece per rank that runs some of
// its rows. These pieces have no padding between them, so each must be divisible.
func (p *Plan) divides(param *graph.Param, n int64) bool {
	if param.Shard != graph.ByTokens || p.Parallel.SP == 1 {
		return n <= param.Local[0]
	}
	grid := p.RowGrid()
	unequal := func(tokens int64) bool { return tokens/grid%n != 0 }
	if slices.ContainsFunc(p.Subsequences.Lengths, unequal) {
		return false
	}
	return !slices.ContainsFunc(p.Mux.Pieces, func(pieces []int64) bool { return slices.ContainsFunc(pieces, unequal) })
}

// WholeTable reports whether every replica holds the whole state of its part of the position table, because replicas cannot divide a
// piece of it evenly.
func (p *Plan) WholeTable() bool {
	return min(p.Parallel.DP, p.Parallel.SP) > 1 && slices.ContainsFunc(p.Graph().Embedding.Params, func(param graph.Param) bool {
		return param.Shard == graph.ByTokens && !param.Frozen && p.Slicing(&param).Slices() == 1
	})
}

// Divided returns the shares of the model's parameters whose optimizer state, gradients and weights are divided among the
// ranks that hold them, in the order of the ZeRO stages, and the padding of the slices as a share of the parameters.
func (p *Plan) Divided() (shares [ZeroWeights]float64, padding float64) {
	g, all := p.Graph(), 0.0
	add := func(b *graph.Block, times int) {
		for i := range b.Params {
			param := &b.Params[i]
			if param.Tied {
				continue
			}
			cols := float64(int64(times) * param.Local[1])
			all += cols * float64(param.Local[0])
			for stage := range p.ZeroOf(b, param) {
				shares[stage] += cols * float64(param.Local[0])
			}
			if p.ZeroOf(b, param) > 0 {
				padding += cols * float64(p.Slicing(param).Whole()-param.Local[0])
			}
		}
	}
	add(g.Embedding, 1)
	add(g.Head, 1)
	for kind := range g.Kinds() {
		add(g.LayerOf(kind), g.LayersOf(kind))
	}
	for stage := range shares {
		shares[stage] /= all
	}
	return shares, padding / all
}

// StateBytes returns the bytes of a block's parameters on one rank that persist from step to step
// or until the end of the step: weights, gradients, optimizer states on the device, and f32 masters
// unless the weights are f32. A tied head on the embedding's rank has its own gradient, but nothing else.
func (p *Plan) StateBytes(g *graph.Model, b *graph.Block) (weights, gradients, optimizer ir.Bytes) {
	together := p.Home(0) == p.Home(p.Parallel.Stages()-1)
	for i := range b.Params {
		param := &b.Params[i]
		divided := func(stage int, d ir.DType) ir.Bytes { return p.dividedBytes(b, param, stage, d) }
		gradients += p.gradientBytes(b, param)
		if param.Frozen {
			if !(param.Tied && together) {
				weights += divided(ZeroWeights, param.DType(g.DType()))
			}
			continue
		}
		if param.Tied && together {
			continue
		}
		weights += divided(ZeroWeights, param.DType(g.DType()))
		for _, state := range p.OptimizerOf(b, param).States {
			optimizer += divided(ZeroState, state.DType)
		}
		if !p.weightIsMaster(g, b, param) {
			optimizer += divided(ZeroState, ir.F32)
		}
		for _, d := range p.HostStates(g, b, param) {
			optimizer -= divided(ZeroState, d)
		}
	}
	return weights, gradients, optimizer
}

// dividedBytes returns the bytes on one rank of a tensor that belongs to a parameter: its weight, gradient, master or
// state. From the given ZeRO stage upwards, the rank holds only a slice. Below it, the tensor is whole; if collectives
// read or write it, it has padding.
func (p *Plan) dividedBytes(b *graph.Block, param *graph.Param, stage int, d ir.DType) ir.Bytes {
	rows, zero, cut := param.Local[0], p.ZeroOf(b, param), p.Slicing(param)
	switch {
	case zero >= stage, stage == ZeroWeights && p.KeepsSlice(b, param):
		rows = cut.Rows
	case stage == ZeroGradients || zero > 0:
		rows = cut.Whole()
	}
	return graph.Align(ir.Bytes(rows*param.Local[1]) * d.Bytes())
}

// weightIsMaster reports whether the optimizer updates the weight itself, rather than an f32 master of it.
func (p *Plan) weightIsMaster(g *graph.Model, b *graph.Block, param *graph.Param) bool {
	return g.DType() == ir.F32 && (p.ZeroOf(b, param) == 0 || p.KeepsSlice(b, param))
}

// SavedBytes returns the bytes that a checkpoint contains for a block's parameters on one rank: the weight, or
// its master if it has one, and the states of the optimizer, on the device and on the host.
func (p *Plan) SavedBytes(g *graph.Model, b *graph.Block) (n ir.Bytes) {
	together := p.Home(0) == p.Home(p.Parallel.Stages()-1)
	for i := range b.Params {
		param := &b.Params[i]
		switch {
		case param.Tied && together:
			continue
		case param.Frozen:
			n += p.dividedBytes(b, param, ZeroWeights, param.DType(g.DType()))
			continue
		case p.weightIsMaster(g, b, param):
			n += p.dividedBytes(b, param, ZeroWeights, ir.F32)
		default:
			n += p.dividedBytes(b, param, ZeroState, ir.F32)
		}
		for _, state := range p.OptimizerOf(b, param).States {
			n += p.dividedBytes(b, param, ZeroState, state.DType)
		}
	}
	return n
}

// gradientBytes returns the bytes that a parameter's gradient occupies, at least, until the end of the step.
func (p *Plan) gradientBytes(b *graph.Block, param *graph.Param) ir.Bytes {
	if param.Frozen {
		return 0
	}
	return p.dividedBytes(b, param, ZeroGradients, p.ReducedType(param))
}

// OffloadHost is the value of Parallel.OptimizerOffload that keeps optimizer state in host memory.
const OffloadHost = "host"

// OptimizerOnHost reports whether a parameter's optimizer state and f32 master are kept in host memory. Vectors
// stay on the device.
func (p *Plan) OptimizerOnHost(param *graph.Param) bool {
	return p.Parallel.OptimizerOffload == OffloadHost && !param.Vector && !param.Frozen
}

// hostBlock is the number of elements that pass through the device as one block. A copy of 32 MiB takes about
// 600 us, and its launch 8 us.
const hostBlock = 8 << 20

// HostBlock returns the number of rows of a parameter's state that pass through the device as one
// block. It returns all rows if the update needs whole matrices.
func (p *Plan) HostBlock(b *graph.Block, param *graph.Param) int64 {
	rows := p.StateRows(b, param)
	if p.OptimizerOf(b, param).Whole {
		return rows
	}
	return min(rows, max(1, hostBlock/param.Local[1]))
}

// HostStates returns the types of a parameter's tensors in host memory: its optimizer states, and its master if
// weights are bf16.
func (p *Plan) HostStates(g *graph.Model, b *graph.Block, param *graph.Param) (types []ir.DType) {
	if !p.OptimizerOnHost(param) {
		return nil
	}
	for _, state := range p.OptimizerOf(b, param).States {
		types = append(types, state.DType)
	}
	if g.DType() != ir.F32 {
		types = append(types, ir.F32)
	}
	return types
}

// HostStateBytes returns the bytes of a block's optimizer state in the host memory of one rank.
// StateBytes counts the bytes on the device.
func (p *Plan) HostStateBytes(g *graph.Model, b *graph.Block) (n ir.Bytes) {
	together := p.Home(0) == p.Home(p.Parallel.Stages()-1)
	for i := range b.Params {
		param := &b.Params[i]
		if param.Tied && together {
			continue
		}
		elements := ir.Bytes(p.StateRows(b, param) * param.Local[1])
		for _, d := range p.HostStates(g, b, param) {
			n += graph.Align(elements * d.Bytes())
		}
	}
	return n
}

// StateSlices returns the number of parts into which the optimizer state of a block's parameter is divided.
func (p *Plan) StateSlices(b *graph.Block, param *graph.Param) int64 {
	if p.ZeroOf(b, param) < ZeroState {
		return 1
	}
	return p.Slicing(param).Slices()
}

// StateRows returns the rows of a block's parameter for which a rank has optimizer state.
func (p *Plan) StateRows(b *graph.Block, param *graph.Param) int64 {
	return param.SliceRows(p.StateSlices(b, param))
}

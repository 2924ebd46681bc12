package passes

import (
	"fmt"
	"slices"
	"strconv"

	"sppo.dev/graph"
	"sppo.dev/ir"
	"sppo.dev/ir/cost"
	"sppo.dev/lang"
)

// What ranks that hold the same matrix divide among themselves: ZeRO (Rajbhandari et al. 2020). Such ranks complete the
// gradient of a matrix in slices of its rows, whether they go on with slices or not, so that stage 1 changes no bit.

// Stages of ZeRO: each divides what the one before it does, too. Embedding and head, which ranks of a stage divide by
// vocabulary anyway, stay with the first.
const (
	ZeroState     = 1 // the optimizer's state
	ZeroGradients = 2 // a layer's gradients, which are whole only from a task's backward of the layer to its end
	ZeroWeights   = 3 // a layer's weights, which are brought together for each visit of the layer
)

// ZeroOf is the stage that applies to a parameter of a block.
func (p *Plan) ZeroOf(b *graph.Block, param *graph.Param) int {
	switch {
	case p.Slicing(param).Slices() == 1:
		return 0
	case b.Name != graph.BlockLayer:
		return min(p.Parallel.Zero, ZeroState)
	}
	return p.Parallel.Zero
}

// Completes reports whether a backward of a layer completes its gradient over ranks, under ZeroGradients: each does in sequence
// order, where the next layer's follows; in layer order that of the first subsequence, which is the microbatch's last.
func (p *Plan) Completes(t Task) bool { return !p.layerOrder() || t.Subsequence == 0 }

// solveZero decides whether ranks keep the state of their slice alone.
func solveZero(p *Plan) {
	shared := p.Parallel.DP > 1 || p.Split().Replicates()
	why := "given"
	switch request := p.Schedule.Zero; {
	case request != "" && request != "auto":
		p.Parallel.Zero, _ = strconv.Atoi(request) // checked by zeroProblems
		why = "given: " + zeroDocs[min(p.Parallel.Zero, len(zeroDocs)-1)]
	case shared:
		p.Parallel.Zero, why = ZeroState, "auto: "+zeroDocs[ZeroState]
	}
	if shared {
		p.decide("solve", "zero", fmt.Sprint(p.Parallel.Zero), why)
	}
}

// zeroDocs are the reasons of a stage.
var zeroDocs = [...]string{
	"every rank keeps the state of all that it holds",
	"ranks that hold the same matrix divide its optimizer state, at no more traffic",
	"ranks that hold the same matrix divide its gradient, too, and complete it as soon as another layer's turn comes",
	"ranks that hold the same matrix divide the weight itself, and bring it together before each forward and backward of its layer",
}

func zeroProblems(p *Plan) []problem {
	if z := p.Parallel.Zero; z < 0 || z >= len(zeroDocs) {
		return []problem{fault("schedule.zero", lang.OutOfRange, "0 to 3", "ZeRO has stages 1 to 3, and 0 is none: there is no %d", z)}
	}
	return nil
}

// Slicing is over how many ranks the rows of a parameter are sliced: those of a stage, then replicas. Rank (d, k) has
// slice k*DP + d.
type Slicing struct{ SP, DP int64 }

// Slices is their number; with one there is nothing to slice.
func (s Slicing) Slices() int64 { return s.SP * s.DP }

// Slicing is how a parameter's gradient is completed. Vectors are not worth it, and rows that do not divide stay whole.
func (p *Plan) Slicing(param *graph.Param) Slicing {
	whole := Slicing{1, 1}
	if param.Shape[1] == 1 {
		return whole
	}
	most := Slicing{1, int64(p.Parallel.DP)}
	if param.Reduce == graph.GroupNames[graph.GroupSP] {
		most.SP = int64(p.Parallel.SP)
	}
	for _, s := range []Slicing{most, {most.SP, 1}, {1, most.DP}} {
		if p.divides(param, s.Slices()) {
			return s
		}
	}
	return whole
}

// divides reports whether each piece of a parameter has that many equal slices: the position table has a piece for every
// subsequence, two in zigzag order, and as many as ranks run rows of a subsequence that they share.
func (p *Plan) divides(param *graph.Param, n int64) bool {
	if param.Shard != graph.ByTokens {
		return param.Local[0]%n == 0
	}
	unequal := func(tokens int64) bool { return tokens/p.rowGrid()%n != 0 }
	if slices.ContainsFunc(p.Subsequences.Lengths, unequal) {
		return false
	}
	return !slices.ContainsFunc(p.Mux.Pieces, func(pieces []int64) bool { return slices.ContainsFunc(pieces, unequal) })
}

// stateBytes are those of a block's parameters on one rank, from step to step or to the end of the step: weights, gradients, and
// what the optimizer keeps, which is two f32 moments and an f32 master where the weight cannot be it. A tied head on the embedding's
// rank has a gradient of its own alone.
func (p *Plan) stateBytes(g *graph.Model, b *graph.Block) (weights, gradients, optimizer ir.Bytes) {
	together := p.Home(0) == p.Home(p.Parallel.Stages()-1)
	for i := range b.Params {
		param := &b.Params[i]
		zero := p.ZeroOf(b, param)
		whole := ir.Bytes(param.Local[0] * param.Local[1])
		divided := func(stage int, d ir.DType) ir.Bytes {
			if zero >= stage {
				return graph.Align(whole / ir.Bytes(p.Slicing(param).Slices()) * d.Bytes())
			}
			return graph.Align(whole * d.Bytes())
		}
		gradients += p.gradientBytes(b, param)
		if param.Tied && together {
			continue
		}
		weights += divided(ZeroWeights, g.DType())
		state := divided(ZeroState, ir.F32)
		optimizer += 2 * state
		if weightIsMaster := g.DType() == ir.F32 && (zero == 0 || zero == ZeroWeights); !weightIsMaster {
			optimizer += state
		}
	}
	return weights, gradients, optimizer
}

// gradientBytes are those of what stays of a parameter's gradient to the end of the step.
func (p *Plan) gradientBytes(b *graph.Block, param *graph.Param) ir.Bytes {
	n := ir.Bytes(param.Local[0] * param.Local[1])
	if p.ZeroOf(b, param) >= ZeroGradients {
		n /= ir.Bytes(p.Slicing(param).Slices())
	}
	return graph.Align(n * ir.F32.Bytes())
}

// visitBytes are those that a visit of a layer needs for a while besides what is divided.
type visitBytes struct {
	gathered, divided  params   // of a layer: of these the weights, the gradients
	weights, gradients ir.Bytes // whole
	halves, halfSums   ir.Bytes // where there are two steps, between these
	sums               ir.Bytes // slices of the gradients, added up
}

func (p *Plan) visitBytes(g *graph.Model) (n visitBytes) {
	for i := range g.Layer.Params {
		param := &g.Layer.Params[i]
		zero, cut := p.ZeroOf(g.Layer, param), p.Slicing(param)
		whole := ir.Bytes(param.Local[0] * param.Local[1])
		half := ir.Bytes(0) // of the way, where both the ranks of a stage and replicas divide
		if cut.SP > 1 && cut.DP > 1 {
			half = whole / ir.Bytes(cut.SP)
		}
		if zero >= ZeroWeights {
			n.gathered |= 1 << i
			n.weights += graph.Align(whole * g.DType().Bytes())
			n.halves += graph.Align(half * g.DType().Bytes())
		}
		if zero >= ZeroGradients {
			n.divided |= 1 << i
			n.gradients += graph.Align(whole * ir.F32.Bytes())
			n.halfSums += graph.Align(half * ir.F32.Bytes())
			n.sums += graph.Align(whole / ir.Bytes(cut.Slices()) * ir.F32.Bytes())
		}
	}
	return n
}

// stateSlices is into how many parts the optimizer state of a block's parameter is divided.
func (p *Plan) stateSlices(b *graph.Block, param *graph.Param) int64 {
	if p.ZeroOf(b, param) < ZeroState {
		return 1
	}
	return p.Slicing(param).Slices()
}

// updater prices the end of a step.
type updater struct {
	plan     *Plan
	graph    *graph.Model
	cost     cost.Model
	sp, kv   cost.Link // ranks of a stage; those of them that hold the same key and value heads
	replicas cost.Link
}

func newUpdater(p *Plan, g *graph.Model, m cost.Model) updater {
	replicas := make([]int32, p.Parallel.DP)
	for d := range replicas {
		replicas[d] = int32(d * p.Parallel.PP * p.Parallel.SP)
	}
	stage := stageRanks(p, 0, 0)
	return updater{p, g, m, m.LinkOf(stage), m.LinkOf(stage[:g.KVCopies()]), m.LinkOf(replicas)}
}

// block is the time to complete gradients, take their norm and update the weights of a block. The reductions of
// vectors inside a stage are left out: they are small.
func (u updater) block(b *graph.Block) ir.Seconds {
	var t ir.Seconds
	for i := range b.Params {
		param := &b.Params[i]
		t += u.kernels(b, param)
		if zero := u.plan.ZeroOf(b, param); zero < ZeroGradients {
			t += u.completed(param)
		}
		t += u.returned(b, param)
	}
	return t
}

// completed is the time to add up a gradient over all ranks that hold the parameter, each for its slice.
func (u updater) completed(param *graph.Param) (t ir.Seconds) {
	s := u.plan.Slicing(param)
	bytes := ir.Bytes(param.Local[0]*param.Local[1]) * ir.F32.Bytes()
	add := func(kind ir.WorkKind, l cost.Link) { t += u.cost.Time(ir.Work{Kind: kind, Bytes: bytes}, l) }
	matrix := param.Shape[1] > 1
	switch {
	case s.SP > 1:
		add(ir.WorkReduceScatter, u.sp)
		bytes /= ir.Bytes(s.SP)
	case matrix && param.Reduce == graph.GroupNames[graph.GroupSP]:
		add(ir.WorkAllReduce, u.sp)
	case matrix && param.Reduce == graph.GroupNames[graph.GroupKV]:
		add(ir.WorkAllReduce, u.kv)
	}
	if s.DP > 1 {
		add(ir.WorkReduceScatter, u.replicas)
	} else {
		add(ir.WorkAllReduce, u.replicas)
	}
	return t
}

// gathered is the time to bring the slices of a parameter back to all ranks that hold it.
func (u updater) gathered(param *graph.Param, d ir.DType) (t ir.Seconds) {
	s := u.plan.Slicing(param)
	bytes := ir.Bytes(param.Local[0]*param.Local[1]) * d.Bytes()
	add := func(n ir.Bytes, l cost.Link) { t += u.cost.Time(ir.Work{Kind: ir.WorkAllGather, Bytes: n}, l) }
	if s.DP > 1 {
		add(bytes/ir.Bytes(s.SP), u.replicas)
	}
	if s.SP > 1 {
		add(bytes, u.sp)
	}
	return t
}

// returned is the time in which what was sliced goes back to all ranks at the end of a step: gradients, or new weights.
func (u updater) returned(b *graph.Block, param *graph.Param) ir.Seconds {
	switch u.plan.ZeroOf(b, param) {
	case 0:
		return u.gathered(param, ir.F32)
	case ZeroWeights:
		return 0
	}
	return u.gathered(param, u.graph.DType())
}

// visit is the traffic of parameters that a layer has beside it in a task: the weights of the next layer and, where a backward
// completes them, the gradients of the one before. Two layers are always whole; a rank with no more keeps them.
func (u updater) visit() (weights, gradients ir.Seconds) {
	layer := u.graph.Layer
	many := false
	for r := range u.plan.Parallel.PP {
		many = many || u.plan.layersOf(r) > 2
	}
	for i := range layer.Params {
		param := &layer.Params[i]
		zero := u.plan.ZeroOf(layer, param)
		if zero >= ZeroWeights && many {
			weights += u.gathered(param, u.graph.DType())
		}
		if zero >= ZeroGradients {
			gradients += u.completed(param)
		}
	}
	return weights, gradients
}

// kernels are the sum of squares over a rank's slice and AdamW over what it has the state of.
func (u updater) kernels(b *graph.Block, param *graph.Param) ir.Seconds {
	rows := func(slices int64) ir.View {
		return ir.View{Shape: [ir.MaxDims]int64{param.Local[0] / slices, param.Local[1]}, DType: ir.F32}
	}
	w, half := rows(u.plan.stateSlices(b, param)), ir.Absent()
	if u.graph.DType() == ir.BF16 {
		half = w
		half.DType = ir.BF16
	}
	adamw := ir.Instr{Op: ir.AdamW, Args: []ir.View{w, w, w, half, w, {}, {}}, Attrs: make([]ir.Attr, len(ir.Ops[ir.AdamW].Attrs))}
	sumsq := ir.Instr{Op: ir.SumSq, Args: []ir.View{{}, rows(u.plan.Slicing(param).Slices())}, Attrs: make([]ir.Attr, len(ir.Ops[ir.SumSq].Attrs))}
	return u.cost.Time(adamw.Work(), cost.Link{}) + u.cost.Time(sumsq.Work(), cost.Link{})
}

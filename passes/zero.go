package passes

import (
	"fmt"

	"sppo/graph"
	"sppo/ir"
	"sppo/ir/cost"
	"sppo/lang"
)

// The optimizer's state over ranks that hold the same parameter: ZeRO's first stage. Such ranks complete the gradient
// of a matrix in slices of its rows, whether they go on with slices or not, so that `zero` changes no bit.

// solveZero decides whether ranks keep the state of their slice alone.
func solveZero(p *Plan) {
	shared := p.Parallel.DP > 1 || p.Parallel.SP > 1 && p.Parallel.SPMode == graph.ModeUlysses
	why := "given"
	switch request := p.Schedule.Zero; {
	case request == "0":
		p.Parallel.Zero = 0
	case request == "1":
		p.Parallel.Zero = 1
	case shared:
		p.Parallel.Zero, why = 1, "auto: ranks that hold the same matrix divide its optimizer state, at no more traffic"
	}
	if shared {
		p.decide("solve", "zero", fmt.Sprint(p.Parallel.Zero), why)
	}
}

func zeroProblems(p *Plan) []problem {
	if z := p.Parallel.Zero; z != 0 && z != 1 {
		return []problem{fault("schedule.zero", lang.OutOfRange, "0 or 1", "optimizer state is divided or not, zero = %d is neither", z)}
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

// divides says whether each piece of a parameter has that many equal slices: the position table has a piece for every
// subsequence.
func (p *Plan) divides(param *graph.Param, slices int64) bool {
	if param.Shard != graph.ByTokens {
		return param.Local[0]%slices == 0
	}
	for _, n := range p.Subsequences.Lengths {
		if n/int64(p.Parallel.SP)%slices != 0 {
			return false
		}
	}
	return true
}

// stateBytes are those of a block's parameters on one rank: weights, gradients, and what the optimizer keeps, which is
// two f32 moments and an f32 master where the weight cannot be it.
func (p *Plan) stateBytes(g *graph.Model, b *graph.Block) (weights, gradients, optimizer ir.Bytes) {
	for i := range b.Params {
		param := &b.Params[i]
		slices := ir.Bytes(p.stateSlices(param))
		elements := ir.Bytes(param.Local[0] * param.Local[1])
		weights += graph.Align(elements * g.DType().Bytes())
		gradients += graph.Align(elements * ir.F32.Bytes())
		state := graph.Align(elements / slices * ir.F32.Bytes())
		optimizer += 2 * state
		if slices > 1 || g.DType() != ir.F32 {
			optimizer += state
		}
	}
	return weights, gradients, optimizer
}

// stateSlices is into how many parts a parameter's optimizer state is divided.
func (p *Plan) stateSlices(param *graph.Param) int64 {
	if p.Parallel.Zero == 0 {
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
	stage := p.stageRanks(0, 0)
	return updater{p, g, m, m.LinkOf(stage), m.LinkOf(stage[:g.KVCopies()]), m.LinkOf(replicas)}
}

// block is the time to complete gradients, take their norm and update the weights of a block. The reductions of
// vectors inside a stage are left out: they are small.
func (u updater) block(b *graph.Block) ir.Seconds {
	var t ir.Seconds
	for i := range b.Params {
		t += u.sums(&b.Params[i]) + u.kernels(&b.Params[i])
	}
	return t
}

// sums brings the gradient together, and what was sliced, gradients or weights, back to all ranks.
func (u updater) sums(param *graph.Param) (t ir.Seconds) {
	s := u.plan.Slicing(param)
	bytes := ir.Bytes(param.Local[0]*param.Local[1]) * ir.F32.Bytes()
	back := bytes
	if u.plan.Parallel.Zero == 1 {
		back = bytes / ir.F32.Bytes() * u.graph.DType().Bytes()
	}
	add := func(kind ir.WorkKind, n ir.Bytes, l cost.Link) { t += u.cost.Time(ir.Work{Kind: kind, Bytes: n}, l) }
	matrix := param.Shape[1] > 1
	switch {
	case s.SP > 1:
		add(ir.WorkReduceScatter, bytes, u.sp)
		add(ir.WorkAllGather, back, u.sp)
		bytes, back = bytes/ir.Bytes(s.SP), back/ir.Bytes(s.SP)
	case matrix && param.Reduce == graph.GroupNames[graph.GroupSP]:
		add(ir.WorkAllReduce, bytes, u.sp)
	case matrix && param.Reduce == graph.GroupNames[graph.GroupKV]:
		add(ir.WorkAllReduce, bytes, u.kv)
	}
	if s.DP > 1 {
		add(ir.WorkReduceScatter, bytes, u.replicas)
		add(ir.WorkAllGather, back, u.replicas)
	} else {
		add(ir.WorkAllReduce, bytes, u.replicas)
	}
	return t
}

// kernels are the sum of squares over a rank's slice and AdamW over what it has the state of.
func (u updater) kernels(param *graph.Param) ir.Seconds {
	rows := func(slices int64) ir.View {
		return ir.View{Shape: [ir.MaxDims]int32{int32(param.Local[0] / slices), int32(param.Local[1])}, DType: ir.F32}
	}
	w, half := rows(u.plan.stateSlices(param)), ir.Absent()
	if u.graph.DType() == ir.BF16 {
		half = w
		half.DType = ir.BF16
	}
	adamw := ir.Instr{Op: ir.AdamW, Args: []ir.View{w, w, w, half, w, {}, {}}, Attrs: make([]ir.Attr, len(ir.Ops[ir.AdamW].Attrs))}
	sumsq := ir.Instr{Op: ir.SumSq, Args: []ir.View{{}, rows(u.plan.Slicing(param).Slices())}, Attrs: make([]ir.Attr, len(ir.Ops[ir.SumSq].Attrs))}
	return u.cost.Time(adamw.Work(), cost.Link{}) + u.cost.Time(sumsq.Work(), cost.Link{})
}

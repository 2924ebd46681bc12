package codegen

import (
	"fmt"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/walk"
	"sppo.dev/ir"
)

// layout holds the data that all ranks of a job share: the dataflow, the tensors of the model in one global
// order, and the names of constants and groups. The order of tensors does not depend on the number of stages,
// so neither does the gradient norm.
type layout struct {
	plan       *plan.Plan
	model      *graph.Model
	stages     [][]int // layers of every virtual stage
	tables     tables
	training   order
	validation order
}

// tables holds the names to which instructions refer by number.
type tables struct {
	tensors []ir.Tensor
	index   map[string]int32 // tensor by name
	consts  []string
	ranges  []tokenRange          // token ranges that a stage's ranks divide: of subsequences, or of their pieces
	slices  map[string]slicePlace // by name of a constant: the slice whose first row it holds
	lines   *lineTable
}

func newLayout(p *plan.Plan) *layout {
	l := &layout{plan: p, model: p.Graph(), tables: tables{index: map[string]int32{}, lines: newLineTable(p)}}
	l.tables.tensors = l.model.Tensors()
	for i := range l.tables.tensors {
		l.tables.index[l.tables.tensors[i].Name] = int32(i)
	}
	for i := range p.Subsequences.N {
		for _, t := range p.Pieces(plan.Task{Subsequence: i}) {
			z := p.SizeOf(t)
			if l.model.Chunks() > 0 { // in zigzag order a rank has a part of each half
				l.tables.ranges = append(l.tables.ranges, tokenRange{z.Prefix, z.Tokens, 2, 0}, tokenRange{z.Prefix, z.Tokens, 2, 1})
				continue
			}
			l.tables.ranges = append(l.tables.ranges, tokenRange{z.Prefix, z.Tokens, 1, 0})
		}
	}
	for j := range p.Parallel.Stages() {
		l.stages = append(l.stages, p.Layers(j))
	}
	l.tables.consts = l.constNames()
	l.training = order{p, walk.Pipeline(p), timeline(p, l.model)}
	l.validation = l.training
	if p.Mux.Left || p.Mux.Right {
		l.validation.plan = p.Unshared()
		l.validation.steps = timeline(l.validation.plan, l.model)
	}
	return l
}

// tokenRange is what each rank holds of the tokens of a subsequence: all its rows, or one of its two blocks.
type tokenRange struct {
	first, tokens int64 // of the subsequence
	blocks, block int64 // number of blocks of each rank, and this one
}

// size returns the number of tokens of a rank.
func (r tokenRange) size(sp int64) int64 { return r.tokens / (r.blocks * sp) }

// local returns the first of these tokens among those of the rank in the whole sequence.
func (r tokenRange) local(sp int64) int64 { return r.first/sp + r.block*r.size(sp) }

// firstOf returns the first token of rank k.
func (r tokenRange) firstOf(g *graph.Model, k int) int64 {
	return r.first + g.Block(k, int(r.block))*r.tokens/(2*int64(g.SP))
}

// Constants that this package adds to those of the graph.
const (
	constPrev   = "prev"    // rank of the previous stage
	constNext   = "next"    // rank of the next stage
	constPosRow = "pos_row" // this rank's first row of the position table in a range of tokens: "pos_row.3"
	constRank   = "rank"    // this rank's counterpart in a stage: "rank.3"
)

func (l *layout) constNames() []string {
	names := []string{constPrev, constNext, graph.ConstReplica, graph.ConstEvalFirst}
	names = append(names, graph.SPConstNames...)
	names = append(names, l.model.MemberConsts()...)
	if l.model.Documents {
		names = append(names, graph.ConstPosition)
	}
	if l.positions() != nil && l.plan.Parallel.SP > 1 {
		for i := range l.tables.ranges {
			names = append(names, posRowConst(i))
		}
	}
	if l.plan.Mux.Left || l.plan.Mux.Right {
		for i := range l.plan.Parallel.PP {
			names = append(names, rankConst(i))
		}
	}
	return append(names, l.sliceConsts()...)
}

func rankConst(rank int) string { return fmt.Sprintf("%s.%d", constRank, rank) }

func posRowConst(i int) string { return fmt.Sprintf("%s.%d", constPosRow, i) }

// positions returns the learned position table, or nil.
func (l *layout) positions() *graph.Param {
	for i := range l.model.Embedding.Params {
		if p := &l.model.Embedding.Params[i]; p.Shard == graph.ByTokens {
			return p
		}
	}
	return nil
}

func (l *layout) constRef(name string) ir.Attr {
	for i, n := range l.tables.consts {
		if n == name {
			return ir.ConstRef(i)
		}
	}
	panic("internal: no constant " + name)
}

// param is a parameter of a stage with its buffers.
type param struct {
	*graph.Param
	block     *graph.Block
	tensor    int32
	name      string
	kept      uint32 // the weight between steps: whole, or this rank's slice
	weight    uint32 // the whole weight: kept, or the buffer of the current visit
	master    uint32
	optimizer *graph.Optimizer
	states    []uint32 // optimizer states
	onHost    bool     // states are in host memory, as is the master of a bf16 weight
	grad      uint32
	gradReady bool // grad has been allocated in this step
	cut       plan.Slicing
	zero      int     // ZeRO stage, which determines what the rank holds only a slice of
	sliced    bool    // the weight, too, between steps
	sum       ir.View // the complete gradient, or its slice
	back      ir.View // without ZeRO: the complete gradient, gathered from slices
	owner     bool    // included in the gradient norm (false for a tied copy)
	shared    *param  // the embedding on the same stage to which this parameter is tied, or nil
}

// elements returns the number of elements of the local part.
func (p *param) elements() int64 { return p.Local[0] * p.Local[1] }

// padded returns the number of elements of a buffer that collectives of slices read or write.
func (p *param) padded() int64 { return p.cut.Whole() * p.Local[1] }

// view returns a view of one of the parameter's buffers with the shape of the local part, as the forward pass
// reads it.
func (p *param) view(b uint32, d ir.DType) ir.View {
	if p.Vector {
		return vector(b, d, p.Local[0])
	}
	return matrix(b, d, p.Local[0], p.Local[1])
}

// newParam creates a parameter and allocates those of its buffers that live through the whole run.
func (e *emitter) newParam(b *graph.Block, g *graph.Param, prefix string, shared *param) *param {
	p := &param{Param: g, block: b, name: prefix + g.Name, shared: shared, owner: !g.Tied, sum: ir.Absent(), back: ir.Absent()}
	p.cut, p.zero, p.optimizer = e.plan.Slicing(g), e.plan.ZeroOf(b, g), e.plan.OptimizerOf(b, g)
	p.sliced = e.plan.KeepsSlice(b, g)
	p.tensor = e.tables.index[p.name]
	n, act := ir.Bytes(p.elements()), g.DType(e.model.DType())
	if shared != nil {
		p.kept, p.weight, p.master = shared.kept, shared.weight, shared.master
		return p
	}
	state, name := ir.Bytes(p.stateElements()), p.name
	switch {
	case p.sliced:
		n, name = state, name+".slice"
	case p.zero > 0:
		n = ir.Bytes(p.padded())
	}
	p.kept = e.persist(name, n*act.Bytes())
	p.weight, p.master = p.kept, p.kept
	if g.Frozen {
		e.initialiseFrozen(p)
		return p
	}
	n = state
	arena := ir.Device
	if p.onHost = e.plan.OptimizerOnHost(g); p.onHost {
		arena = ir.Host
	}
	switch {
	case act != ir.F32:
		p.master = e.persistIn(arena, p.name+".master", n*ir.F32.Bytes())
	case p.zero > 0 && !p.sliced:
		p.master = e.persist(p.name+".master", n*ir.F32.Bytes())
	}
	for _, state := range p.optimizer.States {
		p.states = append(p.states, e.persistIn(arena, p.name+"."+state.Name, n*state.DType.Bytes()))
	}
	e.initialise(p)
	e.addStates(p, act)
	return p
}

// initialise sets the parameter's initial values and clears the optimizer's states.
func (e *emitter) initialise(p *param) {
	e.filled(p, p.master, ir.F32, func(b uint32) {
		e.firstValues(p, p.stateView(b, ir.F32), e.stateRectangles(p, b, ir.F32))
	})
	if p.kept != p.master {
		v := p.keptView(p.DType(e.model.DType()))
		e.firstValues(p, v, e.keptRectangles(p, v))
	}
	for i, state := range p.optimizer.States {
		e.filled(p, p.states[i], state.DType, func(b uint32) {
			e.op(ir.Fill, ir.Compute, []ir.View{vector(b, state.DType, p.stateElements())}, ir.Float(0))
		})
	}
}

// initialiseFrozen sets the values of a parameter that is not trained, which has only one copy.
func (e *emitter) initialiseFrozen(p *param) {
	act := p.DType(e.model.DType())
	v := p.whole(p.kept, act)
	e.firstValues(p, p.keptView(act), e.keptRectangles(p, v))
	e.addState(p, ir.RoleWeight, e.keptRectangles(p, v))
}

// keptView returns the view of the kept weight: whole, or this rank's slice.
func (p *param) keptView(d ir.DType) ir.View {
	if p.sliced {
		return p.stateView(p.kept, d)
	}
	return p.view(p.kept, d)
}

// filled fills a buffer of optimizer state. A buffer in host memory is filled through the device.
func (e *emitter) filled(p *param, b uint32, d ir.DType, fill func(b uint32)) {
	if e.buffers.list[b].arena == ir.Device {
		fill(b)
		return
	}
	size := ir.Bytes(p.stateElements()) * d.Bytes()
	from := e.allocate(e.buffers.list[b].name+".device", ir.Device, size)
	fill(from)
	e.op(ir.CopyD2H, ir.D2H, []ir.View{in(b, asBytes(0, size)), in(from, asBytes(0, size))})
}

func (e *emitter) firstValues(p *param, whole ir.View, parts []rectangle) {
	if p.Std == 0 {
		e.op(ir.Fill, ir.Compute, []ir.View{whole}, ir.Float(p.Fill))
		return
	}
	for _, r := range parts {
		if r.view.Shape[1] == 0 { // a vector is a column
			r.view.Shape[1] = 1
		}
		e.op(ir.InitNormal, ir.Compute, []ir.View{r.view}, ir.Int(int64(p.tensor)), r.row, r.col, ir.Float(p.Std), r.end)
	}
}

// rectangle is a part of a rank's view with its position in the tensor.
type rectangle struct {
	view     ir.View
	row, col ir.Attr
	end      ir.Attr // the row of the tensor at which padding starts; 0: after its last row
}

// piece is a range of a parameter's local rows that is also contiguous in the tensor.
type piece struct {
	first, rows int64
	start       string // constant that holds its first row in the tensor; empty: 0
}

// pieces returns the pieces of a parameter: one, except for the position table, which has one for each range of tokens.
func (l *layout) pieces(p *graph.Param) []piece {
	switch p.Shard {
	case graph.ByRows:
		return []piece{{0, p.Local[0], p.Start}}
	case graph.ByTokens:
		var list []piece
		sp := int64(l.plan.Parallel.SP)
		if sp == 1 {
			break // one after another, the ranges are the whole table
		}
		for i, r := range l.tables.ranges {
			list = append(list, piece{r.local(sp), r.size(sp), posRowConst(i)})
		}
		return list
	}
	return []piece{{0, p.Local[0], ""}}
}

// rectangles divides a local view into rectangles with their positions in the tensor.
func (e *emitter) rectangles(p *param, v ir.View) []rectangle {
	var list []rectangle
	for _, part := range e.pieces(p.Param) {
		list = append(list, rectangle{view: rowsOf(v, part.first, part.rows, p.Local[1]), row: e.rowAttr(part.start), col: e.colAttr(p)})
	}
	return list
}

// rowsOf returns a range of rows of a view. The rows of a vector are its elements.
func rowsOf(v ir.View, first, rows, cols int64) ir.View {
	v.Offset += ir.Bytes(first*cols) * v.DType.Bytes()
	v.Shape[0] = rows
	return v
}

// keptRectangles returns the rectangles of the kept weight (the whole weight or this rank's slice) in the
// buffer of the given view.
func (e *emitter) keptRectangles(p *param, v ir.View) []rectangle {
	if p.sliced {
		return e.stateRectangles(p, v.Buffer, v.DType)
	}
	return e.rectangles(p, v)
}

func (e *emitter) rowAttr(start string) ir.Attr {
	if start == "" {
		return ir.Int(0)
	}
	return e.constRef(start)
}

func (e *emitter) colAttr(p *param) ir.Attr {
	if p.Shard == graph.ByCols {
		return e.constRef(p.Start)
	}
	return ir.Int(0)
}

// addStates lists the parameter's buffers for checkpoints. If weights are f32 and have a divided master, the
// master is listed as another copy of the weight.
func (e *emitter) addStates(p *param, act ir.DType) {
	e.addState(p, ir.RoleWeight, e.keptRectangles(p, p.whole(p.kept, act)))
	if p.master != p.kept {
		role := ir.RoleMaster
		if act == ir.F32 {
			role = ir.RoleWeight
		}
		e.addState(p, role, e.stateRectangles(p, p.master, ir.F32))
	}
	for i, state := range p.optimizer.States {
		e.addState(p, state.Role, e.stateRectangles(p, p.states[i], state.DType))
	}
}

// whole is like view, but with the shape that checkpoints use: vectors are n by 1.
func (p *param) whole(b uint32, d ir.DType) ir.View { return matrix(b, d, p.Local[0], p.Local[1]) }

func (e *emitter) addState(p *param, role ir.Role, parts []rectangle) {
	for _, r := range parts {
		e.code.States = append(e.code.States, ir.State{Tensor: p.tensor, Role: role, View: r.view, Row0: r.row, Col0: r.col, End: r.end})
	}
}

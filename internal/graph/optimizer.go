package graph

import (
	"fmt"
	"math"
	"slices"

	"sppo.dev/ir"
	"sppo.dev/lang"
)

// Optimizer is a row of Optimizers.
type Optimizer struct {
	Name   string
	States []State
	Whole  bool   // the rule needs whole matrices: it gathers slices and reads ConstSlice
	others string // the optimizer of all parameters except the matrices of layers; empty: this optimizer updates all
	rule   func(*updater)
}

// State is a tensor that an optimizer keeps for each parameter from step to step, in addition to
// the f32 master weight. It has the same shape as the parameter, is divided among ranks in the same
// way as the master weight, and is initially 0.
type State struct {
	Name  string // its name in the rule, which is also the suffix of the buffer's name
	Role  ir.Role
	DType ir.DType
}

// Optimizers lists all optimizers, by the names that train.optimizer takes.
var Optimizers = []Optimizer{
	{Name: "adamw", States: []State{{"m", ir.RoleMoment1, ir.F32}, {"v", ir.RoleMoment2, ir.F32}}, rule: adamW},
	{Name: "sgd", States: []State{{"m", ir.RoleMomentum, ir.F32}}, rule: sgd},
	{Name: "muon", States: []State{{"m", ir.RoleMomentum, ir.F32}}, Whole: true, others: "adamw", rule: muon},
}

// rounded lists the optimizers of Optimizers, but with their states stored as bf16.
var rounded = func() (list []Optimizer) {
	for _, o := range Optimizers {
		o.States = slices.Clone(o.States)
		for i := range o.States {
			o.States[i].DType = ir.BF16
		}
		list = append(list, o)
	}
	return list
}()

// OptimizerOf returns the row of the optimizer that updates a parameter of a block in a run with these
// settings.
func OptimizerOf(settings *lang.Optimizer, b *Block, p *Param) *Optimizer {
	rows := Optimizers
	if settings.Moments == "bf16" {
		rows = rounded
	}
	row := func(name string) *Optimizer {
		i := slices.IndexFunc(rows, func(o Optimizer) bool { return o.Name == name })
		if i < 0 {
			panic("internal: no optimizer " + name)
		}
		return &rows[i]
	}
	o := row(settings.Kind)
	if o.others != "" && (b.Name != BlockLayer || p.Vector) {
		return row(o.others)
	}
	return o
}

// Inputs of an update: values of the parameter, the optimizer and the step. For the names of states, see State.
const (
	UpdateWeight = "w"    // the f32 master of the rows whose optimizer state this rank holds
	UpdateCopy   = "copy" // the same rows, rounded, if weights are bf16
	UpdateGrad   = "grad" // gradient of these rows
	UpdateStep   = "step"
	UpdateNorm   = "norm"
)

// ConstSlice names a constant: the index, among the local rows of a parameter, of the first row whose optimizer
// state the rank holds. The caller sets its value.
const ConstSlice = "slice"

// Update returns the dataflow that updates a parameter at the end of a step, on a rank that holds the optimizer
// state of one of several slices of its local rows, each of SliceRows rows. The nodes of its block are in Forward,
// and the inputs are of kind Weight. If the optimizer needs whole matrices, an all_gather in the block collects the
// slices of all ranks.
func (g *Model) Update(settings *lang.Optimizer, block *Block, p *Param, slices int64) *Block {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	key := updateKey{*settings, p, slices}
	if g.updates[key] == nil {
		g.updates[key] = g.update(settings, OptimizerOf(settings, block, p), p, slices)
	}
	return g.updates[key]
}

// updateKey contains everything that an update depends on.
type updateKey struct {
	settings lang.Optimizer
	param    *Param
	slices   int64
}

func (g *Model) update(settings *lang.Optimizer, o *Optimizer, p *Param, slices int64) *Block {
	u := &updater{builder: g.newBuilder("update"), model: g, settings: settings, param: p, slices: slices, values: map[string]int{}}
	u.rows, u.cols = p.SliceRows(slices), p.Local[1]
	u.bring(UpdateWeight, ir.F32)
	for _, s := range o.States {
		u.bring(s.Name, s.DType)
	}
	u.bring(UpdateGrad, ir.F32)
	u.values[UpdateCopy] = Missing
	if u.act != ir.F32 {
		u.bring(UpdateCopy, u.act)
	}
	u.values[UpdateStep] = u.value(Value{Name: UpdateStep, Kind: Weight, Rows: Fixed, Count: 3, DType: ir.F32})
	u.values[UpdateNorm] = u.value(Value{Name: UpdateNorm, Kind: Weight, Rows: Fixed, Count: 2, DType: ir.F32})
	o.rule(u)
	return &u.Block
}

// updater builds the block of an update.
type updater struct {
	*builder
	model      *Model
	settings   *lang.Optimizer
	param      *Param
	slices     int64
	rows, cols int64 // of a slice
	values     map[string]int
}

// bring adds an input that has the shape of the slice.
func (u *updater) bring(name string, d ir.DType) {
	cols := u.cols
	if u.param.Vector {
		cols = 0
	}
	u.values[name] = u.value(Value{Name: name, Kind: Weight, Rows: Fixed, Count: u.rows, Cols: cols, DType: d})
}

// of returns the update's input with a given name.
func (u *updater) of(name string) Arg { return Arg{Value: u.values[name]} }

// temporary adds a matrix that is live during part of the update.
func (u *updater) temporary(name string, rows, cols int64, d ir.DType) Arg {
	return all(u.value(Value{Name: name, Rows: Fixed, Count: rows, Cols: cols, DType: d}))
}

// decay returns the weight decay of the parameter.
func (u *updater) decay() Attr {
	if !u.param.Adapter && u.settings.NoDecay.Has(u.param.Group()) {
		return float("weight_decay", 0)
	}
	return float("weight_decay", u.settings.WeightDecay)
}

// adamW is the rule of Loshchilov and Hutter 2019.
func adamW(u *updater) {
	o := u.settings
	u.node(ir.AdamW, []Attr{float("beta1", o.Beta1), float("beta2", o.Beta2), float("eps", o.Eps), u.decay()},
		u.of(UpdateWeight), u.of("m"), u.of("v"), u.of(UpdateCopy), u.of(UpdateGrad), u.of(UpdateStep), u.of(UpdateNorm))
}

// sgd is the rule of gradient descent with momentum.
func sgd(u *updater) {
	u.node(ir.SGD, []Attr{float("momentum", u.settings.Momentum), u.decay(), float("scale", 1), integer("row", 0), integer("scaled", 0)},
		u.of(UpdateWeight), u.of("m"), u.of(UpdateCopy), u.of(UpdateGrad), u.of(UpdateStep), u.of(UpdateNorm))
}

// muonSteps is the number of Newton-Schulz iterations; muonA, muonB and muonC are their coefficients. Before
// the iterations, the matrix is divided by its norm plus muonNorm. All these numbers are from Jordan et al.
// 2024. muonScale gives the step the same length as an AdamW step (Liu et al. 2025).
const (
	muonSteps           = 5
	muonNorm            = 1e-7
	muonA, muonB, muonC = 3.4445, -4.7750, 2.0315
	muonScale           = 0.2
)

// muon is the rule of Jordan et al. 2024: the step is the momentum with all singular values brought close to 1,
// which needs the whole matrix X. Each iteration computes a*X + (b*G + c*G*G) * X with the Gram matrix G = X * X^T,
// or, with G = X^T * X, a*X + X * (b*G + c*G*G). If the ranks of a stage divide the matrix, they sum their
// contributions to G, which has the size of the undivided dimension. ZeRO's slices are gathered first, so that the
// ZeRO stage does not change any bit. Ranks that would hold the same matrix without ZeRO all perform the same
// iterations.
func muon(u *updater) {
	rows, cols := u.param.Local[0], u.cols
	x := u.temporary("momentum", u.rows, cols, u.act)
	u.node(ir.Nesterov, []Attr{float("momentum", u.settings.Momentum)}, x, u.of("m"), u.of(UpdateGrad), u.of(UpdateNorm))
	row := integer("row", 0)
	if u.slices > 1 {
		whole := u.temporary("momentum.whole", rows, cols, u.act)
		u.Values[whole.Value].Padding = u.slices*u.rows - rows
		u.node(ir.AllGather, nil, whole, x)
		x, row = whole, constant("row", ConstSlice)
	}
	divided := u.param.Shard != Replicated && u.split.SP > 1
	fromLeft := rows <= cols
	if divided {
		fromLeft = u.param.Shard == ByCols
	}
	x = u.normalized(x, divided)
	for i := range muonSteps {
		x = u.iteration(fmt.Sprint(".", i), x, fromLeft, divided)
	}
	scale := muonScale * math.Sqrt(float64(max(u.param.Shape[0], u.param.Shape[1])))
	u.node(ir.SGD, []Attr{float("momentum", 0), u.decay(), float("scale", scale), row, integer("scaled", 1)},
		u.of(UpdateWeight), Arg{Value: Missing}, u.of(UpdateCopy), x, u.of(UpdateStep), u.of(UpdateNorm))
}

// normalized returns a matrix divided by its Frobenius norm.
func (u *updater) normalized(x Arg, divided bool) Arg {
	sum := all(u.value(Value{Name: "norm.square", Rows: Fixed, Count: 1, DType: ir.F32}))
	counts := float("weight", 1)
	if divided && u.param.Once != "" {
		counts = constant("weight", u.param.Once)
	}
	u.node(ir.SumSq, []Attr{counts}, sum, x)
	if divided {
		u.node(ir.AllReduce, []Attr{group(GroupSP)}, sum)
	}
	y := u.temporary("normalized", u.param.Local[0], u.cols, u.act)
	u.node(ir.Normalize, []Attr{float("eps", muonNorm)}, y, x, sum)
	return y
}

// iteration appends one Newton-Schulz iteration: a*x + (b*G + c*G*G)*x or, unless fromLeft is set,
// a*x + x*(b*G + c*G*G).
func (u *updater) iteration(suffix string, x Arg, fromLeft, divided bool) Arg {
	rows, cols := u.param.Local[0], u.cols
	side := cols
	if fromLeft {
		side = rows
	}
	square := func(name string, d ir.DType) Arg { return u.temporary(name+suffix, side, side, d) }
	gram := square("gram", u.act)
	part := gram
	if divided {
		part = square("gram.sum", ir.F32)
	}
	u.node(ir.Matmul, product(!fromLeft, fromLeft, false), part, x, x, Arg{Value: Missing})
	if divided {
		u.node(ir.AllReduce, []Attr{group(GroupSP)}, part)
		u.node(ir.Axpby, []Attr{float("alpha", 1/float64(u.copies())), float("beta", 0)}, gram, part, Arg{Value: Missing})
	}
	squared, poly := square("gram.square", u.act), square("polynomial", u.act)
	u.node(ir.Matmul, product(false, false, false), squared, gram, gram, Arg{Value: Missing})
	u.node(ir.Axpby, []Attr{float("alpha", muonB), float("beta", muonC)}, poly, gram, squared)
	y := u.temporary("iterate"+suffix, rows, cols, u.act)
	u.node(ir.Axpby, []Attr{float("alpha", muonA), float("beta", 0)}, y, x, Arg{Value: Missing})
	factors := []Arg{poly, x}
	if !fromLeft {
		factors = []Arg{x, poly}
	}
	u.node(ir.Matmul, product(false, false, true), y, factors[0], factors[1], Arg{Value: Missing})
	return y
}

// copies returns the number of ranks of a stage that hold the same part of the parameter.
func (u *updater) copies() int {
	switch u.param.Reduce {
	case GroupNames[GroupKV]:
		return u.model.KVCopies() * u.split.rings()
	case GroupNames[GroupRing]:
		return u.split.rings()
	}
	return 1
}

// product returns the attributes of a matmul.
func product(transA, transB, accumulate bool) []Attr {
	return []Attr{
		{Name: "trans_a", Value: ir.Bool(transA)}, {Name: "trans_b", Value: ir.Bool(transB)}, {Name: "accumulate", Value: ir.Bool(accumulate)},
	}
}

package irtest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"

	"sppo.dev/ir"
)

// Random returns a valid program of about n instructions. It has a few stages with several ranks each, every
// opcode of the table, all streams, buffers that share bytes, and only the waits that are needed to order
// its accesses. Equal seeds give equal programs.
//
// Random orders accesses buffer by buffer, whereas the verifier checks them byte by byte. The two share no
// code.
func Random(seed uint64, n int) *ir.Program {
	r := rand.New(rand.NewPCG(seed, 0))
	g := &generator{r: r, p: frame(r), pp: 1 + r.IntN(3), sp: 1 + r.IntN(3), dp: 1 + r.IntN(2)}
	for i := range g.p.Tensors { // the last rank of a stage holds padding, too
		g.p.Tensors[i].Shape[0] = int64(g.sp)*shareRows - int64(i)
	}
	for i := range g.pp {
		g.stages = append(g.stages, &stage{g: g, code: ir.Code{Name: fmt.Sprintf("stage%d", i)}, index: i})
	}
	for s := range ir.NumSections {
		for _, st := range g.stages {
			st.begin(s)
		}
		share := n / 2
		if s == ir.SectionInit {
			share = n / 8
		}
		for g.size() < share*(int(s)+1) {
			g.act()
		}
	}
	for _, st := range g.stages {
		g.p.Codes = append(g.p.Codes, st.finish())
	}
	g.ranks()
	return g.p
}

// Indices of the constants of a random program; the indices of its groups follow.
const (
	constNext = iota
	constPrev
	constFirst
	constRow
)

// shareRows is the number of rows of a tensor that each rank of a stage holds.
const shareRows = 16

const (
	groupSP = iota
	groupDP
	groupEnds // first and last stage, as for a tied embedding
)

func frame(r *rand.Rand) *ir.Program {
	p := &ir.Program{
		Name: "random \"#\" program", FlopsModel: 1.5e12 * r.Float64(),
		Run: ir.Run{
			Sequence: 1 << 20, Batch: 1 << 10, EvalSequences: 1 << 10, Steps: r.IntN(100), LR: 3e-4, LRSchedule: "cosine",
			DataKind: "tokens", DataFiles: []string{"a b.txt", "# no comment"}, Seed: r.Int64(),
			DataOptions: &ir.DataOptions{Type: "uint16", Header: "auto", Shuffle: r.IntN(2) > 0, Weights: []float64{r.Float64(), 1}},
		},
		Model: ir.Model{Name: "a \"b\"", Family: "gpt", Layers: 2, Tied: r.IntN(2) == 1, RopeTheta: 1e4 * r.Float64(), NormEps: 1e-5},
		Machine: ir.Machine{
			Name: "local", Nodes: 2, GPUsPerNode: 8, DeviceMemory: 1 << 40, HostMemory: 1 << 43, PeakF32: 1e12,
			MatmulEfficiency: []ir.CurvePoint{{1, 0.25}, {1024, r.Float64()}},
		},
		Passes: []string{"schedule", "offload", "place", "two words"},
		Consts: []string{"next", "prev", "first", "row"},
		Groups: []string{"sp", "dp", "ends"},
		Tensors: []ir.Tensor{
			{Name: "wte", Shape: [2]int64{shareRows, 4}}, {Name: "l0.ln1.gamma", Shape: [2]int64{shareRows, 1}}, {Name: "odd name, with: signs", Shape: [2]int64{shareRows, 3}},
		},
	}
	for i := range 5 {
		p.Lines = append(p.Lines, fmt.Sprintf("random.sppo:%d: x = %q # %d", i+1, "é", i))
	}
	return p
}

type generator struct {
	r          *rand.Rand
	p          *ir.Program
	pp, sp, dp int
	stages     []*stage
}

func (g *generator) size() int {
	n := 0
	for _, st := range g.stages {
		for s := range st.code.Sections {
			n += len(st.code.Sections[s])
		}
	}
	return n
}

// act adds one operation, or both halves of a message. Every code keeps the order in which act adds operations,
// so the job cannot deadlock.
func (g *generator) act() {
	i := g.r.IntN(g.pp)
	switch k := g.r.IntN(10); {
	case k == 0 && i+1 < g.pp:
		g.message(g.stages[i], g.stages[i+1], ir.SendNext, ir.RecvPrev)
	case k == 1 && i+1 < g.pp:
		g.message(g.stages[i+1], g.stages[i], ir.SendPrev, ir.RecvNext)
	case k == 2 && i+1 < g.pp:
		g.message(g.stages[i], g.stages[i+1], ir.Mux, ir.MuxIn)
	case k == 3:
		g.collective(g.stages[i])
	case k == 4 && g.pp > 1:
		g.allReduce()
	default:
		ops := localOps()
		g.stages[i].local(ops[g.r.IntN(len(ops))])
	}
}

// localOps lists the opcodes that involve no other rank and do not order streams.
func localOps() (ops []ir.Op) {
	for op := range ir.NumOps {
		if c := ir.Ops[op].Class; c != ir.ClassComm && c != ir.ClassSync {
			ops = append(ops, op)
		}
	}
	return ops
}

func (g *generator) message(from, to *stage, out, in ir.Stream) {
	dtype, shape := g.dtype(), g.shape()
	peer, back := ir.ConstRef(constNext), ir.ConstRef(constPrev)
	if from.index > to.index {
		peer, back = back, peer
	}
	from.emit(ir.Send, out, []ir.View{from.readable(ir.Device, dtype, shape)}, []ir.Attr{peer})
	to.emit(ir.Recv, in, []ir.View{to.write(ir.Device, dtype, shape, false)}, []ir.Attr{back})
}

func (g *generator) collective(st *stage) {
	group, size := groupSP, g.sp
	if g.r.IntN(2) == 0 {
		group, size = groupDP, g.dp
	}
	share := [ir.MaxDims]int64{int64(1 + g.r.IntN(4)), int64(1 + g.r.IntN(4))}
	whole := share
	whole[0] *= int64(size)
	dtype := g.dtype()
	attrs := []ir.Attr{ir.Int(int64(group))}
	stream := []ir.Stream{ir.Coll, ir.Mux, ir.Params}[g.r.IntN(3)]
	switch g.r.IntN(4) {
	case 3:
		x := st.readable(ir.Device, dtype, share)
		st.emit(ir.Rotate, stream, []ir.View{st.write(ir.Device, dtype, share, false), x}, attrs)
	case 0:
		x := st.readable(ir.Device, dtype, share)
		st.emit(ir.AllGather, stream, []ir.View{st.write(ir.Device, dtype, whole, false), x}, attrs)
	case 1:
		x := st.readable(ir.Device, dtype, whole)
		st.emit(ir.ReduceScatter, stream, []ir.View{st.write(ir.Device, dtype, share, false), x}, attrs)
	default:
		g.allToAll(st, stream, dtype, size, ir.Int(int64(group)))
	}
}

// allToAll adds an exchange in either direction. The number of copies is a random divisor of the group size.
func (g *generator) allToAll(st *stage, stream ir.Stream, dtype ir.DType, size int, group ir.Attr) {
	copies := 1 + g.r.IntN(size)
	for size%copies != 0 {
		copies--
	}
	rows, cols := 1+g.r.IntN(4), 1+g.r.IntN(4)
	tall := [ir.MaxDims]int64{int64(rows * size), int64(cols)}
	wide := [ir.MaxDims]int64{int64(rows), int64(cols * size / copies)}
	inverse := g.r.IntN(2) == 0
	from, to := wide, tall
	if inverse {
		from, to = tall, wide
	}
	x := st.readable(ir.Device, dtype, from)
	st.emit(ir.AllToAll, stream, []ir.View{st.write(ir.Device, dtype, to, false), x}, []ir.Attr{group, ir.Int(int64(copies)), ir.Bool(inverse)})
}

// allReduce adds a sum over the first and the last stage.
func (g *generator) allReduce() {
	dtype, shape := g.dtype(), g.shape()
	for _, st := range []*stage{g.stages[0], g.stages[g.pp-1]} {
		st.emit(ir.AllReduce, ir.Coll, []ir.View{st.changeable(ir.Device, dtype, shape)}, []ir.Attr{ir.Int(groupEnds)})
	}
}

func (g *generator) dtype() ir.DType { return ir.DType(g.r.IntN(2)) }

func (g *generator) shape() (s [ir.MaxDims]int64) {
	for i := range 1 + g.r.IntN(ir.MaxDims) {
		s[i] = int64(1 + g.r.IntN(4))
	}
	return s
}

func (g *generator) ranks() {
	at := func(d, i, k int) int32 { return int32((d*g.pp+i)*g.sp + k) }
	for d := range g.dp {
		for i := range g.pp {
			for k := range g.sp {
				r := ir.Rank{Code: int32(i), DP: int32(d), PP: int32(i), SP: int32(k), Groups: make([][]int32, 3)}
				r.Consts = []int64{ir.None, ir.None, int64(k) * 7, int64(k) * shareRows}
				if i+1 < g.pp {
					r.Consts[constNext] = int64(at(d, i+1, k))
				}
				if i > 0 {
					r.Consts[constPrev] = int64(at(d, i-1, k))
				}
				for j := range g.sp {
					r.Groups[groupSP] = append(r.Groups[groupSP], at(d, i, j))
				}
				for j := range g.dp {
					r.Groups[groupDP] = append(r.Groups[groupDP], at(j, i, k))
				}
				if g.pp > 1 && (i == 0 || i == g.pp-1) {
					r.Groups[groupEnds] = []int32{at(d, 0, k), at(d, g.pp-1, k)}
				}
				g.p.Ranks = append(g.p.Ranks, r)
			}
		}
	}
}

// local adds an operation that involves no other rank, built from the opcode's row.
func (st *stage) local(op ir.Op) {
	row, r := &ir.Ops[op], st.g.r
	in := instance{st: st, row: row, named: map[string]int64{}, set: map[string]bool{}, dtype: st.g.dtype(), any: ir.DType(r.IntN(int(ir.NumDTypes)))}
	attrs := in.attrs()
	args := make([]ir.View, len(row.Operands))
	// Operands that are read are chosen first, so that the instruction does not write to the bytes that it
	// reads.
	for i := range slices.Backward(row.Operands) {
		o := &row.Operands[i]
		dtype, shape := in.view(o, i)
		write := o.Dir == ir.Write || o.Dir == ir.WriteOrAdd && !in.set[o.AddsBy()]
		switch {
		case o.Optional && in.leftOut(args, i):
			args[i] = ir.Absent()
		case o.Dir == ir.Read:
			args[i] = st.readable(o.Arena, dtype, shape)
		case !write:
			args[i] = st.changeable(o.Arena, dtype, shape)
		default:
			args[i] = in.output(args, i, o, dtype, shape)
		}
	}
	stream := row.Streams[r.IntN(len(row.Streams))]
	if stream == ir.Mux && r.IntN(4) > 0 {
		stream = row.Streams[0]
	}
	st.emit(op, stream, args, attrs)
}

// instance holds the choices made for one instruction.
type instance struct {
	st    *stage
	row   *ir.OpInfo
	named map[string]int64 // values of dimensions and attributes
	dtype ir.DType         // of operands whose type is T
	any   ir.DType         // of operands of any type
	set   map[string]bool  // attributes that are true
}

// leftOut reports whether optional operand i is omitted. Operand o of attention_grad is omitted if delta is
// given. Any other operand is omitted at random, and always if the instruction accumulates and is not
// attention.
func (in *instance) leftOut(args []ir.View, i int) bool {
	if in.row.Rule == ir.RuleAttention && in.row.Operands[i].Name == "o" {
		delta := slices.IndexFunc(in.row.Operands, func(o ir.Operand) bool { return o.Name == "delta" })
		return args[delta].Present()
	}
	if in.row.Rule == ir.RuleAttention {
		return in.st.g.r.IntN(2) == 0
	}
	if in.row.Name == "matmul_grouped_weight_grad" { // gradients of matrices, of biases, or of both
		last := len(args) - 1
		switch i {
		case 0:
			return !args[last].Present()
		case last:
			return in.st.g.r.IntN(4) == 0
		}
		return args[last].Present() && in.st.g.r.IntN(2) == 0
	}
	return in.set["accumulate"] || in.set["trans_b"] && in.row.Name == "matmul_grouped" || in.st.g.r.IntN(2) == 0
}

func (in *instance) attrs() []ir.Attr {
	var attrs []ir.Attr
	for i := range in.row.Attrs {
		attrs = append(attrs, in.attr(&in.row.Attrs[i]))
	}
	return attrs
}

func (in *instance) attr(a *ir.AttrInfo) ir.Attr {
	r := in.st.g.r
	switch a.Kind {
	case ir.KindFactor:
		if a.Name == "share" { // at most 1
			return ir.Float(float64(r.IntN(3)) / 2)
		}
		return ir.Float([]float64{0, 0, 1, 1e-5, 30, math.Abs(r.NormFloat64())}[r.IntN(6)])
	case ir.KindFloat:
		if a.Name == "rate" { // at least 0 and below 1
			return ir.Float(r.Float64())
		}
		return ir.Float([]float64{0, 1, -0.5, 1e-5, 1e10, r.NormFloat64()}[r.IntN(6)])
	case ir.KindBool:
		in.set[a.Name] = r.IntN(2) == 0
		return ir.Bool(in.set[a.Name])
	case ir.KindOption:
		if a.Name == "window" && r.IntN(2) == 0 {
			return ir.Int(in.window())
		}
		return ir.Int(0)
	case ir.KindFunction:
		return ir.Int(r.Int64N(int64(len(ir.Functions))))
	case ir.KindTensor:
		return ir.Int(r.Int64N(int64(len(in.st.g.p.Tensors))))
	}
	switch a.Name {
	case "first", "row":
		if r.IntN(2) == 0 {
			return ir.ConstRef(map[string]int{"first": constFirst, "row": constRow}[a.Name])
		}
	case "valid":
		return ir.Int(1)
	}
	v := int64(1 + r.IntN(3))
	if a.Name == "heads" {
		v *= in.name("kv_heads")
	}
	if a.Name == "channels" && r.IntN(2) == 0 {
		v = in.named["key_dim"]
	} else if a.Name == "channels" {
		v = 1
	}
	if in.row.Rule == ir.RuleConcat && a.Name == "head_dim" {
		v = in.name("first") + in.name("rest")
	}
	if known, ok := in.named[a.Name]; ok {
		v = known
	}
	in.named[a.Name] = v
	return ir.Int(int64(v))
}

// window returns a random window with which every query sees a key. If the instruction continues attention
// to other keys, it is enough that one query sees a key.
func (in *instance) window() int64 {
	end := in.named["prefix"] + in.name("n")
	least := end - in.name("keys") + 1
	if in.set["accumulate_q"] || in.set["accumulate"] && in.row.Work == ir.WorkAttention {
		least -= in.name("n") - 1
	}
	return max(1, least) + int64(in.st.g.r.IntN(4))
}

// name returns the value of a dimension, which is chosen on first use.
func (in *instance) name(s string) int64 {
	if _, ok := in.named[s]; !ok {
		in.named[s] = int64(1 + in.st.g.r.IntN(4))
		if s == "e" { // experts
			in.named[s] += in.named["top"]
		}
		if s == "l" { // some of the experts
			in.named[s] = int64(1 + in.st.g.r.IntN(int(in.name("e"))))
		}
		if s == "n" && in.row.Rule == ir.RulePlaced { // room for some rows of each token
			in.named[s] = in.name("r") * int64(1+in.st.g.r.IntN(int(in.named["top"])))
		}
		if s == "keys" {
			in.named[s] = int64(1 + in.st.g.r.IntN(int(in.named["prefix"]+in.name("n"))))
		}
	}
	return in.named[s]
}

func (in *instance) view(o *ir.Operand, i int) (dtype ir.DType, shape [ir.MaxDims]int64) {
	switch o.Types {
	case "f32":
		dtype = ir.F32
	case "bf16":
		dtype = ir.BF16
	case "i32":
		dtype = ir.I32
	case "F":
		if dtype = in.st.g.dtype(); in.row.Rule == ir.RuleGrouped && in.set["trans_b"] {
			dtype = in.dtype
		}
	case "any":
		dtype = in.any
	default:
		dtype = in.dtype
	}
	switch {
	case in.row.Rule == ir.RuleMatmul && o.Name == "a":
		return dtype, matrix(in.name("m"), in.name("k"), in.set["trans_a"])
	case in.row.Rule == ir.RuleMatmul && o.Name == "b":
		return dtype, matrix(in.name("k"), in.name("n"), in.set["trans_b"])
	case in.row.Rule == ir.RuleGrouped && o.Dims == "":
		m := matrix(in.name("k"), in.name("o"), in.set["trans_b"])
		return dtype, [ir.MaxDims]int64{in.name("e"), m[0], m[1]}
	case o.Name == "positions":
		return dtype, [ir.MaxDims]int64{in.name("n") * in.name("batch")}
	case o.Dims == "":
		return dtype, [ir.MaxDims]int64{in.name("r"), in.name("c")}
	}
	for i, dim := range strings.Split(o.Dims, ",") {
		shape[i] = 1
		for factor := range strings.SplitSeq(dim, "*") {
			var v int64
			if _, err := fmt.Sscan(factor, &v); err != nil {
				v = in.name(factor)
			}
			shape[i] *= v
		}
	}
	return dtype, shape
}

func matrix(rows, cols int64, transposed bool) [ir.MaxDims]int64 {
	if transposed {
		rows, cols = cols, rows
	}
	return [ir.MaxDims]int64{rows, cols}
}

// output returns a view for operand i. If the row allows it, this is occasionally a view that the instruction
// also reads.
func (in *instance) output(args []ir.View, i int, o *ir.Operand, dtype ir.DType, shape [ir.MaxDims]int64) ir.View {
	if in.row.InPlace && in.st.g.r.IntN(3) == 0 {
		for j := in.row.Written(); j < len(args); j++ {
			v := args[j]
			free := !slices.Contains(args[:in.row.Written()], v) && !slices.Contains(args[j+1:], v) && !slices.Contains(args[in.row.Written():j], v)
			if free && v.Present() && v.DType == dtype && v.Shape == shape && in.st.aloneAt(v, args, j) && in.st.buffers[v.Buffer].mayChange() {
				return v
			}
		}
	}
	return in.st.write(o.Arena, dtype, shape, false)
}

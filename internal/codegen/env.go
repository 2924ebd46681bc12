package codegen

import (
	"fmt"
	"slices"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
)

// place is the location of a value of a block while a task runs.
type place struct {
	buffer uint32
	offset ir.Bytes
	known  bool
}

// env emits the nodes of one block for one task: it finds or creates the buffer of every value.
type env struct {
	s         *lowering
	block     *graph.Block
	params    []*param
	task      plan.Task
	layer     int // global, or ir.None
	size      graph.Size
	at        []place
	unitOf    []int              // value -> the saved unit that contains it, or -1
	read      []bool             // value -> whether an instruction has read it since it was written
	wrote     map[graph.Arg]bool // operands that an instruction has written
	backward  bool               // emits the backward pass of a layer
	begun     bool               // whether, in a backward task with streamed K and V, later subsequences have added to the gradients of its own rows
	keys      [2]int64           // first token and end of the keys that a loop is at
	suffix    string
	lossScale float64
}

func (s *lowering) newEnv(b *graph.Block, params []*param, t plan.Task, layer int, z graph.Size) *env {
	if layer != ir.None {
		z = s.model.OfLayer(z, layer)
	}
	return &env{s: s, block: b, params: params, task: t, layer: layer, size: z, at: make([]place, len(b.Values)), read: make([]bool, len(b.Values)), wrote: map[graph.Arg]bool{}}
}

func (e *env) put(value int, buffer uint32, offset ir.Bytes) {
	e.at[value] = place{buffer, offset, true}
}

// run emits nodes. It emits the chunked nodes of the head once for every chunk of rows.
func (e *env) run(nodes []graph.Node) {
	for i := 0; i < len(nodes); {
		if e.attends(&nodes[i]) {
			_, end := graph.LoopOf(nodes, i)
			e.attend(nodes[i:end])
			i = end
			continue
		}
		if !nodes[i].Chunked {
			e.node(&nodes[i])
			i++
			continue
		}
		end := i
		for end < len(nodes) && nodes[end].Chunked {
			end++
		}
		e.chunks(nodes[i:end])
		i = end
	}
}

// runBackward emits the backward pass of the block, or its first half if the second is a separate task.
func (e *env) runBackward() {
	if e.s.work.split[e.task] {
		e.run(e.block.Halves[graph.InputGradient])
		later := e.task.As(plan.WeightGrad)
		e.s.work.deferred[later] = append(e.s.work.deferred[later], e)
		return
	}
	e.run(e.block.Backward)
}

// runWeightGrads emits the second half of a backward pass.
func (e *env) runWeightGrads() {
	e.s.visits.number++
	e.run(e.block.Halves[graph.WeightGradient])
}

func (e *env) chunks(nodes []graph.Node) {
	rows, step := e.size.Tokens*e.size.Batch, e.s.model.ChunkRows(e.size)
	for first := int64(0); first < rows; first += step {
		e.size.Chunk, e.size.Rows = first, min(step, rows-first)
		e.suffix = fmt.Sprintf(".c%d", first/step)
		for i := range nodes {
			e.node(&nodes[i])
		}
		for v := range e.block.Values {
			if e.block.Values[v].Rows == graph.ChunkRows {
				e.at[v].known = false
			}
		}
	}
	e.suffix = ""
}

func (e *env) node(n *graph.Node) {
	if n.Op == ir.Dropout && !e.s.trains() { // a validation drops nothing
		x := e.view(n.Args[1], e.block.View(n.Args[1], e.size))
		e.put(n.Args[0].Value, x.Buffer, x.Offset)
		return
	}
	if n.Op == ir.ExpertCounts && !(e.s.trains() && (e.block.ReadsBack(n.Args[0].Value) || e.s.model.TalliesJoint())) || n.Op == ir.ExpertLoad && !e.s.trains() {
		return
	}
	if e.shares(n) {
		e.offload(n)
		return
	}
	if n.Op == ir.CopyD2D && e.size.Prefix == 0 {
		e.beginSequence(n)
		return
	}
	in := e.block.Instr(n, e.size, e.view, func(a graph.Attr) ir.Attr { return e.attr(n, a) })
	e.rename(n, &in)
	e.s.aside(func() {
		in.Stream = ir.Compute
		if ir.Ops[n.Op].Class == ir.ClassComm {
			in.Stream = ir.Coll
			e.s.decidedBy("lower", "schedule.sp")
		}
		e.s.emit(in)
	})
	e.offload(n)
	e.kvToHost(n)
}

// beginSequence emits a copy of a carried value for the first subsequence: it begins with zeros, and nothing reads the gradient of these.
func (e *env) beginSequence(n *graph.Node) {
	if e.block.Values[n.Args[1].Value].Kind == graph.Carry {
		e.s.op(ir.Fill, ir.Compute, []ir.View{e.view(n.Args[0], e.block.View(n.Args[0], e.size))}, ir.Float(0))
		e.offload(n)
	}
}

// rename assigns a new buffer with the same bytes to each value that a node overwrites, because each buffer
// stands for a single version of a value.
func (e *env) rename(n *graph.Node, in *ir.Instr) {
	written := in.Info().Written()
	for i, a := range n.Args {
		if reads, writes := in.Access(i); a.Value == graph.Missing || i >= written || reads || !writes {
			continue
		}
		unread := e.wrote[a] && e.backward && !e.block.ReadsBack(a.Value)
		if e.read[a.Value] || unread {
			e.replace(a.Value, &in.Args[i])
		}
		e.read[a.Value], e.wrote[a] = false, true
	}
	for i, a := range n.Args[written:] {
		if a.Value != graph.Missing && in.Args[written+i].Present() && !slices.ContainsFunc(n.Args[:written], func(w graph.Arg) bool { return w.Value == a.Value }) {
			e.read[a.Value] = true
		}
	}
}

// replace gives a view that overwrites an activation, or what passes from a subsequence to the next, the buffer of a new version.
func (e *env) replace(value int, to *ir.View) {
	v, p := &e.block.Values[value], e.at[value]
	if v.Kind != graph.Activation && !v.Carries() {
		return
	}
	to.Buffer = e.s.takeOver(p.buffer)
	e.put(value, to.Buffer, p.offset)
	if v.Carries() {
		e.s.kv.device[e.kvKey(value)] = to.Buffer
	}
}

// key returns the spec key that a block's instructions refer to.
func (e *env) key() string {
	if e.layer >= 0 {
		return "model.layers"
	}
	return "model.vocab"
}

func (e *env) view(a graph.Arg, v ir.View) ir.View {
	if e.block.Values[a.Value].Kind == graph.CarryGrad && a.Span == graph.All && e.size.Prefix+e.size.Tokens == e.size.Sequence {
		return ir.Absent() // no subsequence follows
	}
	p := e.find(a.Value)
	v.Buffer = p.buffer
	v.Offset += p.offset
	return v
}

// find returns the place of a value, and assigns one if the value has none yet.
func (e *env) find(value int) place {
	if e.at[value].known {
		return e.at[value]
	}
	v := &e.block.Values[value]
	switch v.Kind {
	case graph.Given:
		of := map[string]uint32{graph.ValuePositions: e.s.work.documents[e.task.Microbatch], graph.ValueDropout: e.s.numbers.dropout}
		e.put(value, of[v.Name], 0)
	case graph.Weight:
		e.put(value, e.params[v.Param].weight, 0)
	case graph.WeightGrad:
		e.put(value, e.s.gradBuffer(e.params[v.Param]), 0)
	case graph.Load:
		e.put(value, e.s.numbers.load, ir.Bytes(e.layer)*v.Bytes(e.size))
	case graph.Tally, graph.Carry, graph.CarryGrad:
		e.put(value, e.kvBuffer(value), 0)
	case graph.Cache, graph.CacheGrad:
		if v.Spans() {
			e.put(value, e.kvBuffer(value), 0)
			break
		}
		if e.backward {
			e.transfers(nil, ir.Instr{})
			break
		}
		e.put(value, e.s.allocate(e.s.label(e.task, e.layer, v.Name), ir.Device, v.Bytes(e.size)), 0)
	default:
		z := e.size
		if v.Rows == graph.Piece {
			z = z.OfPiece(e.keys[0], e.keys[1])
		}
		if e.unitOf != nil && e.unitOf[value] >= 0 {
			e.makeUnit(e.unitOf[value])
			break
		}
		name := e.s.label(e.task, e.layer, v.Name+e.suffix)
		e.put(value, e.s.allocate(name, ir.Device, v.Bytes(z)), 0)
	}
	return e.at[value]
}

func (e *env) kvKey(value int) kvKey {
	if e.block.Values[value].Name == graph.ValueJoint {
		return jointKey(e.task.Microbatch)
	}
	return kvKey{e.task.Microbatch, e.layer, e.block.Values[value].Name}
}

// kvBuffer returns the buffer of K, V, one of their gradients or a tally, which all tasks of a microbatch share.
func (e *env) kvBuffer(value int) uint32 {
	key := e.kvKey(value)
	b, ok := e.s.kv.device[key]
	if !ok {
		v := &e.block.Values[value]
		b = e.s.allocate(e.s.kvName(e.task.Microbatch, e.layer, v), ir.Device, v.Bytes(e.size))
		if e.s.kv.device[key] = b; v.Kind == graph.CacheGrad && e.s.plan.Stream.Latents { // all contributions are added
			e.s.op(ir.Fill, ir.Compute, []ir.View{in(b, asBytes(0, v.Bytes(e.size)))}, ir.Float(0))
		}
	}
	return b
}

func (e *env) attr(n *graph.Node, a graph.Attr) ir.Attr {
	s := e.s
	switch a.Source {
	case graph.FromFirst:
		return ir.Int(int64(e.task.Microbatch * s.plan.Parallel.Microbatch))
	case graph.FromLossScale:
		return ir.Float(e.lossScale)
	case graph.PerToken:
		return ir.Float(a.Value.Float(nil) / (float64(s.plan.Train.Sequence) * float64(s.plan.Train.Batch)))
	case graph.FromConst:
		if a.Const == graph.ConstReplica && !s.trains() {
			return s.constRef(graph.ConstEvalFirst)
		}
		return s.constRef(a.Const)
	case graph.FromTensor:
		return ir.Int(int64(s.tables.index[graph.LayerPrefix(e.layer)+a.Const]))
	case graph.FromLayer:
		return ir.Int(s.model.Rotation(e.layer, a.Const))
	case graph.NotFirst:
		return ir.Bool(e.touchAll(n, a.Name))
	}
	panic("internal: attribute without a source")
}

// touchAll reports whether any value to which a node adds has already been written in this section, and marks
// all of them as written.
func (e *env) touchAll(n *graph.Node, attribute string) bool {
	before := false
	for i, o := range ir.Ops[n.Op].Operands {
		if o.Dir != ir.WriteOrAdd || o.AddsBy() != attribute || n.Args[i].Value == graph.Missing {
			continue
		}
		v := e.view(n.Args[i], e.block.View(n.Args[i], e.size))
		key := touch{v.Buffer, v.Offset}
		before = before || e.s.work.touched[key]
		e.s.work.touched[key] = true
	}
	return before
}

package codegen

import (
	"fmt"
	"maps"
	"slices"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/walk"
	"sppo.dev/ir"
)

// This file emits attention with streamed K and V: a subsequence keeps its own rows on the device, and
// attention processes the earlier rows block by block, in the order in which the plan's queue loads them from
// the host.

// kv holds the places of K, V and their gradients in a section, and the transfers that are in progress.
type kv struct {
	*emitter
	device   map[kvKey]uint32
	host     map[kvKey]uint32
	inputs   map[int]uint32         // [subsequence]: inputs of a layer that are on the device to recompute K and V
	lent     map[lentKey]*lentBlock // keys of other stages
	queue    *walk.LoadQueue
	rest     []walk.Transfer // of the current visit
	arrivals []arrival       // issued and not yet used
	sent     [][]uint32      // [block]: dK and dV that are held because they may be in transit to the host
}

type kvKey struct {
	microbatch, layer int
	value             string
}

// arrival is a load and the buffers that it fills, by the names of values.
type arrival struct {
	walk.Transfer
	buffers map[string]uint32
}

// streaming returns the streamed values of a layer: K and V and, if grads is set, those of their gradients that are
// read.
func streaming(b *graph.Block, grads bool) []*graph.Value {
	var out []*graph.Value
	for i := range b.Values {
		v := &b.Values[i]
		if v.Rows == graph.Full && (v.Kind == graph.Cache || grads && v.Kind == graph.CacheGrad && b.ReadsBack(i)) {
			out = append(out, v)
		}
	}
	return out
}

// hostRows returns the host bytes that hold a range of tokens of K, V or one of their gradients. If the ranks
// divide the tokens, these are the bytes of this rank's share.
func (k *kv) hostRows(microbatch, layer int, v *graph.Value, first, end int64) ir.View {
	z := k.plan.Size(0)
	row := ir.Bytes(z.Batch*v.Cols) * v.DType.Bytes()
	if v.Rows == graph.WholeLocal {
		first, end, z.Sequence = first/z.Ring, end/z.Ring, z.Sequence/z.Ring
	}
	key := kvKey{microbatch, layer, v.Name}
	host, ok := k.host[key]
	if !ok {
		rows := z.Sequence
		switch {
		case v.Kind == graph.CacheGrad: // no later subsequence adds to the rows of the last one
			rows = k.plan.Size(k.plan.Subsequences.N - 1).Prefix
		case !k.layerOfModel(layer).Attends:
			rows = k.rowsOfForwards(layer)
		}
		host = k.allocate(k.kvName(microbatch, layer, v)+".host", ir.Host, row*ir.Bytes(rows))
		k.host[key] = host
	}
	return in(host, asBytes(row*ir.Bytes(first), row*ir.Bytes(end-first)))
}

// rowsOfForwards returns the end of the rows of a layer's K and V that forward tasks load, counted from the
// start of the sequence.
func (k *kv) rowsOfForwards(layer int) int64 {
	for i := k.plan.Subsequences.N - 1; i > 0; i-- {
		z := k.model.OfLayer(k.plan.Size(i), layer)
		if len(walk.Blocks(k.plan.Stream.Block, z)) > 0 {
			return z.Prefix
		}
	}
	return 0
}

func (e *emitter) kvName(microbatch, layer int, v *graph.Value) string {
	name := fmt.Sprintf("m%d.l%d.%s", microbatch, layer, v.Name)
	if !e.trains() {
		name = "eval." + name
	}
	return name
}

// load allocates the buffers of a load and issues its copies.
func (k *kv) load(l walk.Transfer) map[string]uint32 {
	k.at(l.Task)
	k.prov.Layer = int32(l.Layer)
	k.decidedBy("offload", "schedule.keep")
	buffers := map[string]uint32{}
	for _, v := range streaming(k.layerOfModel(l.Layer), l.Grads) {
		rows := k.hostRows(l.Task.Microbatch, l.Layer, v, l.First, l.End)
		b := k.allocate(k.label(l.Task, l.Layer, loadName(l, v)), ir.Device, rows.Bytes())
		at := ir.Bytes(0)
		if v.Kind == graph.CacheGrad && l.Begun > l.First {
			at = rows.Bytes() / ir.Bytes(l.End-l.First) * ir.Bytes(l.Begun-l.First)
			k.op(ir.Fill, ir.Compute, []ir.View{in(b, asBytes(0, at))}, ir.Float(0))
			rows = k.hostRows(l.Task.Microbatch, l.Layer, v, l.Begun, l.End)
		}
		k.op(ir.CopyH2D, ir.H2D, []ir.View{in(b, asBytes(at, rows.Bytes())), rows})
		buffers[v.Name] = b
	}
	return buffers
}

// loadName names a value's buffer in a load; each load of a task has different names.
func loadName(l walk.Transfer, v *graph.Value) string {
	switch {
	case l.Own:
		return v.Name + ".own"
	case l.Recomputed:
		return fmt.Sprintf("%s.at%d.again", v.Name, l.First)
	case l.Task.Kind == plan.Backward:
		return fmt.Sprintf("%s.at%d.back", v.Name, l.First)
	}
	return fmt.Sprintf("%s.at%d", v.Name, l.First)
}

// transfers emits the rest of the visit's transfers, up to the next that begins attention. The instruction is that of
// attention over the subsequence's own rows, if attention has begun.
func (e *env) transfers(loop []graph.Node, own ir.Instr) {
	q, block := &e.s.kv, arrival{}
	for ; len(q.rest) > 0 && q.rest[0].Op != walk.Attend; q.rest = q.rest[1:] {
		switch x := q.rest[0]; x.Op {
		case walk.Issue:
			q.aside(func() { q.arrivals = append(q.arrivals, arrival{x, q.load(x)}) })
		case walk.Use:
			block, q.arrivals = q.arrivals[0], q.arrivals[1:]
			if x.Own {
				e.takeOwn(block)
			} else {
				e.attendBlock(loop, own, block)
			}
		case walk.Send:
			e.sendGrads(block)
		case walk.Free:
			for _, b := range q.sent[0] {
				e.s.hold(b)
			}
			q.sent = q.sent[1:]
		}
	}
}

// takeOwn takes a backward task's own rows: of K and V, and of dK and dV if later subsequences have added to
// them.
func (e *env) takeOwn(own arrival) {
	e.begun = own.Grads
	for i := range e.block.Values {
		v := &e.block.Values[i]
		if v.Kind == graph.CacheGrad && v.Spans() && own.Grads && own.Begun > own.First {
			e.clearRows(i, own.First, own.Begun) // for example dV, if only K is streamed
		}
		if v.Rows != graph.Full || v.Kind != graph.Cache && v.Kind != graph.CacheGrad {
			continue
		}
		b, ok := own.buffers[v.Name]
		if !ok {
			b = e.s.allocate(e.s.label(e.task, e.layer, v.Name), ir.Device, v.Bytes(e.size))
			if v.Kind == graph.CacheGrad {
				e.clearUnread(b, v.Bytes(e.size), own.Grads || e.s.plan.Stream.Latents)
			}
		}
		e.put(i, b, 0)
	}
}

// clearRows clears the rows of a gradient of K or V that is kept on the device.
func (e *env) clearRows(value int, first, end int64) {
	v := &e.block.Values[value]
	row := ir.Bytes(e.size.Batch*v.Cols) * v.DType.Bytes()
	rows := in(e.kvBuffer(value), asBytes(row*ir.Bytes(first), row*ir.Bytes(end-first)))
	e.s.op(ir.Fill, ir.Compute, []ir.View{rows}, ir.Float(0))
}

// clearUnread clears a buffer for a gradient of K or V that is never read, if a node adds to it.
func (e *env) clearUnread(b uint32, size ir.Bytes, adds bool) {
	if adds {
		e.s.op(ir.Fill, ir.Compute, []ir.View{in(b, asBytes(0, size))}, ir.Float(0))
	}
}

// attend emits an attention node in parts: the subsequence's own rows, then each earlier block. The softmax continues
// from part to part in f32, and so does the sum of the gradients of the queries. The other nodes of its loop, if there are any, compute
// K and V of a part before it, and add to the gradients of what these come from after it.
func (e *env) attend(loop []graph.Node) {
	at := slices.IndexFunc(loop, func(n graph.Node) bool { return n.Attends() })
	n, prefix, end := &loop[at], e.size.Prefix, e.size.Prefix+e.size.Tokens
	blocks := walk.Blocks(e.s.plan.Stream.Block, e.size)
	e.keys = [2]int64{prefix, end}
	e.around(loop[:at])
	own := e.part(n, prefix, end, e.view)
	result := own.Args[0] // o, or dq
	sum := result
	if len(blocks) > 0 && result.DType != ir.F32 {
		sum.DType = ir.F32
		sum = e.scratch(n.Args[0], "sum", sum)
	}
	if n.Op == ir.AttentionGrad && len(blocks) > 0 {
		delta := e.scratch(n.Args[0], "delta", own.Arg("lse"))
		e.s.op(ir.AttentionDelta, ir.Compute, []ir.View{delta, own.Arg("do"), own.Arg("o")}, own.Attr("heads"), ir.Int(own.Work().ValueDim))
		setArg(&own, "o", ir.Absent())
		setArg(&own, "delta", delta)
	}
	own.Args[0] = sum
	e.s.emit(own)
	e.around(loop[at+1:])
	e.forget()
	if e.s.plan.Streams() {
		e.s.kv.rest = e.s.kv.rest[1:]
		e.transfers(loop, own)
		blocks = nil
	}
	for i := range blocks {
		e.attendBlock(loop, own, arrival{Transfer: walk.Transfer{Load: &blocks[i]}, buffers: map[string]uint32{}})
	}
	if sum != result && (n.Op == ir.Attention || e.block.ReadsBack(n.Args[0].Value)) {
		e.s.op(ir.Cast, ir.Compute, []ir.View{result, sum})
	}
	e.offload(n)
}

// around emits nodes of a loop other than attention, for the part of the keys that the loop is at.
func (e *env) around(nodes []graph.Node) {
	whole := e.size
	e.size = e.size.OfPiece(e.keys[0], e.keys[1])
	for i := range nodes {
		e.node(&nodes[i])
	}
	e.size = whole
}

// forget ends what a loop has computed for a range of tokens.
func (e *env) forget() {
	for v := range e.block.Values {
		if e.block.Values[v].Rows == graph.Piece {
			e.at[v].known, e.read[v] = false, false
		}
	}
	maps.DeleteFunc(e.wrote, func(a graph.Arg, _ bool) bool { return !e.at[a.Value].known })
}

// attendBlock emits the part for a block. Operands that do not depend on the block are taken from the
// part for the subsequence's own rows.
func (e *env) attendBlock(loop []graph.Node, own ir.Instr, block arrival) {
	s, at := e.s, slices.IndexFunc(loop, func(n graph.Node) bool { return n.Attends() })
	n, expands := &loop[at], len(loop) > 1
	grads := n.Op == ir.AttentionGrad
	adds := grads && e.prepareGrads(block, s.plan.Streams() && (expands || e.mayBeUnseen(own, block)))
	before := slices.Clone(e.at)
	for v := range e.block.Values {
		if b, ok := block.buffers[e.block.Values[v].Name]; ok {
			e.put(v, b, 0)
		}
	}
	e.suffix, e.keys = fmt.Sprintf(".at%d", block.First), [2]int64{block.First, block.End}
	e.around(loop[:at])
	in := e.part(n, block.First, block.End, e.view)
	continued := "accumulate"
	if grads {
		continued = "accumulate_q"
		setAttr(&in, "accumulate", ir.Bool(adds && !expands))
		setArg(&in, "o", own.Arg("o"))
		setArg(&in, "delta", own.Arg("delta"))
	}
	setAttr(&in, continued, ir.Bool(true))
	in.Args[0] = own.Args[0]
	s.emit(in)
	e.around(loop[at+1:])
	e.forget()
	e.at, e.suffix = before, ""
}

// prepareGrads makes room for the gradients of a block that have not been loaded, and clears them if that is asked for. It reports whether
// gradients are to be added.
func (e *env) prepareGrads(block arrival, cleared bool) (adds bool) {
	adds = block.Grads || cleared
	for i := range e.block.Values {
		v := &e.block.Values[i]
		if cleared && v.Kind == graph.CacheGrad && v.Spans() {
			e.clearRows(i, block.First, block.End)
		}
		if _, ok := block.buffers[v.Name]; ok || v.Rows != graph.Full || v.Kind != graph.CacheGrad {
			continue
		}
		bytes := ir.Bytes((block.End-block.First)*e.size.Batch*v.Cols) * v.DType.Bytes()
		b := e.s.allocate(e.s.label(e.task, e.layer, loadName(block.Transfer, v)), ir.Device, bytes)
		e.clearUnread(b, bytes, adds) // nothing has been added to the gradient of these rows yet, or it is never read
		block.buffers[v.Name] = b
	}
	return adds
}

// mayBeUnseen reports whether some members of a ring may see none of a block, and thus cannot overwrite its gradients, to
// which nothing has been added yet.
func (e *env) mayBeUnseen(own ir.Instr, block arrival) bool {
	return !block.Grads && own.Attr("chunks").Bits != 0 && (e.size.Window > 0 || own.Arg("positions").Present())
}

// attends reports whether a node is emitted in parts, with the other nodes of its loop.
func (e *env) attends(n *graph.Node) bool { return n.Loop > 0 || e.s.plan.Streams() && n.Attends() }

// part returns the instruction of an attention node for the keys of a range of tokens.
func (e *env) part(n *graph.Node, first, end int64, view func(graph.Arg, ir.View) ir.View) ir.Instr {
	in := e.block.Piece(n, e.size, first, end, view, func(a graph.Attr) ir.Attr {
		if a.Source == graph.FromConst {
			return e.s.constRef(a.Const)
		}
		return ir.Bool(a.Name == "accumulate" && e.begun) // adds to the sums of later subsequences
	})
	in.Stream = ir.Compute
	return in
}

// sendGrads copies dK and dV of a block back to the host.
func (e *env) sendGrads(block arrival) {
	s := e.s
	s.decidedBy("offload", "schedule.keep")
	var sent []uint32
	for _, v := range streaming(e.block, true) { // those that are read
		if v.Kind != graph.CacheGrad {
			continue
		}
		rows, b := s.kv.hostRows(e.task.Microbatch, e.layer, v, block.First, block.End), block.buffers[v.Name]
		s.op(ir.CopyD2H, ir.D2H, []ir.View{rows, in(b, asBytes(0, rows.Bytes()))})
		sent = append(sent, b)
	}
	s.kv.sent = append(s.kv.sent, sent)
	s.decidedBy("lower", e.key())
}

// scratch returns a view like the given one in a new temporary buffer, which is named after a node's operand.
func (e *env) scratch(a graph.Arg, name string, like ir.View) ir.View {
	like.Buffer = e.s.allocate(e.s.label(e.task, e.layer, e.block.Values[a.Value].Name+"."+name+e.suffix), ir.Device, like.Bytes())
	like.Offset = 0
	return like
}

package irtest

import (
	"fmt"
	"slices"

	"sppo.dev/ir"
)

// stage builds the code of one stage and adds the waits that order its accesses.
type stage struct {
	g       *generator
	index   int
	code    ir.Code
	section ir.Section
	buffers []buffer
	live    []int // buffers that have been written
	inUse   []int // buffers of the current instruction
	step    int   // buffer that the VM fills before each step
	exact   bool  // the provenance is not random but taken from the field where, and begin creates no buffers
	where   ir.Provenance

	known [ir.NumStreams]clock // [s][t]: number of instructions of stream t that stream s has waited for
	count clock                // instructions on each stream so far
}

type clock [ir.NumStreams]int

// buffer is a buffer with the history of accesses to its bytes. A buffer that replaces another inherits the
// other's history.
type buffer struct {
	ir.Buffer
	persistent bool
	state      bool // a weight, which no step changes
	place      *place

	// State in this section: whether the buffer has been written, whether it has been read since, and whether
	// it was changed in place after being read. A buffer is also stale if a copy of it has been changed.
	written, read, stale bool
	source               int // 1 + the buffer on the host that a reload has copied here; 0: none
}

// mayRead reports whether a read sees the value that the buffer represents. mayChange reports whether the value
// can be changed in place: it comes from before the section, or no instruction has read it.
func (b *buffer) mayRead() bool   { return !b.stale }
func (b *buffer) mayChange() bool { return !b.state && !b.stale && !(b.written && b.read) }

type place struct {
	size  ir.Bytes
	write access
	reads clock
}

type access struct {
	stream ir.Stream
	number int // 0: none
}

// begin starts a section. All streams are joined, and persistent buffers hold the values from the init section.
func (st *stage) begin(s ir.Section) {
	st.section = s
	st.known, st.count = [ir.NumStreams]clock{}, clock{}
	st.live = nil
	for i := range st.buffers {
		b := &st.buffers[i]
		b.place.write, b.place.reads = access{}, clock{}
		b.read, b.stale, b.written, b.source = false, false, i == st.step, 0
		if b.persistent {
			st.live = append(st.live, i)
		}
	}
	switch {
	case st.exact:
	case s == ir.SectionInit:
		st.lasting()
	case s == ir.SectionStep:
		st.live = append(st.live, st.step)
		fallthrough
	default:
		st.emit(ir.Fill, ir.Compute, []ir.View{st.code.Results[0].View}, []ir.Attr{ir.Float(0)})
	}
}

// lasting creates the buffers that persist from the init section onwards.
func (st *stage) lasting() {
	for i, t := range st.g.p.Tensors {
		shape := [ir.MaxDims]int64{shareRows, t.Shape[1]}
		v := st.write(ir.Device, ir.F32, shape, true)
		st.emit(ir.InitNormal, ir.Compute, []ir.View{v}, []ir.Attr{ir.Int(int64(i)), ir.ConstRef(constRow), ir.Int(0), ir.Float(0.02), ir.Int(0)})
		st.buffers[v.Buffer].state = true
		st.code.States = append(st.code.States, ir.State{Tensor: int32(i), Role: ir.RoleWeight, View: v, Row0: ir.ConstRef(constRow), Col0: ir.Int(0)})
	}
	loss := st.write(ir.Device, ir.F32, [ir.MaxDims]int64{1}, true)
	st.emit(ir.Fill, ir.Compute, []ir.View{loss}, []ir.Attr{ir.Float(0)})
	step := st.write(ir.Device, ir.F32, [ir.MaxDims]int64{3}, true)
	st.step = int(step.Buffer)
	st.buffers[st.step].persistent = false
	st.live = st.live[:len(st.live)-1]
	st.inUse = nil
	st.code.Results = []ir.Result{{Name: ir.ResultLoss, View: loss}, {Name: ir.ResultStep, View: step}}
}

func (st *stage) finish() ir.Code {
	c := st.code
	for i := range st.buffers {
		b := st.buffers[i].Buffer
		c.Buffers = append(c.Buffers, b)
		c.Arenas[b.Arena] = max(c.Arenas[b.Arena], b.Offset+b.Size)
	}
	return c
}

// readable returns a view of a buffer that has been written, creating the buffer if necessary.
func (st *stage) readable(arena ir.Arena, dtype ir.DType, shape [ir.MaxDims]int64) ir.View {
	return st.some(arena, dtype, shape, (*buffer).mayRead)
}

// changeable returns a view of a buffer that has been written and may be changed in place, creating the buffer
// if necessary.
func (st *stage) changeable(arena ir.Arena, dtype ir.DType, shape [ir.MaxDims]int64) ir.View {
	return st.some(arena, dtype, shape, (*buffer).mayChange)
}

func (st *stage) some(arena ir.Arena, dtype ir.DType, shape [ir.MaxDims]int64, may func(*buffer) bool) ir.View {
	v := ir.View{DType: dtype, Shape: shape}
	r := st.g.r
	for range 4 {
		if len(st.live) == 0 {
			break
		}
		i := st.live[r.IntN(len(st.live))]
		b := &st.buffers[i]
		if b.Arena == arena && b.Size >= v.Bytes() && !st.used(i) && may(b) {
			v.Buffer = uint32(i)
			v.Offset = st.offset(b.Size-v.Bytes(), dtype)
			st.inUse = append(st.inUse, i)
			return v
		}
	}
	return st.fresh(arena, dtype, shape)
}

// fresh creates a buffer and writes it.
func (st *stage) fresh(arena ir.Arena, dtype ir.DType, shape [ir.MaxDims]int64) ir.View {
	keep := st.inUse
	v := st.write(arena, dtype, shape, false)
	made := int(v.Buffer)
	flat := v
	flat.Shape = [ir.MaxDims]int64{v.Elements()}
	if arena == ir.Host {
		x := st.readable(ir.Device, dtype, flat.Shape)
		st.emit(ir.CopyD2H, ir.D2H, []ir.View{flat, x}, nil)
	} else {
		st.emit(ir.Fill, ir.Compute, []ir.View{v}, []ir.Attr{ir.Float(1)})
	}
	st.inUse = append(keep, made)
	return v
}

// write creates a buffer for a view that the next instruction writes, often in the place of a buffer that is
// no longer needed.
func (st *stage) write(arena ir.Arena, dtype ir.DType, shape [ir.MaxDims]int64, persistent bool) ir.View {
	v := ir.View{DType: dtype, Shape: shape, Buffer: uint32(len(st.buffers))}
	size := v.Bytes()
	b := buffer{Buffer: ir.Buffer{Arena: arena, Size: size}, persistent: persistent}
	b.Name = fmt.Sprintf("b%d", len(st.buffers))
	if st.g.r.IntN(20) == 0 {
		b.Name = fmt.Sprintf("odd \"name\" # %d", len(st.buffers))
	}
	if old := st.victim(arena, size); old >= 0 && !persistent {
		b.place, b.Offset = st.buffers[old].place, st.buffers[old].Offset
	} else {
		b.place = &place{size: size}
		for i := range st.buffers {
			if o := &st.buffers[i]; o.Arena == arena {
				b.Offset = max(b.Offset, o.Offset+o.place.size)
			}
		}
		b.Offset = (b.Offset + 15) / 16 * 16
	}
	st.live = append(st.live, len(st.buffers))
	st.inUse = append(st.inUse, len(st.buffers))
	st.buffers = append(st.buffers, b)
	return v
}

// victim returns the index of a buffer whose place can be taken, or -1.
func (st *stage) victim(arena ir.Arena, size ir.Bytes) int {
	for range 3 {
		if len(st.buffers) == 0 {
			return -1
		}
		i := st.g.r.IntN(len(st.buffers))
		b := &st.buffers[i]
		if b.persistent || i == st.step || b.Arena != arena || b.place.size < size || st.placeUsed(b.place) {
			continue
		}
		for k := 0; k < len(st.live); k++ {
			if st.buffers[st.live[k]].place == b.place {
				st.live = append(st.live[:k], st.live[k+1:]...)
				k--
			}
		}
		return i
	}
	return -1
}

func (st *stage) used(i int) bool { return st.placeUsed(st.buffers[i].place) }

func (st *stage) placeUsed(p *place) bool {
	for _, u := range st.inUse {
		if st.buffers[u].place == p {
			return true
		}
	}
	return false
}

func (st *stage) offset(slack ir.Bytes, dtype ir.DType) ir.Bytes {
	return ir.Bytes(st.g.r.Int64N(int64(slack/dtype.Bytes())+1)) * dtype.Bytes()
}

// aloneAt reports whether view v, which is operand j, is the only operand in its buffer.
func (st *stage) aloneAt(v ir.View, args []ir.View, j int) bool {
	for i := range args {
		if i != j && args[i].Present() && args[i].Elements() > 0 && args[i].Buffer == v.Buffer {
			return false
		}
	}
	return true
}

// emit adds an instruction, preceded by the waits that its accesses need.
func (st *stage) emit(op ir.Op, s ir.Stream, args []ir.View, attrs []ir.Attr) {
	in := ir.Instr{Op: op, Stream: s, Args: args, Attrs: attrs, Prov: st.provenance()}
	for i := range args {
		if !args[i].Present() {
			continue
		}
		pl := st.buffers[args[i].Buffer].place
		_, writes := in.Access(i)
		st.after(s, pl.write.stream, pl.write.number)
		if writes {
			for t, n := range pl.reads {
				st.after(s, ir.Stream(t), n)
			}
		}
	}
	st.push(in)
	for i := range args {
		if !args[i].Present() {
			continue
		}
		pl := st.buffers[args[i].Buffer].place
		if reads, _ := in.Access(i); reads {
			pl.reads[s] = st.count[s]
		}
	}
	for i := range args {
		if !args[i].Present() {
			continue
		}
		pl := st.buffers[args[i].Buffer].place
		if _, writes := in.Access(i); writes {
			pl.write, pl.reads = access{s, st.count[s]}, clock{}
		}
	}
	st.note(&in)
	st.inUse = nil
}

// note updates the state of an instruction's buffers.
func (st *stage) note(in *ir.Instr) {
	for i, v := range in.Args {
		if !v.Present() {
			continue
		}
		b := &st.buffers[v.Buffer]
		reads, writes := false, false
		for k := range in.Args {
			if in.Args[k] == v {
				r, w := in.Access(k)
				reads, writes = reads || r, writes || w
			}
		}
		switch first := slices.Index(in.Args, v) == i; {
		case !writes:
			b.read = true
		case first:
			b.stale = reads && !b.written && b.read
			b.written, b.read = true, false
			switch {
			case in.Op == ir.CopyH2D:
				b.source = 1 + int(in.Args[1].Buffer)
			case reads && b.source > 0:
				st.buffers[b.source-1].stale = true
			}
		}
	}
}

func (st *stage) push(in ir.Instr) {
	st.code.Sections[st.section] = append(st.code.Sections[st.section], in)
	st.count[in.Stream]++
	st.known[in.Stream][in.Stream] = st.count[in.Stream]
}

// after makes stream s wait for instruction number n of stream t, unless it has already done so.
func (st *stage) after(s, t ir.Stream, n int) {
	if s == t || st.known[s][t] >= n {
		return
	}
	e := st.code.Events[st.section]
	st.code.Events[st.section]++
	attrs := []ir.Attr{ir.Int(int64(e))}
	st.push(ir.Instr{Op: ir.Record, Stream: t, Attrs: attrs, Prov: st.provenance()})
	at := st.known[t]
	st.push(ir.Instr{Op: ir.Wait, Stream: s, Attrs: attrs, Prov: st.provenance()})
	for i := range at {
		st.known[s][i] = max(st.known[s][i], at[i])
	}
}

func (st *stage) provenance() ir.Provenance {
	if st.exact {
		return st.where
	}
	r := st.g.r
	maybe := func(n int) int32 { return int32(r.IntN(n+1)) - 1 }
	return ir.Provenance{
		Microbatch: maybe(2), Subsequence: maybe(1000), Layer: maybe(80), Stage: int16(maybe(16)),
		Line: uint16(r.IntN(len(st.g.p.Lines))), Pass: uint8(r.IntN(len(st.g.p.Passes))), Phase: ir.Phase(r.IntN(int(ir.NumPhases))),
	}
}

package codegen

import (
	"strconv"
	"strings"

	"sppo.dev/ir"
)

// position is the index of an instruction in its section, in issue order.
type position = int32

// buffer describes a buffer before it has an address.
type buffer struct {
	name       string
	arena      ir.Arena
	size       ir.Bytes
	persistent bool     // live in every section
	offset     ir.Bytes // given by place
	start, end position // first and last position in its section at which its bytes are in use
	over       uint32   // 1 plus the index of the buffer whose bytes it takes over; 0: none
}

// buffers lists the buffers of all sections of a code.
type buffers struct {
	list  []buffer
	parts []part // [section]: those that it created
}

// emitter appends instructions to a code, section by section, and keeps track of the lifetimes of the buffers that
// they use.
type emitter struct {
	*layout
	rank    int // index of the pipeline rank
	section ir.Section
	order   *order // of the section's tasks and messages
	prov    ir.Provenance
	code    ir.Code
	buffers buffers
}

// trains reports whether the section is a training step.
func (e *emitter) trains() bool { return e.section == ir.SectionStep }

// now returns the position of the next instruction.
func (e *emitter) now() position { return position(len(e.code.Sections[e.section])) }

// allocate creates a buffer that is live from the next instruction on.
func (e *emitter) allocate(name string, arena ir.Arena, size ir.Bytes) uint32 {
	e.buffers.list = append(e.buffers.list, buffer{name: name, arena: arena, size: size, start: e.now(), end: e.now()})
	return uint32(len(e.buffers.list) - 1)
}

// takeOver creates a buffer for the next version of a value. The buffer takes over the bytes of the previous
// version, which is no longer read.
func (e *emitter) takeOver(old uint32) uint32 {
	name, version := e.buffers.list[old].name, 2
	if base, n, ok := strings.Cut(name, versionMark); ok {
		name = base
		version, _ = strconv.Atoi(n)
		version++
	}
	b := e.allocate(name+versionMark+strconv.Itoa(version), e.buffers.list[old].arena, e.buffers.list[old].size)
	e.buffers.list[b].over = old + 1
	return b
}

// versionMark separates a buffer's name from its version number, which the first version does not have.
const versionMark = "-"

// persist creates a device buffer that is live in every section.
func (e *emitter) persist(name string, size ir.Bytes) uint32 {
	return e.persistIn(ir.Device, name, size)
}

// persistIn creates a buffer that is live in every section.
func (e *emitter) persistIn(arena ir.Arena, name string, size ir.Bytes) uint32 {
	b := e.allocate(name, arena, size)
	e.buffers.list[b].persistent = true
	return b
}

// reserve extends the lifetime of a buffer back to an earlier position, so that a message or copy issued now
// can run while the instructions since then are still running.
func (e *emitter) reserve(b uint32, from position) {
	e.buffers.list[b].start = min(e.buffers.list[b].start, from)
}

// hold extends the lifetime of a buffer to the instruction emitted last. Only later instructions can reuse its
// bytes, and they wait for any copy or message of the buffer that is still in progress.
func (e *emitter) hold(b uint32) { e.buffers.list[b].end = max(e.buffers.list[b].end, e.now()-1) }

// emit appends an instruction and extends the lifetimes of its buffers.
func (e *emitter) emit(in ir.Instr) {
	at := e.now()
	for _, a := range in.Args {
		if a.Present() {
			b := &e.buffers.list[a.Buffer]
			b.end = max(b.end, at)
		}
	}
	in.Prov = e.prov
	if in.Stream == ir.Coll && !e.plan.Overlaps() || in.Stream == ir.Params && !e.plan.ReplicasOverlap() {
		in.Stream = ir.Compute
	}
	e.code.Sections[e.section] = append(e.code.Sections[e.section], in)
}

// op emits an instruction with operands and attributes in the order of the opcode's row in ir.Ops. Absent
// operands at the end may be omitted.
func (e *emitter) op(op ir.Op, stream ir.Stream, args []ir.View, attrs ...ir.Attr) {
	row := &ir.Ops[op]
	for len(args) < len(row.Operands) {
		args = append(args, ir.Absent())
	}
	if len(attrs) != len(row.Attrs) {
		panic("internal: " + row.Name + " emitted with a wrong number of attributes")
	}
	e.emit(ir.Instr{Op: op, Stream: stream, Args: args, Attrs: attrs})
}

// aside emits instructions whose provenance is not that of the instructions that follow.
func (e *emitter) aside(emit func()) {
	prov := e.prov
	emit()
	e.prov = prov
}

// vector returns a whole buffer as a vector.
func vector(b uint32, d ir.DType, n int64) ir.View {
	return ir.View{Buffer: b, DType: d, Shape: [ir.MaxDims]int64{n}}
}

// matrix returns a whole buffer as a matrix.
func matrix(b uint32, d ir.DType, rows, cols int64) ir.View {
	return ir.View{Buffer: b, DType: d, Shape: [ir.MaxDims]int64{rows, cols}}
}

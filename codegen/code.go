package codegen

import (
	"strconv"
	"strings"

	"sppo.dev/ir"
)

// position counts instructions of a section in issue order.
type position = int32

// buffer is a buffer before it has a place.
type buffer struct {
	name       string
	arena      ir.Arena
	size       ir.Bytes
	persistent bool     // lives through every section
	offset     ir.Bytes // given by place
	start, end position // first and last instruction of its section that needs its bytes
	over       uint32   // 1 + the buffer of the same size whose bytes it takes over; 0: none
}

// emitter collects the instructions of one section and the lives of the buffers they use.
type emitter struct {
	section ir.Section
	instrs  []ir.Instr
	buffers *[]buffer // shared by the sections of a code
	prov    ir.Provenance
}

// now is the position of the next instruction.
func (e *emitter) now() position { return position(len(e.instrs)) }

// allocate makes a buffer that lives from now on.
func (e *emitter) allocate(name string, arena ir.Arena, size ir.Bytes) uint32 {
	*e.buffers = append(*e.buffers, buffer{name: name, arena: arena, size: size, start: e.now(), end: e.now()})
	return uint32(len(*e.buffers) - 1)
}

// takeOver makes a buffer in the place of one that nobody reads any more, for the next version of what it holds.
func (e *emitter) takeOver(old uint32) uint32 {
	name, version := (*e.buffers)[old].name, 2
	if base, n, ok := strings.Cut(name, versionMark); ok {
		name = base
		version, _ = strconv.Atoi(n)
		version++
	}
	b := e.allocate(name+versionMark+strconv.Itoa(version), (*e.buffers)[old].arena, (*e.buffers)[old].size)
	(*e.buffers)[b].over = old + 1
	return b
}

// versionMark stands in the name of a buffer before its version, from 2.
const versionMark = "-"

// persist makes a buffer of device memory that lives through every section.
func (e *emitter) persist(name string, size ir.Bytes) uint32 {
	return e.persistIn(ir.Device, name, size)
}

// persistIn makes a buffer that lives through every section.
func (e *emitter) persistIn(arena ir.Arena, name string, size ir.Bytes) uint32 {
	b := e.allocate(name, arena, size)
	(*e.buffers)[b].persistent = true
	return b
}

// reserve makes a buffer own its bytes from an earlier position on, so that a message or a copy that is issued
// now may run while the instructions since then still do.
func (e *emitter) reserve(b uint32, from position) {
	(*e.buffers)[b].start = min((*e.buffers)[b].start, from)
}

// hold makes a buffer own its bytes until now: what reuses them comes later, and then waits for whatever copy of
// the buffer is still under way.
func (e *emitter) hold(b uint32) { (*e.buffers)[b].end = max((*e.buffers)[b].end, e.now()-1) }

// emit appends an instruction and prolongs the lives of its buffers.
func (e *emitter) emit(in ir.Instr) {
	at := e.now()
	for _, a := range in.Args {
		if a.Present() {
			b := &(*e.buffers)[a.Buffer]
			b.end = max(b.end, at)
		}
	}
	in.Prov = e.prov
	e.instrs = append(e.instrs, in)
}

// op emits an opcode with operands and attributes in the order of its row; absent operands at the end may be left out.
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

// vector is the view of a whole buffer as a vector.
func vector(b uint32, d ir.DType, n int64) ir.View {
	return ir.View{Buffer: b, DType: d, Shape: [ir.MaxDims]int64{n}}
}

// matrix is the view of a whole buffer as a matrix.
func matrix(b uint32, d ir.DType, rows, cols int64) ir.View {
	return ir.View{Buffer: b, DType: d, Shape: [ir.MaxDims]int64{rows, cols}}
}

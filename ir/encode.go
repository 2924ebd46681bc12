package ir

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"hash/fnv"
	"io"
	"reflect"
	"sync"
)

// The binary format is .sppb. Numbers are little-endian or varints (unsigned, or zigzag if they may be
// negative).
//
//	magic     8 bytes "sppb\r\n\x1a\n"; the line endings reveal a transfer in text mode
//	version   uint32
//	table     uint64, hash of the opcode table that the numbers below refer to
//	parts     one 'H', a 'C' for each code, one 'R'; each: kind byte, uint64 length, payload
//	end       'E', uint32 CRC-32C of every byte before it
//
// H, header: JSON of the plain data (name, run, model, machine, tensors, lines, passes, names of constants and groups).
//
// C, code: name; arenas; buffers (the length of the prefix that the name shares with the previous name, the
// rest of the name, arena, offset as a delta from the end of the previous buffer, size); states; results; then
// for each section: the total numbers of events, instructions, operands and attributes, and the instructions.
//
// An instruction is encoded as differences from the previous instruction (provenance) and from the
// last instruction with the same opcode in the section (operands, attributes). Layers resemble each
// other, so most fields are equal and most others differ little.
//
//	opcode    byte
//	stream    byte
//	prov      byte with a bit for each field that differs, and the differences
//	operand   byte with a bit for buffer, offset, element type and each dimension that differs, and the differences
//	attrs     varint with a bit for each that differs, and for each: constant (0: none), then the literal, 8 bytes for
//	          a float and a varint for the rest
//
// Operands and attributes are in the order of the opcode's row, which also determines how many there are.
//
// R, ranks: count, then code, coordinates, constants and groups of each.
const (
	magic   = "sppb\r\n\x1a\n"
	version = 4

	partHeader = 'H'
	partCode   = 'C'
	partRanks  = 'R'
	partEnd    = 'E'

	preambleBytes = len(magic) + 4 + 8
	trailerBytes  = 1 + 4
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// tableHash returns a hash of what gives the numbers in a file their meaning: the opcode table, without its
// documentation, and the names of types, streams, phases, sections and roles.
var tableHash = sync.OnceValue(func() uint64 {
	h := fnv.New64a()
	for i := range Ops {
		o := &Ops[i]
		fmt.Fprintln(h, o.Name, o.Class, o.Streams, o.InPlace, o.Rule)
		for _, a := range o.Operands {
			fmt.Fprintln(h, a.Name, a.Dir, a.Types, a.Dims, a.Arena, a.Optional)
		}
		for _, a := range o.Attrs {
			fmt.Fprintln(h, a.Name, a.Kind)
		}
	}
	fmt.Fprintln(h, dtypes, streamNames, phaseNames, sectionNames, roleNames())
	return h.Sum64()
})

// header is the plain data of a program, which the file stores as JSON.
type header struct {
	Name       string   `json:"name"`
	Run        Run      `json:"run"`
	Model      Model    `json:"model"`
	Machine    Machine  `json:"machine"`
	FlopsModel float64  `json:"flops_model"`
	Lines      []string `json:"lines"`
	Passes     []string `json:"passes"`
	Consts     []string `json:"consts"`
	Groups     []string `json:"groups"`
	Tensors    []Tensor `json:"tensors"`
}

func headerOf(p *Program) header {
	return header{p.Name, p.Run, p.Model, p.Machine, p.FlopsModel, p.Lines, p.Passes, p.Consts, p.Groups, p.Tensors}
}

// marshalHeader returns the header as JSON. It fails if the JSON would not decode to the same header.
func marshalHeader(p *Program) ([]byte, error) {
	h := headerOf(p)
	data, err := json.Marshal(h)
	if err != nil {
		return nil, err
	}
	var back header
	if err := json.Unmarshal(data, &back); err != nil {
		return nil, err
	}
	if !reflect.DeepEqual(h, back) {
		return nil, errNotText
	}
	return data, nil
}

// Encode writes a program in the binary format. Equal programs give equal bytes.
func Encode(w io.Writer, p *Program) error {
	if err := p.Check(); err != nil {
		return fmt.Errorf("cannot encode: %w", err)
	}
	head, err := marshalHeader(p)
	if err != nil {
		return fmt.Errorf("cannot encode: %w", err)
	}
	e := encoder{w: w}
	pre := []byte(magic)
	pre = binary.LittleEndian.AppendUint32(pre, version)
	e.write(binary.LittleEndian.AppendUint64(pre, tableHash()))
	e.part(partHeader, head)
	for i := range p.Codes {
		e.buf = e.buf[:0]
		e.code(&p.Codes[i])
		e.part(partCode, e.buf)
	}
	e.buf = e.buf[:0]
	e.ranks(p)
	e.part(partRanks, e.buf)
	e.write([]byte{partEnd})
	e.write(binary.LittleEndian.AppendUint32(nil, e.sum))
	return e.err
}

// encoder collects a part in buf and maintains the checksum of the bytes written.
type encoder struct {
	w   io.Writer
	buf []byte
	sum uint32
	err error
}

func (e *encoder) write(b []byte) {
	if e.err == nil {
		e.sum = crc32.Update(e.sum, castagnoli, b)
		_, e.err = e.w.Write(b)
	}
}

func (e *encoder) part(kind byte, payload []byte) {
	e.write(binary.LittleEndian.AppendUint64([]byte{kind}, uint64(len(payload))))
	e.write(payload)
}

func (e *encoder) byte(b byte)     { e.buf = append(e.buf, b) }
func (e *encoder) uint(v uint64)   { e.buf = binary.AppendUvarint(e.buf, v) }
func (e *encoder) int(v int64)     { e.buf = binary.AppendVarint(e.buf, v) }
func (e *encoder) string(s string) { e.uint(uint64(len(s))); e.buf = append(e.buf, s...) }
func (e *encoder) float(v uint64)  { e.buf = binary.LittleEndian.AppendUint64(e.buf, v) }
func (e *encoder) signed(vs ...int) {
	for _, v := range vs {
		e.int(int64(v))
	}
}

func (e *encoder) code(c *Code) {
	e.string(c.Name)
	for _, peak := range c.Arenas {
		e.uint(uint64(peak))
	}
	e.buffers(c.Buffers)
	e.uint(uint64(len(c.States)))
	for i := range c.States {
		s := &c.States[i]
		e.uint(uint64(s.Tensor))
		e.byte(byte(s.Role))
		e.view(&s.View, &View{})
		e.attr(&s.Row0, KindInt)
		e.attr(&s.Col0, KindInt)
		e.attr(&s.End, KindInt)
	}
	e.uint(uint64(len(c.Results)))
	for i := range c.Results {
		e.string(c.Results[i].Name)
		e.view(&c.Results[i].View, &View{})
	}
	for s := range c.Sections {
		e.uint(uint64(c.Events[s]))
		e.section(c.Sections[s])
	}
}

func (e *encoder) buffers(buffers []Buffer) {
	e.uint(uint64(len(buffers)))
	name, end := "", Bytes(0)
	for i := range buffers {
		b := &buffers[i]
		shared := 0
		for shared < len(name) && shared < len(b.Name) && name[shared] == b.Name[shared] {
			shared++
		}
		e.uint(uint64(shared))
		e.string(b.Name[shared:])
		e.byte(byte(b.Arena))
		e.int(int64(b.Offset - end))
		e.uint(uint64(b.Size))
		name, end = b.Name, b.Offset+b.Size
	}
}

func (e *encoder) section(instrs []Instr) {
	args, attrs := 0, 0
	for i := range instrs {
		args += len(instrs[i].Args)
		attrs += len(instrs[i].Attrs)
	}
	e.uint(uint64(len(instrs)))
	e.uint(uint64(args))
	e.uint(uint64(attrs))
	last := newBases()
	prov := Provenance{}
	for i := range instrs {
		in := &instrs[i]
		e.byte(byte(in.Op))
		e.byte(byte(in.Stream))
		e.provenance(&in.Prov, &prov)
		prov = in.Prov
		base := &last[in.Op]
		for j := range in.Args {
			e.view(&in.Args[j], &base.Args[j])
		}
		e.attrs(in, base)
		last[in.Op] = *in
	}
}

// newBases returns a zero instruction for each opcode. The first instruction with that opcode in a section is
// encoded as differences from it.
func newBases() *[NumOps]Instr {
	var bases [NumOps]Instr
	for op := range bases {
		bases[op].Args = make([]View, len(Ops[op].Operands))
		bases[op].Attrs = make([]Attr, len(Ops[op].Attrs))
	}
	return &bases
}

// provFields lists the fields of a provenance in the order of their bits in the file.
func provFields(p *Provenance) [7]int64 {
	return [7]int64{
		int64(p.Microbatch), int64(p.Subsequence), int64(p.Layer), int64(p.Stage),
		int64(p.Line), int64(p.Pass), int64(p.Phase),
	}
}

func (e *encoder) provenance(p, base *Provenance) {
	if *p == *base {
		e.byte(0)
		return
	}
	now, was := provFields(p), provFields(base)
	at := len(e.buf)
	e.byte(0)
	for i := range now {
		if now[i] != was[i] {
			e.buf[at] |= 1 << i
			e.int(now[i] - was[i])
		}
	}
}

// Bits of an operand's mask. The bits of the other dimensions follow viewDim0.
const (
	viewBuffer = 1 << iota
	viewOffset
	viewDType
	viewDim0
)

func (e *encoder) view(v, base *View) {
	at := len(e.buf)
	mask := byte(0)
	e.byte(0)
	if v.Buffer != base.Buffer {
		mask |= viewBuffer
		e.int(int64(int32(v.Buffer - base.Buffer)))
	}
	if v.Offset != base.Offset {
		mask |= viewOffset
		e.int(int64(v.Offset - base.Offset))
	}
	if v.DType != base.DType {
		mask |= viewDType
		e.byte(byte(v.DType))
	}
	if v.Shape != base.Shape {
		for i := range v.Shape {
			if v.Shape[i] != base.Shape[i] {
				mask |= viewDim0 << i
				e.int(int64(v.Shape[i]) - int64(base.Shape[i]))
			}
		}
	}
	e.buf[at] = mask
}

func (e *encoder) attrs(in, base *Instr) {
	mask := uint64(0)
	for i := range in.Attrs {
		if in.Attrs[i] != base.Attrs[i] {
			mask |= 1 << i
		}
	}
	e.uint(mask)
	for i := range in.Attrs {
		if mask&(1<<i) != 0 {
			e.attr(&in.Attrs[i], in.Info().Attrs[i].Kind)
		}
	}
}

func (e *encoder) attr(a *Attr, kind AttrKind) {
	e.uint(uint64(a.Const))
	switch {
	case a.Const != 0:
	case kind.IsFloat():
		e.float(a.Bits)
	default:
		e.int(int64(a.Bits))
	}
}

func (e *encoder) ranks(p *Program) {
	e.uint(uint64(len(p.Ranks)))
	for i := range p.Ranks {
		r := &p.Ranks[i]
		e.signed(int(r.Code), int(r.DP), int(r.PP), int(r.SP))
		for _, v := range r.Consts {
			e.int(v)
		}
		for _, members := range r.Groups {
			e.uint(uint64(len(members)))
			last := int32(0)
			for _, m := range members {
				e.int(int64(m) - int64(last))
				last = m
			}
		}
	}
}

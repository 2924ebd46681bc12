package cpu

import (
	"errors"
	"fmt"
	"maps"

	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/ir"
)

// bound is an instruction that is ready to execute: everything that the program specifies about it has been looked
// up.
type bound struct {
	kernel func()       // computation, or nil
	action func() error // copy or communication, which may fail; or nil
	record bool         // if both are nil: whether it is a record rather than a wait
	stream ir.Stream
	event  int32
	top    [ir.NumArenas]ir.Bytes // highest byte touched
}

// kernelTable binds opcodes that compute. Each file of kernels has its own table.
type kernelTable map[ir.Op]func(*binder) func()

var kernels = joined(attentionKernels, elementwiseKernels, embedKernels, expertKernels, lossKernels, matmulKernels, normKernels, optimizerKernels, ropeKernels, scanKernels)

func joined(tables ...kernelTable) kernelTable {
	all := kernelTable{}
	for _, t := range tables {
		maps.Copy(all, t)
	}
	return all
}

// bind binds the instructions of a section.
func (d *Device) bind(section ir.Section) error {
	code := d.code.Sections[section]
	d.bound[section] = make([]bound, len(code))
	consts := d.program.Ranks[d.rank].Consts
	for pc := range code {
		in := &code[pc]
		b := &binder{device: d, in: in, consts: consts, stream: d.streams[in.Stream]}
		if d.bound[section][pc] = b.guarded(); b.err != nil {
			return fmt.Errorf("%s: %w", vm.At(d.program, section, pc, in), b.err)
		}
	}
	return nil
}

// binder resolves the operands of one instruction. It keeps the first error, so that kernels need no checks.
type binder struct {
	device *Device
	in     *ir.Instr
	consts []int64
	stream *stream
	used   int // number of scratch floats
	err    error
}

// guarded is like bind, but turns a panic caused by an unverified program, such as a division by a batch size of
// 0, into an error.
func (b *binder) guarded() (out bound) {
	defer func() {
		if r := recover(); r != nil {
			b.fail("the instruction", fmt.Errorf("invalid instruction: %v", r))
		}
	}()
	return b.bind()
}

func (b *binder) bind() bound {
	out := bound{stream: b.in.Stream}
	for i, v := range b.in.Args {
		if !v.Present() {
			if !b.in.Info().Operands[i].Optional {
				b.fail(b.in.Info().Operands[i].Name, errors.New("is missing"))
			}
			continue
		}
		_, end, err := b.device.code.Locate(&v)
		if err != nil {
			b.fail(b.in.Info().Operands[i].Name+":", err)
			return out
		}
		arena := b.device.code.Buffers[v.Buffer].Arena
		out.top[arena] = max(out.top[arena], end)
	}
	switch class := b.in.Info().Class; {
	case class == ir.ClassSync:
		out.record, out.event = b.in.Op == ir.Record, int32(b.int("event"))
	case checkedKernels[b.in.Op] != nil:
		out.action = checkedKernels[b.in.Op](b)
	case class == ir.ClassKernel:
		out.kernel = kernels[b.in.Op](b)
	case b.in.Op.Collective() != nil:
		out.action = collective(b)
	default:
		out.action = actions[b.in.Op](b)
	}
	b.stream.scratchNeed = max(b.stream.scratchNeed, b.used)
	return out
}

func (b *binder) fail(name string, err error) {
	if b.err == nil {
		b.err = fmt.Errorf("%s %w", name, err)
	}
}

func (b *binder) has(name string) bool { return b.in.Arg(name).Present() }

// same reports whether two operands are the same view.
func (b *binder) same(a, c string) bool { return b.in.Arg(a) == b.in.Arg(c) }

func (b *binder) int(name string) int       { return int(b.in.Attr(name).Int(b.consts)) }
func (b *binder) bool(name string) bool     { return b.int(name) != 0 }
func (b *binder) float(name string) float64 { return b.in.Attr(name).Float(b.consts) }

// shape returns the shape of an operand viewed as a matrix.
func (b *binder) shape(name string) (rows, cols int) {
	v := b.in.Arg(name)
	return int(v.Rows()), int(v.Cols())
}

// bytes returns an operand's stored bytes, or nil if it is absent.
func (b *binder) bytes(name string) []byte {
	v := b.in.Arg(name)
	if !v.Present() {
		return nil
	}
	bytes, err := b.device.bytes(v)
	if err != nil {
		b.fail(name, err)
	}
	return bytes
}

func (b *binder) typed(name string, want ir.DType) []byte {
	if v := b.in.Arg(name); v.Present() && v.DType != want {
		b.fail(name, fmt.Errorf("is %s, not %s", v.DType, want))
		return nil
	}
	return b.bytes(name)
}

// floats returns an operand of type f32; ints returns one of type i32.
func (b *binder) floats(name string) []float32 { return vm.Float32s(b.typed(name, ir.F32)) }

// ifFloats returns an operand of type f32, or nil if it is absent.
func (b *binder) ifFloats(name string) []float32 {
	if !b.has(name) {
		return nil
	}
	return b.floats(name)
}

func (b *binder) ints(name string) []int32 { return vm.Int32s(b.typed(name, ir.I32)) }

// mat returns an operand of type f32 or bf16 as a matrix.
func (b *binder) mat(name string) simd.Mat {
	_, cols := b.shape(name)
	if b.in.Arg(name).DType == ir.BF16 {
		return simd.BF16(vm.Uint16s(b.bytes(name)), cols)
	}
	return simd.F32(b.floats(name), cols)
}

// scratch reserves floats for the duration of the kernel.
func (b *binder) scratch(n int) scratch {
	b.used += n
	return scratch{b.stream, b.used - n, n}
}

// scratch is a part of its stream's scratch memory, which is allocated after binding.
type scratch struct {
	stream *stream
	at, n  int
}

func (s scratch) floats() []float32 { return s.stream.scratch[s.at : s.at+s.n] }

// vector is an operand of type f32 or bf16 whose values a kernel needs as contiguous f32 numbers.
type vector struct {
	mat  simd.Mat
	wide scratch
}

// vector binds a vector. Its values are nil if the operand is absent.
func (b *binder) vector(name string) vector {
	v := vector{mat: b.mat(name)}
	if v.mat.BF16 != nil {
		v.wide = b.scratch(len(v.mat.BF16))
	}
	return v
}

func (v vector) values() []float32 {
	if v.mat.BF16 == nil {
		return v.mat.F32
	}
	out := v.wide.floats()
	simd.Widen(out, v.mat.BF16)
	return out
}

// Package vmtest checks a device against the opcode table. It runs every opcode that computes, moves or loads
// data, with random values of both element types, and compares the results with the float64 formulas of package
// naive. It is for tests only.
//
//	vmtest.go       puts one instruction into a program, runs it on a device and reads the result
//	elementwise.go  the cases of elementwise opcodes, derived from the opcode table and their formulas
//	cases.go        the cases of the other opcodes
//	scan.go         the cases of scans and of the convolutions before them
//	attention.go    the cases of attention, also over blocks of keys; ring.go has those over a ring of members
//	conformance.go  the suite
package vmtest

import (
	"bytes"
	"math"
	"math/rand/v2"
	"testing"

	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// value is an operand of a call, with its values before the call.
type value struct {
	dtype ir.DType
	shape []int
	data  []float64
}

func (v *value) elements() int {
	n := 1
	for _, d := range v.shape {
		n *= d
	}
	return n
}

// call is one instruction. Operands that are not given are absent. An operand with an alias has the same
// address as another operand.
type call struct {
	op    ir.Op
	args  map[string]*value
	attrs map[string]float64
	alias map[string]string
}

// suite runs the cases of one device in one or more configurations.
type suite struct {
	*testing.T
	devices []func() vm.Device // all must give the same bits
	short   bool               // skip the slowest cases
	rng     *rand.Rand
	dtype   ir.DType // element type of this round
}

// guard is the minimum number of bytes before and after each buffer. A kernel must not write to these bytes.
const guard = 64

// normal returns a normally distributed operand of the round's type, rounded to that type.
func (s *suite) normal(shape ...int) *value { return s.typed(s.dtype, shape...) }

// f32 returns a normally distributed operand that is f32 in every round.
func (s *suite) f32(shape ...int) *value { return s.typed(ir.F32, shape...) }

// otherType returns the element type that is not the round's.
func (s *suite) otherType() ir.DType {
	if s.dtype == ir.F32 {
		return ir.BF16
	}
	return ir.F32
}

func (s *suite) typed(t ir.DType, shape ...int) *value {
	v := &value{dtype: t, shape: shape}
	v.data = make([]float64, v.elements())
	for i := range v.data {
		v.data[i] = stored(s.rng.NormFloat64(), t)
	}
	return v
}

// out returns an operand of the round's type that a kernel must overwrite.
func (s *suite) out(shape ...int) *value    { return nothing(s.dtype, shape) }
func (s *suite) outF32(shape ...int) *value { return nothing(ir.F32, shape) }

func nothing(t ir.DType, shape []int) *value {
	v := &value{dtype: t, shape: shape}
	v.data = make([]float64, v.elements())
	for i := range v.data {
		v.data[i] = math.NaN()
		if t == ir.I32 {
			v.data[i] = -1
		}
	}
	return v
}

// sum returns an f32 operand for sums: with random values if the kernel adds to it, otherwise one that it must
// overwrite.
func (s *suite) sum(accumulate bool, shape ...int) *value {
	if accumulate {
		return s.f32(shape...)
	}
	return s.outF32(shape...)
}

// integers returns random values below a limit.
func (s *suite) integers(below int, shape ...int) *value {
	v := &value{dtype: ir.I32, shape: shape}
	v.data = make([]float64, v.elements())
	for i := range v.data {
		v.data[i] = float64(s.rng.IntN(below))
	}
	return v
}

func (v *value) ints() []int32 {
	out := make([]int32, len(v.data))
	for i, x := range v.data {
		out[i] = int32(x)
	}
	return out
}

// stored returns a number rounded to the value that an operand of the given type stores.
func stored(x float64, t ir.DType) float64 {
	switch t {
	case ir.F32:
		return float64(float32(x))
	case ir.BF16:
		return float64(vm.FromBF16(vm.BF16(float32(x))))
	}
	return math.Trunc(x)
}

func (v *value) encode() []byte {
	out := make([]byte, len(v.data)*int(v.dtype.Bytes()))
	for i, x := range v.data {
		switch v.dtype {
		case ir.F32:
			vm.Float32s(out)[i] = float32(x)
		case ir.BF16:
			vm.Uint16s(out)[i] = vm.BF16(float32(x))
		case ir.I32:
			vm.Int32s(out)[i] = int32(x)
		default:
			out[i] = byte(x)
		}
	}
	return out
}

func (v *value) decode(b []byte) []float64 {
	out := make([]float64, len(v.data))
	for i := range out {
		switch v.dtype {
		case ir.F32:
			out[i] = float64(vm.Float32s(b)[i])
		case ir.BF16:
			out[i] = float64(vm.FromBF16(vm.Uint16s(b)[i]))
		case ir.I32:
			out[i] = float64(vm.Int32s(b)[i])
		default:
			out[i] = float64(b[i])
		}
	}
	return out
}

// program returns a program whose step consists of only the call, on the first stream that the opcode allows.
func (s *suite) program(c call) *ir.Program {
	info := &ir.Ops[c.op]
	code := ir.Code{Name: "case"}
	instr := ir.Instr{Op: c.op, Stream: info.Streams[0]}
	places := map[string]ir.View{}
	for _, o := range info.Operands {
		arg := c.args[o.Name]
		if arg == nil {
			places[o.Name] = ir.Absent()
			continue
		}
		view := ir.View{Buffer: uint32(len(code.Buffers)), DType: arg.dtype}
		for i, d := range arg.shape {
			view.Shape[i] = int64(d)
		}
		start := (code.Arenas[o.Arena] + guard + 63) &^ 63
		code.Buffers = append(code.Buffers, ir.Buffer{Name: o.Name, Arena: o.Arena, Offset: start, Size: view.Bytes()})
		code.Arenas[o.Arena] = start + view.Bytes()
		places[o.Name] = view
	}
	for _, o := range info.Operands {
		name := o.Name
		if other := c.alias[name]; other != "" {
			name = other
		}
		instr.Args = append(instr.Args, places[name])
	}
	for _, a := range info.Attrs {
		if a.Kind.IsFloat() {
			instr.Attrs = append(instr.Attrs, ir.Float(c.attrs[a.Name]))
		} else {
			instr.Attrs = append(instr.Attrs, ir.Int(int64(c.attrs[a.Name])))
		}
	}
	code.Sections[ir.SectionStep] = []ir.Instr{instr}
	for a := range code.Arenas { // also put a guard after the last buffer
		code.Arenas[a] += guard
		code.Buffers = append(code.Buffers, ir.Buffer{Name: "all", Arena: ir.Arena(a), Size: code.Arenas[a]})
	}
	var turns []ir.Rotation
	for _, r := range rotations {
		turns = append(turns, ir.Rotation(r))
	}
	return &ir.Program{
		Name: "case", Codes: []ir.Code{code}, Ranks: []ir.Rank{{}}, Lines: []string{""},
		Run:     ir.Run{Seed: seed, Sequence: 64, Vocab: 100, Rotations: turns},
		Tensors: []ir.Tensor{{Name: "w", Shape: [2]int64{23, 17}}},
	}
}

const seed = 7

// tokens is a data set in which every token encodes its section, round, sequence and position.
type tokens struct{}

// Tokens implements vm.Tokens.
func (tokens) Tokens(section ir.Section, round, sequence, position int64, out []int32, stride int) error {
	for i := 0; i < len(out); i += stride {
		out[i] = tokenAt(section, round, sequence, position)
		position++
	}
	return nil
}

func tokenAt(section ir.Section, round, sequence, position int64) int32 {
	return int32(((int64(section)*100+round)*100+sequence)*1000 + position)
}

// run executes a call on every device, checks that all give the same bits, and returns all its operands afterwards.
func (s *suite) run(c call) map[string][]float64 {
	s.Helper()
	p := s.program(c)
	in := &p.Codes[0].Sections[ir.SectionStep][0]
	if err := in.CheckRule(); err != nil {
		s.Fatalf("the case itself is wrong: %v", err)
	}
	var first map[string][]byte
	for i, open := range s.devices {
		after := s.runOn(open(), p, c)
		if i == 0 {
			first = after
		}
		for name, b := range after {
			if !bytes.Equal(b, first[name]) {
				s.Errorf("%s differs between device 0 and device %d", name, i)
			}
		}
	}
	out := map[string][]float64{}
	for name, b := range first {
		out[name] = c.args[name].decode(b)
	}
	return out
}

// runOn executes a call on one device, which it closes, and returns all its operands afterwards.
func (s *suite) runOn(d vm.Device, p *ir.Program, c call) map[string][]byte {
	s.Helper()
	defer d.Close()
	s.must(d.Load(p, 0, &vm.Env{Transport: vm.NewLocal(), Tokens: tokens{}}))
	s.setUp(d, p, c)
	s.must(d.Begin(ir.SectionStep, 1))
	switch p.Codes[0].Sections[ir.SectionStep][0].Info().Class {
	case ir.ClassMove:
		d.Copy(0)
	default:
		d.Launch(0)
	}
	s.must(d.Join())
	return s.collect(d, p, c)
}

func (s *suite) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

// setUp fills the arenas with noise and the operands with the call's values.
func (s *suite) setUp(d vm.Device, p *ir.Program, c call) {
	code := &p.Codes[0]
	for i := range code.Buffers {
		b := &code.Buffers[i]
		if b.Name != "all" {
			continue
		}
		s.must(d.Write(wholeBuffer(code, uint32(i)), noise(int(b.Size))))
	}
	for i, o := range ir.Ops[c.op].Operands {
		if arg := c.args[o.Name]; arg != nil {
			s.must(d.Write(code.Sections[ir.SectionStep][0].Args[i], arg.encode()))
		}
	}
}

func wholeBuffer(code *ir.Code, buffer uint32) ir.View {
	return ir.View{Buffer: buffer, DType: ir.U8, Shape: [ir.MaxDims]int64{int64(code.Buffers[buffer].Size)}}
}

// noise returns n bytes that are NaNs in both f32 and bf16, to reveal kernels that read them or fail to
// overwrite them.
func noise(n int) []byte {
	out := make([]byte, n)
	for i := range out {
		out[i] = 0xff
	}
	return out
}

// collect reads the operands, and checks that no byte outside them has changed and that the device reports the
// right peak of every arena.
func (s *suite) collect(d vm.Device, p *ir.Program, c call) map[string][]byte {
	s.Helper()
	code := &p.Codes[0]
	in := &code.Sections[ir.SectionStep][0]
	out := map[string][]byte{}
	for i, o := range in.Info().Operands {
		if c.args[o.Name] != nil {
			out[o.Name] = make([]byte, in.Args[i].Bytes())
			s.must(d.Read(in.Args[i], out[o.Name]))
		}
	}
	for i := range code.Buffers {
		if code.Buffers[i].Name == "all" {
			s.checkGuards(d, code, uint32(i))
		}
	}
	for a := range ir.NumArenas {
		want := ir.Bytes(0)
		for i := range code.Buffers {
			if b := &code.Buffers[i]; b.Arena == a && b.Name != "all" {
				want = b.Offset + b.Size
			}
		}
		if got := d.Peak(a); got != want {
			s.Errorf("peak of the %s arena is %d, the highest operand ends at %d", a, got, want)
		}
	}
	return out
}

func (s *suite) checkGuards(d vm.Device, code *ir.Code, all uint32) {
	s.Helper()
	bytes := make([]byte, code.Buffers[all].Size)
	s.must(d.Read(wholeBuffer(code, all), bytes))
	for i := range code.Buffers {
		if b := &code.Buffers[i]; b.Arena == code.Buffers[all].Arena && b.Name != "all" {
			copy(bytes[b.Offset:b.Offset+b.Size], noise(int(b.Size)))
		}
	}
	for at, b := range bytes {
		if b != 0xff {
			s.Fatalf("byte %d of the %s arena, outside every operand, was written", at, code.Buffers[all].Arena)
		}
	}
}

// equal compares a result with naive values. The tolerance is that of f32 sums, relative to the largest value,
// plus 1/200 of each value in bf16, which is more than half a unit in the last place.
func (s *suite) equal(what string, got, want []float64, t ir.DType) {
	s.Helper()
	s.within(what, got, want, t, nil)
}

// within compares like equal, with an additional tolerance for each element; nil means none.
func (s *suite) within(what string, got, want []float64, t ir.DType, slack []float64) {
	s.Helper()
	if len(got) != len(want) {
		s.Fatalf("%s has %d elements, want %d", what, len(got), len(want))
	}
	largest := 1.0
	for _, w := range want {
		largest = math.Max(largest, math.Abs(w))
	}
	for i := range got {
		tolerance := 1e-5 * largest
		if t == ir.BF16 {
			tolerance += math.Abs(want[i]) / 200
		}
		if slack != nil {
			tolerance += slack[i]
		}
		if !(math.Abs(got[i]-want[i]) <= tolerance) {
			s.Fatalf("%s[%d] = %.9g, want %.9g within %.2g (seed %d)", what, i, got[i], want[i], tolerance, seed)
		}
	}
}

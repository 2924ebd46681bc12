package cuda

import (
	"encoding/binary"
	"fmt"
	"slices"
	"testing"

	"sppo.dev/internal/cuda/kernels"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// primitive is a building block of the attention kernels: one launch, its operands, and what it must compute. All
// values are small whole numbers, so that results are exact in any order of sums.
type primitive struct {
	source, kernel string
	blocks         int64 // threads of its block
	shared         int64
	operands       []operand
	boxes          *kernels.Boxes // the tensor map of the operand after the results; nil: none
	scalars        []int64
}

// operand is an input with its values or, if want is not nil, a result.
type operand struct {
	name   string
	t      ir.DType
	cols   int64
	values []float32
	want   []float32
	at     func(i int) int // where element i of a result stands; nil: at i
}

// numbers returns n small whole numbers, positive and negative.
func numbers(n, seed int) []float32 {
	out, state := make([]float32, n), uint32(seed)
	for i := range out {
		state = state*1664525 + 1013904223
		out[i] = float32(int(state>>24)%9 - 4)
	}
	return out
}

// product returns a[n,k] b[k,m], in which the functions give the operands.
func product(n, k, m int, a, b func(row, col int) float32) []float32 {
	out := make([]float32, n*m)
	for i := range n {
		for j := range m {
			for l := range k {
				out[i*m+j] += a(i, l) * b(l, j)
			}
		}
	}
	return out
}

// byRows and byColumns read a matrix with the given number of columns, and its transpose.
func byRows(x []float32, cols int) func(int, int) float32 {
	return func(row, col int) float32 { return x[row*cols+col] }
}

func byColumns(x []float32, cols int) func(int, int) float32 {
	return func(row, col int) float32 { return x[col*cols+row] }
}

// tilePlace returns where an element of a tile stands in shared memory, in elements, as hopper.cuh describes.
func tilePlace(tokens, dim, row, col int) int {
	panel, chunk := tilePanel(dim), col%tilePanel(dim)/8
	switch panel {
	case 64:
		chunk ^= row % 8
	case 32:
		chunk ^= row / 2 % 4
	default:
		chunk ^= row / 4 % 2
	}
	return col/panel*tokens*panel + row*panel + chunk*8 + col%8
}

// aroundTile is the shared memory that aligning a tile may take, and that of barriers.
const aroundTile = 1024 + 64

// primitives lists the building blocks, those that others need first.
func primitives() (all []primitive) {
	all = append(all, ringPrimitive())
	for trans := range 4 {
		all = append(all, fragmentsPrimitive(trans))
	}
	rows := slices.DeleteFunc(slices.Clone(ir.HeadKernels), func(row ir.HeadKernel) bool { return !kernels.OnHopper(row.Dim, row.Value) })
	for _, row := range rows {
		all = append(all, tilePrimitives(int(row.Dim))...)
	}
	for _, row := range rows {
		own, more := 64, []int{64, 128} // by the tokens of tiles
		switch row.Dim {
		case 192:
			own, more = 48, []int{48, 64, 112}
		case 256:
			own, more = 0, []int{32, 64, 80}
		}
		for _, n := range more {
			all = append(all, productPrimitives(int(row.Dim), n, n == own)...)
		}
	}
	return append(all, turnsPrimitive(), pairsPrimitive(), registersPrimitive())
}

func ringPrimitive() primitive {
	const tiles, there = 5, 4*128 + 50
	x, w := numbers(tiles*512, 1), numbers(tiles*128, 2)
	y := make([]float32, tiles*640)
	for i := range min(tiles*128, there) {
		tile, at := i/128, i%128
		copy(y[tile*640+4*at:][:4], x[4*i:])
		y[tile*640+512+127-at] = w[i]
	}
	return primitive{kernels.Primitives, "primitive_ring", 128, 0, []operand{
		{name: "y", t: ir.F32, cols: 640, want: y}, {name: "x", t: ir.F32, values: x}, {name: "w", t: ir.F32, values: w}}, nil, []int64{tiles, there}}
}

func fragmentsPrimitive(trans int) primitive {
	a, b := numbers(256, 3), numbers(256, 4)
	left, right := byRows(a, 16), byColumns(b, 16)
	if trans&1 != 0 {
		left = byColumns(a, 16)
	}
	if trans&2 != 0 {
		right = byRows(b, 16)
	}
	return primitive{kernels.Primitives, "primitive_fragments", 32, 0, []operand{
		{name: "d", t: ir.F32, cols: 16, want: product(16, 16, 16, left, right)},
		{name: "a", t: ir.BF16, values: a}, {name: "b", t: ir.BF16, values: b}}, nil, []int64{int64(trans)}}
}

// tilePrimitives returns the two ways to load the second head of a tensor whose last tokens are past its end.
func tilePrimitives(dim int) []primitive {
	const tokens, heads, head = 100, 2, 1
	x := numbers(tokens*heads*dim, 5)
	want := make([]float32, 128*dim)
	for token := range tokens {
		copy(want[token*dim:][:dim], x[(token*heads+head)*dim:])
	}
	y := operand{name: "y", t: ir.BF16, cols: int64(dim), want: want, at: func(i int) int { return tilePlace(128, dim, i/dim, i%dim) }}
	shared := int64(128*2*dim + aroundTile)
	in := operand{name: "x", t: ir.BF16, values: x}
	panel := tilePanel(dim)
	return []primitive{
		{kernels.HopperPrimitives, fmt.Sprint("primitive_threads_", dim), 256, shared, []operand{y, in}, nil, []int64{tokens, heads, head}},
		{kernels.HopperPrimitives, fmt.Sprint("primitive_engine_", dim), 256, shared, []operand{y, in},
			&kernels.Boxes{Extent: [4]int64{int64(dim), heads, 1, tokens}, Box: [4]int64{int64(panel), 1, 1, 128}}, []int64{head}},
	}
}

// tilePanel returns the elements of a panel of a tile.
func tilePanel(dim int) int {
	panel := 64
	for dim%panel != 0 {
		panel /= 2
	}
	return panel
}

// productPrimitives returns a product with both operands in shared memory and n columns, one with the first in registers and
// n tokens and, if own is set, one with the first in registers and n columns.
func productPrimitives(dim, n int, own bool) (all []primitive) {
	a, b := numbers(128*dim, 6), numbers(n*dim, 7)
	weights, values := numbers(128*n, 8), numbers(n*dim, 9)
	rows := primitive{kernels.HopperPrimitives, fmt.Sprintf("primitive_rows_%d_%d", dim, n), 256, int64((128+n)*2*dim + aroundTile), []operand{
		{name: "d", t: ir.F32, cols: int64(n), want: product(128, dim, n, byRows(a, dim), byColumns(b, dim))},
		{name: "a", t: ir.BF16, values: a}, {name: "b", t: ir.BF16, values: b}}, nil, nil}
	all = append(all, rows, primitive{kernels.HopperPrimitives, fmt.Sprintf("primitive_columns_%d_%d", dim, n), 256, int64(n*2*dim + aroundTile), []operand{
		{name: "d", t: ir.F32, cols: int64(dim), want: product(128, n, dim, byRows(weights, n), byRows(values, dim))},
		{name: "a", t: ir.BF16, values: weights}, {name: "b", t: ir.BF16, values: values}}, nil, nil})
	if rows.kernel = fmt.Sprintf("primitive_own_%d_%d", dim, n); own {
		all = append(all, rows)
	}
	return all
}

func turnsPrimitive() primitive {
	const rounds = 20
	y := make([]float32, 2*rounds)
	for i := range y {
		y[i] = float32(i % 2)
	}
	return primitive{kernels.HopperPrimitives, "primitive_turns", 256, 0, []operand{{name: "y", t: ir.F32, cols: 2, want: y}}, nil, []int64{rounds}}
}

func pairsPrimitive() primitive {
	const tiles = 7
	x, w := numbers(tiles*64*64, 10), numbers(tiles*128, 11)
	place := func(i int) int { return i/4096*4096 + tilePlace(64, 64, i%4096/64, i%64) }
	return primitive{kernels.HopperPrimitives, "primitive_pairs", 384, 3*(64*128+512) + aroundTile, []operand{
		{name: "y", t: ir.BF16, cols: 64, want: x, at: place}, {name: "z", t: ir.F32, cols: 128, want: w},
		{name: "x", t: ir.BF16, values: x}, {name: "w", t: ir.F32, values: w}},
		&kernels.Boxes{Extent: [4]int64{64, 1, 1, tiles * 64}, Box: [4]int64{64, 1, 1, 64}}, []int64{tiles}}
}

func registersPrimitive() primitive {
	const held, threads = 200, 384
	x := numbers(held*threads, 12)
	y := make([]float32, threads)
	for j := range y {
		if y[j] = x[j]; j < 128 {
			continue
		}
		for i := 1; i < held; i++ {
			y[j] += float32(i+1) * x[i*threads+j]
		}
	}
	return primitive{kernels.HopperPrimitives, "primitive_registers", threads, 0, []operand{
		{name: "y", t: ir.F32, cols: 128, want: y}, {name: "x", t: ir.F32, values: x}}, nil, nil}
}

// program returns a program without instructions whose buffers are the operands.
func (p *primitive) program() *ir.Program {
	b := &builder{}
	for _, o := range p.operands {
		b.buffer(ir.Device, o.t, int64(max(len(o.values), len(o.want))), 1)
	}
	return &ir.Program{Name: p.kernel, Codes: []ir.Code{b.code}, Ranks: []ir.Rank{{}}, Lines: []string{""}}
}

// launch returns the launch of the kernel. Arguments are the operands in order, with the table of the tensor map in
// place of the first input, and then the scalars.
func (p *primitive) launch() kernels.Launch {
	l := kernels.Launch{Source: p.source, Kernel: p.kernel, Grid: [3]int64{1, 1, 1}, Block: p.blocks, SharedBytes: p.shared}
	for i, o := range p.operands {
		arg := kernels.Arg{Kind: kernels.Operand, Value: uint64(i)}
		if o.want == nil && p.boxes != nil && len(l.Boxes) == 0 {
			x := *p.boxes
			x.Tensor = arg
			l.Boxes, arg = []kernels.Boxes{x}, kernels.Arg{Kind: kernels.Table}
		}
		l.Args = append(l.Args, arg)
	}
	for _, s := range p.scalars {
		l.Args = append(l.Args, kernels.Arg{Kind: kernels.Scalar, Value: uint64(s)})
	}
	return l
}

// check runs a building block on a machine. It returns an error that names the first result that differs, with its first
// wrong element and a map of the wrong blocks.
func (p *primitive) check(m *Machine) (err error) {
	program := p.program()
	d := m.New(0).(*Device)
	defer func() {
		if closed := d.Close(); err == nil {
			err = closed
		}
	}()
	if err := d.Load(program, 0, &vm.Env{Transport: m}); err != nil {
		return err
	}
	if err := d.makeStream(ir.Compute); err != nil {
		return err
	}
	b := &binder{device: d, in: &ir.Instr{Op: ir.Attention, Stream: ir.Compute}, stream: d.streams[ir.Compute], out: &bound{}}
	views := make([]ir.View, len(p.operands))
	for i, o := range p.operands {
		views[i] = ir.View{Buffer: uint32(i), DType: o.t, Shape: [ir.MaxDims]int64{int64(max(len(o.values), len(o.want))), 1}}
		at, err := d.place(views[i])
		if err != nil {
			return err
		}
		b.places = append(b.places, at)
		if err := d.Write(views[i], o.bytes()); err != nil {
			return err
		}
	}
	if err := b.kernel(&kernels.Plan{Launches: []kernels.Launch{p.launch()}}); err != nil {
		return err
	}
	for _, a := range b.out.actions {
		if err := a.Make(); err != nil {
			return err
		}
	}
	if err := d.Join(); err != nil {
		return fmt.Errorf("%s: %w", p.kernel, err)
	}
	for i, o := range p.operands {
		bytes := make([]byte, views[i].Bytes())
		if err := d.Read(views[i], bytes); err != nil {
			return err
		}
		if text := o.differs(floats(o.t, bytes)); text != "" {
			return fmt.Errorf("%s of %s %s", o.name, p.kernel, text)
		}
	}
	return nil
}

// bytes returns the contents of an operand before the launch: a result is full of NaNs.
func (o *operand) bytes() []byte {
	out := slices.Repeat([]byte{0xff}, len(o.want)*int(o.t.Bytes()))
	for _, x := range o.values {
		if o.t == ir.BF16 {
			out = binary.LittleEndian.AppendUint16(out, vm.BF16(x))
		} else {
			out = append(out, vm.BytesOf([]float32{x})...)
		}
	}
	return out
}

// differs returns "" if a result is exact, or else a description of its errors.
func (o *operand) differs(got []float32) string {
	if o.want == nil {
		return ""
	}
	if o.at != nil {
		placed := got
		got = make([]float32, len(placed))
		for i := range got {
			got[i] = placed[o.at(i)]
		}
	}
	return differs(got, o.want, o.cols, o.cols, 0)
}

// Each building block of the attention kernels computes exact results on the GPU. TestPlantedPrimitives checks
// the same results on the emulator.
func TestGPUPrimitives(t *testing.T) {
	m := needGPU(t, Options{OwnProducts: true})
	card := m.card(m.gpus[0])
	for _, p := range primitives() {
		if p.source == kernels.HopperPrimitives && !card.Hopper || p.boxes != nil && !card.CopyEngine {
			continue
		}
		t.Run(p.name(), func(t *testing.T) {
			if err := p.check(m); err != nil {
				t.Error(err)
			}
		})
	}
}

// name distinguishes a building block from others with the same kernel.
func (p *primitive) name() string {
	if len(p.scalars) > 0 && p.source == kernels.Primitives {
		return fmt.Sprint(p.kernel, " ", p.scalars[0])
	}
	return p.kernel
}

package cpu

import (
	"fmt"
	"math"

	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/ir"
)

var elementwiseKernels = kernelTable{
	ir.InitNormal: initNormal,
	ir.Fill:       fill,
	ir.Add:        add,
	ir.Cast:       cast,
	ir.SumSq:      sumSq,
	ir.GradNorm:   gradNorm,
	ir.Dropout:    dropout,
}

// each binds a kernel that works element by element on operands of the same shape.
func (b *binder) each(outs, ins []string, f func(out, in [][]float32)) func() {
	rows, _ := b.shape(outs[0])
	run := b.eachOf(outs, ins, f)
	return func() { run(rows) }
}

// eachUpTo is like each, for the rows up to the last of ends if there are ends.
func (b *binder) eachUpTo(outs, ins []string, f func(out, in [][]float32)) func() error {
	rows, _ := b.shape(outs[0])
	run, ends := b.eachOf(outs, ins, f), []int32{int32(rows)}
	if b.has("ends") {
		ends = b.ints("ends")
	}
	return func() error {
		last := int(ends[len(ends)-1])
		if last < 0 || last > rows {
			return fmt.Errorf("the last of ends is %d, but there are only %d rows", last, rows)
		}
		run(last)
		return nil
	}
}

func (b *binder) eachOf(outs, ins []string, f func(out, in [][]float32)) func(rows int) {
	_, cols := b.shape(outs[0])
	mats := func(names []string) (list []simd.Mat) {
		for _, name := range names {
			list = append(list, b.mat(name))
		}
		return list
	}
	out, in, pool := mats(outs), mats(ins), b.device.pool
	return func(rows int) { simd.Map(pool, rows, cols, out, in, f) }
}

func cast(b *binder) func() { return b.each([]string{"y"}, []string{"x"}, copyRow) }

func add(b *binder) func() {
	if !b.has("bias") {
		return b.each([]string{"y"}, []string{"a", "b"}, addRow)
	}
	bias := b.vector("bias")
	values := []float32(nil)
	rows := b.each([]string{"y"}, []string{"a", "b"}, func(out, in [][]float32) {
		simd.Add(out[0], in[0], in[1])
		simd.Add(out[0], out[0], values)
	})
	return func() {
		values = bias.values()
		rows()
	}
}

func fill(b *binder) func() {
	value := b.float("value")
	v := b.in.Arg("y")
	switch v.DType {
	case ir.F32:
		y, value := b.floats("y"), float32(value)
		return func() { simd.Fill(y, value) }
	case ir.BF16:
		y, value := vm.Uint16s(b.bytes("y")), vm.BF16(float32(value))
		return func() { repeat(y, value) }
	case ir.I32:
		y, value := b.ints("y"), int32(value)
		return func() { repeat(y, value) }
	}
	y := b.bytes("y")
	return func() { repeat(y, byte(value)) }
}

func repeat[T any](y []T, value T) {
	for i := range y {
		y[i] = value
	}
}

func initNormal(b *binder) func() {
	tensor := &b.device.program.Tensors[b.int("tensor")]
	random := vm.InitialValues(b.device.program.Run.Seed, tensor.Name)
	rows, cols := b.shape("w")
	row0, col0, std := b.int("row"), b.int("col"), b.float("std")
	w, pool := b.mat("w"), b.device.pool
	inside, end := int(min(int64(cols), tensor.Shape[1]-int64(col0))), tensor.EndOf(int64(b.int("end")))
	rowOf := func(row int, out []float32) {
		clear(out)
		if int64(row0+row) < end && inside > 0 {
			random.Normals(uint64(int64(row0+row)*tensor.Shape[1]+int64(col0)), out[:inside], std)
		}
	}
	wide := b.scratch(0)
	if w.BF16 != nil {
		wide = b.scratch(rows * cols)
	}
	return func() {
		pool.Split(rows, max(1, 1024/cols), func(lo, hi int) {
			for r := lo; r < hi; r++ {
				if w.BF16 == nil {
					rowOf(r, w.F32[r*cols:(r+1)*cols])
					continue
				}
				out := wide.floats()[r*cols : (r+1)*cols]
				rowOf(r, out)
				simd.Narrow(w.BF16[r*cols:], out)
			}
		})
	}
}

func dropout(b *binder) func() {
	rows, width := b.shape("x")
	batch, position, sequence := b.int("batch"), b.int("position"), b.int("first")+b.int("replica")
	if b.int("chunks") == 0 {
		position += b.int("member") * (rows / batch)
	}
	tensor, col, rate := vm.DropoutTensor(b.device.program.Tensors[b.int("tensor")].Name), uint64(b.int("col")), b.float("rate")
	y, x, key, pool, wide := b.mat("y"), b.mat("x"), b.ints("key"), b.device.pool, b.scratch(0)
	if x.BF16 != nil {
		wide = b.scratch(rows * width)
	}
	half, first := rows/batch/2, b.halves(position)
	return func() {
		draws := vm.NewDropout(uint64(uint32(key[0]))|uint64(uint32(key[1]))<<32, tensor, rate)
		pool.Split(rows, max(1, 4096/width), func(lo, hi int) {
			for r := lo; r < hi; r++ {
				at := first[0] + r/batch
				if r/batch >= half {
					at = first[1] + r/batch - half
				}
				in := wideRowAt(x, r, width, wide)
				if y.BF16 == nil {
					draws.Row(int64(sequence+r%batch), int64(at), col, y.F32[r*width:], in)
					continue
				}
				draws.Row(int64(sequence+r%batch), int64(at), col, in, in)
				simd.Narrow(y.BF16[r*width:], in)
			}
		})
	}
}

// halves returns the positions of the first token of each half of x. The tokens of x are consecutive and start
// at the given position, unless the attribute chunks is set. If it is, the halves are two chunks of a subsequence
// that starts at that position.
func (b *binder) halves(position int) [2]int {
	rows, _ := b.shape("x")
	half, chunks, member := rows/b.int("batch")/2, b.int("chunks"), b.int("member")
	if chunks > 0 {
		return [2]int{position + member*half, position + (chunks-1-member)*half}
	}
	return [2]int{position, position + half}
}

// sumSq sums in f64; f32 values are first summed in f32 within blocks.
func sumSq(b *binder) func() {
	y, x, weight, pool := b.floats("y"), b.mat("x"), b.float("weight"), b.device.pool
	return func() {
		sum := 0.0
		if x.BF16 == nil {
			sum = simd.SumSquares(pool, x.F32)
		}
		for _, h := range x.BF16 {
			v := float64(simd.FromBF16(h))
			sum += float64(v * v)
		}
		y[0] = float32(weight * sum)
	}
}

func gradNorm(b *binder) func() {
	y, sums, limit := b.floats("y"), b.floats("sums"), b.float("max_norm")
	most := []float32{math.MaxFloat32}
	if b.has("limit") {
		most = b.floats("limit")
	}
	return func() {
		sum := 0.0
		for _, s := range sums {
			sum += float64(s)
		}
		norm, factor := math.Sqrt(sum), 1.0
		if limit > 0 && norm > limit {
			factor = limit / norm
		}
		if !(float32(norm) <= min(most[0], math.MaxFloat32)) {
			factor = -1 // the optimizer skips the step
		}
		y[0], y[1] = float32(norm), float32(factor)
	}
}

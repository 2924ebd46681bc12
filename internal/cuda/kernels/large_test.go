package kernels

import (
	"strings"
	"testing"

	"sppo.dev/ir"
)

// bindLarge binds an instruction whose operands have the given shapes, each in its own buffer. It needs no memory.
func bindLarge(op ir.Op, dtype ir.DType, attrs map[string]int64, shapes ...[]int64) (Plan, error) {
	code := ir.Code{}
	in := ir.Instr{Op: op}
	for i := range ir.Ops[op].Operands {
		v := ir.Absent()
		if i < len(shapes) && shapes[i] != nil {
			v = ir.View{Buffer: uint32(len(code.Buffers)), DType: dtype}
			if types := ir.Ops[op].Operands[i].Types; types == "f32" {
				v.DType = ir.F32
			} else if types == "i32" {
				v.DType = ir.I32
			}
			copy(v.Shape[:], shapes[i])
			start := (code.Arenas[ir.Device] + 255) &^ 255
			code.Buffers = append(code.Buffers, ir.Buffer{Offset: start, Size: v.Bytes()})
			code.Arenas[ir.Device] = start + v.Bytes()
		}
		in.Args = append(in.Args, v)
	}
	for _, a := range ir.Ops[op].Attrs {
		in.Attrs = append(in.Attrs, ir.Int(attrs[a.Name]))
	}
	p := &ir.Program{Codes: []ir.Code{code}, Ranks: []ir.Rank{{}}}
	return Bind(Card{Hopper: true, CopyEngine: true}, p, 0, &in)
}

// scalars returns the numbers among the arguments of a launch.
func scalars(l *Launch) map[int64]bool {
	out := map[int64]bool{}
	for _, a := range l.Args {
		if a.Kind == Scalar {
			out[int64(a.Value)] = true
		}
	}
	return out
}

// TestLargeOperands checks that kernels receive sizes beyond 32 bits unchanged.
func TestLargeOperands(t *testing.T) {
	const rows, cols = 1 << 22, 1 << 13
	x := []int64{rows, cols}
	for _, c := range []struct {
		op     ir.Op
		attrs  map[string]int64
		shapes [][]int64
		want   int64
	}{
		{ir.Activation, nil, [][]int64{x, x}, rows * cols},
		{ir.GLU, nil, [][]int64{x, x, x}, rows * cols},
		{ir.Add, nil, [][]int64{x, x, x}, rows * cols},
		{ir.Cast, nil, [][]int64{x, x}, rows * cols},
		{ir.Fill, nil, [][]int64{x}, 2 * rows * cols},
		{ir.RMSNorm, nil, [][]int64{x, {rows, 1}, x, {cols}}, cols},
		{ir.Matmul, nil, [][]int64{{1 << 33, 64}, {1 << 33, 64}, {64, 64}}, 1 << 33},
		{ir.Matmul, nil, [][]int64{{64, 64}, {64, 1 << 33}, {1 << 33, 64}}, 1 << 33},
		{ir.BiasGrad, nil, [][]int64{{64}, {1 << 33, 64}}, 1 << 33},
		{ir.Attention, map[string]int64{"heads": 1, "kv_heads": 1, "head_dim": 64, "batch": 1, "prefix": 1 << 33},
			[][]int64{{64, 64}, {64, 1}, {64, 64}, {1 << 33, 64}, {1 << 33, 64}}, 1 << 33},
	} {
		plan, err := bindLarge(c.op, ir.BF16, c.attrs, c.shapes...)
		if err != nil {
			t.Errorf("%s: %v", ir.Ops[c.op].Name, err)
			continue
		}
		if !scalars(&plan.Launches[0])[c.want] {
			t.Errorf("%s: %v is not told of %d", ir.Ops[c.op].Name, plan.Launches[0], c.want)
		}
		for _, l := range plan.Launches {
			if len(l.Boxes) > 0 {
				t.Errorf("%s: the copy engine has no coordinates for %v", ir.Ops[c.op].Name, l.Boxes)
			}
		}
	}
}

// TestLargestGrid requires an error that names the limit and a remedy if a grid would need too many blocks.
func TestLargestGrid(t *testing.T) {
	x := []int64{1 << 31, 8}
	_, err := bindLarge(ir.RMSNorm, ir.BF16, nil, x, []int64{1 << 31, 1}, x, []int64{8})
	for _, want := range []string{"2147483648 blocks", "dimension x", "2147483647", "schedule.subsequences"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not say %q", err, want)
		}
	}
}

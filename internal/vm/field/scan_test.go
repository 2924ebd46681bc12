package field

import (
	"testing"

	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// layout places views of f32 elements one after another.
type layout struct{ end ir.Bytes }

func (l *layout) view(shape ...int64) ir.View {
	v := ir.View{DType: ir.F32, Offset: l.end}
	copy(v.Shape[:], shape)
	l.end += v.Bytes()
	return v
}

// rowsOf returns rows of a view, from the given one on.
func rowsOf(v ir.View, row, rows int64) ir.View {
	v.Offset += ir.Bytes(row*v.Shape[1]) * v.DType.Bytes()
	v.Shape[0] = rows
	return v
}

// elementsOf executes instructions on elements that nothing has written, and returns those of views.
func elementsOf(t *testing.T, l *layout, code []ir.Instr, views ...ir.View) (out [][]element) {
	t.Helper()
	c := ir.Code{Buffers: []ir.Buffer{{Name: "all", Size: l.end}}}
	c.Arenas[ir.Device], c.Sections[ir.SectionStep] = l.end, code
	p := &ir.Program{Codes: []ir.Code{c}, Ranks: []ir.Rank{{}}, Lines: []string{""}}
	d := New(p).Device().(*Device)
	if err := d.Load(p, 0, &vm.Env{Transport: vm.NewLocal()}); err != nil {
		t.Fatal(err)
	}
	for pc := range code {
		if err := d.execute(&code[pc]); err != nil {
			t.Fatalf("%d: %v", pc, err)
		}
	}
	for _, v := range views {
		x, err := d.vector(v)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, x.list())
	}
	return out
}

// TestScanCut cuts a scan in two, with a state that is passed on and its gradient passed back: every element is that of the whole.
func TestScanCut(t *testing.T) {
	const n, cut, batch, heads, shared, dim, width = 7, 3, 2, 2, 2, 3, 2
	for _, channels := range []int64{1, dim} {
		for _, delta := range []bool{false, true} {
			var l layout
			attrs := []ir.Attr{ir.Int(heads), ir.Int(shared), ir.Int(dim), ir.Int(width), ir.Int(batch), ir.Int(channels), ir.Bool(delta), ir.Float(1e-6), ir.Float(0.5)}
			row := func(cols int64) ir.View { return l.view(n*batch, cols) }
			state := func() ir.View { return l.view(batch, heads*shared, dim, width) }
			keys, values := func() ir.View { return row(heads * dim) }, func() ir.View { return row(heads * shared * width) }
			decays, betas := func() ir.View { return row(heads * shared * channels) }, func() ir.View { return row(heads * shared) }
			in := []ir.View{keys(), keys(), values(), decays(), betas()}
			first, dout, dnext := state(), values(), state()
			results := func() (o, next ir.View, grads []ir.View) {
				return values(), state(), []ir.View{keys(), keys(), values(), decays(), betas(), state()}
			}
			scan := func(o, next, state ir.View, in []ir.View) ir.Instr {
				return ir.Instr{Op: ir.Scan, Args: append(append([]ir.View{o, next}, in...), state, ir.Absent()), Attrs: attrs}
			}
			grad := func(to []ir.View, dout, dnext, state ir.View, in []ir.View) ir.Instr {
				return ir.Instr{Op: ir.ScanGrad, Args: append(append(append(append([]ir.View{}, to...), dout, dnext), in...), state, ir.Absent()), Attrs: attrs}
			}
			cutAt := func(views []ir.View, row, rows int64) (out []ir.View) {
				for _, v := range views {
					out = append(out, rowsOf(v, row*batch, rows*batch))
				}
				return out
			}
			wholeO, wholeNext, whole := results()
			o, next, grads := results()
			middle, dmiddle := state(), state()
			in1, in2 := cutAt(in, 0, cut), cutAt(in, cut, n-cut)
			to1, to2 := append(cutAt(grads[:5], 0, cut), grads[5]), append(cutAt(grads[:5], cut, n-cut), dmiddle)
			got := elementsOf(t, &l, []ir.Instr{
				scan(wholeO, wholeNext, first, in), grad(whole, dout, dnext, first, in),
				scan(rowsOf(o, 0, cut*batch), middle, first, in1), scan(rowsOf(o, cut*batch, (n-cut)*batch), next, middle, in2),
				grad(to2, rowsOf(dout, cut*batch, (n-cut)*batch), dnext, middle, in2), grad(to1, rowsOf(dout, 0, cut*batch), dmiddle, first, in1),
			}, append(append([]ir.View{wholeO, wholeNext}, whole...), append([]ir.View{o, next}, grads...)...)...)
			for i, name := range []string{"o", "next", "dq", "dk", "dv", "ddecay", "dbeta", "dstate"} {
				for j, want := range got[i] {
					if have := got[8+i][j]; have != want {
						t.Errorf("channels %d, delta %v: %s[%d] is %v in parts, %v as a whole", channels, delta, name, j, have, want)
						break
					}
				}
			}
		}
	}
}

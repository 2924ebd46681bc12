package cpu

import (
	"strings"
	"testing"

	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// TestWrongIndices checks that an instruction whose indices are wrong ends with an error that names them.
func TestWrongIndices(t *testing.T) {
	const rows, cols = 4, 3
	view := func(buffer uint32, dtype ir.DType, shape ...int64) ir.View {
		v := ir.View{Buffer: buffer, DType: dtype}
		copy(v.Shape[:], shape)
		return v
	}
	y, x := view(0, ir.F32, rows, cols), view(1, ir.F32, rows, cols)
	permute := ir.Instr{Op: ir.Permute, Stream: ir.Compute, Args: []ir.View{y, x, view(2, ir.I32, rows, 1)}, Attrs: []ir.Attr{ir.Int(1)}}
	grouped := ir.Instr{Op: ir.MatmulGrouped, Stream: ir.Compute, Args: []ir.View{y, x, view(2, ir.I32, rows), view(3, ir.F32, rows, cols, cols), ir.Absent()}, Attrs: []ir.Attr{ir.Int(0), ir.Int(0)}}
	sorted := ir.Instr{Op: ir.Activation, Stream: ir.Compute, Args: []ir.View{y, x, view(2, ir.I32, rows)}, Attrs: []ir.Attr{ir.Int(ir.Silu)}}
	for name, c := range map[string]struct {
		in      ir.Instr
		indices [rows]int32
		want    string
	}{
		"a place outside":   {permute, [rows]int32{0, 1, 2, 4}, "places[3] is 4"},
		"a negative place":  {permute, [rows]int32{-2, 1, 2, 3}, "places[0] is -2"},
		"a place twice":     {permute, [rows]int32{0, 1, 1, 3}, "places[2] is 1"},
		"ends that descend": {grouped, [rows]int32{3, 2, 4, 4}, "ends[1] is 2, less than 3 before it"},
		"too many rows":     {grouped, [rows]int32{1, 2, 3, 5}, "the last of ends is 5, but there are only 4 rows"},
		"rows of none":      {sorted, [rows]int32{0, 0, 0, 5}, "the last of ends is 5, but there are only 4 rows"},
		"negative rows":     {sorted, [rows]int32{0, 0, 0, -1}, "the last of ends is -1, but there are only 4 rows"},
	} {
		t.Run(name, func(t *testing.T) {
			code := ir.Code{Name: "case"}
			for i := range 4 {
				code.Buffers = append(code.Buffers, ir.Buffer{Name: "b", Offset: ir.Bytes(256 * i), Size: 256})
			}
			code.Arenas[ir.Device] = 1024
			code.Sections[ir.SectionStep] = []ir.Instr{c.in}
			p := &ir.Program{Name: "case", Codes: []ir.Code{code}, Ranks: []ir.Rank{{}}, Lines: []string{""}}
			d := New(nil)
			defer d.Close()
			if err := d.Load(p, 0, &vm.Env{Transport: vm.NewLocal()}); err != nil {
				t.Fatal(err)
			}
			for i, index := range c.indices {
				v := view(2, ir.I32, 1)
				v.Offset = ir.Bytes(4 * i)
				if err := d.Write(v, []byte{byte(index), byte(index >> 8), byte(index >> 16), byte(index >> 24)}); err != nil {
					t.Fatal(err)
				}
			}
			if err := d.Begin(ir.SectionStep, 1); err != nil {
				t.Fatal(err)
			}
			d.Launch(0)
			if err := d.Join(); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, not %q", err, c.want)
			}
		})
	}
}

package cpu

import (
	"math"

	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/ir"
)

var ropeKernels = kernelTable{
	ir.Rope: rope,
}

// ropeKey identifies a table. All instructions of a device with the same rotation share one table.
type ropeKey struct {
	theta    float64
	headDim  int
	rotation int
}

// ropeTable holds the cosine and sine of every angle, multiplied by the rotation's factors, by position and pair. They
// depend only on the position, not on the subsequence.
type ropeTable struct {
	ir.Rotation
	positions int
	cos, sin  []float32
}

// growth returns the factor for a position that Beta gives.
func (t *ropeTable) growth(position int) float64 {
	if t.Beta == 0 {
		return 1
	}
	return 1 + t.Beta*math.Log1p(float64(int64(position)/t.Period))
}

func rope(b *binder) func() {
	batch, heads, headDim := b.int("batch"), b.int("heads"), b.int("head_dim")
	rows, width := b.shape("x")
	position := b.int("position")
	sign := float32(1)
	if b.bool("inverse") {
		sign = -1
	}
	key := ropeKey{b.float("theta"), headDim, b.int("rotation")}
	table := b.device.tables[key]
	if table == nil {
		table = &ropeTable{Rotation: b.in.Rotation(&b.device.program.Run)}
		b.device.tables[key] = table
	}
	half := len(table.Rates)
	tokens, first := rows/batch, b.halves(position)
	table.positions = max(table.positions, first[1]+tokens-tokens/2)
	pool, documents := b.device.pool, b.ints("positions")
	y, x := b.mat("y"), b.mat("x")
	wide := b.scratch(0)
	if x.BF16 != nil || y.BF16 != nil {
		wide = b.scratch(rows * width)
	}
	turn := func(lo, hi int) {
		for r := lo; r < hi; r++ {
			in, out := wideRowAt(x, r, width, wide), y.F32
			if y.BF16 != nil {
				out = wide.floats()
			}
			out = out[r*width : (r+1)*width]
			at := first[0] + r/batch
			if r/batch >= tokens/2 {
				at = first[1] + r/batch - tokens/2
			}
			if documents != nil {
				at = int(documents[(at-position)*batch+r%batch])
			}
			rest := float32(table.Rest * table.growth(at))
			at *= half
			for h := range heads {
				turned, from := out[h*headDim:(h+1)*headDim], in[h*headDim:(h+1)*headDim]
				simd.Rotate(turned, from, table.cos[at:at+half], table.sin[at:at+half], sign)
				if 2*half < headDim {
					simd.Scale(turned[2*half:], from[2*half:], rest)
				}
			}
			if y.BF16 != nil {
				simd.Narrow(y.BF16[r*width:], out)
			}
		}
	}
	return func() { pool.Split(rows, max(1, 8192/width), turn) }
}

// wideRowAt returns a row as f32, using scratch with space for every row.
func wideRowAt(m simd.Mat, row, width int, wide scratch) []float32 {
	if m.BF16 == nil {
		return m.F32[row*width : (row+1)*width]
	}
	out := wide.floats()[row*width : (row+1)*width]
	simd.Widen(out, m.BF16[row*width:(row+1)*width])
	return out
}

// growTables extends every table that is too short for instructions outside the program to twice the length that
// they need.
func (d *Device) growTables() {
	for _, t := range d.tables {
		if len(t.cos) < t.positions*len(t.Rates) {
			t.positions *= 2
		}
	}
	d.fillTables()
}

// fillTables computes the angles once the range of positions is known.
func (d *Device) fillTables() {
	for _, t := range d.tables {
		if len(t.Rates) == 0 || len(t.cos) >= t.positions*len(t.Rates) {
			continue
		}
		half := len(t.Rates)
		t.cos, t.sin = make([]float32, t.positions*half), make([]float32, t.positions*half)
		d.pool.Split(t.positions, 64, func(lo, hi int) {
			factor := make([]float64, hi-lo)
			for i := range factor {
				factor[i] = t.Scale * t.growth(lo+i)
			}
			for i, rate := range t.Rates {
				for p := lo; p < hi; p++ {
					sin, cos := math.Sincos(float64(p) * rate)
					t.cos[p*half+i], t.sin[p*half+i] = float32(factor[p-lo]*cos), float32(factor[p-lo]*sin)
				}
			}
		})
	}
}

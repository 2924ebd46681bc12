package cpu

import (
	"math"

	"sppo.dev/vm/cpu/simd"
)

// ropeKey tells tables apart; a table is shared by all instructions of a device that turn by the same angles.
type ropeKey struct {
	theta   float64
	headDim int
}

// ropeTable holds cosine and sine of every angle, by position and pair. An angle depends on the position alone, not on
// the subsequence that asks for it.
type ropeTable struct {
	positions int
	cos, sin  []float32
}

func rope(b *binder) func() {
	batch, heads, headDim := b.int("batch"), b.int("heads"), b.int("head_dim")
	rows, width := b.shape("x")
	position, half := b.int("position"), headDim/2
	sign := float32(1)
	if b.bool("inverse") {
		sign = -1
	}
	key := ropeKey{b.float("theta"), headDim}
	table := b.device.tables[key]
	if table == nil {
		table = new(ropeTable)
		b.device.tables[key] = table
	}
	tokens, chunks, member := rows/batch, b.int("chunks"), b.int("member")
	first := [2]int{position, position + tokens/2} // of each half of the tokens
	if chunks > 0 {
		first = [2]int{position + member*(tokens/2), position + (chunks-1-member)*(tokens/2)}
	}
	table.positions = max(table.positions, first[1]+tokens-tokens/2)
	pool := b.device.pool
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
			at *= half
			for h := range heads {
				simd.Rotate(out[h*headDim:], in[h*headDim:], table.cos[at:at+half], table.sin[at:at+half], sign)
			}
			if y.BF16 != nil {
				simd.Narrow(y.BF16[r*width:], out)
			}
		}
	}
	return func() { pool.Split(rows, max(1, 8192/width), turn) }
}

// wideRowAt is a row as f32, in scratch that has a row for each.
func wideRowAt(m simd.Mat, row, width int, wide scratch) []float32 {
	if m.BF16 == nil {
		return m.F32[row*width : (row+1)*width]
	}
	out := wide.floats()[row*width : (row+1)*width]
	simd.Widen(out, m.BF16[row*width:(row+1)*width])
	return out
}

// fillTables computes the angles once it is known how far positions reach.
func (d *Device) fillTables() {
	for key, t := range d.tables {
		half := key.headDim / 2
		t.cos, t.sin = make([]float32, t.positions*half), make([]float32, t.positions*half)
		d.pool.Split(t.positions, 64, func(lo, hi int) {
			for i := range half {
				frequency := math.Pow(key.theta, -2*float64(i)/float64(key.headDim))
				for p := lo; p < hi; p++ {
					sin, cos := math.Sincos(float64(p) * frequency)
					t.cos[p*half+i], t.sin[p*half+i] = float32(cos), float32(sin)
				}
			}
		})
	}
}

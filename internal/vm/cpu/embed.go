package cpu

import (
	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/ir"
)

var embedKernels = kernelTable{
	ir.Embed:             embed,
	ir.EmbedGrad:         embedGrad,
	ir.PositionEmbed:     positionEmbed,
	ir.PositionEmbedGrad: positionEmbedGrad,
}

func embed(b *binder) func() {
	y, tokens, table := b.bytes("y"), b.ints("tokens"), b.bytes("table")
	width := len(y) / max(len(tokens), 1) // bytes of a row
	rows, _ := b.shape("table")
	first := b.int("first")
	scale, out, pool := b.embedScale(), []simd.Mat{b.mat("y")}, b.device.pool
	return func() {
		for i, token := range tokens {
			row := y[i*width : (i+1)*width]
			if at := int(token) - first; at >= 0 && at < rows {
				copy(row, table[at*width:])
			} else {
				clear(row)
			}
		}
		if scale != 1 {
			simd.Map(pool, len(tokens), out[0].Ld, out, out, func(out, in [][]float32) { simd.Scale(out[0], in[0], scale) })
		}
	}
}

// embedScale returns the factor that multiplies rows of the table.
func (b *binder) embedScale() float32 {
	if scale := float32(b.float("scale")); scale != 0 {
		return scale
	}
	return 1
}

// embedGrad divides columns among threads, so that every thread adds the rows of a token in the same order.
func embedGrad(b *binder) func() {
	dtable, tokens, dy := b.floats("dtable"), b.ints("tokens"), b.mat("dy")
	rows, width := b.shape("dtable")
	first, accumulate := b.int("first"), b.bool("accumulate")
	pool, wide := b.device.pool, b.wideRow(dy)
	scale := b.embedScale()
	const stripe = 64
	addRows := func(lo, hi int) {
		for i, token := range tokens {
			if at := int(token) - first; at >= 0 && at < rows {
				sum := dtable[at*width+lo : at*width+hi]
				simd.Axpy(sum, wide.part(dy, i, lo, hi), scale)
			}
		}
	}
	return func() {
		if !accumulate {
			clear(dtable)
		}
		pool.Split(width, stripe, addRows)
	}
}

// wideRow is scratch for one row of a bf16 operand as f32.
type wideRow struct{ row scratch }

func (b *binder) wideRow(m simd.Mat) wideRow {
	if m.BF16 == nil {
		return wideRow{}
	}
	return wideRow{b.scratch(m.Ld)}
}

// part returns columns lo .. hi-1 of a row as f32. Threads may request different columns concurrently.
func (w wideRow) part(m simd.Mat, row, lo, hi int) []float32 {
	if m.BF16 == nil {
		return m.F32[row*m.Ld+lo : row*m.Ld+hi]
	}
	out := w.row.floats()[lo:hi]
	simd.Widen(out, m.BF16[row*m.Ld+lo:row*m.Ld+hi])
	return out
}

// sequences returns the rows of each sequence of a batch as a separate matrix.
func sequences(m simd.Mat, batch int) []simd.Mat {
	out := make([]simd.Mat, batch)
	for s := range out {
		out[s] = simd.Mat{Ld: m.Ld * batch}
		if m.BF16 != nil {
			out[s].BF16 = m.BF16[s*m.Ld:]
		} else {
			out[s].F32 = m.F32[s*m.Ld:]
		}
	}
	return out
}

func positionEmbed(b *binder) func() {
	batch := b.int("batch")
	rows, width := b.shape("table")
	table, pool := b.mat("table"), b.device.pool
	y, x := sequences(b.mat("y"), batch), sequences(b.mat("x"), batch)
	return func() {
		for s := range batch {
			simd.Map(pool, rows, width, y[s:s+1], []simd.Mat{x[s], table}, addRow)
		}
	}
}

func positionEmbedGrad(b *binder) func() {
	batch, accumulate := b.int("batch"), b.bool("accumulate")
	rows, width := b.shape("dtable")
	dtable, pool := b.mat("dtable"), b.device.pool
	dy := sequences(b.mat("dy"), batch)
	return func() {
		for s := range batch {
			if s == 0 && !accumulate {
				simd.Map(pool, rows, width, []simd.Mat{dtable}, dy[:1], copyRow)
				continue
			}
			simd.Map(pool, rows, width, []simd.Mat{dtable}, []simd.Mat{dtable, dy[s]}, addRow)
		}
	}
}

func addRow(out, in [][]float32)  { simd.Add(out[0], in[0], in[1]) }
func copyRow(out, in [][]float32) { copy(out[0], in[0]) }

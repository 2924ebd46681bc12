package simd

import "math"

// Mat is a row-major matrix stored as float32 or as bfloat16; exactly one of the slices is set. Ld is the
// number of elements from one row to the next. The numbers of rows and columns are passed with each call.
type Mat struct {
	F32  []float32
	BF16 []uint16
	Ld   int
}

// F32 wraps a float32 matrix.
func F32(x []float32, ld int) Mat { return Mat{F32: x, Ld: ld} }

// BF16 wraps a bfloat16 matrix.
func BF16(x []uint16, ld int) Mat { return Mat{BF16: x, Ld: ld} }

// at returns the submatrix that starts at the given element.
func (m Mat) at(row, col int) Mat {
	off := row*m.Ld + col
	if m.BF16 != nil {
		return Mat{BF16: m.BF16[off:], Ld: m.Ld}
	}
	return Mat{F32: m.F32[off:], Ld: m.Ld}
}

// From returns the matrix without the rows before the given row.
func (m Mat) From(row int) Mat { return m.at(row, 0) }

// load copies a block into dst, as float32.
func (m Mat) load(dst []float32, dstLd, rows, cols int) {
	if m.BF16 != nil {
		active.widen2D(dst, dstLd, m.BF16, m.Ld, rows, cols)
		return
	}
	active.copy2D(dst, dstLd, m.F32, m.Ld, rows, cols)
}

// store copies a float32 block into the matrix, rounding to nearest even.
func (m Mat) store(src []float32, srcLd, rows, cols int) {
	if m.BF16 != nil {
		active.narrow2D(m.BF16, m.Ld, src, srcLd, rows, cols)
		return
	}
	active.copy2D(m.F32, m.Ld, src, srcLd, rows, cols)
}

// row returns a row for reading: in place if it is float32, otherwise converted into buf.
func (m Mat) row(i, cols int, buf []float32) []float32 {
	if m.BF16 != nil {
		buf = buf[:cols]
		Widen(buf, m.BF16[i*m.Ld:i*m.Ld+cols])
		return buf
	}
	return m.F32[i*m.Ld : i*m.Ld+cols]
}

// target returns a slice to write a row to: the row itself, or buf, which done then stores.
func (m Mat) target(i, cols int, buf []float32) []float32 {
	if m.BF16 != nil {
		return buf[:cols]
	}
	return m.F32[i*m.Ld : i*m.Ld+cols]
}

// done stores a row that target returned, unless it is already in place.
func (m Mat) done(i int, row []float32) {
	if m.BF16 != nil {
		Narrow(m.BF16[i*m.Ld:], row)
	}
}

// FromBF16 converts one bfloat16.
func FromBF16(x uint16) float32 { return math.Float32frombits(uint32(x) << 16) }

// ToBF16 rounds to the nearest bfloat16, ties to even. NaN stays NaN.
func ToBF16(x float32) uint16 {
	u := math.Float32bits(x)
	if u&0x7fffffff > 0x7f800000 {
		return uint16(u>>16) | 0x40
	}
	return uint16((u + 0x7fff + (u>>16)&1) >> 16)
}

// Widen converts bfloat16 to float32: dst[i] = src[i].
func Widen(dst []float32, src []uint16) {
	n := len(dst)
	active.widen2D(dst, n, src[:n], n, 1, n)
}

// Narrow converts float32 to bfloat16, rounding to nearest even: dst[i] = src[i] for every element of src.
func Narrow(dst []uint16, src []float32) {
	n := len(src)
	active.narrow2D(dst[:n], n, src, n, 1, n)
}

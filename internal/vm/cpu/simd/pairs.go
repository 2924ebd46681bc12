package simd

import "unsafe"

// An instruction set whose kernels include interleave multiplies bfloat16 without converting it. Along k, two
// elements form a pair, one word of 32 bits with the first element in its lower half. If k is odd, the second
// element of the last pair is zero. The operands of a product then consist of words, as float32 operands do,
// but are half as long along k. Slices of float32 hold the words.

// perWord returns the number of elements in a word of a product's operands: 2 if they are
// multiplied in pairs, otherwise 1.
func perWord(operands ...Mat) int {
	for _, m := range operands {
		if active.interleave == nil || m.BF16 == nil {
			return 1
		}
	}
	return 2
}

// halves views words as the bfloat16 elements of their pairs.
func halves(words []float32) []uint16 {
	return unsafe.Slice((*uint16)(unsafe.Pointer(unsafe.SliceData(words))), 2*len(words))
}

// pairsAlong copies rows of a bfloat16 matrix into rows of ceil(cols/2) words, dstLd apart. A pair is two adjacent
// elements of a row.
func (m Mat) pairsAlong(dst []float32, dstLd, rows, cols int) {
	to := halves(dst)
	for i := range rows {
		row := to[2*i*dstLd:][:cols+cols%2]
		copy(row, m.BF16[i*m.Ld:i*m.Ld+cols])
		if cols%2 != 0 {
			row[cols] = 0
		}
	}
}

// pairsAcross makes ceil(rows/2) rows of cols words from rows of a bfloat16 matrix. A pair is two adjacent
// elements of a column.
func (m Mat) pairsAcross(dst []float32, dstLd, rows, cols int) {
	active.interleave(dst, dstLd, m.BF16, m.Ld, rows/2, cols)
	if rows%2 == 0 {
		return
	}
	to := halves(dst[rows/2*dstLd:])[:2*cols]
	for j, x := range m.BF16[(rows-1)*m.Ld:][:cols] {
		to[2*j], to[2*j+1] = x, 0
	}
}

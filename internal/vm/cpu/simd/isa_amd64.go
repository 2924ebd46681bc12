//go:build amd64 && !race

package simd

import "golang.org/x/sys/cpu"

//go:generate go run ./internal/gen

// detect returns the sets that this processor and operating system support, slowest first.
func detect() (sets []*kernelSet) {
	x := &cpu.X86
	if x.HasAVX2 && x.HasFMA && x.HasBMI2 {
		sets = append(sets, &avx2)
		if x.HasAVX512F && x.HasAVX512DQ && x.HasAVX512VL && x.HasAVX512BW {
			sets = append(sets, &avx512)
			if x.HasAVX512BF16 {
				withPairs := avx512
				withPairs.name, withPairs.interleave = "avx512_bf16", interleaveAVX512
				sets = append(sets, &withPairs)
			}
		}
	}
	return sets
}

func packTAVX2(dst, src []float32, srcLd, rows, cols int) {
	packT(transposeAVX2, 8, dst, src, srcLd, rows, cols)
}

func packTAVX512(dst, src []float32, srcLd, rows, cols int) {
	packT(transposeAVX512, 16, dst, src, srcLd, rows, cols)
}

// packT transposes full vectors of rows in steps of four columns, and the remaining columns one by one.
func packT(transpose func(dst []float32, dstLd int, src []float32, srcLd, steps int), lanes int, dst, src []float32, srcLd, rows, cols int) {
	nr, whole, steps := 2*lanes, rows/lanes*lanes, cols/4
	for r := 0; r < whole; r += lanes {
		transpose(dst[r:], nr, src[r*srcLd:], srcLd, steps)
	}
	for r := range rows {
		first := 0
		if r < whole {
			first = 4 * steps
		}
		for c := first; c < cols; c++ {
			dst[c*nr+r] = src[r*srcLd+c]
		}
	}
}

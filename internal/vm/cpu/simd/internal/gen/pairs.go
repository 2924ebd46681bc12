package main

import (
	"fmt"
	"strconv"
	"strings"
)

// pairKernels are the kernels that only AVX512-BF16 needs: those that make pairs of bfloat16. A pair is a word of
// 32 bits, with the element that has the lower k in its lower half. The matrix product of AVX-512 multiplies pairs
// if its tile requests it.
var pairKernels = []kernel{
	{name: "interleave", params: params("dst []float32; dstLd int; src []uint16; srcLd, pairs, cols int"), body: interleave},
}

// dotPairs is VDPBF16PS: d += a.low*b.low + a.high*b.high in every word. Go's assembler does not support the
// instruction, so dotPairs writes its encoding from Intel's manual: EVEX.512.F3.0F38.W0 52 /r. Only processors
// with AVX512-BF16 execute it.
func (f *fn) dotPairs(d, a, b string) {
	reg, vvvv, rm := number(d), number(a), number(b)
	inverted := func(r, bit int) int { return 1 - r>>bit&1 }
	bytes := []int{
		0x62,
		inverted(reg, 3)<<7 | inverted(rm, 4)<<6 | inverted(rm, 3)<<5 | inverted(reg, 4)<<4 | 2,
		^vvvv&15<<3 | 4 | 2,
		0x40 | inverted(vvvv, 4)<<3,
		0x52,
		0xc0 | reg&7<<3 | rm&7,
	}
	var text []string
	for _, b := range bytes {
		text = append(text, fmt.Sprintf("BYTE $0x%02x", b))
	}
	f.p("%s // VDPBF16PS %s, %s, %s", strings.Join(text, "; "), b, a, d)
}

// number returns the number of a register.
func number(r string) int {
	n, err := strconv.Atoi(r[1:])
	if err != nil {
		panic("internal: no register " + r)
	}
	return n
}

// interleave makes each row of pairs from two rows of bfloat16.
func interleave(f *fn) {
	dst, low := f.slice("dst"), f.slice("src")
	dstLd, srcLd, pairs, cols, high := f.word("dstLd"), f.word("srcLd"), f.word("pairs"), f.word("cols"), f.integer()
	f.p("SHLQ $2, %s", dstLd)
	f.p("SHLQ $1, %s", srcLd)
	f.p("LEAQ (%s)(%s*1), %s", low, srcLd, high)
	rows := func(label string, body func()) {
		f.label(label)
		f.p("SUBQ $1, %s", pairs)
		f.p("JLT end")
		body()
		f.p("ADDQ %s, %s", dstLd, dst)
		f.p("LEAQ (%s)(%s*2), %s", low, srcLd, low)
		f.p("LEAQ (%s)(%s*2), %s", high, srcLd, high)
		f.p("JMP %s", label)
	}
	vector := func(dst, low, high string) {
		x, y := f.v(0), f.v(1)
		if f.masked {
			f.p("VPMOVZXWD.Z %s, K1, %s", low, x)
			f.p("VPMOVZXWD.Z %s, K1, %s", high, y)
		} else {
			f.p("VPMOVZXWD %s, %s", low, x)
			f.p("VPMOVZXWD %s, %s", high, y)
		}
		f.p("VPSLLD $16, %s, %s", y, y)
		f.p("VPORD %s, %s, %s", x, y, y)
		f.store(dst, y)
	}
	f.p("CMPQ %s, $%d", cols, 2*f.lanes)
	f.p("JNE general")
	rows("sliver", func() {
		f.p("PREFETCHT0 (%s)(%s*8)", low, srcLd)
		f.p("PREFETCHT0 (%s)(%s*8)", high, srcLd)
		for j := range 2 {
			vector(offset(4*f.lanes*j, dst), offset(2*f.lanes*j, low), offset(2*f.lanes*j, high))
		}
	})
	rows("general", func() {
		f.p("MOVQ %s, CX", cols)
		f.each(func() { vector(at(dst), "("+low+")(AX*2)", "("+high+")(AX*2)") })
	})
	f.label("end")
}

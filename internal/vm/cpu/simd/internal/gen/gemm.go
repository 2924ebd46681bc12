package main

import "fmt"

// Offsets in simd's tile struct.
const (
	tileA          = 0
	tileARow       = 8
	tileAK         = 16
	tileB          = 24
	tileBK         = 32
	tileC          = 40
	tileCRow       = 48
	tileK          = 56
	tileRows       = 64
	tileCols       = 72
	tileBias       = 80
	tileAccumulate = 88
	tileAhead      = 96
	tileAheadBase  = 104
	tileAheadEnd   = 112
	tilePairs      = 120
)

// gemm is the micro-kernel over one sliver of b, two vectors wide, and any number of rows. It divides the rows
// into panels of nearly equal height, at most mr, and keeps a whole panel of c in registers for all of k.
//
//	DI tile, SI a, R8 its row stride, R9 three times that, R10..R13 addresses of rows 0, 4, 8, 12 of the panel
//	BX b, DX its stride, CX k, R15 a's stride along k; AX the prefetch list and R14 its base; later AX c
var gemm = kernel{name: "gemm", params: params("t *tile"), field: true, frame: 64, body: func(f *fn) {
	f.p("MOVQ t+0(FP), DI")
	f.p("MOVQ %d(DI), SI", tileA)
	f.p("MOVQ %d(DI), R8", tileARow)
	f.p("LEAQ (R8)(R8*2), R9")
	f.columnMask()
	f.heights()
	for h := f.mr; h >= 1; h-- {
		f.panel(h)
	}
	f.label("done")
}}

// columnMask sets K1 and K2, the masks of a sliver's two vectors. AVX2 has no registers to spare during the
// sum, so loadMasks sets its masks afterwards.
func (f *fn) columnMask() {
	if !f.avx512 {
		return
	}
	f.p("MOVQ %d(DI), CX", tileCols)
	f.p("MOVQ $-1, R15")
	f.p("SHLXQ CX, R15, R15")
	f.p("NOTQ R15")
	f.p("KMOVW R15, K1")
	f.p("SHRQ $16, R15")
	f.p("KMOVW R15, K2")
}

// heights divides the rows into panels. The frame holds the number of panels left, how many of them have one
// row more than the rest, and the height of the rest. heights then jumps to the code of one panel after
// another.
func (f *fn) heights() {
	f.p("MOVQ %d(DI), AX", tileC)
	f.p("MOVQ AX, c-32(SP)")
	f.p("MOVQ %d(DI), AX", tileCRow)
	f.p("MOVQ AX, crow-64(SP)")
	f.p("MOVQ %d(DI), AX", tileAhead)
	f.p("MOVQ AX, ahead-40(SP)")
	f.p("MOVQ %d(DI), AX", tileRows)
	f.p("TESTQ AX, AX")
	f.p("JLE done")
	f.p("ADDQ $%d, AX", f.mr-1)
	f.p("XORQ DX, DX")
	f.p("MOVQ $%d, CX", f.mr)
	f.p("DIVQ CX")
	f.p("MOVQ AX, CX") // number of panels
	f.p("MOVQ AX, panels-8(SP)")
	f.p("MOVQ %d(DI), AX", tileRows)
	f.p("XORQ DX, DX")
	f.p("DIVQ CX")
	f.p("MOVQ DX, tall-16(SP)") // number of panels with an additional row
	f.p("MOVQ AX, height-24(SP)")
	f.label("next")
	f.p("SUBQ $1, panels-8(SP)")
	f.p("JLT done")
	f.p("MOVQ height-24(SP), AX")
	f.p("SUBQ $1, tall-16(SP)")
	f.p("JLT short")
	f.p("ADDQ $1, AX")
	f.label("short")
	for h := f.mr; h >= 2; h-- {
		f.p("CMPQ AX, $%d", h)
		f.p("JEQ panel%d", h)
	}
	f.p("JMP panel1")
}

// aOperand returns the address of row i of the panel.
func aOperand(i int) string {
	base := []string{"R10", "R11", "R12", "R13"}[i/4]
	return []string{"(" + base + ")", "(" + base + ")(R8*1)", "(" + base + ")(R8*2)", "(" + base + ")(R9*1)"}[i%4]
}

// bases returns the registers that hold row addresses, for a panel of h rows.
func bases(h int) []string { return []string{"R10", "R11", "R12", "R13"}[:(h+3)/4] }

// acc returns the register that accumulates vector j of row i of c.
func (f *fn) acc(i, j int) string { return f.v(4 + 2*i + j) }

// panel computes the product for h rows. With AVX-512 the sum is over floats or over pairs of bfloat16; the code
// before and after the sum is the same.
func (f *fn) panel(h int) {
	bases := bases(h)
	f.label(fmt.Sprintf("panel%d", h))
	f.p("MOVQ %d(DI), BX", tileB)
	f.p("MOVQ %d(DI), DX", tileBK)
	f.p("MOVQ %d(DI), CX", tileK)
	f.p("MOVQ c-32(SP), AX")
	f.p("MOVQ SI, R10")
	for i := range bases[1:] {
		f.p("LEAQ (%s)(R8*4), %s", bases[i], bases[i+1])
	}
	for i := range h {
		for j := range 2 {
			f.p("VXORPS %s, %s, %s", f.acc(i, j), f.acc(i, j), f.acc(i, j))
		}
	}
	f.p("MOVQ AX, fetch-56(SP)")
	f.p("MOVQ $%d, unfetched-48(SP)", h)
	f.p("MOVQ %d(DI), R15", tileAK)
	f.p("MOVQ %d(DI), R14", tileAheadBase)
	f.p("MOVQ ahead-40(SP), AX")
	end := fmt.Sprintf("end%d", h)
	if f.avx512 {
		f.p("CMPQ %d(DI), $0", tilePairs)
		f.p("JNE firstPair%d", h)
	}
	f.sums(h, "", f.fma, end)
	if f.avx512 {
		f.p("JMP %s", end)
		f.sums(h, "Pair", f.dotPairs, end)
	}
	f.label(end)
	f.p("MOVQ t+0(FP), DI")
	f.p("CMPQ AX, %d(DI)", tileAheadEnd)
	f.p("CMOVQGT %d(DI), AX", tileAheadEnd)
	f.p("MOVQ AX, ahead-40(SP)")
	f.p("MOVQ c-32(SP), AX")
	f.p("MOVQ %d(DI), R15", tileCRow)
	f.bias(h)
	f.writeBack(h)
	f.p("MOVQ AX, c-32(SP)")
	f.p("IMUL3Q $%d, R8, CX", h)
	f.p("ADDQ CX, SI")
	f.p("JMP next")
}

// sums adds up the products of h rows over k, two steps at a time, and then jumps to end or falls through.
// Every second step prefetches a line for later calls; the first h of these steps also prefetch a row of c
// each. Prefetching all rows of c at once would fill the buffers needed for loads from a. multiply adds a*b to d,
// for vectors of words.
func (f *fn) sums(h int, words string, multiply func(d, a, b string), end string) {
	name := func(label string) string { return fmt.Sprintf("%s%s%d", label, words, h) }
	first, loop, odd := name("first"), name("sum"), name("odd")
	step := func(ahead bool) {
		b0, b1 := f.v(0), f.v(1)
		f.p("VMOVUPS (BX), %s", b0)
		f.p("VMOVUPS %d(BX), %s", 4*f.lanes, b1)
		for i := range h {
			a := f.v(2 + i%2)
			f.p("VBROADCASTSS %s, %s", aOperand(i), a)
			multiply(f.acc(i, 0), a, b0)
			multiply(f.acc(i, 1), a, b1)
		}
		if ahead {
			f.p("MOVQ (AX), DI")
			f.p("PREFETCHT1 (R14)(DI*1)")
			f.p("ADDQ $8, AX")
		}
		f.p("ADDQ DX, BX")
		for _, r := range bases(h) {
			f.p("ADDQ R15, %s", r)
		}
	}
	f.label(first)
	f.p("SUBQ $2, CX")
	f.p("JLT %s", odd)
	f.p("MOVQ fetch-56(SP), DI")
	f.p("PREFETCHT0 (DI)")
	f.p("PREFETCHT0 %d(DI)", 8*f.lanes-1)
	f.p("ADDQ crow-64(SP), DI")
	f.p("MOVQ DI, fetch-56(SP)")
	step(true)
	step(false)
	f.p("SUBQ $1, unfetched-48(SP)")
	f.p("JGT %s", first)
	f.p("SUBQ $2, CX")
	f.p("JLT %s", odd)
	f.p("PCALIGN $32")
	f.label(loop)
	step(true)
	step(false)
	f.p("SUBQ $2, CX")
	f.p("JGE %s", loop)
	f.label(odd)
	f.p("ADDQ $2, CX")
	f.p("JLE %s", end)
	step(false)
}

// loadColumns and storeColumns move both vectors of a row; if masked is set, only the lanes of existing
// columns.
func (f *fn) loadColumns(mem string, r [2]string, masked bool) {
	second := fmt.Sprintf("%d%s", 4*f.lanes, mem)
	switch {
	case !masked:
		f.p("VMOVUPS %s, %s", mem, r[0])
		f.p("VMOVUPS %s, %s", second, r[1])
	case f.avx512:
		f.p("VMOVUPS.Z %s, K1, %s", mem, r[0])
		f.p("VMOVUPS.Z %s, K2, %s", second, r[1])
	default:
		f.p("VMASKMOVPS %s, %s, %s", mem, f.v(2), r[0])
		f.p("VMASKMOVPS %s, %s, %s", second, f.v(3), r[1])
	}
}

func (f *fn) storeColumns(mem string, r [2]string, masked bool) {
	second := fmt.Sprintf("%d%s", 4*f.lanes, mem)
	switch {
	case !masked:
		f.p("VMOVUPS %s, %s", r[0], mem)
		f.p("VMOVUPS %s, %s", r[1], second)
	case f.avx512:
		f.p("VMOVUPS %s, K1, %s", r[0], mem)
		f.p("VMOVUPS %s, K2, %s", r[1], second)
	default:
		f.p("VMASKMOVPS %s, %s, %s", r[0], f.v(2), mem)
		f.p("VMASKMOVPS %s, %s, %s", r[1], f.v(3), second)
	}
}

// loadMasks computes AVX2's masks from the number of columns. They take the registers that held broadcast
// elements of a.
func (f *fn) loadMasks() {
	if f.avx512 {
		return
	}
	f.p("MOVQ %d(DI), CX", tileCols)
	f.p("LEAQ tail<>(SB), BX")
	for j := range 2 {
		// The first vector has min(8, cols) lanes, the second max(0, cols-8).
		f.p("MOVQ CX, DX")
		if j == 1 {
			f.p("SUBQ $8, DX")
			f.p("MOVQ $0, R10")
			f.p("CMOVQLT R10, DX")
		}
		f.p("MOVQ $8, R10")
		f.p("CMPQ DX, R10")
		f.p("CMOVQGT R10, DX")
		f.p("NEGQ DX")
		f.p("VMOVUPS 32(BX)(DX*4), %s", f.v(2+j))
	}
}

// bias adds the bias to every row, if there is one.
func (f *fn) bias(h int) {
	none := fmt.Sprintf("nobias%d", h)
	f.p("MOVQ %d(DI), CX", tileBias)
	f.p("TESTQ CX, CX")
	f.p("JEQ %s", none)
	f.p("MOVQ CX, R11")
	f.loadMasks()
	f.loadColumns("(R11)", [2]string{f.v(0), f.v(1)}, true)
	for i := range h {
		for j := range 2 {
			f.add(f.acc(i, j), f.acc(i, j), f.v(j))
		}
	}
	f.label(none)
}

// writeBack adds the panel to c or overwrites c, and leaves AX pointing to the row after the panel.
func (f *fn) writeBack(h int) {
	next, masked, over := fmt.Sprintf("written%d", h), fmt.Sprintf("masked%d", h), fmt.Sprintf("over%d", h)
	f.p("CMPQ %d(DI), $%d", tileCols, 2*f.lanes)
	f.p("JNE %s", masked)
	f.rows(h, over, next, false)
	f.label(masked)
	f.loadMasks()
	f.rows(h, over+"m", next, true)
	f.label(next)
}

func (f *fn) rows(h int, over, next string, masked bool) {
	f.p("CMPQ %d(DI), $0", tileAccumulate)
	f.p("JEQ %s", over)
	for i := range h {
		f.loadColumns("(AX)", [2]string{f.v(0), f.v(1)}, masked)
		for j := range 2 {
			f.add(f.acc(i, j), f.acc(i, j), f.v(j))
		}
		f.storeColumns("(AX)", [2]string{f.acc(i, 0), f.acc(i, 1)}, masked)
		f.p("ADDQ R15, AX")
	}
	f.p("JMP %s", next)
	f.label(over)
	for i := range h {
		f.storeColumns("(AX)", [2]string{f.acc(i, 0), f.acc(i, 1)}, masked)
		f.p("ADDQ R15, AX")
	}
	f.p("JMP %s", next)
}

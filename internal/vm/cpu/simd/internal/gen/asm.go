package main

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"strings"
)

// set is an instruction set.
type set struct {
	name, title, suffix string
	reg                 string // prefix of its registers
	lanes, mr           int
	avx512              bool
	kernels             []kernel
}

var sets = []set{
	{name: "avx2", title: "AVX2 and FMA", suffix: "AVX2", reg: "Y", lanes: 8, mr: 6, kernels: floatKernels},
	{name: "avx512", title: "AVX-512", suffix: "AVX512", reg: "Z", lanes: 16, mr: 14, avx512: true, kernels: slices.Concat(floatKernels, pairKernels)},
}

var floatKernels = append([]kernel{gemm}, vectorKernels...)

// param is a parameter: a slice, an int, a float32 or a pointer.
type param struct{ name, typ string }

func (p param) size() int {
	switch p.typ {
	case "float32":
		return 4
	case "int", "*tile", "*adamwConstants":
		return 8
	}
	return 24
}

// kernel describes one function. The field results is written like the results of a Go function, all float32.
// If field is set, the kernel goes into the kernel table under its name.
type kernel struct {
	name    string
	params  []param
	results string
	field   bool
	frame   int
	body    func(f *fn)
}

// params parses a list of parameters, such as "dst, x []float32; alpha float32".
func params(text string) (list []param) {
	for group := range strings.SplitSeq(text, ";") {
		names, typ, _ := cutLast(strings.TrimSpace(group))
		for name := range strings.SplitSeq(names, ",") {
			list = append(list, param{strings.TrimSpace(name), typ})
		}
	}
	return list
}

func cutLast(s string) (before, after string, found bool) {
	i := strings.LastIndex(s, " ")
	return s[:i], s[i+1:], true
}

func (k kernel) signature() string {
	var parts []string
	for _, p := range k.params {
		parts = append(parts, p.name+" "+p.typ)
	}
	return strings.Join(parts, ", ")
}

// offset returns the place of a parameter in the frame; resultOffset returns that of the first result.
func (k kernel) offset(name string) int {
	at := 0
	for _, p := range k.params {
		align := min(p.size(), 8)
		at = (at + align - 1) &^ (align - 1)
		if p.name == name {
			return at
		}
		at += p.size()
	}
	panic("internal: no parameter " + name + " in " + k.name)
}

func (k kernel) resultOffset() int {
	last := k.params[len(k.params)-1]
	return (k.offset(last.name) + last.size() + 7) &^ 7
}

// fn emits one kernel for one instruction set.
type fn struct {
	set
	kernel    kernel
	text      bytes.Buffer
	constants map[string]bool // every constant that the file needs
	vectors   int             // number of vector registers in use
	ints      int             // number of integer registers in use
	labels    int
	masked    bool // the code being emitted handles the tail
}

var intRegisters = []string{"DI", "SI", "DX", "BX", "R8", "R9", "R10", "R11", "R12", "R13", "R15"}

func (f *fn) emit() {
	last := f.kernel.params[len(f.kernel.params)-1]
	size := f.kernel.offset(last.name) + last.size()
	if f.kernel.results != "" {
		size = f.kernel.resultOffset() + 4*(1+strings.Count(f.kernel.results, ","))
	}
	fmt.Fprintf(&f.text, "\n// func %s%s(%s) %s\nTEXT ·%s%s(SB), NOSPLIT, $%d-%d\n", f.kernel.name, f.suffix,
		f.kernel.signature(), f.kernel.results, f.kernel.name, f.suffix, f.kernel.frame, size)
	f.kernel.body(f)
	f.p("VZEROUPPER")
	f.p("RET")
}

func (f *fn) p(format string, args ...any) { fmt.Fprintf(&f.text, "\t"+format+"\n", args...) }

func (f *fn) label(l string) { fmt.Fprintf(&f.text, "%s:\n", l) }

// fresh returns a new label.
func (f *fn) fresh(what string) string {
	f.labels++
	return fmt.Sprintf("%s%d", what, f.labels)
}

// vec allocates a vector register; integer allocates an integer register.
func (f *fn) vec() string {
	f.vectors++
	limit := 32
	if !f.avx512 {
		limit = 14 // the last two hold the tail's mask and a temporary
	}
	if f.vectors > limit {
		panic("internal: out of vector registers in " + f.kernel.name)
	}
	return f.v(f.vectors - 1)
}

func (f *fn) v(i int) string { return fmt.Sprintf("%s%d", f.reg, i) }

func (f *fn) integer() string {
	f.ints++
	return intRegisters[f.ints-1]
}

// slice loads the address of a slice into a register; length loads its length into the given register.
func (f *fn) slice(name string) string {
	r := f.integer()
	f.p("MOVQ %s_base+%d(FP), %s", name, f.kernel.offset(name), r)
	return r
}

func (f *fn) length(name, reg string) {
	f.p("MOVQ %s_len+%d(FP), %s", name, f.kernel.offset(name)+8, reg)
}

// word loads an int or a pointer.
func (f *fn) word(name string) string {
	r := f.integer()
	f.p("MOVQ %s+%d(FP), %s", name, f.kernel.offset(name), r)
	return r
}

// scalar broadcasts a float32 parameter.
func (f *fn) scalar(name string) string {
	r := f.vec()
	f.p("VBROADCASTSS %s+%d(FP), %s", name, f.kernel.offset(name), r)
	return r
}

// zero returns a register of zeros; constant returns a register filled with a constant.
func (f *fn) zero() string {
	r := f.vec()
	f.p("VXORPS %s, %s, %s", low(r), low(r), low(r))
	return r
}

func (f *fn) constant(v float64) string {
	r := f.vec()
	f.p("VMOVUPS %s, %s", f.c(v), r)
	return r
}

// low returns the name of a register's lowest 128 bits; half returns that of the lower half of an AVX-512
// register.
func low(r string) string { return "X" + r[1:] }

func half(r string) string { return "Y" + r[1:] }

// c returns a memory operand that holds a constant in every lane.
func (f *fn) c(v float64) string { return f.word32(math.Float32bits(float32(v))) }

func (f *fn) word32(bits uint32) string {
	name := fmt.Sprintf("c%08x", bits)
	f.constants[name] = true
	return name + "<>(SB)"
}

func writeConstants(w *bytes.Buffer, constants map[string]bool) {
	names := []string{}
	for name := range constants {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		w.WriteByte('\n')
		for i := range 8 {
			fmt.Fprintf(w, "DATA %s<>+%d(SB)/8, $0x%s%s\n", name, 8*i, name[1:], name[1:])
		}
		fmt.Fprintf(w, "GLOBL %s<>(SB), RODATA|NOPTR, $64\n", name)
	}
	// AVX2's tail mask is a window into this table: ones, then zeros.
	fmt.Fprintf(w, "\n")
	for i := range 8 {
		bits := "ffffffffffffffff"
		if i >= 4 {
			bits = "0"
		}
		fmt.Fprintf(w, "DATA tail<>+%d(SB)/8, $0x%s\n", 8*i, bits)
	}
	fmt.Fprintf(w, "GLOBL tail<>(SB), RODATA|NOPTR, $64\n")
}

// Arithmetic, destination first. The last source may be in memory.

func (f *fn) add(d, a, b string) { f.p("VADDPS %s, %s, %s", b, a, d) }
func (f *fn) sub(d, a, b string) { f.p("VSUBPS %s, %s, %s", b, a, d) }
func (f *fn) mul(d, a, b string) { f.p("VMULPS %s, %s, %s", b, a, d) }
func (f *fn) div(d, a, b string) { f.p("VDIVPS %s, %s, %s", b, a, d) }
func (f *fn) max(d, a, b string) { f.p("VMAXPS %s, %s, %s", b, a, d) }
func (f *fn) mov(d, a string)    { f.p("VMOVUPS %s, %s", a, d) }

// fma computes d += a*b, fnma d -= a*b, fms d = a*d - b, horner d = d*a + b.
func (f *fn) fma(d, a, b string)    { f.p("VFMADD231PS %s, %s, %s", b, a, d) }
func (f *fn) fnma(d, a, b string)   { f.p("VFNMADD231PS %s, %s, %s", b, a, d) }
func (f *fn) fms(d, a, b string)    { f.p("VFMSUB213PS %s, %s, %s", b, a, d) }
func (f *fn) horner(d, a, b string) { f.p("VFMADD213PS %s, %s, %s", b, a, d) }

// The mask of a tail is in K1 or, for AVX2, in this register. tailMask sets it.
const maskAVX2 = "Y15"

// load reads a vector from memory, with zeros in the lanes past the end of the operand; store writes all other
// lanes of a vector.
func (f *fn) load(d, mem string) {
	switch {
	case !f.masked:
		f.p("VMOVUPS %s, %s", mem, d)
	case f.avx512:
		f.p("VMOVUPS.Z %s, K1, %s", mem, d)
	default:
		f.p("VMASKMOVPS %s, %s, %s", mem, maskAVX2, d)
	}
}

func (f *fn) store(mem, s string) {
	switch {
	case !f.masked:
		f.p("VMOVUPS %s, %s", s, mem)
	case f.avx512:
		f.p("VMOVUPS %s, K1, %s", s, mem)
	default:
		f.p("VMASKMOVPS %s, %s, %s", s, maskAVX2, mem)
	}
}

// clearTail zeroes the lanes past the end.
func (f *fn) clearTail(r string) {
	switch {
	case !f.masked:
	case f.avx512:
		f.p("VMOVAPS.Z %s, K1, %s", r, r)
	default:
		f.p("VANDPS %s, %s, %s", maskAVX2, r, r)
	}
}

// tailFill puts a constant into the lanes past the end.
func (f *fn) tailFill(r string, bits uint32) {
	switch {
	case !f.masked:
	case f.avx512:
		f.p("KNOTW K1, K2")
		f.p("VMOVUPS %s, K2, %s", f.word32(bits), r)
	default:
		t := f.v(14)
		f.p("VMOVUPS %s, %s", f.word32(bits), t)
		f.p("VBLENDVPS %s, %s, %s, %s", maskAVX2, r, t, r)
	}
}

// tailMask sets the mask to the first n lanes. n is a register; its value is less than the number of lanes and is
// preserved. R15 is clobbered.
func (f *fn) tailMask(n string) {
	if f.avx512 {
		f.p("MOVQ $-1, R15")
		f.p("SHLXQ %s, R15, R15", n)
		f.p("NOTQ R15")
		f.p("KMOVW R15, K1")
		return
	}
	f.p("LEAQ tail<>(SB), R15")
	f.p("NEGQ %s", n)
	f.p("VMOVUPS 32(R15)(%s*4), %s", n, maskAVX2)
	f.p("NEGQ %s", n)
}

// each runs body over CX elements, a vector at a time; AX is the index of the first element. The last vector may
// be partial, so body is emitted once more, with a mask.
func (f *fn) each(body func()) {
	loop, tail, done := f.fresh("loop"), f.fresh("tail"), f.fresh("done")
	saved := f.vectors
	f.p("XORQ AX, AX")
	f.p("SUBQ $%d, CX", f.lanes)
	f.p("JLT %s", tail)
	f.p("PCALIGN $32")
	f.label(loop)
	body()
	f.p("ADDQ $%d, AX", f.lanes)
	f.p("SUBQ $%d, CX", f.lanes)
	f.p("JGE %s", loop)
	f.label(tail)
	f.p("ADDQ $%d, CX", f.lanes)
	f.p("JLE %s", done)
	f.tailMask("CX")
	f.vectors, f.masked = saved, true
	body()
	f.masked = false
	f.label(done)
}

// at returns the operand that starts at index AX of the slice at base.
func at(base string) string { return "(" + base + ")(AX*4)" }

// exp replaces x with its exponential. Below -87 the result is zero, never denormal.
func (f *fn) exp(x string, t, u, m string) {
	limit := f.c(-87)
	if f.avx512 {
		f.p("VCMPPS $5, %s, %s, K3", limit, x)
		f.mul(t, x, f.c(math.Log2E))
		f.p("VRNDSCALEPS $8, %s, %s", t, t)
		f.fnma(x, t, f.c(ln2High))
		f.fnma(x, t, f.c(math.Ln2-ln2High))
	} else {
		f.p("VCMPPS $5, %s, %s, %s", limit, x, m)
		f.mov(u, f.c(88.37))
		f.p("VMINPS %s, %s, %s", x, u, x) // keeps NaN
		f.mul(t, x, f.c(math.Log2E))
		f.p("VCVTPS2DQ %s, %s", t, t)
		f.p("VCVTDQ2PS %s, %s", t, u)
		f.fnma(x, u, f.c(ln2High))
		f.fnma(x, u, f.c(math.Ln2-ln2High))
		f.p("VPSLLD $23, %s, %s", t, t)
	}
	f.mov(u, f.c(expPoly[0]))
	for _, c := range expPoly[1:] {
		f.horner(u, x, f.c(c))
	}
	if f.avx512 {
		f.p("VSCALEFPS.Z %s, %s, K3, %s", t, u, x)
		return
	}
	f.p("VPADDD %s, %s, %s", t, u, u)
	f.p("VANDPS %s, %s, %s", m, u, x)
}

// ln2High has so few bits that its products with exponents are exact; expPoly approximates exp on [-ln2/2, ln2/2].
const ln2High = 0.693359375

var expPoly = []float64{1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1, 1}

// reduce combines all lanes of a register into its lowest, by add or max; t is clobbered.
func (f *fn) reduce(op func(d, a, b string), r, t string) {
	if f.avx512 {
		f.p("VEXTRACTF64X4 $1, %s, %s", r, half(t))
		op(half(r), half(r), half(t))
	}
	f.p("VEXTRACTF128 $1, %s, %s", half(r), low(t))
	op(low(r), low(r), low(t))
	f.p("VPERMILPS $0x4e, %s, %s", low(r), low(t))
	op(low(r), low(r), low(t))
	f.p("VPERMILPS $0xb1, %s, %s", low(r), low(t))
	op(low(r), low(r), low(t))
}

// result stores the lowest lane of r as the kernel's result with the given index.
func (f *fn) result(name string, index int, r string) {
	f.p("VMOVSS %s, %s+%d(FP)", low(r), name, f.kernel.resultOffset()+4*index)
}

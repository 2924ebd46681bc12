package simd

import (
	"math"
	"unsafe"
)

const portableNR = 8

// portable defines every kernel. Products are rounded explicitly, so that no compiler fuses them with the
// following addition.
var portable = kernelSet{
	name: "portable", mr: 8, nr: portableNR,
	gemm:           gemmPortable,
	copy2D:         copy2DPortable,
	widen2D:        widen2DPortable,
	narrow2D:       narrow2DPortable,
	packT:          packTPortable,
	add:            addPortable,
	mul:            mulPortable,
	axpy:           axpyPortable,
	scale:          scalePortable,
	gelu:           geluPortable,
	geluBackward:   geluBackwardPortable,
	swiglu:         swigluPortable,
	swigluBackward: swigluBackwardPortable,
	max:            maxPortable,
	sumExp:         sumExpPortable,
	expScale:       expScalePortable,
	sum:            sumPortable,
	dot:            dotPortable,
	sumSquares:     sumSquaresPortable,
	norm:           normPortable,
	normSums:       normSumsPortable,
	normBackward:   normBackwardPortable,
	columnSums:     columnSumsPortable,
	rotate:         rotatePortable,
	adamw:          adamwPortable,
	softmaxStrip:   softmaxStripPortable,
	softmaxGrads:   softmaxGradsPortable,
}

func exp32(x float32) float32 { return float32(math.Exp(float64(x))) }

// gemmPortable is the micro-kernel, one row of eight columns at a time.
func gemmPortable(t *tile) {
	for i := range t.rows {
		aRow := unsafe.Add(t.a, i*t.aRow)
		var s0, s1, s2, s3, s4, s5, s6, s7 float32
		for k := range t.k {
			a := *(*float32)(unsafe.Add(aRow, k*t.aK))
			b := (*[8]float32)(unsafe.Add(t.b, k*t.bK))
			s0 += float32(a * b[0])
			s1 += float32(a * b[1])
			s2 += float32(a * b[2])
			s3 += float32(a * b[3])
			s4 += float32(a * b[4])
			s5 += float32(a * b[5])
			s6 += float32(a * b[6])
			s7 += float32(a * b[7])
		}
		s := [8]float32{s0, s1, s2, s3, s4, s5, s6, s7}
		c := unsafe.Slice((*float32)(unsafe.Add(t.c, i*t.cRow)), t.cols)
		if t.bias != nil {
			for j, b := range unsafe.Slice((*float32)(t.bias), t.cols) {
				s[j] += b
			}
		}
		for j := range c {
			if t.accumulate != 0 {
				s[j] += c[j]
			}
			c[j] = s[j]
		}
	}
}

func copy2DPortable(dst []float32, dstLd int, src []float32, srcLd, rows, cols int) {
	for i := range rows {
		copy(dst[i*dstLd:i*dstLd+cols], src[i*srcLd:])
	}
}

func widen2DPortable(dst []float32, dstLd int, src []uint16, srcLd, rows, cols int) {
	for i := range rows {
		d := dst[i*dstLd : i*dstLd+cols]
		for j, s := range src[i*srcLd : i*srcLd+cols] {
			d[j] = FromBF16(s)
		}
	}
}

func narrow2DPortable(dst []uint16, dstLd int, src []float32, srcLd, rows, cols int) {
	for i := range rows {
		d := dst[i*dstLd : i*dstLd+cols]
		for j, s := range src[i*srcLd : i*srcLd+cols] {
			d[j] = ToBF16(s)
		}
	}
}

func packTPortable(dst, src []float32, srcLd, rows, cols int) {
	for r := range rows {
		for c, s := range src[r*srcLd : r*srcLd+cols] {
			dst[c*portableNR+r] = s
		}
	}
}

func addPortable(dst, a, b []float32) {
	for i := range dst {
		dst[i] = a[i] + b[i]
	}
}

func mulPortable(dst, a, b []float32) {
	for i := range dst {
		dst[i] = a[i] * b[i]
	}
}

func axpyPortable(dst, x []float32, alpha float32) {
	for i := range dst {
		dst[i] += float32(alpha * x[i])
	}
}

func scalePortable(dst, x []float32, alpha float32) {
	for i := range dst {
		dst[i] = alpha * x[i]
	}
}

// The tanh approximation of gelu is x*sigmoid(2u) with u = c*(x + a*x^3).
const (
	geluC = 0.7978845608028654 // sqrt(2/pi)
	geluA = 0.044715
)

func geluPortable(dst, x []float32) {
	for i := range dst {
		v := float64(x[i])
		dst[i] = float32(v / (1 + math.Exp(-2*geluC*(v+geluA*v*v*v))))
	}
}

func geluBackwardPortable(dx, x, dy []float32) {
	for i := range dx {
		v := float64(x[i])
		s := 1 / (1 + math.Exp(-2*geluC*(v+geluA*v*v*v)))
		dx[i] = float32(float64(dy[i]) * (s + v*s*(1-s)*2*geluC*(1+3*geluA*v*v)))
	}
}

func swigluPortable(dst, gate, up []float32) {
	for i := range dst {
		g := float64(gate[i])
		dst[i] = float32(g / (1 + math.Exp(-g)) * float64(up[i]))
	}
}

func swigluBackwardPortable(dgate, dup, gate, up, dy []float32) {
	for i := range dgate {
		g, u, d := float64(gate[i]), float64(up[i]), float64(dy[i])
		s := 1 / (1 + math.Exp(-g))
		dgate[i] = float32(d * u * (s + g*s*(1-s)))
		dup[i] = float32(d * g * s)
	}
}

func maxPortable(x []float32) float32 {
	m := float32(math.Inf(-1))
	for _, v := range x {
		m = max(m, v)
	}
	return m
}

func sumExpPortable(x []float32, max float32) float32 {
	var s float64
	for _, v := range x {
		s += float64(exp32(v - max))
	}
	return float32(s)
}

func expScalePortable(dst, x []float32, max, c float32) {
	for i := range dst {
		dst[i] = exp32(x[i]-max) * c
	}
}

func sumPortable(x []float32) float32 {
	var s float64
	for _, v := range x {
		s += float64(v)
	}
	return float32(s)
}

func dotPortable(a, b []float32) float32 {
	var s float64
	for i := range a {
		s += float64(a[i]) * float64(b[i])
	}
	return float32(s)
}

func sumSquaresPortable(x []float32, mean float32) float32 {
	var s float64
	for _, v := range x {
		d := float64(v - mean)
		s += float64(d * d)
	}
	return float32(s)
}

func normPortable(dst, x, gamma, beta []float32, mean, rstd float32) {
	for i := range dst {
		h := float32((x[i] - mean) * rstd)
		dst[i] = float32(h*gamma[i]) + beta[i]
	}
}

func normSumsPortable(dy, x, gamma []float32, mean, rstd float32) (sumG, sumGX float32) {
	var g, gx float64
	for i := range dy {
		h := float32((x[i] - mean) * rstd)
		d := float32(dy[i] * gamma[i])
		g += float64(d)
		gx += float64(float32(d * h))
	}
	return float32(g), float32(gx)
}

func normBackwardPortable(dx, dgamma, dbeta, dy, x, gamma []float32, mean, rstd, meanG, meanGX float32) {
	for i := range dx {
		h := float32((x[i] - mean) * rstd)
		d := dy[i]
		dgamma[i] += float32(d * h)
		dbeta[i] += d
		dx[i] = rstd * (float32(d*gamma[i]) - meanG - float32(h*meanGX))
	}
}

func columnSumsPortable(dst, x []float32, ld, rows int) {
	for i := range rows {
		for j, v := range x[i*ld : i*ld+len(dst)] {
			dst[j] += v
		}
	}
}

func rotatePortable(y, x, cos, sin []float32, sign float32) {
	half := len(cos)
	for i, c := range cos {
		s := float32(sin[i] * sign)
		a, b := x[i], x[half+i]
		y[i] = float32(a*c) - float32(b*s)
		y[half+i] = float32(a*s) + float32(b*c)
	}
}

func adamwPortable(w, m, v, g []float32, c *adamwConstants) {
	for i := range w {
		d := float32(g[i] * c.gradScale)
		m1 := float32(c.beta1*m[i]) + float32(c.oneMinusBeta1*d)
		v1 := float32(c.beta2*v[i]) + float32(float32(c.oneMinusBeta2*d)*d)
		m[i], v[i] = m1, v1
		root := float32(math.Sqrt(float64(float32(v1 * c.correction2))))
		w[i] = float32(w[i]*c.keep) - float32(float32(m1*c.step)/(root+c.eps))
	}
}

// softmaxStripPortable converts a block of scores, with a row for each key and a column for each of nr queries,
// to probabilities relative to the new running maximum, and updates the running sums. alpha receives the factor
// for earlier probabilities.
func softmaxStripPortable(s []float32, ld, rows int, rowMax, sum, alpha []float32, scale float32) {
	for j := range portableNR {
		m := rowMax[j]
		for i := range rows {
			m = max(m, float32(s[i*ld+j]*scale))
		}
		alpha[j] = exp32(rowMax[j] - m)
		rowMax[j] = m
		var t float32
		for i := range rows {
			e := exp32(float32(s[i*ld+j]*scale) - m)
			s[i*ld+j] = e
			t += e
		}
		sum[j] = float32(sum[j]*alpha[j]) + t
	}
}

// softmaxGradsPortable converts a block of scores, laid out as in softmaxStripPortable, to probabilities, and
// converts the gradients of these probabilities to gradients of the unscaled scores.
func softmaxGradsPortable(s, ds []float32, ld, rows int, lse, delta []float32, scale float32) {
	for i := range rows {
		for j := range portableNR {
			p := exp32(float32(s[i*ld+j]*scale) - lse[j])
			s[i*ld+j] = p
			ds[i*ld+j] = float32(p*(ds[i*ld+j]-delta[j])) * scale
		}
	}
}

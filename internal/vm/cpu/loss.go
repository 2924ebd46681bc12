package cpu

import (
	"math"

	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/ir"
)

var lossKernels = kernelTable{
	ir.CrossEntropyStats: crossEntropyStats,
	ir.CrossEntropy:      crossEntropy,
	ir.CrossEntropyGrad:  crossEntropyGrad,
}

func crossEntropyStats(b *binder) func() {
	stats, logits, labels := b.floats("stats"), b.mat("logits"), b.ints("labels")
	rows, _ := b.shape("logits")
	first, valid, pool := b.int("first"), b.int("valid"), b.device.pool
	both, softcap := b.scratch(2*rows), b.softcap(logits)
	return func() {
		logits := softcap.apply()
		largest, sum := both.floats()[:rows], both.floats()[rows:]
		simd.RowMax(pool, largest, logits, rows, valid)
		simd.RowSumExp(pool, sum, logits, largest, rows, valid)
		for i, label := range labels {
			own := float32(0)
			if at := int(label) - first; at >= 0 && at < valid {
				own = element(logits, i, at)
			}
			stats[3*i], stats[3*i+1], stats[3*i+2] = largest[i], sum[i], own
		}
	}
}

// softcap caps logits in scratch memory if the instruction requires it.
type softcap struct {
	pool       *simd.Pool
	from       simd.Mat
	rows, cols int
	limit      float32
	capped     scratch
}

func (b *binder) softcap(logits simd.Mat) *softcap {
	s := &softcap{pool: b.device.pool, from: logits, limit: float32(b.float("softcap"))}
	s.rows, s.cols = b.shape("logits")
	if s.limit > 0 {
		s.capped = b.scratch(s.rows * s.cols)
	}
	return s
}

// apply returns the logits, capped if the instruction requires it.
func (s *softcap) apply() simd.Mat {
	if s.limit == 0 {
		return s.from
	}
	to := simd.F32(s.capped.floats(), s.cols)
	simd.Map(s.pool, s.rows, s.cols, []simd.Mat{to}, []simd.Mat{s.from}, func(out, in [][]float32) {
		simd.Softcap(out[0], in[0], s.limit)
	})
	return to
}

// differentiate multiplies gradients of apply's result y by the slope of the cap, 1 - (y / limit)^2.
func (s *softcap) differentiate(grad simd.Mat) {
	if s.limit == 0 {
		return
	}
	capped := simd.F32(s.capped.floats(), s.cols)
	simd.Map(s.pool, s.rows, s.cols, []simd.Mat{grad}, []simd.Mat{grad, capped}, func(out, in [][]float32) {
		for i, y := range in[1] {
			y /= s.limit
			out[0][i] = in[0][i] * float32(1-float32(y*y))
		}
	})
}

func element(m simd.Mat, row, col int) float32 {
	if m.BF16 != nil {
		return simd.FromBF16(m.BF16[row*m.Ld+col])
	}
	return m.F32[row*m.Ld+col]
}

// join combines the statistics of a row over the parts of the vocabulary, in rank order.
func join(stats []float32, rows, row int) (largest, sum, label float64) {
	largest = math.Inf(-1)
	for at := 3 * row; at < len(stats); at += 3 * rows {
		largest = max(largest, float64(stats[at]))
	}
	for at := 3 * row; at < len(stats); at += 3 * rows {
		sum += float64(float64(stats[at+1]) * math.Exp(float64(stats[at])-largest))
		label += float64(stats[at+2])
	}
	return largest, sum, label
}

func crossEntropy(b *binder) func() {
	loss, losses, stats, scale := b.floats("loss"), b.floats("losses"), b.floats("stats"), b.labelScale()
	labels := b.ints("labels")
	rows := int(b.in.Arg("stats").Shape[1])
	return func() {
		total := 0.0
		for i := range rows {
			if labels != nil && labels[i] < 0 {
				if losses != nil {
					losses[i] = float32(math.NaN())
				}
				continue
			}
			largest, sum, label := join(stats, rows, i)
			own := largest + math.Log(sum) - label
			if losses != nil {
				losses[i] = float32(own)
			}
			total += own
		}
		loss[0] += float32(scale() * total)
	}
}

// labelScale returns a function that returns the factor by which every label's loss is multiplied. The factor can
// differ from step to step.
func (b *binder) labelScale() func() float64 {
	scale, weight := b.float("scale"), b.floats("weight")
	return func() float64 {
		if weight == nil {
			return scale
		}
		return scale * float64(weight[0])
	}
}

func crossEntropyGrad(b *binder) func() {
	dlogits, logits := b.mat("dlogits"), b.mat("logits")
	stats, labels := b.floats("stats"), b.ints("labels")
	rows, cols := b.shape("logits")
	first, valid, pool := b.int("first"), b.int("valid"), b.device.pool
	scale, same := b.labelScale(), b.same("dlogits", "logits")
	columns := b.scratch(3 * rows)
	// The logits are first stored in dlogits, where the gradient is then computed, unless storing them there would
	// round them.
	softcap := b.softcap(logits)
	work, detour := dlogits, dlogits.BF16 != nil && (logits.BF16 == nil || softcap.limit > 0)
	wide := b.scratch(0)
	if detour {
		wide = b.scratch(rows * cols)
	}
	return func() {
		all := columns.floats()
		largest, sum, target := all[:rows], all[rows:2*rows], vm.Int32s(vm.BytesOf(all[2*rows:]))
		for i, label := range labels {
			l, s, _ := join(stats, rows, i)
			largest[i], sum[i], target[i] = float32(l), float32(s), label-int32(first)
		}
		if detour {
			work = simd.F32(wide.floats(), cols)
		}
		if !same || softcap.limit > 0 {
			simd.Map(pool, rows, cols, []simd.Mat{work}, []simd.Mat{softcap.apply()}, copyRow)
		}
		simd.SoftmaxGradient(pool, work, largest, sum, target, float32(scale()), rows, valid)
		clearMasked(work, labels, cols)
		softcap.differentiate(work)
		clearPadding(work, rows, valid, cols)
		if detour {
			simd.Map(pool, rows, cols, []simd.Mat{dlogits}, []simd.Mat{work}, copyRow)
		}
	}
}

// clearMasked sets the rows of masked labels to zero.
func clearMasked(m simd.Mat, labels []int32, cols int) {
	for i, label := range labels {
		switch {
		case label >= 0:
		case m.BF16 != nil:
			clear(m.BF16[i*cols : (i+1)*cols])
		default:
			clear(m.F32[i*cols : (i+1)*cols])
		}
	}
}

func clearPadding(m simd.Mat, rows, valid, cols int) {
	for i := range rows {
		if m.BF16 != nil {
			clear(m.BF16[i*cols+valid : (i+1)*cols])
		} else {
			clear(m.F32[i*cols+valid : (i+1)*cols])
		}
	}
}

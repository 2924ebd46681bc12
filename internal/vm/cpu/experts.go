package cpu

import (
	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/ir"
)

// checkedKernels are kernels whose operands hold indices, which they check before they use them.
var checkedKernels = map[ir.Op]func(*binder) func() error{
	ir.Permute:                 permute,
	ir.PermuteGrad:             permuteGrad,
	ir.Unpermute:               unpermute,
	ir.UnpermuteGrad:           unpermuteGrad,
	ir.RouteGrad:               routeGrad,
	ir.ExpertLoad:              expertLoad,
	ir.MatmulGrouped:           matmulGrouped,
	ir.MatmulGroupedWeightGrad: matmulGroupedWeightGrad,
	ir.Activation:              activation,
	ir.ActivationGrad:          activationGrad,
	ir.GLU:                     glu,
	ir.GLUGrad:                 gluGrad,
}

var expertKernels = kernelTable{ir.Route: route, ir.ExpertCounts: expertCounts, ir.RouterLossGrad: routerLossGrad}

func (b *binder) router() simd.Router {
	_, experts := b.shape("logits")
	return simd.Router{
		Experts: experts, Top: b.int("top"), Scores: b.int("scores"), Renormalize: b.bool("renormalize"), Eps: b.float("eps"), Scale: b.float("scale"),
	}
}

func route(b *binder) func() {
	r, pool, correction := b.router(), b.device.pool, b.ifFloats("correction")
	r.Groups, r.TopGroups, r.First, r.Correction = b.int("groups"), b.int("top_groups"), b.int("first"), correction
	r.GroupsByMax = b.int("group_scores") == ir.GroupsByMax
	weights, experts, places, ends, logits := b.floats("weights"), b.ints("experts"), b.ints("places"), b.ints("ends"), b.mat("logits")
	rows, _ := b.shape("logits")
	return func() { r.Route(pool, weights, experts, places, ends, logits, rows) }
}

func routeGrad(b *binder) func() error {
	r, pool := b.router(), b.device.pool
	dlogits, dy, logits, experts := b.mat("dlogits"), b.floats("dy"), b.mat("logits"), b.ints("experts")
	rows, _ := b.shape("logits")
	return func() error {
		if err := simd.CheckExperts(experts, r.Experts); err != nil {
			return err
		}
		r.RouteGrad(pool, dlogits, dy, logits, experts, rows)
		return nil
	}
}

func expertCounts(b *binder) func() {
	counts, logits, top, accumulate, pool := b.floats("counts"), b.mat("logits"), b.int("top"), b.bool("accumulate"), b.device.pool
	rows, experts := b.shape("logits")
	return func() {
		if !accumulate {
			clear(counts)
		}
		simd.CountExperts(pool, counts, logits, top, experts, rows)
	}
}

func expertLoad(b *binder) func() error {
	load, experts, accumulate := b.floats("load"), b.ints("experts"), b.bool("accumulate")
	return func() error {
		if err := simd.CheckExperts(experts, len(load)); err != nil {
			return err
		}
		if !accumulate {
			clear(load)
		}
		for _, e := range experts {
			load[e]++
		}
		return nil
	}
}

func routerLossGrad(b *binder) func() {
	pool, dlogits, logits := b.device.pool, b.mat("dlogits"), b.mat("logits")
	rows, experts := b.shape("logits")
	l := simd.RouterLoss{Experts: experts, Sigmoid: b.int("scores") == ir.ScoresSigmoid, Z: b.float("z"), Balance: b.float("balance"), Counts: b.ifFloats("counts")}
	return func() { l.Grad(pool, dlogits, logits, rows) }
}

// placed returns a kernel that checks places, which are rows of an operand, before it runs.
func (b *binder) placed(sorted string, run func(pool *simd.Pool, places []int32)) func() error {
	places, pool := b.ints("places"), b.device.pool
	n, _ := b.shape(sorted)
	return func() error {
		if err := simd.CheckPlaces(places, n); err != nil {
			return err
		}
		run(pool, places)
		return nil
	}
}

func permute(b *binder) func() error {
	y, x := b.mat("y"), b.mat("x")
	rows, cols := b.shape("x")
	return b.placed("y", func(p *simd.Pool, places []int32) { simd.Permute(p, y, x, places, nil, rows, cols) })
}

func permuteGrad(b *binder) func() error {
	dx, dy := b.mat("dx"), b.mat("dy")
	rows, cols := b.shape("dx")
	return b.placed("dy", func(p *simd.Pool, places []int32) { simd.Unpermute(p, dx, dy, places, nil, rows, cols) })
}

func unpermute(b *binder) func() error {
	y, x, weights := b.mat("y"), b.mat("x"), b.floats("weights")
	rows, cols := b.shape("y")
	return b.placed("x", func(p *simd.Pool, places []int32) { simd.Unpermute(p, y, x, places, weights, rows, cols) })
}

func unpermuteGrad(b *binder) func() error {
	dx, dweights, dy, x, weights := b.mat("dx"), b.floats("dweights"), b.mat("dy"), b.mat("x"), b.floats("weights")
	rows, cols := b.shape("dy")
	return b.placed("x", func(p *simd.Pool, places []int32) {
		simd.Permute(p, dx, dy, places, weights, rows, cols)
		simd.UnpermuteWeightGrad(p, dweights, dy, x, places, rows, cols)
	})
}

// grouped returns a kernel that checks ends before it runs. There may be no matrices.
func (b *binder) grouped(rows int, matrices string, run func(pool *simd.Pool, g *simd.Grouped)) func() error {
	shape, pool := b.in.Arg(matrices).Shape, b.device.pool
	g := &simd.Grouped{Ends: b.ints("ends"), Inner: int(shape[1]), Outer: int(shape[2])}
	if b.has(matrices) {
		g.Matrices = b.mat(matrices)
	}
	return func() error {
		if err := simd.CheckEnds(g.Ends, rows); err != nil {
			return err
		}
		run(pool, g)
		return nil
	}
}

func matmulGrouped(b *binder) func() error {
	c, a, transposed, accumulate := b.mat("c"), b.mat("a"), b.bool("trans_b"), b.bool("accumulate")
	rows, _ := b.shape("a")
	var biases simd.Mat
	if b.has("bias") {
		biases = b.mat("bias")
	}
	return b.grouped(rows, "b", func(p *simd.Pool, g *simd.Grouped) {
		if transposed {
			g.TransposedProduct(p, c, a, accumulate)
			return
		}
		g.Product(p, c, a, biases, accumulate)
	})
}

func matmulGroupedWeightGrad(b *binder) func() error {
	db, dbias, dy, transposed, accumulate := b.ifFloats("db"), b.ifFloats("dbias"), b.mat("dy"), b.bool("trans_b"), b.bool("accumulate")
	add := b.bool("accumulate_bias")
	rows, _ := b.shape("dy")
	if !b.has("db") {
		return b.grouped(rows, "db", func(p *simd.Pool, g *simd.Grouped) { g.BiasGrad(p, dbias, dy, add) })
	}
	a := b.mat("a")
	return b.grouped(rows, "db", func(p *simd.Pool, g *simd.Grouped) {
		left, right := a, dy
		if transposed {
			left, right = dy, a
		}
		g.WeightGrad(p, db, left, right, accumulate)
		g.BiasGrad(p, dbias, dy, add)
	})
}

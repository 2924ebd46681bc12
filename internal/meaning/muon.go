package meaning

import (
	"math"

	"sppo.dev/ir"
)

// The numbers of Muon: iterations, their coefficients, what is added to the norm by which a matrix is divided before them (Jordan et al.
// 2024), and the scale of a step (Liu et al. 2025).
const (
	muonSteps           = 5
	muonA, muonB, muonC = 3.4445, -4.7750, 2.0315
	muonScale           = 0.2
	muonEps             = 1e-7
)

// muon adds the update of a matrix: its momentum, with all singular values brought close to 1. An iteration may multiply from either side,
// which gives the same matrix.
func (r *reference) muon(p *ir.Program, i int) {
	name, step := p.Tensors[i].Name, leafKey("the "+ir.ResultStep)
	operands := []value{r.states[ir.RoleMomentum][i], r.gradients[i], r.normed}
	x := r.plain("the step of "+name, ir.Nesterov, newKey("nesterov").int(0), operands...)
	r.after[ir.RoleMomentum][i] = r.plain("the updated momentum of "+name, ir.Nesterov, newKey("nesterov").int(1), operands...)
	squares := r.add("the squares of "+r.names[x], ir.SumSq, term{kind: overAll, need: box{full, {0, r.shapes[i][0]}, {0, r.shapes[i][1]}, full}}, newKey("sumsq"), x)
	x = r.plain("the normalized step of "+name, ir.Normalize, newKey("normalize"), x, squares)
	scale := muonScale * math.Sqrt(float64(max(r.shapes[i][0], r.shapes[i][1])))
	left, right := x, x
	for range muonSteps {
		left, right = r.iteration(name, left, r.shapes[i][0], r.shapes[i][1], true), r.iteration(name, right, r.shapes[i][1], r.shapes[i][0], false)
	}
	r.after[ir.RoleWeight][i] = r.plain("the updated weight of "+name, ir.SGD, sgdKey(0, scale, 1), r.weights[i], left, step, r.normed)
	r.other[i] = r.plain("the updated weight of "+name, ir.SGD, sgdKey(0, scale, 1), r.weights[i], right, step, r.normed)
}

// iteration adds a Newton-Schulz iteration of a matrix, whose side that is kept in products has a given size.
func (r *reference) iteration(name string, x value, side, other int64, fromLeft bool) value {
	k := productKey(!fromLeft, fromLeft)
	over := func(n int64) term { return term{kind: overCols, need: nowhere.by(features, interval{0, n})} }
	gram := r.add("the Gram matrix for "+name, ir.Matmul, over(other), k, x, x)
	squared := r.add("the square of the Gram matrix for "+name, ir.Matmul, over(side), productKey(false, false), gram, gram)
	poly := r.named("the polynomial for "+name, gram.times(muonB).plus(squared.times(muonC)))
	factors := []value{poly, x}
	if !fromLeft {
		factors = []value{x, poly}
	}
	return r.named("an iterate for "+name, x.times(muonA).plus(r.add("a product for "+name, ir.Matmul, over(side), productKey(false, false), factors...)))
}

package meaning

import (
	"slices"
	"strconv"

	"sppo.dev/ir"
)

// moe is an MLP with experts in the reference, with the values that its backward pass needs.
type moe struct {
	x, rows      value
	router       choice
	out          value // of the experts
	act, biases  value
	dense        *mlp   // of the shared expert
	shared       value  // its result before its gate
	sharedRouter choice // its gate
	gate, up     value  // of the experts
}

// choice is what a router makes of logits.
type choice struct {
	router  router
	logits  value
	results [4]value // of route
}

// mlp has the operands of an MLP's activation.
type mlp struct{ gate, up value }

// sparse reports whether the layer's MLP has experts.
func (l *layer) sparse() bool {
	if n := len(l.MLPs); n > 0 {
		return l.MLPs[l.number%n] == "sparse"
	}
	return l.Experts > 0
}

// route adds a router: its logits and the choice of experts.
func (l *layer) route(name string, x value, experts int64, biased bool, r router, g groups, more ...value) choice {
	c := choice{router: r, logits: l.linear(name+".w", name+".b", biased, x, int64(l.Hidden), experts)}
	for i, result := range []string{"weights", "experts", "places", "ends"} {
		c.results[i] = l.plain(l.name(name+"'s "+result), ir.Route, routeKey(r, g, int64(i)), append([]value{c.logits}, more...)...)
	}
	return c
}

// routeGradient adds the gradient of a router, given those of its weights, which may be added before or after they go through it.
func (l *layer) routeGradient(name string, c choice, dweights ...value) value {
	var sum, out value
	for _, d := range dweights {
		out = out.plus(l.plain("the gradient of "+l.name(name+"'s logits"), ir.RouteGrad, routeGradKey(c.router), d, c.logits, c.results[routeExperts]))
		sum = sum.plus(d)
	}
	if k := routeGradKey(c.router).of(sum, c.logits, c.results[routeExperts]).value(); len(dweights) > 1 {
		l.terms[k] = &term{name: "the gradient of " + l.name(name+"'s logits"), op: ir.RouteGrad, value: k, whole: &content{value: out}}
	}
	if name == "router" {
		out = out.plus(l.routerLoss(c))
	}
	return l.linearGradient(name+".w", l.named("the gradient of "+l.name(name+"'s logits"), out))
}

// routerLosses returns what multiplies the two losses of a router, by token: its z-loss, of which the gradient has a factor of two, and
// the balance of a sequence.
func (r *reference) routerLosses() (z, balance float64) {
	tokens := float64(r.batch * r.sequence)
	z, balance = 2*r.RouterZLoss/tokens, r.RouterAuxLoss*float64(r.Experts)/(float64(r.sequence)*tokens)
	if r.AuxLoss == "joint" {
		return z, balance / float64(len(r.loads)*len(r.loads))
	}
	return z, balance / float64(r.TopExperts)
}

// counted returns the number of tokens of each expert in a sequence.
func (l *layer) counted(c choice) value {
	t := term{kind: overTokens, need: nowhere.by(tokens, interval{0, l.sequence})}
	return l.add(l.name("the tokens of each expert"), ir.ExpertCounts, t, countsKey(c.router.top), c.logits)
}

// routerLoss adds the gradient of the losses of a router.
func (l *layer) routerLoss(c choice) value {
	z, balance := l.routerLosses()
	if z == 0 && balance == 0 {
		return value{}
	}
	operands, scores := []value{c.logits}, c.router.scores
	switch {
	case balance == 0:
	case l.AuxLoss == "joint":
		operands = append(operands, l.named("the tokens of each expert in all layers", l.joint))
	default:
		operands = append(operands, l.counted(c))
	}
	if l.AuxLoss == "joint" {
		scores = ir.ScoresSoftmax
	}
	return l.plain(l.name("the gradient of the router's losses"), ir.RouterLossGrad, routerLossKey(scores), operands...)
}

// unpermute adds the sum of the rows of each token, times the weights; unpermuteGradient returns the gradients of the rows and of
// the weights.
func (l *layer) unpermute(name string, c choice, x value) value {
	return l.plain(l.name(name), ir.Unpermute, unpermuteKey(c.router.top), x, c.results[routePlaces], c.results[routeWeights])
}

func (l *layer) unpermuteGradient(name string, c choice, x, dy value) (dx, dweights value) {
	dx = l.plain("the gradient of the rows of "+l.name(name), ir.UnpermuteGrad, unpermuteRowsKey(c.router.top), dy, c.results[routePlaces], c.results[routeWeights])
	return dx, l.plain("the gradient of the weights of "+l.name(name), ir.UnpermuteGrad, weightsGradKey(c.router.top), x, dy, c.results[routePlaces])
}

// grouped adds the product of rows and the matrices of experts, with n rows or, transposed, columns.
func (l *layer) grouped(name string, x, w value, transposed bool, n int64) value {
	return l.add(name, ir.MatmulGrouped, term{kind: overCols, need: nowhere.by(features, interval{0, n})}, groupedKey("matmul_grouped", transposed), x, w, l.moe.router.results[routeEnds])
}

// groupedGradient adds the gradients of the matrices of experts and of their biases, and returns that of the rows.
func (l *layer) groupedGradient(weight, bias string, x, dy value, transposed bool, cols int64) value {
	ends := l.moe.router.results[routeEnds]
	w := l.name(weight)
	l.gradient(w, l.overTokens(w+".grad", ir.MatmulGroupedWeightGrad, groupedKey("grouped_outer", transposed), x, dy, ends))
	if bias != "" {
		b := l.name(bias)
		l.gradient(b, l.overTokens(b+".grad", ir.MatmulGroupedWeightGrad, newKey("grouped_bias_grad"), dy, ends))
	}
	return l.grouped("the gradient through "+w, dy, l.weight(w), !transposed, cols)
}

// experts adds an MLP with experts.
func (l *layer) experts(x value) value {
	h, f, m := l.rowWidth(), int64(l.ExpertFFN), &moe{x: x}
	l.moe = m
	var correction []value
	if l.Correction {
		correction = []value{l.weight(l.name("router.correction"))}
	}
	m.router = l.route("router", x, int64(l.Experts), l.has("router"), l.modelRouter(), l.modelGroups(), correction...)
	l.loads[l.number] = l.overTokens("the load of the experts of layer "+strconv.Itoa(l.number), ir.ExpertLoad, newKey("expert_load"), m.router.results[routeExperts])
	if l.AuxLoss == "joint" {
		l.joint = l.joint.plus(l.counted(m.router))
	}
	own := x
	if l.LatentSize > 0 {
		own = l.linear("latent.w_in", "", false, x, int64(l.Hidden), h)
	}
	m.rows = l.plain(l.name("the rows of experts"), ir.Permute, permuteKey(m.router.router.top), own, m.router.results[routePlaces])
	into := func(suffix string) value {
		y := l.grouped(l.name("experts.w"+suffix)+" times its rows", m.rows, l.weight(l.name("experts.w"+suffix)), false, h)
		if l.has("experts") {
			y = y.plus(l.plain(l.name("experts.b"+suffix), ir.MatmulGrouped, newKey("grouped_bias"), l.weight(l.name("experts.b"+suffix)), m.router.results[routeEnds]))
		}
		return l.named(l.name("the result of experts.w"+suffix), y)
	}
	down := "w2"
	if l.Gated {
		down = "w_down"
		m.gate, m.up = into("_gate"), into("_up")
		m.act = l.ofRows(l.name("the glu of experts"), ir.GLU, newKey("glu").int(l.activation()), m.gate, m.up)
	} else {
		m.up = into("1")
		m.act = l.ofRows(l.name("the activation of experts"), ir.Activation, newKey("activation").int(l.activation()), m.up)
	}
	m.out = l.grouped(l.name("the result of experts"), m.act, l.weight(l.name("experts."+down)), true, f)
	y := l.unpermute("the sum of experts", m.router, m.out)
	if l.LatentSize > 0 {
		y = l.linear("latent.w_out", "", false, y, h, int64(l.Hidden))
	}
	if l.SharedFFN > 0 {
		y = y.plus(l.sharedExpert(x))
	}
	if l.has("experts") {
		m.biases = l.grouped(l.name("the biases of experts"), constantOne, l.weight(l.name(l.downBias("experts."))), false, 1)
		y = y.plus(l.unpermute("the sum of biases", m.router, m.biases))
	}
	return y
}

// ofRows returns an elementwise function of rows in the order of experts, which is needed for no more rows than there are.
func (l *layer) ofRows(name string, op ir.Op, k key, operands ...value) value {
	return l.add(name, op, term{ends: l.moe.router.results[routeEnds]}, k, operands...)
}

// rowWidth returns the width of the rows of experts.
func (l *layer) rowWidth() int64 {
	if l.LatentSize > 0 {
		return int64(l.LatentSize)
	}
	return int64(l.Hidden)
}

// modelRouter returns the model's router.
func (l *layer) modelRouter() router {
	r := router{top: int64(l.TopExperts), renormalize: l.NormTop, scale: l.RoutedScale}
	switch l.Scoring {
	case "sigmoid":
		r.scores, r.eps = ir.ScoresSigmoid, 1e-20
	case "softmax_topk":
		r.scores = ir.ScoresOfChosen
	}
	return r
}

// modelGroups returns the model's groups of experts.
func (l *layer) modelGroups() groups {
	g := groups{count: int64(l.ExpertGroups), top: int64(l.TopGroups)}
	if l.TopMethod == "group_limited_greedy" {
		g.scores = ir.GroupsByMax
	}
	return g
}

func (l *layer) sharedExpert(x value) value {
	m := l.moe
	m.shared, m.dense = l.dense("shared.", int64(l.SharedFFN), false, x)
	if !l.SharedGate {
		return m.shared
	}
	m.sharedRouter = l.route("shared.router", x, 1, false, router{top: 1, scores: ir.ScoresSigmoid}, groups{})
	return l.unpermute("the shared expert, times its gate", m.sharedRouter, m.shared)
}

func (l *layer) sharedExpertGradient(dy value) (dx value) {
	m := l.moe
	if l.SharedGate {
		var dweights value
		dy, dweights = l.unpermuteGradient("the shared expert", m.sharedRouter, m.shared, dy)
		dx = l.routeGradient("shared.router", m.sharedRouter, dweights)
	}
	return dx.plus(l.denseGradient("shared.", m.dense, dy))
}

// expertsGradient adds the gradients of an MLP with experts, and returns that of its operand.
func (l *layer) expertsGradient(dy value) value {
	h, f, m := l.rowWidth(), int64(l.ExpertFFN), l.moe
	dsum := dy
	if l.LatentSize > 0 {
		dsum = l.named("the gradient of "+l.name("the sum of experts"), l.linearGradient("latent.w_out", dy))
	}
	dout, dw := l.unpermuteGradient("the experts", m.router, m.out, dsum)
	dweights, suffix := []value{dw}, func(bias string) string { return "" }
	if l.has("experts") {
		suffix = func(bias string) string { return "experts." + bias }
		dbiases, dw := l.unpermuteGradient("the biases", m.router, m.biases, dy)
		dweights = append(dweights, dw)
		b := l.name(l.downBias("experts."))
		l.gradient(b, l.overTokens(b+".grad", ir.MatmulGroupedWeightGrad, groupedKey("grouped_outer", false), constantOne, dbiases, m.router.results[routeEnds]))
	}
	var drows value
	if l.Gated {
		dact := l.groupedGradient("experts.w_down", "", m.act, dout, true, h)
		gate := l.ofRows(l.name("d.gate of experts"), ir.GLUGrad, newKey("glu_grad_gate").int(l.activation()), dact, m.gate, m.up)
		up := l.ofRows(l.name("d.up of experts"), ir.GLUGrad, newKey("glu_grad_up").int(l.activation()), dact, m.gate, m.up)
		drows = l.groupedGradient("experts.w_up", suffix("b_up"), m.rows, up, false, f).plus(l.groupedGradient("experts.w_gate", suffix("b_gate"), m.rows, gate, false, f))
	} else {
		dact := l.groupedGradient("experts.w2", "", m.act, dout, true, h)
		up := l.ofRows(l.name("d.up of experts"), ir.ActivationGrad, newKey("activation_grad").int(l.activation()), dact, m.up)
		drows = l.groupedGradient("experts.w1", suffix("b1"), m.rows, up, false, f)
	}
	l.named(l.name("the gradient of the rows of experts"), drows)
	dx := l.plain(l.name("the gradient through the rows of experts"), ir.PermuteGrad, permuteGradKey(m.router.router.top), drows, m.router.results[routePlaces])
	if l.LatentSize > 0 {
		dx = l.linearGradient("latent.w_in", dx)
	}
	dx = dx.plus(l.routeGradient("router", m.router, slices.Clip(dweights)...))
	if l.SharedFFN > 0 {
		dx = dx.plus(l.sharedExpertGradient(dy))
	}
	return dx
}

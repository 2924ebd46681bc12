package naive

import (
	"fmt"
	"math"
	"slices"
)

// sparseTape holds the values of an MLP with experts that its backward pass needs.
type sparseTape struct {
	logits          []float64
	experts         []int     // of each row, Top of them
	weights         []float64 // of their results
	each            []expertTape
	shared          []float64 // the result of the shared expert, before its gate
	gate            []float64 // the gate of each row
	sGate, sUp, act []float64
	rows, sums      []float64 // what experts take, and the sum of what they return, if these are not as wide as the model
}

// expertTape holds the values of the rows that use an expert.
type expertTape struct {
	choices             []int // indices into experts and weights
	x, gate, up, act, y []float64
}

// sparse reports whether a layer's MLP has experts.
func (cfg *Config) sparse(layer int) bool {
	if n := len(cfg.MLPs); n > 0 {
		return cfg.MLPs[layer%n] == "sparse"
	}
	return cfg.Experts > 0
}

func (cfg *Config) router() Router {
	r := Router{
		Experts: cfg.Experts, Top: cfg.TopExperts, Scores: cfg.Scoring, Renormalize: cfg.NormTop, Scale: cfg.RoutedScale, Groups: cfg.ExpertGroups, TopGroups: cfg.TopGroups, Closest: cfg.Closest,
		GroupsByMax: cfg.TopMethod == "group_limited_greedy",
	}
	switch cfg.Scoring {
	case "softmax_topk":
		r.Scores = "chosen"
	case "sigmoid":
		r.Eps = 1e-20
	}
	return r
}

// sparseParameters lists the tensors of an MLP with experts. The rows of each matrix of an expert follow those of the expert before, and the
// last matrix is transposed.
func sparseParameters(cfg Config) (list []tensor) {
	e, h, f, width := cfg.Experts, cfg.Hidden, cfg.ExpertFFN, cfg.rowWidth()
	add := func(there bool, name string, shape ...int) {
		if there {
			list = append(list, tensor{name, shape})
		}
	}
	biased := slices.Contains(cfg.Bias, "experts")
	add(slices.Contains(cfg.Bias, "router"), "router.b", e)
	add(true, "router.w", h, e)
	add(cfg.Correction, "router.correction", e)
	gate, up, down := cfg.suffixes()
	for _, suffix := range []string{gate, up} {
		add(suffix != "", "experts.w"+suffix, e*width, f)
		add(suffix != "" && biased, "experts.b"+suffix, e, f)
	}
	add(true, "experts.w"+down, e*width, f)
	add(cfg.LatentSize > 0, "latent.w_in", h, width)
	add(cfg.LatentSize > 0, "latent.w_out", width, h)
	if s := cfg.SharedFFN; s > 0 {
		for _, m := range []struct {
			there   bool
			weight  string
			in, out int
		}{{cfg.Gated, "shared.w" + gate, h, s}, {true, "shared.w" + up, h, s}, {true, "shared.w" + down, s, h}} {
			add(m.there, m.weight, m.in, m.out)
			if a := cfg.lowered(m.weight); m.there && a != "" {
				add(!slices.ContainsFunc(list, func(t tensor) bool { return t.name == a }), a, m.in, cfg.AdapterRank)
				add(true, m.weight+".lora_b", cfg.AdapterRank, m.out)
			}
		}
		add(cfg.SharedGate, "shared.router.w", h, 1)
	}
	add(biased, "experts.b"+down, e, h)
	return list
}

// sparse returns the result of an MLP with experts.
func (m *model) sparse(l int, t *tape) []float64 {
	cfg, in, x := &m.cfg, fmt.Sprintf("layer.%d.", l), t.norm2
	s, width := &t.sparse, cfg.rowWidth()
	rows, r := len(m.inputs), cfg.router()
	r.Correction = m.w[in+"router.correction"]
	s.logits = MatMul(x, m.w[in+"router.w"], m.w[in+"router.b"], rows, cfg.Experts, cfg.Hidden, false, false)
	if counts := r.Counts(s.logits, m.batch); m.joint == nil {
		m.joint = counts
	} else {
		addTo(m.joint, counts)
	}
	s.experts = r.Choose(s.logits)
	s.weights = r.Weights(s.logits, s.experts)
	if s.rows = x; cfg.LatentSize > 0 {
		s.rows = m.linear(x, in+"latent.w_in", "")
	}
	y := make([]float64, len(s.rows))
	s.each = make([]expertTape, cfg.Experts)
	for e := range s.each {
		own := &s.each[e]
		for i, chosen := range s.experts {
			if chosen == e {
				own.choices = append(own.choices, i)
				own.x = append(own.x, s.rows[i/r.Top*width:][:width]...)
			}
		}
		m.expert(in, e, own)
		for n, i := range own.choices {
			for c := range width {
				y[i/r.Top*width+c] += s.weights[i] * own.y[n*width+c]
			}
		}
	}
	if s.sums = y; cfg.LatentSize > 0 {
		y = m.linear(y, in+"latent.w_out", "")
	}
	if cfg.SharedFFN > 0 {
		addTo(y, m.sharedExpert(in, x, s))
	}
	return y
}

// rowWidth returns the width of the rows that experts take and return.
func (cfg *Config) rowWidth() int {
	if cfg.LatentSize > 0 {
		return cfg.LatentSize
	}
	return cfg.Hidden
}

// expertPart returns an expert's part of a tensor, or nil if there is no such tensor.
func (m *model) expertPart(values Tensors, name string, e int) []float64 {
	all := values[name]
	size := len(all) / m.cfg.Experts
	if all == nil {
		return nil
	}
	return all[e*size:][:size]
}

// suffixes returns how the names of an expert's tensors end: of the gate, of the first map, and of the last.
func (cfg *Config) suffixes() (gate, up, down string) {
	if cfg.Gated {
		return "_gate", "_up", "_down"
	}
	return "", "1", "2"
}

func (m *model) expert(in string, e int, own *expertTape) {
	cfg, n := &m.cfg, len(own.choices)
	gate, up, down := cfg.suffixes()
	into := func(suffix string) []float64 {
		return MatMul(own.x, m.expertPart(m.w, in+"experts.w"+suffix, e), m.expertPart(m.w, in+"experts.b"+suffix, e), n, cfg.ExpertFFN, cfg.rowWidth(), false, false)
	}
	own.up = into(up)
	if cfg.Gated {
		own.gate = into(gate)
		own.act = GLU(cfg.Activation, own.gate, own.up)
	} else {
		own.act = Activate(cfg.Activation, own.up)
	}
	own.y = MatMul(own.act, m.expertPart(m.w, in+"experts.w"+down, e), m.expertPart(m.w, in+"experts.b"+down, e), n, cfg.rowWidth(), cfg.ExpertFFN, false, true)
}

// expertGrad adds the gradients of an expert's tensors, and returns that of its rows.
func (m *model) expertGrad(in string, e int, own *expertTape, dy []float64) (dx []float64) {
	cfg, n := &m.cfg, len(own.choices)
	h, f := cfg.rowWidth(), cfg.ExpertFFN
	gate, up, down := cfg.suffixes()
	addTo(m.expertPart(m.grads, in+"experts.w"+down, e), MatMul(dy, own.act, nil, h, f, n, true, false))
	if db := m.expertPart(m.grads, in+"experts.b"+down, e); db != nil {
		addTo(db, columnSums(dy, h))
	}
	dact := MatMul(dy, m.expertPart(m.w, in+"experts.w"+down, e), nil, n, f, h, false, false)
	dx = make([]float64, len(own.x))
	back := func(suffix string, d []float64) {
		addTo(m.expertPart(m.grads, in+"experts.w"+suffix, e), MatMul(own.x, d, nil, h, f, n, true, false))
		if db := m.expertPart(m.grads, in+"experts.b"+suffix, e); db != nil {
			addTo(db, columnSums(d, f))
		}
		addTo(dx, MatMul(d, m.expertPart(m.w, in+"experts.w"+suffix, e), nil, n, h, f, false, true))
	}
	if !cfg.Gated {
		back(up, ActivateGrad(cfg.Activation, own.up, dact))
		return dx
	}
	dgate, dup := GLUGrad(cfg.Activation, own.gate, own.up, dact)
	back(gate, dgate)
	back(up, dup)
	return dx
}

func (m *model) sharedExpert(in string, x []float64, s *sparseTape) []float64 {
	cfg := &m.cfg
	gate, up, down := cfg.suffixes()
	s.sUp = m.linear(x, in+"shared.w"+up, "")
	if cfg.Gated {
		s.sGate = m.linear(x, in+"shared.w"+gate, "")
		s.act = GLU(cfg.Activation, s.sGate, s.sUp)
	} else {
		s.act = Activate(cfg.Activation, s.sUp)
	}
	s.shared = m.linear(s.act, in+"shared.w"+down, "")
	if !cfg.SharedGate {
		return s.shared
	}
	s.gate = Router{Experts: 1, Top: 1, Scores: "sigmoid"}.scores(MatMul(x, m.w[in+"shared.router.w"], nil, len(m.inputs), 1, cfg.Hidden, false, false))
	y := slices.Clone(s.shared)
	for i := range y {
		y[i] *= s.gate[i/cfg.Hidden]
	}
	return y
}

func (m *model) sharedExpertGrad(in string, x, dy []float64, s *sparseTape) (dx []float64) {
	cfg, h := &m.cfg, m.cfg.Hidden
	gate, up, down := cfg.suffixes()
	dx, dy = make([]float64, len(x)), slices.Clone(dy)
	if cfg.SharedGate {
		dgate := make([]float64, len(s.gate))
		for i := range dy {
			dgate[i/h] += dy[i] * s.shared[i]
			dy[i] *= s.gate[i/h]
		}
		for r, g := range s.gate {
			dgate[r] *= g * (1 - g)
		}
		addTo(dx, m.linearGrad(x, dgate, in+"shared.router.w", ""))
	}
	dact := m.linearGrad(s.act, dy, in+"shared.w"+down, "")
	if !cfg.Gated {
		return add(dx, m.linearGrad(x, ActivateGrad(cfg.Activation, s.sUp, dact), in+"shared.w"+up, ""))
	}
	dgate, dup := GLUGrad(cfg.Activation, s.sGate, s.sUp, dact)
	addTo(dx, m.linearGrad(x, dgate, in+"shared.w"+gate, ""))
	return add(dx, m.linearGrad(x, dup, in+"shared.w"+up, ""))
}

// sparseGrad adds the gradients of an MLP with experts, and returns that of its input.
func (m *model) sparseGrad(l int, t *tape, dy []float64) (dx []float64) {
	cfg, in, x, width := &m.cfg, fmt.Sprintf("layer.%d.", l), t.norm2, m.cfg.rowWidth()
	s, r, dsums := &t.sparse, cfg.router(), dy
	if cfg.LatentSize > 0 {
		dsums = m.linearGrad(s.sums, dy, in+"latent.w_out", "")
	}
	dx = make([]float64, len(s.rows))
	dweights := make([]float64, len(s.weights))
	for e := range s.each {
		own := &s.each[e]
		if load := m.grads[in+"router.correction"]; load != nil {
			load[e] += float64(len(own.choices))
		}
		var d []float64
		for n, i := range own.choices {
			for c := range width {
				dweights[i] += dsums[i/r.Top*width+c] * own.y[n*width+c]
				d = append(d, s.weights[i]*dsums[i/r.Top*width+c])
			}
		}
		back := m.expertGrad(in, e, own, d)
		for n, i := range own.choices {
			addTo(dx[i/r.Top*width:][:width], back[n*width:][:width])
		}
	}
	if cfg.LatentSize > 0 {
		dx = m.linearGrad(x, dx, in+"latent.w_in", "")
	}
	dlogits := r.weightsGrad(s.logits, s.experts, dweights)
	addTo(dlogits, m.routerLossGrad(s.logits))
	addTo(dx, m.linearGrad(x, dlogits, in+"router.w", in+"router.b"))
	if cfg.SharedFFN > 0 {
		addTo(dx, m.sharedExpertGrad(in, x, dy, s))
	}
	return dx
}

// routerLosses returns the losses of a layer's router: RouterZLoss times the mean of the squares of the logarithms of the sums of
// exponentials and, as a mean over sequences, RouterAuxLoss times the sum over experts of f P: P is an expert's mean probability, and f the
// number of tokens that have it among the most probable ones, divided by the number if all experts had equally many.
func (m *model) routerLosses(logits []float64) float64 {
	r, rows := m.cfg.router(), float64(len(m.inputs))
	r, counts, balance := m.balance(r, logits)
	return r.Losses(logits, counts, 2*m.cfg.RouterZLoss/rows, balance/rows)
}

// balance returns the counts of the loss that balances experts and, times the number of rows, its coefficient, with a router that has its
// scores. The loss of all layers together is that of transformers for one sequence.
func (m *model) balance(r Router, logits []float64) (of Router, counts []float64, coefficient float64) {
	if r.Scores == "chosen" || m.cfg.AuxLoss == "joint" {
		r.Scores = "softmax"
	}
	each := m.cfg.RouterAuxLoss * float64(r.Experts) / (float64(len(m.inputs)) / float64(m.batch))
	if m.cfg.AuxLoss != "joint" {
		return r, r.Counts(logits, m.batch), each / float64(r.Top)
	}
	layers := 0.0
	for l := range m.cfg.Layers {
		if m.cfg.sparse(l) {
			layers++
		}
	}
	return r, m.joint, each / (layers * layers)
}

// routerLossGrad returns the gradient of routerLosses with respect to the logits. The counts are constants.
func (m *model) routerLossGrad(logits []float64) []float64 {
	cfg, rows := &m.cfg, float64(len(m.inputs))
	d := make([]float64, len(logits))
	r, counts, balance := m.balance(cfg.router(), logits)
	for row := range len(m.inputs) {
		own, out := logits[row*r.Experts:][:r.Experts], d[row*r.Experts:][:r.Experts]
		lse, mean, sum := logOfSumOfExp(own), 0.0, 0.0
		scores, used := r.scores(own), counts[row%m.batch*r.Experts:][:r.Experts]
		for e, s := range scores {
			sum, mean = sum+s, mean+s*used[e]
		}
		for e, s := range scores {
			slope := s
			if r.Scores == "sigmoid" {
				slope *= 1 - s
			}
			out[e] = (2*cfg.RouterZLoss*lse*math.Exp(own[e]-lse) + balance*(used[e]-mean/sum)*slope/sum) / rows
		}
	}
	return d
}

// weightsGrad returns the gradient of Weights with respect to the logits.
func (r Router) weightsGrad(logits []float64, experts []int, dweights []float64) []float64 {
	dlogits := make([]float64, len(logits))
	for row := range len(logits) / r.Experts {
		d, own := dlogits[row*r.Experts:][:r.Experts], experts[row*r.Top:][:r.Top]
		r.rowGrad(d, logits[row*r.Experts:][:r.Experts], own, dweights[row*r.Top:][:r.Top])
	}
	return dlogits
}

func (r Router) rowGrad(d, logits []float64, own []int, dweights []float64) {
	plain := r
	plain.Renormalize, plain.Scale = false, 0
	scores, ds, sum, mean := plain.Weights(logits, own), make([]float64, len(own)), r.Eps, 0.0
	for _, s := range scores {
		sum += s
	}
	for k, s := range scores {
		mean += dweights[k] * s / sum
	}
	for k := range ds {
		if ds[k] = dweights[k]; r.Renormalize {
			ds[k] = (dweights[k] - mean) / sum
		}
		if r.Scale != 0 {
			ds[k] *= r.Scale
		}
	}
	inner := 0.0
	for k, s := range scores {
		inner += ds[k] * s
	}
	if r.Scores == "softmax" {
		for e, p := range r.scores(logits) {
			d[e] -= p * inner
		}
	}
	for k, e := range own {
		switch s := scores[k]; r.Scores {
		case "softmax":
			d[e] += s * ds[k]
		case "chosen":
			d[e] += s * (ds[k] - inner)
		case "sigmoid":
			d[e] += s * (1 - s) * ds[k]
		}
	}
}

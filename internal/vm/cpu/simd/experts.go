package simd

import (
	"fmt"
	"math"
	"sync"
)

// Router is how Route turns logits into scores, choices and weights. Its fields are those of the opcode.
type Router struct {
	Experts, Top      int
	Scores            int // RouterSoftmax, RouterSigmoid or RouterOfChosen
	Renormalize       bool
	Eps, Scale        float64 // Scale 0 means 1
	Groups, TopGroups int     // Groups 0: one group
	GroupsByMax       bool    // the score of a group is its highest key, not the sum of the two highest
	First             int     // the first expert of ends
	Correction        []float32
}

// Values of Router.Scores.
const (
	RouterSoftmax = iota
	RouterSigmoid
	RouterOfChosen
)

// factor returns the factor of the weights.
func (r *Router) factor() float64 {
	if r.Scale == 0 {
		return 1
	}
	return r.Scale
}

// Route chooses the experts of each row of logits. It sets their weights, their numbers, the places of the rows once they are in the
// order of experts, and where the rows of each expert of ends end. A row has no place, -1, if its expert is not among these.
func (r *Router) Route(p *Pool, weights []float32, experts, places, ends []int32, logits Mat, rows int) {
	p.Split(rows, rowGrain(16*r.Experts), func(lo, hi int) {
		c := choice{Router: r, scores: make([]float64, r.Experts), keys: make([]float64, r.Experts)}
		buf := make([]float32, r.Experts)
		for i := lo; i < hi; i++ {
			c.row(logits.row(i, r.Experts, buf), experts[i*r.Top:][:r.Top], weights[i*r.Top:][:r.Top])
		}
	})
	clear(ends)
	for _, e := range experts {
		if e -= int32(r.First); e >= 0 && int(e) < len(ends) {
			ends[e]++
		}
	}
	next, at := make([]int32, len(ends)), int32(0)
	for e, n := range ends {
		next[e], at = at, at+n
		ends[e] = at
	}
	for i, e := range experts {
		places[i] = -1
		if e -= int32(r.First); e >= 0 && int(e) < len(ends) {
			places[i] = next[e]
			next[e]++
		}
	}
}

// choice has room for the scores of one row, and for the keys by which experts are chosen.
type choice struct {
	*Router
	scores, keys []float64
}

func (c *choice) row(logits []float32, experts []int32, weights []float32) {
	c.score(logits)
	copy(c.keys, c.scores)
	for e, x := range c.Correction {
		c.keys[e] += float64(x)
	}
	if c.Groups > 1 {
		c.dropGroups()
	}
	for k := range experts {
		e := largest(c.keys)
		experts[k], c.keys[e] = int32(e), math.Inf(-1)
	}
	of := c.scores
	if c.Scores == RouterOfChosen {
		softmax(c.keys[:len(experts)], len(experts), func(k int) float64 { return c.scores[experts[k]] })
		of = nil
	}
	sum := 0.0
	for k, e := range experts {
		if of != nil {
			c.keys[k] = of[e]
		}
		sum += c.keys[k]
	}
	factor := c.factor()
	if c.Renormalize {
		factor /= sum + c.Eps
	}
	for k := range weights {
		weights[k] = float32(c.keys[k] * factor)
	}
}

// score computes the scores of all experts. Those of RouterOfChosen are the logits.
func (c *choice) score(logits []float32) {
	switch c.Scores {
	case RouterSoftmax:
		softmax(c.scores, len(logits), func(e int) float64 { return float64(logits[e]) })
	case RouterSigmoid:
		for e, x := range logits {
			c.scores[e] = 1 / (1 + math.Exp(-float64(x)))
		}
	default:
		for e, x := range logits {
			c.scores[e] = float64(x)
		}
	}
}

// softmax sets the first n numbers to the softmax of others. The two may be the same.
func softmax(out []float64, n int, of func(int) float64) {
	most, sum := math.Inf(-1), 0.0
	for i := range n {
		most = max(most, of(i))
	}
	for i := range n {
		out[i] = math.Exp(of(i) - most)
		sum += out[i]
	}
	for i := range n {
		out[i] /= sum
	}
}

// dropGroups excludes the experts of all groups but those with the highest scores.
func (c *choice) dropGroups() {
	size, sums := c.Experts/c.Groups, make([]float64, c.Groups)
	for g := range sums {
		first, second := math.Inf(-1), math.Inf(-1)
		for _, x := range c.keys[g*size:][:size] {
			if x > first {
				first, second = x, first
			} else if x > second {
				second = x
			}
		}
		if sums[g] = first; !c.GroupsByMax {
			sums[g] += second
		}
	}
	for range c.TopGroups {
		sums[largest(sums)] = math.NaN() // chosen
	}
	for g, sum := range sums {
		if sum == sum {
			for i := range size {
				c.keys[g*size+i] = math.Inf(-1)
			}
		}
	}
}

// largest returns the index of the largest number, the lower one on a tie. It is not the index of a NaN, unless there is nothing else.
func largest(x []float64) int {
	best := 0
	for i := range x {
		if x[i] > x[best] || x[best] != x[best] {
			best = i
		}
	}
	return best
}

// RouteGrad computes the gradients of the logits from those of the weights.
func (r *Router) RouteGrad(p *Pool, dlogits Mat, dweights []float32, logits Mat, experts []int32, rows int) {
	p.Split(rows, rowGrain(8*r.Experts), func(lo, hi int) {
		c := choice{Router: r, scores: make([]float64, r.Experts), keys: make([]float64, r.Top)}
		buf, out := make([]float32, r.Experts), make([]float32, r.Experts)
		for i := lo; i < hi; i++ {
			row := dlogits.target(i, r.Experts, out)
			c.rowGrad(row, dweights[i*r.Top:][:r.Top], logits.row(i, r.Experts, buf), experts[i*r.Top:][:r.Top])
			dlogits.done(i, row)
		}
	})
}

func (c *choice) rowGrad(dlogits, dweights, logits []float32, experts []int32) {
	c.score(logits)
	scores := c.keys // of the chosen experts
	for k, e := range experts {
		scores[k] = c.scores[e]
	}
	if c.Scores == RouterOfChosen {
		softmax(scores, len(scores), func(k int) float64 { return scores[k] })
	}
	sum, mean := 0.0, 0.0
	for k, s := range scores {
		sum += s
		mean += s * float64(dweights[k])
	}
	// grad is the gradient of the score of the k-th chosen expert.
	grad := func(k int) float64 { return c.factor() * float64(dweights[k]) }
	if c.Renormalize {
		sum += c.Eps
		grad = func(k int) float64 { return c.factor() * (float64(dweights[k]) - mean/sum) / sum }
	}
	clear(dlogits)
	total := 0.0
	for k, s := range scores {
		total += s * grad(k)
	}
	if c.Scores == RouterSoftmax {
		for e, s := range c.scores {
			dlogits[e] = float32(-s * total)
		}
	}
	for k, e := range experts {
		switch s := scores[k]; c.Scores {
		case RouterSoftmax:
			dlogits[e] = float32(s * (grad(k) - total))
		case RouterSigmoid:
			dlogits[e] = float32(s * (1 - s) * grad(k))
		default:
			dlogits[e] = float32(s * (grad(k) - total))
		}
	}
}

// CountExperts adds to counts, [sequences, experts], for each row the experts with the highest logits. Row r belongs to sequence r
// modulo the number of sequences.
func CountExperts(p *Pool, counts []float32, logits Mat, top, experts, rows int) {
	var mu sync.Mutex
	p.Split(rows, rowGrain(2*top*experts), func(lo, hi int) {
		own, keys, buf := make([]float32, len(counts)), make([]float64, experts), make([]float32, experts)
		for i := lo; i < hi; i++ {
			for e, x := range logits.row(i, experts, buf) {
				keys[e] = float64(x)
			}
			of := own[i%(len(counts)/experts)*experts:]
			for range top {
				e := largest(keys)
				of[e]++
				keys[e] = math.NaN() // counted
			}
		}
		mu.Lock()
		defer mu.Unlock()
		for i, n := range own { // whole numbers, so the order does not matter
			counts[i] += n
		}
	})
}

// RouterLoss is the gradient of a router's losses. Its fields are those of the opcode.
type RouterLoss struct {
	Experts    int
	Sigmoid    bool // probabilities are sigmoids divided by their sum, not a softmax
	Z, Balance float64
	Counts     []float32 // [sequences, Experts], or empty
}

// Grad computes the gradients of the logits.
func (l *RouterLoss) Grad(p *Pool, dlogits, logits Mat, rows int) {
	p.Split(rows, rowGrain(16*l.Experts), func(lo, hi int) {
		scores, buf, out := make([]float64, l.Experts), make([]float32, l.Experts), make([]float32, l.Experts)
		for i := lo; i < hi; i++ {
			row := dlogits.target(i, l.Experts, out)
			var counts []float32
			if n := len(l.Counts) / l.Experts; n > 0 {
				counts = l.Counts[i%n*l.Experts:][:l.Experts]
			}
			l.row(row, logits.row(i, l.Experts, buf), counts, scores)
			dlogits.done(i, row)
		}
	})
}

func (l *RouterLoss) row(dlogits, logits, counts []float32, scores []float64) {
	most, sum := math.Inf(-1), 0.0
	for _, x := range logits {
		most = max(most, float64(x))
	}
	for e, x := range logits {
		scores[e] = math.Exp(float64(x) - most)
		sum += scores[e]
	}
	z := l.Z * (most + math.Log(sum)) / sum
	for e, s := range scores {
		dlogits[e] = float32(z * s)
	}
	if len(counts) == 0 {
		return
	}
	if l.Sigmoid {
		sum = 0
		for e, x := range logits {
			scores[e] = 1 / (1 + math.Exp(-float64(x)))
			sum += scores[e]
		}
	}
	mean := 0.0
	for e, s := range scores {
		mean += s / sum * float64(counts[e])
	}
	for e, s := range scores {
		d := l.Balance * s / sum * (float64(counts[e]) - mean)
		if l.Sigmoid {
			d *= 1 - s
		}
		dlogits[e] += float32(d)
	}
}

// CheckExperts returns an error if a number is not that of an expert.
func CheckExperts(experts []int32, count int) error {
	for i, e := range experts {
		if e < 0 || int(e) >= count {
			return fmt.Errorf("experts[%d] is %d, of %d experts", i, e, count)
		}
	}
	return nil
}

// CheckPlaces returns an error unless the numbers are those of different rows, or -1.
func CheckPlaces(places []int32, rows int) error {
	seen := make([]bool, rows)
	for i, at := range places {
		if at == -1 {
			continue
		}
		if at < 0 || int(at) >= rows || seen[at] {
			return fmt.Errorf("places[%d] is %d: outside the %d rows, or a second time", i, at, rows)
		}
		seen[at] = true
	}
	return nil
}

// CheckEnds returns an error unless ends divides rows among experts.
func CheckEnds(ends []int32, rows int) error {
	from := int32(0)
	for e, end := range ends {
		if end < from {
			return fmt.Errorf("ends[%d] is %d, less than %d before it", e, end, from)
		}
		from = end
	}
	if int(from) > rows {
		return fmt.Errorf("the last of ends is %d, but there are only %d rows", from, rows)
	}
	return nil
}

// Permute copies each row of x to the places of its token, multiplied by weights unless these are nil.
func Permute(p *Pool, y, x Mat, places []int32, weights []float32, rows, cols int) {
	top := len(places) / rows
	p.Split(rows, rowGrain(top*cols), func(lo, hi int) {
		in, out := make([]float32, cols), make([]float32, cols)
		for i := lo; i < hi; i++ {
			from := x.row(i, cols, in)
			for k, at := range places[i*top:][:top] {
				if at < 0 {
					continue
				}
				to := y.target(int(at), cols, out)
				copy(to, from)
				if weights != nil {
					active.scale(to, from, weights[i*top+k])
				}
				y.done(int(at), to)
			}
		}
	})
}

// Unpermute adds up the rows of x at the places of each token, each times its weight unless weights is nil.
func Unpermute(p *Pool, y, x Mat, places []int32, weights []float32, rows, cols int) {
	top := len(places) / rows
	p.Split(rows, rowGrain(top*cols), func(lo, hi int) {
		in, sum := make([]float32, cols), make([]float32, cols)
		for i := lo; i < hi; i++ {
			clear(sum)
			for k, at := range places[i*top:][:top] {
				if at < 0 {
					continue
				}
				weight := float32(1)
				if weights != nil {
					weight = weights[i*top+k]
				}
				active.axpy(sum, x.row(int(at), cols, in), weight)
			}
			y.at(i, 0).store(sum, cols, 1, cols)
		}
	})
}

// UnpermuteWeightGrad sets the gradient of each weight of Unpermute: the inner product of the token's row of dy and the row of x at the
// place.
func UnpermuteWeightGrad(p *Pool, dweights []float32, dy, x Mat, places []int32, rows, cols int) {
	top := len(places) / rows
	p.Split(rows, rowGrain(top*cols), func(lo, hi int) {
		a, b := make([]float32, cols), make([]float32, cols)
		for i := lo; i < hi; i++ {
			row := dy.row(i, cols, a)
			for k, at := range places[i*top:][:top] {
				if dweights[i*top+k] = 0; at >= 0 {
					dweights[i*top+k] = active.dot(row, x.row(int(at), cols, b))
				}
			}
		}
	})
}

// Grouped multiplies rows that are in the order of experts by the matrices of the experts, of which there is one for each entry of ends.
type Grouped struct {
	Ends         []int32
	Inner, Outer int // rows and columns of a matrix
	Matrices     Mat // one below the other
}

// each visits the experts with their ranges of rows.
func (g *Grouped) each(visit func(expert, row, rows int)) {
	row := 0
	for e, end := range g.Ends {
		visit(e, row, int(end)-row)
		row = int(end)
	}
}

// Product sets c to the product of a and the experts' matrices, plus their biases unless there are none, or adds it to c.
func (g *Grouped) Product(p *Pool, c, a Mat, biases Mat, accumulate bool) {
	buf := make([]float32, g.Outer)
	g.each(func(e, row, rows int) {
		if rows == 0 {
			return
		}
		var bias []float32
		if biases.Ld > 0 {
			bias = biases.row(e, g.Outer, buf)
		}
		GemmMat(p, false, false, rows, g.Outer, g.Inner, a.From(row), g.Matrices.From(e*g.Inner), accumulate, bias, c.From(row))
	})
}

// TransposedProduct sets c to the product of a and the transposes of the experts' matrices, or adds it to c.
func (g *Grouped) TransposedProduct(p *Pool, c, a Mat, accumulate bool) {
	g.each(func(e, row, rows int) {
		if rows > 0 {
			GemmMat(p, false, true, rows, g.Inner, g.Outer, a.From(row), g.Matrices.From(e*g.Inner), accumulate, nil, c.From(row))
		}
	})
}

// WeightGrad sets the gradients of the experts' matrices to the products of the transposed rows of a and the rows of b, or adds to
// them.
func (g *Grouped) WeightGrad(p *Pool, db []float32, a, b Mat, accumulate bool) {
	g.each(func(e, row, rows int) {
		matrix := db[e*g.Inner*g.Outer:][:g.Inner*g.Outer]
		switch {
		case rows > 0:
			GemmMat(p, true, false, g.Inner, g.Outer, rows, a.From(row), b.From(row), accumulate, nil, F32(matrix, g.Outer))
		case !accumulate:
			clear(matrix)
		}
	})
}

// BiasGrad sets the gradients of the experts' biases, unless there are none, or adds to them.
func (g *Grouped) BiasGrad(p *Pool, dbias []float32, dy Mat, accumulate bool) {
	cols := len(dbias) / len(g.Ends)
	g.each(func(e, row, rows int) {
		bias := dbias[e*cols:][:cols]
		switch {
		case cols == 0:
		case rows > 0:
			ColumnSums(p, bias, dy.From(row), rows, cols, accumulate)
		case !accumulate:
			clear(bias)
		}
	})
}

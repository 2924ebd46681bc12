package naive

import (
	"math"
	"slices"
)

// Router is how tokens choose their experts: the attributes of the opcode route. Scores is softmax, sigmoid or chosen; the last is the
// softmax of the logits of only those experts that are chosen.
type Router struct {
	Experts, Top      int
	Scores            string
	Renormalize       bool
	Eps, Scale        float64
	Groups, TopGroups int
	GroupsByMax       bool      // the score of a group is the highest of its experts, not the sum of the two highest
	Correction        []float64 // by expert; nil: none

	Closest *float64 // if not nil, lowered to the least difference by which an expert or a group was chosen
}

// chosenBy lowers Closest to the difference by which the first of the sorted numbers, as many as were chosen, exceed the others.
func (r Router) chosenBy(numbers []float64, order []int, chosen int) {
	if r.Closest != nil && chosen < len(order) {
		*r.Closest = min(*r.Closest, numbers[order[chosen-1]]-numbers[order[chosen]])
	}
}

// scores returns the scores of all experts of a row. Those of chosen are the logits.
func (r Router) scores(logits []float64) []float64 {
	out := slices.Clone(logits)
	switch r.Scores {
	case "softmax":
		lse := logOfSumOfExp(logits)
		for e := range out {
			out[e] = math.Exp(logits[e] - lse)
		}
	case "sigmoid":
		for e := range out {
			out[e] = 1 / (1 + math.Exp(-logits[e]))
		}
	}
	return out
}

// Choose returns the experts of each row, by descending score.
func (r Router) Choose(logits []float64) (experts []int) {
	for at := 0; at < len(logits); at += r.Experts {
		scores := r.scores(logits[at : at+r.Experts])
		for e, c := range r.Correction {
			scores[e] += c
		}
		allowed := r.groups(scores)
		order := make([]int, 0, r.Experts)
		for e := range scores {
			if r.Groups == 0 || slices.Contains(allowed, e/(r.Experts/r.Groups)) {
				order = append(order, e)
			}
		}
		slices.SortStableFunc(order, func(a, b int) int { return compare(scores[b], scores[a]) })
		r.chosenBy(scores, order, r.Top)
		experts = append(experts, order[:r.Top]...)
	}
	return experts
}

// groups returns the groups with the highest scores.
func (r Router) groups(scores []float64) []int {
	if r.Groups == 0 {
		return nil
	}
	size, sums, order := r.Experts/r.Groups, make([]float64, r.Groups), make([]int, r.Groups)
	for g := range sums {
		own := slices.Clone(scores[g*size : (g+1)*size])
		slices.Sort(own)
		if sums[g], order[g] = own[size-1], g; !r.GroupsByMax {
			sums[g] += own[size-2]
		}
	}
	slices.SortStableFunc(order, func(a, b int) int { return compare(sums[b], sums[a]) })
	r.chosenBy(sums, order, r.TopGroups)
	return order[:r.TopGroups]
}

func compare(a, b float64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// Weights returns the weights of the results of given experts, [rows, Top].
func (r Router) Weights(logits []float64, experts []int) []float64 {
	weights := make([]float64, len(experts))
	for i := range experts {
		row := i / r.Top
		weights[i] = r.scores(logits[row*r.Experts : (row+1)*r.Experts])[experts[i]]
	}
	for at := 0; at < len(weights); at += r.Top {
		own, sum := weights[at:at+r.Top], 0.0
		if r.Scores == "chosen" {
			lse := logOfSumOfExp(own)
			for k := range own {
				own[k] = math.Exp(own[k] - lse)
			}
		}
		for _, w := range own {
			sum += w
		}
		for k := range own {
			if r.Renormalize {
				own[k] /= sum + r.Eps
			}
			if r.Scale != 0 {
				own[k] *= r.Scale
			}
		}
	}
	return weights
}

// Counts returns, for each of a batch's sequences, how many of its rows have an expert among those with the highest logits. Row r is one of
// sequence r modulo batch.
func (r Router) Counts(logits []float64, batch int) []float64 {
	counts := make([]float64, batch*r.Experts)
	for i, e := range (Router{Experts: r.Experts, Top: r.Top, Closest: r.Closest}).Choose(logits) {
		counts[i/r.Top%batch*r.Experts+e]++
	}
	return counts
}

// Losses returns z/2 times the sum over rows of the square of the logarithm of the sum of exponentials, plus balance times the sum over rows
// of counts times probabilities.
func (r Router) Losses(logits, counts []float64, z, balance float64) (loss float64) {
	for row := range len(logits) / r.Experts {
		own := logits[row*r.Experts:][:r.Experts]
		lse := logOfSumOfExp(own)
		loss += z / 2 * lse * lse
		if balance == 0 {
			continue
		}
		probabilities, sum := r.scores(own), 0.0
		if r.Scores == "chosen" {
			probabilities = Router{Experts: r.Experts, Scores: "softmax"}.scores(own)
		}
		for _, p := range probabilities {
			sum += p
		}
		for e, p := range probabilities {
			loss += balance * counts[row%(len(counts)/r.Experts)*r.Experts+e] * p / sum
		}
	}
	return loss
}

// Places returns where the rows of each choice are once all rows of the experts from first on are in the order of experts, or -1, and
// where the rows of each of these experts end.
func Places(experts []int, first, count int) (places, ends []int) {
	places = slices.Repeat([]int{-1}, len(experts))
	next := 0
	for e := range count {
		for i, chosen := range experts {
			if chosen == first+e {
				places[i] = next
				next++
			}
		}
		ends = append(ends, next)
	}
	return places, ends
}

// Permute copies each row of x to its places in y; Unpermute returns the sums of the rows at these places, times the weights.
func Permute(y, x []float64, places []int, top int) []float64 {
	cols := len(x) / (len(places) / top)
	y = slices.Clone(y)
	for i, at := range places {
		if at >= 0 {
			copy(y[at*cols:(at+1)*cols], x[i/top*cols:])
		}
	}
	return y
}

// Unpermute is described above.
func Unpermute(x []float64, cols int, places []int, weights []float64, top int) []float64 {
	y := make([]float64, len(places)/top*cols)
	for i, at := range places {
		for c := 0; c < cols && at >= 0; c++ {
			y[i/top*cols+c] += weights[i] * x[at*cols+c]
		}
	}
	return y
}

// MatMulGrouped multiplies the rows of each expert by its matrix, [inner, outer], and adds its bias. Rows after those of experts have no
// product.
func MatMulGrouped(a, matrices, biases []float64, ends []int, inner, outer int) (c []float64) {
	first := 0
	for e, end := range ends {
		var bias []float64
		if biases != nil {
			bias = biases[e*outer : (e+1)*outer]
		}
		c = append(c, MatMul(a[first*inner:end*inner], matrices[e*inner*outer:(e+1)*inner*outer], bias, end-first, outer, inner, false, false)...)
		first = end
	}
	return c
}

package sample

import (
	"fmt"
	"math"
	"slices"

	"sppo.dev/internal/vm"
)

// Choice defines how a token is sampled from the logits. The filters are applied in the order of the fields, as
// in transformers.
type Choice struct {
	Temperature float64 // divides logits; 0: always take the token with the largest logit, regardless of the other fields
	TopK        int     // number of tokens with the largest logits to choose from; 0: all
	TopP        float64 // choose among the most probable tokens with this total probability; above 0, at most 1
	Seed        int64   // the random number for token number i of a sequence depends only on Seed and i
}

// Check returns an error if a field is out of range.
func (c *Choice) Check() error {
	switch {
	case !(c.Temperature >= 0) || math.IsInf(c.Temperature, 0):
		return fmt.Errorf("temperature %g must be 0 or more", c.Temperature)
	case c.TopK < 0:
		return fmt.Errorf("top-k %d must be 0 or more", c.TopK)
	case !(c.TopP > 0 && c.TopP <= 1):
		return fmt.Errorf("top-p %g must be above 0 and at most 1", c.TopP)
	}
	return nil
}

// Pick samples token number i of a sequence. Among equal logits, the first counts as the largest.
func (c *Choice) Pick(logits []float32, i int) int32 {
	best := 0
	for t, x := range logits {
		if x > logits[best] {
			best = t
		}
	}
	if c.Temperature == 0 {
		return int32(best)
	}
	order := make([]int32, len(logits))
	for t := range order {
		order[t] = int32(t)
	}
	slices.SortStableFunc(order, func(a, b int32) int {
		switch x, y := logits[a], logits[b]; {
		case x > y:
			return -1
		case x < y:
			return 1
		}
		return 0
	})
	if c.TopK > 0 {
		order = order[:min(c.TopK, len(order))]
	}
	shares, sum := make([]float64, len(order)), 0.0
	for k, t := range order {
		shares[k] = math.Exp(float64(logits[t]-logits[best]) / c.Temperature)
		sum += shares[k]
	}
	kept, n := 0.0, 0
	for n < len(shares) && kept < c.TopP*sum { // the token that crosses the limit is kept
		kept += shares[n]
		n++
	}
	n = max(1, n)
	drawn := vm.NewRandom(c.Seed, "sampled token").Uniform(uint64(i)) * kept
	for k := range n - 1 {
		if drawn -= shares[k]; drawn <= 0 {
			return order[k]
		}
	}
	return order[n-1]
}

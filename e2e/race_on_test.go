//go:build race

package e2e

// Under the race detector, which is slow, the covering set stops at pairs, few specs are drawn, and what is about numbers
// alone is left out. Every step has the same instructions, so few will do.
const (
	steps       = 4
	coverLimit  = 0
	randomDraws = 5
	numbers     = false
)

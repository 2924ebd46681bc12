//go:build race

package e2e

// Under the race detector, which is slow, only the first cases of the covering set run, which contain every value
// and most pairs of values, few specs are drawn, and everything that only checks numbers is skipped: tests, and the
// runs that other runs are compared with. Every step has the same instructions, so a few steps suffice.
const (
	steps       = 4
	coverCases  = 30
	randomDraws = 5
	numbers     = false
)

//go:build !race

package e2e

const (
	steps   = 20   // of a training run
	numbers = true // run also what no schedule is in, or sizes alone are new

	// coverLimit is how many cases the covering set has: all pairs take a third of them, the rest go to triples.
	coverLimit = 60
)

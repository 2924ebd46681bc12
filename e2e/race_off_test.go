//go:build !race

package e2e

const (
	steps   = 20   // steps of a training run
	numbers = true // whether to run tests that only check numbers, or differ only in sizes

	randomDraws = 40 // number of specs that TestRandomSpecs draws

	// coverLimit is the number of cases in the covering set. All pairs need a third of them; the rest are for
	// triples.
	coverLimit = 60
)

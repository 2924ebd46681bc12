//go:build !race

package e2e

const (
	steps   = 20   // of a training run
	numbers = true // whether to run tests that are only about numbers, or differ only in sizes

	randomDraws = 40 // number of specs that TestRandomSpecs draws

	// coverLimit is the number of cases in the covering set: all pairs take a third of them, the rest goes to
	// triples.
	coverLimit = 60
)

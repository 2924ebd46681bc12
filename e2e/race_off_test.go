//go:build !race

package e2e

const (
	steps   = 20   // of a training run
	numbers = true // whether to run what is about numbers alone, or only new by its sizes

	randomDraws = 40 // specs that TestRandomSpecs draws

	// coverLimit is how many cases the covering set has: all pairs take a third of them, the rest go to triples.
	coverLimit = 60
)

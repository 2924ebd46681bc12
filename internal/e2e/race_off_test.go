//go:build !race

package e2e

import (
	"math"
	"os"
)

// steps is the length of a training run: long enough for every state of an optimizer to be read and written
// several times.
var steps = map[bool]int{false: 8, true: 20}[os.Getenv("SPPO_LONG") != ""]

const (
	numbers = true // whether to run tests that only check numbers, or differ from others only in sizes

	randomDraws = 40 // number of specs that TestRandomSpecs draws

	coverCases = math.MaxInt // number of cases of the covering set that TestSchedulesAreEqual runs: all
)

//go:build race

package cpu

// Under the race detector streams receive a whole section at once and poll events instead of blocking, so
// that only events and messages order streams.
const (
	raceEnabled  = true
	publishEvery = 1 << 30
)

//go:build race

package cpu

// Under the race detector, streams receive an entire section at once and poll events instead of blocking, so that
// streams are ordered only by events and messages.
const (
	raceEnabled  = true
	publishEvery = 1 << 30
)

//go:build race

package cpu

// Under the race detector streams are handed a whole section at once and look for events instead of sleeping, so that
// the only order among streams is that of events and messages.
const (
	raceEnabled  = true
	publishEvery = 1 << 30
)

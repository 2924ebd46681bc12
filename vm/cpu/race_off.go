//go:build !race

package cpu

const (
	raceEnabled  = false
	publishEvery = 32 // instructions handed to a stream at a time; a hand-over costs as much as several instructions
)

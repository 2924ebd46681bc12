//go:build !race

package cpu

const (
	raceEnabled  = false
	publishEvery = 32 // instructions published to a stream at a time: publishing costs as much as several instructions
)

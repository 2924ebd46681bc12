package irtest

import (
	"os"
	"strconv"
	"testing"
	"time"
)

// Seed returns the seed of a test's random numbers, and logs it. By default, the seed is 1, so that every run
// draws the same numbers. With SPPO_LONG, it differs in every run. To repeat a run, set SPPO_SEED to its
// seed.
func Seed(t testing.TB) uint64 {
	t.Helper()
	seed := uint64(1)
	if os.Getenv("SPPO_LONG") != "" {
		seed = uint64(time.Now().UnixNano())
	}
	if s, err := strconv.ParseUint(os.Getenv("SPPO_SEED"), 10, 64); err == nil {
		seed = s
	}
	t.Logf("SPPO_SEED=%d", seed)
	return seed
}

package ir

import "fmt"

// Quantities have distinct types, so that bytes cannot be added to seconds.
type (
	// Bytes is a size or an offset in an arena.
	Bytes int64
	// Flops is a number of floating-point operations; a multiply-add counts as two.
	Flops float64
	// Seconds is a duration.
	Seconds float64
)

// String formats the size with a binary prefix and three significant digits.
func (b Bytes) String() string {
	v, unit := float64(b), 0
	for unit < 4 && (v >= 1024 || v <= -1024) {
		v, unit = v/1024, unit+1
	}
	if unit == 0 {
		return fmt.Sprintf("%d B", int64(b))
	}
	return fmt.Sprintf("%.*f %s", digitsAfterPoint(v), v, [...]string{"B", "KiB", "MiB", "GiB", "TiB"}[unit])
}

// String formats the duration in the largest unit in which it is at least 1.
func (s Seconds) String() string {
	v := float64(s)
	switch {
	case v >= 1 || v == 0:
		return fmt.Sprintf("%.*f s", digitsAfterPoint(v), v)
	case v >= 1e-3:
		return fmt.Sprintf("%.*f ms", digitsAfterPoint(v*1e3), v*1e3)
	default:
		return fmt.Sprintf("%.*f us", digitsAfterPoint(v*1e6), v*1e6)
	}
}

func digitsAfterPoint(v float64) int {
	switch {
	case v >= 100 || v <= -100:
		return 0
	case v >= 10 || v <= -10:
		return 1
	}
	return 2
}

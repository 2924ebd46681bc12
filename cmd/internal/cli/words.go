package cli

import (
	"fmt"
	"strings"

	"sppo.dev/internal/passes/words"
)

// Wrap breaks text into lines for a terminal.
func Wrap(text, indent string) string {
	return indent + strings.Join(words.Fold(text, 100-len(indent)), "\n"+indent) + "\n"
}

// Short writes a number with the suffix K, M or B for powers of 1000.
func Short(v float64) string {
	for _, p := range []struct {
		unit string
		at   float64
	}{{" B", 1e9}, {" M", 1e6}, {" K", 1e3}} {
		if v >= p.at {
			return fmt.Sprintf("%.3g%s", v/p.at, p.unit)
		}
	}
	return fmt.Sprintf("%.3g", v)
}

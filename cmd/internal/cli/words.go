package cli

import (
	"fmt"
	"strings"
)

// Wrap breaks text into lines for a terminal.
func Wrap(text, indent string) string {
	const width = 100
	var b strings.Builder
	line := indent
	for _, word := range strings.Fields(text) {
		if len(line) > len(indent) {
			if len(line)+1+len(word) > width {
				b.WriteString(line + "\n")
				line = indent
			} else {
				line += " "
			}
		}
		line += word
	}
	if len(line) > len(indent) {
		b.WriteString(line + "\n")
	}
	return b.String()
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

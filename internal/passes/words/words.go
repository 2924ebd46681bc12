// Package words formats numbers and lists for reasons and messages about plans.
package words

import (
	"fmt"
	"strings"
)

// Tokens formats a number of tokens as in specs.
func Tokens(n int64) string {
	const k = 1 << 10
	switch {
	case n >= k*k && n%(k*k) == 0:
		return fmt.Sprintf("%dM", n/(k*k))
	case n >= k && n%k == 0:
		return fmt.Sprintf("%dK", n/k)
	}
	return fmt.Sprint(n)
}

// Plural formats a count followed by its noun.
func Plural[N int | int32 | int64](n N, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// Are returns the form of "be" that suits a count.
func Are(n int) string {
	if n == 1 {
		return "is"
	}
	return "are"
}

// List joins items with spaces.
func List[T any](items []T) string {
	return strings.Trim(fmt.Sprint(items), "[]")
}

// NearMultiples returns the multiples of step nearest to x on both sides.
func NearMultiples(x, step int64) string {
	below := x / step * step
	if below <= 0 {
		return fmt.Sprint(below + step)
	}
	return fmt.Sprintf("%d or %d", below, below+step)
}

// Fold breaks a text into lines of at most width bytes between words. A longer word is a line of its own.
func Fold(text string, width int) []string {
	lines := []string{""}
	for _, word := range strings.Fields(text) {
		switch last := &lines[len(lines)-1]; {
		case *last == "":
			*last = word
		case len(*last)+1+len(word) <= width:
			*last += " " + word
		default:
			lines = append(lines, word)
		}
	}
	return lines
}

// Package near finds the word, or the fraction, that was probably meant.
package near

import (
	"math"
	"strings"
)

// Word returns the candidate most similar to the word, or "" if none is similar.
func Word(word string, candidates []string) string {
	for _, c := range candidates {
		if strings.EqualFold(word, c) && c != word {
			return c
		}
	}
	best, bestAt := "", 1+max(1, len(word)/3)
	for _, c := range candidates {
		if d := Distance(word, c); d < bestAt && d < max(len(word), len(c)) && c != word { // the two words have something in common
			best, bestAt = c, d
		}
	}
	return best
}

// Distance returns the number of insertions, deletions, substitutions and swaps of adjacent
// characters that turn a into b.
func Distance(a, b string) int {
	if len(a) > 64 || len(b) > 64 {
		return 64
	}
	before, last := make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range last {
		last[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row := make([]int, len(b)+1)
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			row[j] = min(row[j-1]+1, last[j]+1, last[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
		before, last = last, row
	}
	return last[len(b)]
}

// Fraction returns the fraction p/q, with q below 2^20 and p below 2^30, for which a positive number stands where arithmetic is exact: the
// one to which it is nearest, so that three times a third is 1. It is a convergent of the number's continued fraction. ok reports
// whether there is such a fraction.
func Fraction(x float64) (p, q uint64, ok bool) {
	p, q = 1, 0
	lastP, lastQ, rest := uint64(0), uint64(1), x
	for rest < 1<<30 {
		whole := math.Floor(rest)
		p, lastP = uint64(whole)*p+lastP, p
		q, lastQ = uint64(whole)*q+lastQ, q
		switch {
		case q >= 1<<20 || p >= 1<<30:
			return 0, 0, false
		case float64(p)/float64(q) == x:
			return p, q, true
		}
		rest = 1 / (rest - whole)
	}
	return 0, 0, false
}

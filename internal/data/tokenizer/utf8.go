package tokenizer

import (
	"strings"
	"unicode/utf8"
)

// validUTF8 replaces each maximal part of an ill-formed sequence with U+FFFD, as the Unicode Standard
// recommends (section 3.9, "U+FFFD Substitution of Maximal Subparts"), and as Rust and Python do.
func validUTF8(s string) string {
	if utf8.ValidString(s) {
		return s
	}
	var b strings.Builder
	b.Grow(len(s) + 2)
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		if r != utf8.RuneError || n > 1 {
			b.WriteString(s[i : i+n])
			i += n
			continue
		}
		b.WriteRune(utf8.RuneError)
		i += maximalSubpart(s[i:])
	}
	return b.String()
}

// maximalSubpart returns the number of bytes at the start of s that could begin the encoding of a rune, or 1 if
// there are none. The start of s must be ill-formed.
func maximalSubpart(s string) int {
	least, most, want := byte(0x80), byte(0xbf), 0
	switch c := s[0]; {
	case c >= 0xc2 && c <= 0xdf:
		want = 1
	case c >= 0xe0 && c <= 0xef:
		want = 2
		if c == 0xe0 {
			least = 0xa0
		} else if c == 0xed {
			most = 0x9f
		}
	case c >= 0xf0 && c <= 0xf4:
		want = 3
		if c == 0xf0 {
			least = 0x90
		} else if c == 0xf4 {
			most = 0x8f
		}
	}
	n := 1
	for n <= want && n < len(s) && s[n] >= least && s[n] <= most {
		least, most = 0x80, 0xbf
		n++
	}
	return n
}

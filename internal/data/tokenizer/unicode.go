package tokenizer

import (
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// newer lists the characters that are in Unicode 16 but not in Go's tables of Unicode 15, by general category.
// The libraries that tokenizers are trained with follow Unicode 16. A test compares every character with these
// libraries.
var newer = map[string][][2]rune{
	"Lu": {{0x1c89, 0x1c89}, {0xa7cb, 0xa7cc}, {0xa7da, 0xa7da}, {0xa7dc, 0xa7dc}, {0x10d50, 0x10d65}},
	"Ll": {{0x1c8a, 0x1c8a}, {0xa7cd, 0xa7cd}, {0xa7db, 0xa7db}, {0x10d70, 0x10d85}},
	"Lm": {{0x10d4e, 0x10d4e}, {0x10d6f, 0x10d6f}, {0x16d40, 0x16d42}, {0x16d6b, 0x16d6c}},
	"Lo": {{0x105c0, 0x105f3}, {0x10d4a, 0x10d4d}, {0x10d4f, 0x10d4f}, {0x10ec2, 0x10ec4}, {0x11380, 0x11389},
		{0x1138b, 0x1138b}, {0x1138e, 0x1138e}, {0x11390, 0x113b5}, {0x113b7, 0x113b7}, {0x113d1, 0x113d1},
		{0x113d3, 0x113d3}, {0x11bc0, 0x11be0}, {0x13460, 0x143fa}, {0x16100, 0x1611d}, {0x16d43, 0x16d6a},
		{0x18cff, 0x18cff}, {0x1e5d0, 0x1e5ed}, {0x1e5f0, 0x1e5f0}, {0x2ebf0, 0x2ee5d}},
	"Mn": {{0x897, 0x897}, {0x10d69, 0x10d6d}, {0x10efc, 0x10efc}, {0x113bb, 0x113c0}, {0x113ce, 0x113ce},
		{0x113d0, 0x113d0}, {0x113d2, 0x113d2}, {0x113e1, 0x113e2}, {0x11f5a, 0x11f5a}, {0x1611e, 0x16129},
		{0x1612d, 0x1612f}, {0x1e5ee, 0x1e5ef}},
	"Mc": {{0x113b8, 0x113ba}, {0x113c2, 0x113c2}, {0x113c5, 0x113c5}, {0x113c7, 0x113ca}, {0x113cc, 0x113cd},
		{0x113cf, 0x113cf}, {0x1612a, 0x1612c}},
	"Nd": {{0x10d40, 0x10d49}, {0x116d0, 0x116e3}, {0x11bf0, 0x11bf9}, {0x16130, 0x16139}, {0x16d70, 0x16d79},
		{0x1ccf0, 0x1ccf9}, {0x1e5f1, 0x1e5fa}},
	"Pd": {{0x10d6e, 0x10d6e}},
	"Po": {{0x1b4e, 0x1b4f}, {0x1b7f, 0x1b7f}, {0x113d4, 0x113d5}, {0x113d7, 0x113d8}, {0x11be1, 0x11be1},
		{0x16d6d, 0x16d6f}, {0x1e5ff, 0x1e5ff}},
	"Sm": {{0x10d8e, 0x10d8f}},
	"So": {{0x2427, 0x2429}, {0x2ffc, 0x2fff}, {0x31e4, 0x31e5}, {0x31ef, 0x31ef}, {0x1cc00, 0x1ccef},
		{0x1cd00, 0x1ceb3}, {0x1f8b2, 0x1f8bb}, {0x1f8c0, 0x1f8c1}, {0x1fa89, 0x1fa89}, {0x1fa8f, 0x1fa8f},
		{0x1fabe, 0x1fabe}, {0x1fac6, 0x1fac6}, {0x1fadc, 0x1fadc}, {0x1fadf, 0x1fadf}, {0x1fae9, 0x1fae9},
		{0x1fbcb, 0x1fbef}},
}

// newerNumbers lists the digits and numbers that are new in Unicode 17. The Digits pre-tokenizer uses them in
// addition to the category Nd of newer.
var newerNumbers = [][2]rune{{0x11de0, 0x11de9}, {0x16ff4, 0x16ff6}}

// newerOf calls f for each range that newer has in a category, given by one or two letters.
func newerOf(category string, f func(r [2]rune)) {
	for _, name := range []string{"Lu", "Ll", "Lm", "Lo", "Mn", "Mc", "Nd", "Pd", "Po", "Sm", "So"} {
		if strings.HasPrefix(name, category) {
			for _, r := range newer[name] {
				f(r)
			}
		}
	}
}

func isNewer(r rune, categories ...string) (found bool) {
	if r < 0x897 {
		return false
	}
	for _, c := range categories {
		newerOf(c, func(x [2]rune) { found = found || r >= x[0] && r <= x[1] })
	}
	return found
}

// inert lists the characters that are in Go's normalization tables but not in Hugging Face's older ones: the
// older tables neither decompose nor reorder them. For instance, U+11935 and U+11930 compose to U+11938 only in
// newer versions.
var inert = [][2]rune{
	{0x7fd, 0x7fd}, {0x898, 0x89f}, {0x8ca, 0x8d3}, {0x9fe, 0x9fe}, {0xc3c, 0xc3c}, {0xd3b, 0xd3c}, {0xeba, 0xeba},
	{0x1715, 0x1715}, {0x1abf, 0x1ace}, {0x1df6, 0x1dfa}, {0x32ff, 0x32ff}, {0xa7f2, 0xa7f4}, {0xa82c, 0xa82c},
	{0xab69, 0xab69}, {0x10780, 0x107ba}, {0x10d24, 0x10d27}, {0x10eab, 0x10eac}, {0x10efd, 0x10eff}, {0x10f46, 0x10f50},
	{0x10f82, 0x10f85}, {0x11070, 0x11070}, {0x1133b, 0x1133b}, {0x1145e, 0x1145e}, {0x11839, 0x1183a},
	{0x11930, 0x11930}, {0x11935, 0x11935}, {0x11938, 0x11938}, {0x1193d, 0x1193e}, {0x11943, 0x11943},
	{0x119e0, 0x119e0}, {0x11a34, 0x11a34}, {0x11a47, 0x11a47}, {0x11a99, 0x11a99}, {0x11d42, 0x11d45}, {0x11d97, 0x11d97},
	{0x11f41, 0x11f42}, {0x16ff0, 0x16ff1}, {0x1e030, 0x1e06d}, {0x1e08f, 0x1e08f}, {0x1e130, 0x1e136}, {0x1e2ae, 0x1e2ae},
	{0x1e2ec, 0x1e2ef}, {0x1e4ec, 0x1e4ef}, {0x1f16c, 0x1f16c}, {0x1fbf0, 0x1fbf9},
}

func isInert(r rune) bool {
	if r < inert[0][0] {
		return false
	}
	_, found := slices.BinarySearchFunc(inert, r, func(x [2]rune, r rune) int {
		if r < x[0] {
			return 1
		}
		if r > x[1] {
			return -1
		}
		return 0
	})
	return found
}

// normalForm returns s in a Unicode normal form of the Unicode version that Hugging Face's library follows, without the
// limit on combining characters that package norm imposes.
func normalForm(form norm.Form, s string) string {
	if form.IsNormalString(s) {
		return s
	}
	marks, plain := 0, true
	for _, r := range s {
		if plain = !isInert(r); !plain {
			break
		}
		if norm.NFD.PropertiesString(string(r)).CCC() == 0 {
			marks = 0
		} else if marks++; marks > 20 {
			plain = false
			break
		}
	}
	if plain {
		return form.String(s)
	}
	return normalFormSlow(form, s)
}

// combining is a character and its canonical combining class.
type combining struct {
	r     rune
	class uint8
}

// normalFormSlow implements the algorithm of the Unicode Standard, section 3.11.
func normalFormSlow(form norm.Form, s string) string {
	apart := norm.NFD
	if form == norm.NFKC || form == norm.NFKD {
		apart = norm.NFKD
	}
	var all []combining
	for _, r := range s {
		if isInert(r) || r == utf8.RuneError {
			all = append(all, combining{r, 0})
			continue
		}
		for _, d := range apart.String(string(r)) {
			all = append(all, combining{d, norm.NFD.PropertiesString(string(d)).CCC()})
		}
	}
	for i := 0; i < len(all); i++ {
		j := i
		for j < len(all) && all[j].class != 0 {
			j++
		}
		slices.SortStableFunc(all[i:j], func(a, b combining) int { return int(a.class) - int(b.class) })
		i = j
	}
	if form == norm.NFC || form == norm.NFKC {
		all = compose(all)
	}
	var b strings.Builder
	for _, c := range all {
		b.WriteRune(c.r)
	}
	return b.String()
}

// compose joins each starter with the later characters that compose with it and are not blocked.
func compose(all []combining) []combining {
	out, starter := all[:0], -1
	for _, c := range all {
		if starter >= 0 {
			last := out[len(out)-1]
			adjacent := starter == len(out)-1
			if adjacent || last.class != 0 && last.class < c.class {
				if r, ok := composed(out[starter].r, c.r); ok {
					out[starter].r = r
					continue
				}
			}
		}
		if c.class == 0 {
			starter = len(out)
		}
		out = append(out, c)
	}
	return out
}

// composed returns the primary composite of a and b.
func composed(a, b rune) (rune, bool) {
	if isInert(a) || isInert(b) {
		return 0, false
	}
	s := norm.NFC.String(string([]rune{a, b}))
	r, n := utf8.DecodeRuneInString(s)
	return r, n == len(s)
}

package main

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// shrinker makes a text smaller, as long as it still fails in the same way. It tries a change, keeps it if the text still fails, and
// begins again until no change is left to try. The order is fixed, so the result depends only on the text and on what fails.
type shrinker struct {
	lines   []string
	fixed   int                    // first lines that are not removed
	fails   func(text string) bool // in the same way
	left    int                    // attempts that may still be made
	made    int
	tried   map[string]bool // texts that do not fail in the same way
	stopped func() bool
}

// shrink changes the lines until no change is left. A spec also gets smaller numbers, not only fewer lines.
func (s *shrinker) shrink(spec bool) {
	s.tried = map[string]bool{}
	for changed := true; changed; {
		before := slices.Clone(s.lines)
		if spec {
			s.rewrite()
			s.numbers()
			s.items()
		}
		s.remove()
		changed = !slices.Equal(before, s.lines)
	}
}

// try keeps lines if their text fails in the same way.
func (s *shrinker) try(lines []string) bool {
	text := strings.Join(lines, "\n")
	if s.left <= 0 || s.stopped() || s.tried[text] || slices.Equal(lines, s.lines) {
		return false
	}
	s.left--
	s.made++
	if !s.fails(text) {
		s.tried[text] = true
		return false
	}
	s.lines = lines
	return true
}

// tryLine keeps a line with another text.
func (s *shrinker) tryLine(i int, text string) bool {
	lines := slices.Clone(s.lines)
	lines[i] = text
	return s.try(lines)
}

// remove removes lines: first many at a time, at last one or two, such as the ends of an empty block.
func (s *shrinker) remove() {
	for size := max(1, (len(s.lines)-s.fixed)/2); size > 0; size /= 2 {
		step := size
		if size == 2 {
			step = 1
		}
		for end := len(s.lines); end > s.fixed; end -= step {
			end = min(end, len(s.lines))
			s.try(slices.Delete(slices.Clone(s.lines), max(s.fixed, end-size), end))
		}
	}
}

// simpler lists what may replace parts of a spec at once.
var simpler = []struct {
	find    *regexp.Regexp
	replace string
}{
	{regexp.MustCompile(`(?ms)^cluster [^{}]*\{.*?^\}`), "import \"clusters/local.sppo\"\n\ncluster all = local(ranks = 64)"},
	{regexp.MustCompile(`(?m)^( *data *=).*`), "$1 random()"},
}

// rewrite replaces parts of a spec by simpler ones.
func (s *shrinker) rewrite() {
	text := strings.Join(s.lines, "\n")
	for _, r := range simpler {
		if after := r.find.ReplaceAllString(text, r.replace); after != text && s.try(strings.Split(after, "\n")) {
			text = after
		}
	}
}

// atoms finds the names, strings and numbers in the line of a spec.
var atoms = regexp.MustCompile(`"[^"]*"|[A-Za-z_][A-Za-z0-9_.-]*|([0-9][0-9_]*)([KMG]\b|[A-Za-z]*)(\.[0-9]+)?`)

// numbers replaces each count of a spec by the smallest one with which it still fails. Numbers with other units, such as those of a
// cluster, remain.
func (s *shrinker) numbers() {
	for i := range s.lines {
		for k := 0; ; k++ {
			line := s.lines[i]
			found := atoms.FindAllStringSubmatchIndex(line, -1)
			if k >= len(found) {
				break
			}
			at := found[k]
			if at[2] < 0 || at[6] >= 0 { // a name, or a fraction
				continue
			}
			for _, n := range smaller(line[at[2]:at[3]], line[at[4]:at[5]]) {
				if s.tryLine(i, line[:at[0]]+n+line[at[1]:]) {
					break
				}
			}
		}
	}
}

// smaller lists smaller counts than one in a spec, in ascending order.
func smaller(digits, unit string) (list []string) {
	n, err := strconv.Atoi(strings.ReplaceAll(digits, "_", ""))
	factor := strings.Index("KMG", unit)
	if err != nil || factor < 0 {
		return nil
	}
	if unit != "" {
		n <<= 10 * (factor + 1)
	}
	for d := 1; d < n; d *= 2 {
		list = append(list, fmt.Sprint(d))
		if d == 2 && n > 3 {
			list = append(list, "3")
		}
	}
	return list
}

// items removes items from lists and arguments from calls, one at a time, or replaces a list by their number.
func (s *shrinker) items() {
	for i := range s.lines {
		for changed := true; changed; {
			changed = slices.ContainsFunc(shorter(s.lines[i]), func(line string) bool { return s.tryLine(i, line) })
		}
	}
}

// shorter returns a line of a spec without one of the items between brackets, in each way, and with a list replaced by a number.
func shorter(line string) (out []string) {
	for open := range len(line) {
		if line[open] != '[' && line[open] != '(' {
			continue
		}
		items, depth, begin := 1, 0, open+1
		for at := open; at < len(line); at++ {
			switch line[at] {
			case '[', '(':
				depth++
			case ']', ')':
				depth--
			}
			if end := depth == 0; end || depth == 1 && line[at] == ',' {
				if end {
					out = append(out, strings.TrimRight(line[:begin], ", ")+line[at:])
					if line[open] == '[' {
						out = append(out, line[:open]+fmt.Sprint(items)+line[at+1:])
					}
					break
				}
				out, items, begin = append(out, line[:begin]+strings.TrimLeft(line[at+1:], " ")), items+1, at+1
			}
		}
	}
	return out
}

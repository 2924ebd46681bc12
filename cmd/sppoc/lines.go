package main

import (
	"fmt"
	"strings"
)

// edit is a run of lines in both texts, or in only one.
type edit struct {
	kind   byte // ' ', '-', '+'
	lines  []string
	a0, b0 int // start in each text
}

// unified returns the differences between two texts in unified format, or "" if they are equal.
func unified(nameA, nameB string, a, b []string, context int) string {
	edits := compare(a, b)
	var out strings.Builder
	for i := 0; i < len(edits); {
		if edits[i].kind == ' ' {
			i++
			continue
		}
		j := i // the hunk is edits[i:j]; equal runs of up to twice the context do not end it
		for j < len(edits) && (edits[j].kind != ' ' || j+1 < len(edits) && len(edits[j].lines) <= 2*context) {
			j++
		}
		if out.Len() == 0 {
			fmt.Fprintf(&out, "--- %s\n+++ %s\n", nameA, nameB)
		}
		out.WriteString(hunk(edits, i, j, context))
		i = j
	}
	return out.String()
}

// hunk returns the text of edits[i:j] with the context around them.
func hunk(edits []edit, i, j, context int) string {
	var body strings.Builder
	a0, b0, na, nb := edits[i].a0, edits[i].b0, 0, 0
	put := func(kind byte, lines []string) {
		for _, l := range lines {
			fmt.Fprintf(&body, "%c%s\n", kind, l)
		}
		if kind != '+' {
			na += len(lines)
		}
		if kind != '-' {
			nb += len(lines)
		}
	}
	if i > 0 {
		before := edits[i-1].lines
		before = before[max(0, len(before)-context):]
		a0, b0 = a0-len(before), b0-len(before)
		put(' ', before)
	}
	for _, e := range edits[i:j] {
		put(e.kind, e.lines)
	}
	if j < len(edits) {
		put(' ', edits[j].lines[:min(context, len(edits[j].lines))])
	}
	return fmt.Sprintf("@@ -%s +%s @@\n%s", place(a0, na), place(b0, nb), body.String())
}

// place writes a line range for a hunk header. Lines are numbered from 1; an empty range names the line before it.
func place(first, n int) string {
	if n == 0 {
		return fmt.Sprintf("%d,0", first)
	}
	return fmt.Sprintf("%d,%d", first+1, n)
}

// compare splits two texts into equal and differing runs.
func compare(a, b []string) []edit {
	c := comparison{a: a, b: b}
	c.part(0, len(a), 0, len(b))
	return c.edits
}

type comparison struct {
	a, b  []string
	edits []edit
}

func (c *comparison) put(kind byte, lines []string, a0, b0 int) {
	if len(lines) == 0 {
		return
	}
	if n := len(c.edits); n > 0 && c.edits[n-1].kind == kind {
		c.edits[n-1].lines = append(c.edits[n-1].lines[:len(c.edits[n-1].lines):len(c.edits[n-1].lines)], lines...)
		return
	}
	c.edits = append(c.edits, edit{kind, lines, a0, b0})
}

// part compares a[a0:a1] with b[b0:b1]. It matches equal lines at both ends first, then lines that occur once in
// each text (Bram Cohen's patience diff). This suits listings, in which few lines repeat and few move. The lines
// between matches are compared in the same way, or replaced if nothing in them matches.
func (c *comparison) part(a0, a1, b0, b1 int) {
	head := 0
	for a0+head < a1 && b0+head < b1 && c.a[a0+head] == c.b[b0+head] {
		head++
	}
	c.put(' ', c.a[a0:a0+head], a0, b0)
	a0, b0 = a0+head, b0+head
	tail := 0
	for a0 < a1-tail && b0 < b1-tail && c.a[a1-tail-1] == c.b[b1-tail-1] {
		tail++
	}
	a1, b1 = a1-tail, b1-tail
	if anchors := c.anchors(a0, a1, b0, b1); len(anchors) > 0 {
		for _, at := range anchors {
			c.part(a0, at[0], b0, at[1])
			c.put(' ', c.a[at[0]:at[0]+1], at[0], at[1])
			a0, b0 = at[0]+1, at[1]+1
		}
		c.part(a0, a1, b0, b1)
	} else {
		c.put('-', c.a[a0:a1], a0, b0)
		c.put('+', c.b[b0:b1], a1, b0)
	}
	c.put(' ', c.a[a1:a1+tail], a1, b1)
}

// anchors returns the largest set of lines that occur exactly once in each part and are in the same order in both,
// as pairs of ascending indexes into a and b.
func (c *comparison) anchors(a0, a1, b0, b1 int) [][2]int {
	type count struct{ inA, inB, atB int }
	seen := map[string]*count{}
	for i := a0; i < a1; i++ {
		n := seen[c.a[i]]
		if n == nil {
			n = &count{}
			seen[c.a[i]] = n
		}
		n.inA++
	}
	for j := b0; j < b1; j++ {
		if n := seen[c.b[j]]; n != nil {
			n.inB++
			n.atB = j
		}
	}
	var pairs [][2]int
	for i := a0; i < a1; i++ {
		if n := seen[c.a[i]]; n.inA == 1 && n.inB == 1 {
			pairs = append(pairs, [2]int{i, n.atB})
		}
	}
	return rising(pairs)
}

// rising takes pairs whose first elements ascend, and returns the longest subsequence of them in which the second
// elements ascend too.
func rising(pairs [][2]int) [][2]int {
	// Of the pairs that can end a subsequence of length k+1, the one at ends[k] has the smallest second element.
	ends := []int{}
	before := make([]int, len(pairs))
	for i, p := range pairs {
		low, high := 0, len(ends)
		for low < high {
			if mid := (low + high) / 2; pairs[ends[mid]][1] < p[1] {
				low = mid + 1
			} else {
				high = mid
			}
		}
		before[i] = -1
		if low > 0 {
			before[i] = ends[low-1]
		}
		if low == len(ends) {
			ends = append(ends, i)
		} else {
			ends[low] = i
		}
	}
	if len(ends) == 0 {
		return nil
	}
	out := make([][2]int, len(ends))
	at := ends[len(ends)-1]
	for k := len(out) - 1; k >= 0; k-- {
		out[k] = pairs[at]
		at = before[at]
	}
	return out
}

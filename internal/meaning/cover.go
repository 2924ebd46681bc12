package meaning

import (
	"fmt"
	"slices"
	"strings"
)

// interval is a range of indices, without its end.
type interval struct{ lo, hi int64 }

func (i interval) size() int64 { return max(0, i.hi-i.lo) }

func (i interval) and(j interval) interval { return interval{max(i.lo, j.lo), min(i.hi, j.hi)} }

// box is a set of the indices over which a sum is taken. Which of them are used, and what features are, depends on the term. An unused
// index is from 0 to 1.
type box [4]interval

const (
	sequences = iota
	tokens
	features // columns, vocabulary entries, or groups of columns such as heads
	shares   // of the query heads that share a head of keys
)

var nowhere = box{full, full, full, full}

// by returns a box with other indices in one direction.
func (b box) by(direction int, i interval) box {
	b[direction] = i
	return b
}

// full is the interval of an unused index.
var full = interval{0, 1}

func (b box) volume() int64 { return b[0].size() * b[1].size() * b[2].size() * b[3].size() }

func (b box) and(c box) box {
	for i := range b {
		b[i] = b[i].and(c[i])
	}
	return b
}

// joined returns the union of two boxes that are adjacent in one direction and equal in the others.
func (b box) joined(c box) (box, bool) {
	at := -1
	for i := range b {
		if b[i] == c[i] {
			continue
		}
		if at >= 0 || b[i].hi != c[i].lo && c[i].hi != b[i].lo {
			return b, false
		}
		at = i
	}
	if at < 0 {
		return b, false
	}
	b[at] = interval{min(b[at].lo, c[at].lo), max(b[at].hi, c[at].hi)}
	return b, true
}

// cover is a set of indices as disjoint boxes, in ascending order.
type cover []box

// coverOf returns the union of boxes. It reports whether they are disjoint.
func coverOf(boxes ...box) (c cover, disjoint bool) {
	for _, b := range boxes {
		var ok bool
		if c, ok = c.with(b); !ok {
			return c, false
		}
	}
	return c, true
}

// with adds a box. It returns false if the cover has some of its indices already.
func (c cover) with(b box) (cover, bool) {
	if b.volume() == 0 {
		return c, true
	}
	for _, other := range c {
		if other.and(b).volume() > 0 {
			return c, false
		}
	}
	c = slices.Clone(c)
	for i := 0; i < len(c); i++ {
		if joined, ok := b.joined(c[i]); ok {
			b, c, i = joined, slices.Delete(c, i, i+1), -1
		}
	}
	at, _ := slices.BinarySearchFunc(c, b, compareBoxes)
	return slices.Insert(c, at, b), true
}

func compareBoxes(a, b box) int {
	for i := range a {
		if a[i].lo != b[i].lo {
			return int(min(1, max(-1, a[i].lo-b[i].lo)))
		}
	}
	return 0
}

// union returns the union of two covers. It returns false if they overlap.
func (c cover) union(d cover) (cover, bool) {
	for _, b := range d {
		var ok bool
		if c, ok = c.with(b); !ok {
			return c, false
		}
	}
	return c, true
}

// shared returns the indices for some shares, in place of an unused index. An empty cover has no other indices.
func (c cover) shared(some *share) (out cover) {
	if len(c) == 0 {
		c = cover{nowhere}
	}
	for _, has := range some.has {
		for _, b := range c {
			out, _ = out.with(b.by(shares, has))
		}
	}
	return out
}

// has reports whether the cover has all indices of a box.
func (c cover) has(need box) bool {
	if len(c) == 1 && c[0] == need {
		return true
	}
	volume := need.volume()
	for _, b := range c {
		volume -= b.and(need).volume()
	}
	return volume == 0
}

// within returns the part of a cover that lies in a box.
func (c cover) within(b box) (inside cover) {
	for _, other := range c {
		if both := other.and(b); both.volume() > 0 {
			inside = append(inside, both)
		}
	}
	return inside
}

// describe lists the boxes with the names of the indices that are not unused.
func (c cover) describe(names [4]string) string {
	if len(c) == 0 {
		return "nothing"
	}
	var boxes []string
	for n, b := range c {
		if n == 3 {
			boxes = append(boxes, "...")
			break
		}
		var words []string
		for i, name := range names {
			if name != "" && (b[i] != full || i == 1) {
				words = append(words, fmt.Sprintf("%s %d to %d", name, b[i].lo, b[i].hi-1))
			}
		}
		boxes = append(boxes, strings.Join(words, " of "))
	}
	return strings.Join(boxes, ", and ")
}

package tokenizer

import (
	"slices"
	"unicode/utf8"

	"github.com/dlclark/regexp2/v2"
	"github.com/dlclark/regexp2/v2/syntax"
)

// shape says which characters may be adjacent in a match of a pattern. It contains every possible match, and others.
type shape struct {
	leaves  []func(r rune) bool // the parts of the pattern that match one character
	pairs   map[[2]int]bool     // leaves that may match adjacent characters
	looks   []int               // leaves that may match the first character of a look-ahead
	lone    []lone              // leaves that can be a whole match
	unknown bool                // the pattern has parts that this analysis does not know, or may match nothing
}

// lone is a leaf that is a whole match, unless its character may also match one of the other leaves.
type lone struct {
	leaf   int
	unless []int
}

// reach holds the leaves at the ends of the matches of a part of a pattern.
type reach struct {
	first, last []int
	lone        []lone
	empty       bool // it may match nothing
	free        bool // it may match nothing without a look-ahead
	atomic      bool // it never gives back what it has matched
}

var nothing = reach{empty: true, free: true}

// separates reports whether no match contains both characters of a border, nor depends on what follows the border.
func (s *shape) separates(at border) bool {
	if s.unknown {
		return false
	}
	for p := range s.pairs {
		if s.leaves[p[0]](at.a) && s.leaves[p[1]](at.b) {
			return false
		}
	}
	return !s.any(s.looks, at.b)
}

// mayMatch reports whether a match may contain a character.
func (s *shape) mayMatch(r rune) bool {
	return slices.ContainsFunc(s.leaves, func(has func(rune) bool) bool { return has(r) })
}

// matches reports whether every occurrence of a character is in a match.
func (s *shape) matches(r rune) bool {
	return slices.ContainsFunc(s.lone, func(x lone) bool { return s.leaves[x.leaf](r) && !s.any(x.unless, r) })
}

func (s *shape) any(leaves []int, r rune) bool {
	return slices.ContainsFunc(leaves, func(i int) bool { return s.leaves[i](r) })
}

// textShape returns the shape of a pattern that matches only one text.
func textShape(text string) *shape {
	s := &shape{pairs: map[[2]int]bool{}}
	s.finish(s.text([]rune(text)))
	return s
}

// shapeOf returns the shape of an expression that compile has translated.
func shapeOf(translated string) *shape {
	s := &shape{pairs: map[[2]int]bool{}}
	tree, err := syntax.Parse(translated, syntax.ParseOptions{RegexOptions: syntax.RegexOptions(regexp2.Multiline)})
	if err != nil {
		s.unknown = true
		return s
	}
	s.finish(s.walk(tree.Root))
	return s
}

func (s *shape) finish(r reach) {
	s.lone = r.lone
	s.unknown = s.unknown || r.empty
}

// leaf adds a leaf that is matched `least` to `most` times.
func (s *shape) leaf(has func(rune) bool, least, most int) reach {
	i := len(s.leaves)
	s.leaves = append(s.leaves, has)
	out := reach{first: []int{i}, last: []int{i}, empty: least == 0, free: least == 0}
	if most > 1 {
		s.pairs[[2]int{i, i}] = true
	}
	if least <= 1 {
		out.lone = []lone{{leaf: i}}
	}
	return out
}

func (s *shape) text(text []rune) reach {
	out := nothing
	for _, r := range text {
		out = s.then(out, s.leaf(func(x rune) bool { return x == r }, 1, 1))
	}
	return out
}

// then returns the reach of two parts, one after the other.
func (s *shape) then(a, b reach) reach {
	s.follow(a.last, b.first)
	out := reach{first: a.first, last: b.last, empty: a.empty && b.empty, free: a.free && b.free,
		atomic: a.atomic || b.atomic}
	if a.empty {
		out.first = slices.Concat(a.first, b.first)
	}
	if b.empty {
		out.last = slices.Concat(a.last, b.last)
	}
	if b.free {
		out.lone = slices.Clone(a.lone)
	}
	if a.free {
		for _, x := range b.lone {
			if a.atomic {
				x.unless = slices.Concat(x.unless, a.first)
			}
			out.lone = append(out.lone, x)
		}
	}
	return out
}

func (s *shape) follow(last, first []int) {
	for _, i := range last {
		for _, j := range first {
			s.pairs[[2]int{i, j}] = true
		}
	}
}

func (s *shape) walk(n *syntax.RegexNode) reach {
	if n.Options&syntax.RightToLeft != 0 {
		s.unknown = true // a look-behind
		return reach{}
	}
	switch n.T {
	case syntax.NtOne, syntax.NtNotone, syntax.NtSet:
		return s.leaf(members(n), 1, 1)
	case syntax.NtOneloop, syntax.NtNotoneloop, syntax.NtSetloop, syntax.NtOnelazy, syntax.NtNotonelazy, syntax.NtSetlazy:
		return s.leaf(members(n), n.M, n.N)
	case syntax.NtOneloopatomic, syntax.NtNotoneloopatomic, syntax.NtSetloopatomic:
		out := s.leaf(members(n), n.M, n.N)
		out.atomic = true
		return out
	case syntax.NtMulti:
		return s.text(n.Str)
	case syntax.NtEmpty, syntax.NtUpdateBumpalong:
		return nothing
	case syntax.NtConcatenate:
		out := nothing
		for _, child := range n.Children {
			out = s.then(out, s.walk(child))
		}
		return out
	case syntax.NtAlternate:
		return s.either(n.Children)
	case syntax.NtLoop, syntax.NtLazyloop:
		out := s.walk(n.Children[0])
		if n.N > 1 {
			s.follow(out.last, out.first)
		}
		if n.M > 1 {
			out.lone = nil
		}
		out.empty, out.free = out.empty || n.M == 0, out.free || n.M == 0
		return out
	case syntax.NtGroup, syntax.NtCapture, syntax.NtAtomic:
		if n.T == syntax.NtCapture && n.N != -1 {
			break
		}
		out := s.walk(n.Children[0])
		out.atomic = out.atomic || n.T == syntax.NtAtomic
		return out
	case syntax.NtPosLook, syntax.NtNegLook:
		s.looks = append(s.looks, s.walk(n.Children[0]).first...)
		return reach{empty: true}
	}
	s.unknown = true
	return reach{}
}

func (s *shape) either(children []*syntax.RegexNode) reach {
	var out reach
	for _, child := range children {
		x := s.walk(child)
		out.first, out.last, out.lone = append(out.first, x.first...), append(out.last, x.last...), append(out.lone, x.lone...)
		out.empty, out.free, out.atomic = out.empty || x.empty, out.free || x.free, out.atomic || x.atomic
	}
	return out
}

// members returns the set of characters that a leaf matches.
func members(n *syntax.RegexNode) func(rune) bool {
	ch := n.Ch
	switch {
	case n.IsSetFamily():
		return n.Set.Contains
	case n.IsNotoneFamily():
		return func(r rune) bool { return r != ch }
	}
	return func(r rune) bool { return r == ch && utf8.ValidRune(r) }
}

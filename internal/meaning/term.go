package meaning

import (
	"fmt"
	"math"
	"slices"

	"sppo.dev/ir"
)

// kind says over which indices a term is a sum, and thus when the sum is complete.
type kind uint8

const (
	plain      kind = iota // no sum
	overCols               // features: those of the columns of the first operand
	overTokens             // all sequences and tokens
	overKeys               // the keys that the row's query sees; linear
	softmax                // the same; not linear
	overQuery              // the queries that see the row's key, and the query heads that use its head
	parallel               // vocabulary entries; not linear
	overAll                // rows and columns: of all elements of a matrix
	overShares             // the query heads that share a head of keys
)

// names of the indices of each kind's sums.
var indices = [...][4]string{
	overCols: {"", "", "columns", "shares"}, overTokens: {"sequences", "tokens", "groups", "shares"}, overKeys: {"", "keys", "", ""}, softmax: {"", "keys", "", ""},
	overQuery: {"", "queries", "", "shares"}, parallel: {"", "", "entries", ""}, overAll: {"", "rows", "columns", ""}, overShares: {"", "", "", "shares"},
}

// term is a term of the reference.
type term struct {
	name     string
	op       ir.Op
	operands []value
	value    value
	whole    *content // the complete term
	kind     kind
	need     box   // of kinds whose sums are over the same indices in all rows and columns
	window   int64 // tokens that a query sees
	partner  value // of the result of attention: its lse
	ends     value // of an elementwise function of rows in the order of experts: where the rows of each expert end
	shared   *term // the same, but its operand is a sum over shares that has been left incomplete; there may be one for each number of shares
}

// linear reports whether incomplete sums may be added as numbers.
func (t *term) linear() bool { return t.kind != softmax && t.kind != parallel }

// needs returns the indices over which the term is summed in a rectangle.
func (t *term) needs(r rectangle) box {
	switch t.kind {
	case overKeys, softmax:
		return nowhere.by(tokens, interval{max(0, r.first-t.window+1), r.first + r.n})
	case overQuery:
		return t.need.by(tokens, interval{r.first, min(t.need[tokens].hi, r.first+r.n-1+t.window)})
	}
	return t.need
}

// share says which of a number of shares an incomplete sum has. It is nil for a complete one. If the sum is one of several terms, the
// shares of each term follow those of the term before.
type share struct {
	has []interval
	of  int64
}

func (s *share) equal(t *share) bool {
	return s == t || s != nil && t != nil && s.of == t.of && slices.Equal(s.has, t.has)
}

// overSome returns the term for an operand that is a sum over some of a number of shares.
func (t *term) overSome(of int64) *term {
	last := t
	for ; last.shared != nil; last = last.shared {
		if last.shared.need[shares].hi == of {
			return last.shared
		}
	}
	copied := *t
	if copied.shared = nil; t.kind == plain {
		copied.kind, copied.need = overShares, nowhere
	}
	copied.need[shares] = interval{0, of}
	last.shared = &copied
	return &copied
}

// sharesOf returns the shares over which the sums are complete, if they lack nothing else, and what they are when they are complete. The
// shares of a sum are queries, of each of the heads that share a head of keys, or, for a product of matrices, columns.
func (c *content) sharesOf(r rectangle) (*share, *content) {
	if !c.value.isZero() {
		return nil, nil
	}
	s, complete := &share{}, c
	for i := range c.parts {
		p := &c.parts[i]
		has, of, ok := p.sharesOf(r)
		if !ok || i > 0 && p.term == c.parts[i-1].term {
			return nil, nil
		}
		whole := p.term.whole.times(p.factor)
		if i > 0 {
			whole = &content{value: complete.value.plus(whole.value)}
		}
		for _, h := range has {
			s.has = append(s.has, interval{s.of + h.lo, s.of + h.hi})
		}
		s.of, complete = s.of+of, whole
	}
	return s, complete
}

func (p *part) sharesOf(r rectangle) (has []interval, of int64, ok bool) {
	need := p.needs(r)
	switch p.kind {
	case overCols: // each column has all shares
		of := need[shares].hi
		for _, b := range p.cover {
			if b[shares] == need[shares] {
				has = append(has, interval{b[features].lo * of, b[features].hi * of})
				continue
			}
			for n := b[features].lo; n < b[features].hi; n++ {
				has = append(has, interval{n*of + b[shares].lo, n*of + b[shares].hi})
			}
		}
		return has, need[features].hi * of, len(has) > 0
	case overQuery: // each share has one query; queries that do not see the rows, or not all of them, add nothing more
		queries := p.term.need[tokens].hi
		for _, b := range p.cover {
			if b[tokens].lo <= need[tokens].lo {
				b[tokens].lo = 0
			}
			if b[tokens].hi >= need[tokens].hi {
				b[tokens].hi = queries
			}
			for n := b[shares].lo; n < b[shares].hi; n++ {
				has = append(has, interval{n*queries + b[tokens].lo, n*queries + b[tokens].hi})
			}
		}
		return has, queries * need[shares].hi, len(has) > 0
	case overShares:
		for _, b := range p.cover {
			if !p.cover.has(need.by(shares, b[shares])) {
				return nil, 0, false
			}
			if !slices.Contains(has, b[shares]) {
				has = append(has, b[shares])
			}
		}
	}
	return has, need[shares].hi, len(has) > 0
}

// sumOver returns a term's sum over some indices, with a factor. Columns and rows beyond those of a tensor are padding, which adds
// nothing.
func sumOver(t *term, over cover, factor float64, r rectangle) *content {
	if t.kind == overCols || t.kind == overAll {
		over = over.within(t.need)
	}
	switch {
	case factor == 0 || len(over) == 0 && t.linear():
		return &content{}
	case factor == 1 && over.has(t.needs(r)):
		return t.whole
	}
	return (&content{parts: []part{{t, over, factor}}}).settled(r)
}

// settled returns the content with the sums that are complete in a rectangle as parts of the value.
func (c *content) settled(r rectangle) *content {
	nothing := func(p part) bool { return p.nothing(r) }
	if slices.ContainsFunc(c.parts, nothing) {
		c = &content{value: c.value, parts: slices.DeleteFunc(slices.Clone(c.parts), nothing)}
	}
	for i := range c.parts {
		if c.parts[i].complete(r) {
			if p := &c.parts[i]; len(c.parts) == 1 && p.factor == 1 && c.value.isZero() {
				return p.whole
			}
			out := &content{value: c.value}
			for _, p := range c.parts {
				if p.complete(r) {
					out.value = out.value.plus(p.term.value.times(p.factor))
				} else {
					out.parts = append(out.parts, p)
				}
			}
			return out
		}
	}
	return c
}

// nothing reports whether none of the queries that are summed over sees a key of the rectangle, because of its window.
func (p *part) nothing(r rectangle) bool {
	return p.kind == overQuery && len(p.cover.within(p.needs(r))) == 0
}

func (p *part) complete(r rectangle) bool {
	return p.kind == plain || p.cover.has(p.needs(r))
}

// describe says which indices a sum has, and which it needs.
func (p *part) describe(r rectangle) string {
	text := fmt.Sprintf("%s, summed over %s of %s", p.name, p.cover.describe(indices[p.kind]), cover{p.needs(r)}.describe(indices[p.kind]))
	if p.factor != 1 {
		text += fmt.Sprintf(" %g times", p.factor)
	}
	return text
}

// plus returns the sum of two contents in a rectangle. If it is not known, it returns why. Both lists of parts are in ascending order.
func (c *content) plus(d *content, r rectangle) (sum *content, why string) {
	out := &content{value: c.value.plus(d.value), parts: c.parts}
	if len(d.parts) == 0 {
		return out, ""
	}
	out.parts = make([]part, 0, len(c.parts)+len(d.parts))
	mine := c.parts
	for others := d.parts; len(others) > 0; {
		n := 0
		for n < len(mine) && mine[n].term.value[0] < others[0].term.value[0] {
			n++
		}
		out.parts, mine = append(out.parts, mine[:n]...), mine[n:]
		var same content // the sums of the same term
		if n = sameTerm(mine, others[0].term); n > 0 {
			same.parts, mine = slices.Clone(mine[:n]), mine[n:]
		}
		for n = sameTerm(others, others[0].term); n > 0; n-- {
			if why := same.add(others[0], r); why != "" {
				return nil, why
			}
			others = others[1:]
		}
		settled := same.settled(r)
		out.value, out.parts = out.value.plus(settled.value), append(out.parts, settled.parts...)
	}
	out.parts = append(out.parts, mine...)
	return out, ""
}

// sameTerm counts the parts at the beginning of a list that are sums of a term.
func sameTerm(list []part, t *term) (n int) {
	for n < len(list) && list[n].term.value == t.value {
		n++
	}
	return n
}

// add adds an incomplete sum to those of a content that is being made.
func (c *content) add(p part, r rectangle) (why string) {
	if !p.linear() {
		return fmt.Sprintf("%s cannot be added as a number before it is complete", p.describe(r))
	}
	for i := 0; i < len(c.parts); i++ {
		old := c.parts[i]
		if old.sameShares(&p); old.term != p.term || math.Abs(old.factor-p.factor) > 1e-12*math.Abs(p.factor) {
			continue
		}
		union, disjoint := old.cover.union(p.cover)
		switch {
		case disjoint:
			p.cover = union
		case len(old.cover) == len(p.cover) && old.cover.same(p.cover):
			p.factor += old.factor
		default:
			return fmt.Sprintf("%s and %s overlap: some are added twice", old.describe(r), p.describe(r))
		}
		c.parts = append(c.parts[:i], c.parts[i+1:]...)
		i = -1
	}
	at := 0
	for at < len(c.parts) && less(&c.parts[at], &p) {
		at++
	}
	c.parts = append(c.parts[:at], append([]part{p}, c.parts[at:]...)...)
	return ""
}

// sameShares gives two sums of a term the same number of shares: each share of one sum may be several of the other. A sum without
// shares has a single one.
func (p *part) sameShares(q *part) {
	if p.term == q.term || p.term.value != q.term.value {
		return
	}
	if p.need[shares].hi > q.need[shares].hi {
		p, q = q, p
	}
	if each := q.need[shares].hi / p.need[shares].hi; each*p.need[shares].hi == q.need[shares].hi {
		p.term, p.cover = q.term, slices.Clone(p.cover)
		for i := range p.cover {
			s := &p.cover[i][shares]
			s.lo, s.hi = s.lo*each, s.hi*each
		}
	}
}

// less orders parts, so that equal sums are equal lists.
func less(p, q *part) bool {
	if p.term != q.term {
		return p.term.value[0] < q.term.value[0]
	}
	return p.factor < q.factor
}

func (c cover) same(d cover) bool {
	for i := range c {
		if c[i] != d[i] {
			return false
		}
	}
	return true
}

// times returns a content multiplied by a number.
func (c *content) times(x float64) *content {
	if x == 1 {
		return c
	}
	out := &content{value: c.value.times(x)}
	for _, p := range c.parts {
		p.factor *= x
		out.parts = append(out.parts, p)
	}
	return out
}

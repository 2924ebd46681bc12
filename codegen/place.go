package codegen

import (
	"cmp"
	"slices"

	"sppo/ir"
)

// This phase gives buffers their bytes: offline dynamic storage allocation, which is NP-hard, by first fit in several
// orders. What makes first fit good is the order; what makes it fast in any order is skyline, which finds the lowest
// gap over a span of time without looking at the lives in it one by one.

// placeAlign is what every offset is a multiple of: the alignment that device libraries want for their fastest loads.
const placeAlign ir.Bytes = 256

// life is the span of issue positions [start, end] over which a buffer must own its bytes.
type life struct {
	start, end int32
	size       ir.Bytes
}

func (l life) padded() ir.Bytes { return aligned(l.size) }

func aligned(b ir.Bytes) ir.Bytes { return (b + placeAlign - 1) &^ (placeAlign - 1) }

// placeLives gives every life an offset from base on, such that lives that meet do not share bytes. The extent is the
// highest byte used. The same lives always get the same places.
func placeLives(lives []life, base ir.Bytes) (offsets []ir.Bytes, extent ir.Bytes) {
	p := newPlacer(lives)
	p.search()
	extent = base
	for i, l := range lives {
		p.best[i] += aligned(base)
		if l.size > 0 {
			extent = max(extent, p.best[i]+l.size)
		}
	}
	return p.best, extent
}

// liveBound is the most bytes ever live at once: no placement has a smaller extent.
func liveBound(lives []life) ir.Bytes {
	return newCalendar(lives).peak()
}

// calendar translates issue positions to instants, the distinct starts of lives. Two lives meet exactly when some
// instant is in both: the later of their starts.
type calendar struct {
	spans []span     // by life
	load  []ir.Bytes // by instant: bytes live
}

// span is the instants from <= t < to. It is never empty.
type span struct{ from, to int32 }

func newCalendar(lives []life) *calendar {
	starts := make([]int32, len(lives))
	for i, l := range lives {
		starts[i] = l.start
	}
	slices.Sort(starts)
	starts = slices.Compact(starts)
	c := &calendar{make([]span, len(lives)), make([]ir.Bytes, len(starts)+1)}
	for i, l := range lives {
		from, _ := slices.BinarySearch(starts, l.start)
		to, _ := slices.BinarySearch(starts, l.end+1)
		c.spans[i] = span{int32(from), int32(to)}
		c.load[from] += l.padded()
		c.load[to] -= l.padded()
	}
	for t := 1; t < len(c.load); t++ {
		c.load[t] += c.load[t-1]
	}
	c.load = c.load[:len(starts)]
	return c
}

func (c *calendar) peak() ir.Bytes {
	peak := ir.Bytes(0)
	for _, b := range c.load {
		peak = max(peak, b)
	}
	return peak
}

// crowding is the most bytes live at once within each life, by a tree of maxima.
func (c *calendar) crowding() []ir.Bytes {
	n := int32(len(c.load))
	tree := make([]ir.Bytes, 2*n)
	copy(tree[n:], c.load)
	for i := n - 1; i > 0; i-- {
		tree[i] = max(tree[2*i], tree[2*i+1])
	}
	out := make([]ir.Bytes, len(c.spans))
	for i, s := range c.spans {
		for a, b := s.from+n, s.to+n; a < b; a, b = (a+1)/2, b/2 {
			out[i] = max(out[i], tree[a], tree[b-1])
		}
	}
	return out
}

// A placer looks for the order in which first fit has the smallest extent.
type placer struct {
	lives   []life
	spans   []span
	bound   ir.Bytes
	crowd   []ir.Bytes // by life: most bytes live at once within it
	sky     *skyline
	offsets []ir.Bytes // of the attempt in progress
	best    []ir.Bytes
	extent  ir.Bytes // of best, with padding
}

func newPlacer(lives []life) *placer {
	c := newCalendar(lives)
	return &placer{
		lives: lives, spans: c.spans, bound: c.peak(), crowd: c.crowding(),
		sky:     newSkyline(len(c.load)),
		offsets: make([]ir.Bytes, len(lives)), best: make([]ir.Bytes, len(lives)),
		extent: 1 << 62,
	}
}

func (p *placer) search() {
	for _, compare := range p.orders() {
		if p.goodEnough() {
			return
		}
		order := make([]int32, len(p.lives))
		for i := range order {
			order[i] = int32(i)
		}
		slices.SortFunc(order, func(i, j int32) int { return cmp.Or(compare(i, j), cmp.Compare(i, j)) })
		p.attempt(order)
	}
}

func (p *placer) goodEnough() bool { return p.extent <= p.bound+p.bound/200 }

// orders compares lives: those to be placed first are less.
//
// Where memory is fullest there is no room for gaps, so lives that are there go first; then the next fullest moment.
// This lays lives outward in time from each peak, and before two peaks meet there is slack. Orders differ in how they
// stack the lives of one moment. The last two know nothing of time, and do well where peaks are alike and many.
func (p *placer) orders() []func(i, j int32) int {
	crowd := func(i, j int32) int { return cmp.Compare(p.crowd[j], p.crowd[i]) }
	start := func(i, j int32) int { return cmp.Compare(p.lives[i].start, p.lives[j].start) }
	end := func(i, j int32) int { return cmp.Compare(p.lives[j].end, p.lives[i].end) }
	size := func(i, j int32) int { return cmp.Compare(p.lives[j].size, p.lives[i].size) }
	length := func(l life) ir.Bytes { return ir.Bytes(l.end-l.start) + 1 }
	long := func(i, j int32) int { return cmp.Compare(length(p.lives[j]), length(p.lives[i])) }
	area := func(i, j int32) int {
		a, b := p.lives[i], p.lives[j]
		return cmp.Compare(length(b)*b.size, length(a)*a.size)
	}
	return []func(i, j int32) int{
		func(i, j int32) int { return cmp.Or(crowd(i, j), start(i, j), end(i, j)) },
		func(i, j int32) int { return cmp.Or(crowd(i, j), end(i, j), start(i, j)) },
		func(i, j int32) int { return cmp.Or(crowd(i, j), size(i, j)) },
		size,
		area,
		func(i, j int32) int { return cmp.Or(crowd(i, j), long(i, j)) },
	}
}

// attempt places the lives in an order, and keeps the result where it is the best so far.
func (p *placer) attempt(order []int32) {
	p.sky.reset()
	extent := ir.Bytes(0)
	for _, i := range order {
		size := p.lives[i].padded()
		at := p.sky.lowestGap(p.spans[i], size)
		if extent = max(extent, at+size); extent >= p.extent {
			return
		}
		p.sky.occupy(p.spans[i], byteRange{at, at + size})
		p.offsets[i] = at
	}
	p.extent = extent
	p.offsets, p.best = p.best, p.offsets
}

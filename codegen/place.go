package codegen

import (
	"cmp"
	"slices"

	"sppo/ir"
)

// This phase gives buffers their bytes: offline dynamic storage allocation, which is NP-hard, by first fit in several
// orders. What makes first fit good is the order; what makes it fast in any order is skyline, which finds the lowest
// gap over a span of time without looking at the lives in it one by one.

// placeAlign is what every offset is a multiple of.
const placeAlign = ir.Alignment

// life is the span of issue positions [start, end] over which a buffer must own its bytes.
type life struct {
	start, end int32
	size       ir.Bytes
}

func (l life) padded() ir.Bytes { return aligned(l.size) }

// area is bytes times positions, which may be more than an int64 holds.
func (l life) area() float64 { return float64(l.padded()) * (float64(l.end) - float64(l.start) + 1) }

func aligned(b ir.Bytes) ir.Bytes { return (b + placeAlign - 1) &^ (placeAlign - 1) }

// placeLives gives every life an offset from base on, such that lives that meet do not share bytes. The extent is the
// highest byte used. The same lives always get the same places.
func placeLives(lives []life, base ir.Bytes) (offsets []ir.Bytes, extent ir.Bytes) {
	if len(lives) == 0 {
		return nil, base
	}
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
		to, _ := slices.BinarySearchFunc(starts, l.end, func(start, end int32) int { return cmp.Or(cmp.Compare(start, end), -1) })
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
	crowd   []ir.Bytes // by life: most bytes live at once within it
	bound   ir.Bytes
	sky     *skyline
	offsets []ir.Bytes // of the attempt in progress
	best    []ir.Bytes
	extent  ir.Bytes // of best, with padding
}

func newPlacer(lives []life) *placer {
	c := newCalendar(lives)
	return &placer{
		lives: lives, spans: c.spans, crowd: c.crowding(), bound: c.peak(),
		sky:     newSkyline(len(c.load)),
		offsets: make([]ir.Bytes, len(lives)), best: make([]ir.Bytes, len(lives)),
		extent: unplaced,
	}
}

const unplaced ir.Bytes = 1 << 62

// The search ends when the extent is within 1/boundPerSlack of the bound, or after this many steps of the skyline. A step
// takes about 30 ns. Steps are counted, not timed, so that the same lives get the same places on every machine.
const (
	boundPerSlack = 256
	stepsPerLife  = 1000
	stepsAtMost   = 30_000_000
)

// search gives every order an equal share of the work.
func (p *placer) search() {
	budget := min(stepsPerLife*len(p.lives), stepsAtMost)
	orders := p.orders()
	for k, compare := range orders {
		if p.closeEnough() {
			return
		}
		order := make([]int32, len(p.lives))
		for i := range order {
			order[i] = int32(i)
		}
		slices.SortFunc(order, func(i, j int32) int { return cmp.Or(compare(i, j), cmp.Compare(i, j)) })
		p.improve(order, budget*(k+1)/len(orders))
	}
}

func (p *placer) closeEnough() bool { return p.extent <= p.bound+p.bound/boundPerSlack }

// improve tries an order, moves the life that stuck out an eighth of the way to the front, tries again, and so on: a
// life that finds no room has come too late.
func (p *placer) improve(order []int32, budget int) {
	for !p.closeEnough() && (p.extent == unplaced || p.sky.steps < budget) {
		k := p.attempt(order, budget)
		to, late := max(0, k-k/8-1), order[k]
		copy(order[to+1:k+1], order[to:k])
		order[to] = late
	}
}

// attempt places the lives in an order and keeps the result where it is the best so far. It gives up as soon as the
// result cannot be that, or the budget is spent; the first attempt never does. It returns the place in the order of
// the life that reached highest.
func (p *placer) attempt(order []int32, budget int) (highest int) {
	p.sky.reset()
	extent := ir.Bytes(0)
	for k, i := range order {
		size := p.lives[i].padded()
		at := p.sky.lowestGap(p.spans[i], size)
		if at+size > extent {
			extent, highest = at+size, k
		}
		if extent >= p.extent || p.extent != unplaced && p.sky.steps > budget {
			return highest
		}
		p.sky.occupy(p.spans[i], byteRange{at, at + size})
		p.offsets[i] = at
	}
	p.extent, p.offsets, p.best = extent, p.best, p.offsets
	return highest
}

// orders compares lives: those to be placed first are less.
//
// Where memory is fullest there is no room for gaps, so the lives that are there go first, then those at the next
// fullest moment. This lays lives outward in time from each peak, and slack is left where nobody needs it. The two
// such orders differ in how they stack the lives of one moment. The others do not look at time, and help where all
// moments are alike.
func (p *placer) orders() []func(i, j int32) int {
	crowd := func(i, j int32) int { return cmp.Compare(p.crowd[j], p.crowd[i]) }
	start := func(i, j int32) int { return cmp.Compare(p.lives[i].start, p.lives[j].start) }
	end := func(i, j int32) int { return cmp.Compare(p.lives[j].end, p.lives[i].end) }
	size := func(i, j int32) int { return cmp.Compare(p.lives[j].size, p.lives[i].size) }
	area := func(i, j int32) int { return cmp.Compare(p.lives[j].area(), p.lives[i].area()) }
	return []func(i, j int32) int{
		func(i, j int32) int { return cmp.Or(crowd(i, j), start(i, j), end(i, j)) },
		func(i, j int32) int { return cmp.Or(crowd(i, j), end(i, j), start(i, j)) },
		size,
		area,
	}
}

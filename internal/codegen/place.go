package codegen

import (
	"cmp"
	"math"
	"slices"

	"sppo.dev/ir"
)

// This phase assigns addresses to buffers. This is offline dynamic storage allocation, which is NP-hard. The
// phase runs first fit in several orders, because the order determines the quality of the result. A skyline
// makes each run fast: it finds the lowest gap over a span of time without visiting the lives in that span. If
// gaps remain, an ejector moves down the lives that reach above the target.

// Every offset is a multiple of placeAlign.
const placeAlign = ir.Alignment

// life is the span of issue positions [start, end] during which a buffer must own its bytes.
type life struct {
	start, end int32
	size       ir.Bytes
}

func (l life) padded() ir.Bytes { return aligned(l.size) }

// area returns bytes times positions, as a float64 because the product can overflow an int64.
func (l life) area() float64 { return float64(l.padded()) * (float64(l.end) - float64(l.start) + 1) }

func aligned(b ir.Bytes) ir.Bytes { return (b + placeAlign - 1) &^ (placeAlign - 1) }

// placeLives assigns every life an offset of at least base, so that lives that overlap in time share no bytes.
// The extent is the offset just past the highest byte in use. The result is deterministic. The stages of a
// program share the limit on ejector steps. The argument capacity is the size of the arena.
func placeLives(lives []life, base, capacity ir.Bytes, stages int) (offsets []ir.Bytes, extent ir.Bytes) {
	if len(lives) == 0 {
		return nil, base
	}
	p := newPlacer(lives)
	p.most = stepsAtMost / stages
	p.room = capacity - aligned(base)
	p.search()
	extent = base
	for i, l := range lives {
		p.offsets[i] += aligned(base)
		if l.size > 0 {
			extent = max(extent, p.offsets[i]+l.size)
		}
	}
	return p.offsets, extent
}

// calendar translates issue positions to instants, which are the distinct starts of lives. Two
// lives overlap if and only if both contain the later of their starts.
type calendar struct {
	spans []span     // by life
	load  []ir.Bytes // by instant: number of live bytes
}

// span is the range of instants t with from <= t < to. It is never empty.
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

// crowding returns, for each life, the maximum number of bytes that are live at once during it. It uses a tree
// of maxima.
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

// A placer places lives one after another at the lowest free offset, and then moves down those that
// exceed the target.
type placer struct {
	*calendar
	lives   []life
	bound   ir.Bytes
	room    ir.Bytes // of the arena
	offsets []ir.Bytes
	extent  ir.Bytes // with padding
	steps   int      // of ejectors
	most    int      // limit of steps
}

func newPlacer(lives []life) *placer {
	c := newCalendar(lives)
	return &placer{calendar: c, lives: lives, bound: c.peak(), most: stepsAtMost, offsets: make([]ir.Bytes, len(lives)), extent: math.MaxInt64}
}

// The search ends when the extent exceeds the bound by at most 1/boundPerSlack of it, or when the ejectors have
// taken stepsPerLife steps for each life or stepsAtMost in total. A step takes about 50 ns. The limit is a
// number of steps, not a time, so that the result is the same on every machine. With manyLives lives or more,
// each order takes a second; an extent that fits the arena and exceeds the bound by at most 1/boundPerRoom is
// then enough.
const (
	boundPerSlack = 256
	boundPerRoom  = 64
	manyLives     = 100_000
	stepsPerLife  = 2000
	stepsAtMost   = 20_000_000 // of all stages together
)

// search improves the result of each order with an equal share of the steps, because no order is the best start
// for all programs.
func (p *placer) search() {
	var starts [][]ir.Bytes
	for _, compare := range orders(p.lives, p.crowding()) {
		starts = append(starts, p.firstFit(compare))
		if p.closeEnough() {
			return
		}
	}
	budget := min(stepsPerLife*len(p.lives), p.most) / len(starts)
	for _, start := range starts {
		e := newEjector(p.lives, p.spans, start, budget)
		for !p.closeEnough() && e.pack(p.lower()) {
			p.keep(e.offsets)
		}
		p.steps += e.steps
	}
}

func (p *placer) closeEnough() bool {
	enough := p.bound + p.bound/boundPerSlack
	if len(p.lives) >= manyLives {
		enough = max(enough, min(p.room, p.bound+p.bound/boundPerRoom))
	}
	return p.extent <= enough
}

// lower returns the next extent to try, which removes one eighth of the gaps. Larger reductions
// fail more often; smaller ones gain little.
func (p *placer) lower() ir.Bytes {
	return (p.extent - max((p.extent-p.bound)/8, placeAlign)) &^ (placeAlign - 1)
}

// keep saves the offsets if they are the best so far.
func (p *placer) keep(offsets []ir.Bytes) {
	extent := ir.Bytes(0)
	for i, at := range offsets {
		extent = max(extent, at+p.lives[i].padded())
	}
	if extent < p.extent {
		p.extent = extent
		copy(p.offsets, offsets)
	}
}

// firstFit assigns each life the lowest free bytes, in the given order.
func (p *placer) firstFit(compare func(i, j int32) int) []ir.Bytes {
	order, offsets := make([]int32, len(p.lives)), make([]ir.Bytes, len(p.lives))
	for i := range order {
		order[i] = int32(i)
	}
	slices.SortFunc(order, func(i, j int32) int { return cmp.Or(compare(i, j), cmp.Compare(i, j)) })
	sky := newSkyline(len(p.load))
	for _, i := range order {
		size := p.lives[i].padded()
		offsets[i] = sky.lowestGap(p.spans[i], size)
		sky.occupy(p.spans[i], byteRange{offsets[i], offsets[i] + size})
	}
	p.keep(offsets)
	return offsets
}

// orders lists comparison functions; lives that compare less are placed first. crowd holds, for each life, the
// maximum number of bytes that are live at once during it.
//
// When memory is fullest, there is no room for gaps, so the lives at that moment are placed first,
// then those at the next fullest moment. This places lives outward in time from each peak and
// leaves slack where memory is not scarce. The first two orders do this; they differ in how they
// stack the lives of one moment. The other orders ignore time, which helps if memory is equally
// full at all times.
func orders(lives []life, crowd []ir.Bytes) []func(i, j int32) int {
	crowded := func(i, j int32) int { return cmp.Compare(crowd[j], crowd[i]) }
	start := func(i, j int32) int { return cmp.Compare(lives[i].start, lives[j].start) }
	end := func(i, j int32) int { return cmp.Compare(lives[j].end, lives[i].end) }
	size := func(i, j int32) int { return cmp.Compare(lives[j].size, lives[i].size) }
	area := func(i, j int32) int { return cmp.Compare(lives[j].area(), lives[i].area()) }
	return []func(i, j int32) int{
		func(i, j int32) int { return cmp.Or(crowded(i, j), start(i, j), end(i, j)) },
		func(i, j int32) int { return cmp.Or(crowded(i, j), end(i, j), start(i, j)) },
		size,
		area,
	}
}

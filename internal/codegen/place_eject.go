package codegen

import (
	"cmp"
	"math"
	"slices"

	"sppo.dev/ir"
)

// ejector packs placed lives into a smaller extent by ejection chains (Glover, "Ejection chains, reference
// structures and alternating path methods", 1996). A life above the limit is moved to the position at
// which it displaces the cheapest other lives, which are then moved in the same way until all are placed.
// Ejecting a life makes its next ejection more expensive, so that chains do not repeat.
type ejector struct {
	lives   []life
	meets   meetings
	offsets []ir.Bytes // nowhere for a life that is not placed
	out     []int32    // lives that are not placed; the last one is next
	cost    []float64  // of ejecting each life
	near    []int32    // scratch of relay: the lives that overlap one life in time
	borders []border   // scratch of spot
	steps   int        // borders visited since the start; deterministic
	budget  int        // maximum number of steps
}

// nowhere is the offset of a life that is not placed.
const nowhere ir.Bytes = -1

func newEjector(lives []life, spans []span, offsets []ir.Bytes, budget int) *ejector {
	e := &ejector{lives: lives, meets: newMeetings(spans), offsets: slices.Clone(offsets), cost: make([]float64, len(lives)), budget: budget}
	for i := range lives {
		e.cost[i] = e.price(int32(i))
	}
	return e
}

// price returns the initial cost of ejecting a life. Larger and longer lives are harder to place, but the
// difficulty grows more slowly than their area.
func (e *ejector) price(i int32) float64 { return math.Sqrt(e.lives[i].area()) }

// pack moves all lives below the offset top, and reports whether the budget was sufficient.
func (e *ejector) pack(top ir.Bytes) bool {
	e.out = e.out[:0]
	for i, at := range e.offsets {
		if at+e.lives[i].padded() > top {
			e.takeOut(int32(i))
		}
	}
	for len(e.out) > 0 {
		if e.steps > e.budget {
			return false
		}
		i := e.out[len(e.out)-1]
		e.out = e.out[:len(e.out)-1]
		e.relay(i, top)
	}
	return true
}

func (e *ejector) takeOut(i int32) {
	e.offsets[i] = nowhere
	e.out = append(e.out, i)
}

// relay places a life and ejects the lives in its way.
func (e *ejector) relay(i int32, top ir.Bytes) {
	e.near = e.meets.with(i, e.near[:0])
	at := e.spot(i, top)
	end := at + e.lives[i].padded()
	for _, j := range e.near {
		if lies := e.offsets[j]; lies < end && lies+e.lives[j].padded() > at && lies != nowhere {
			e.takeOut(j)
			e.cost[j] += e.price(j)
		}
	}
	e.offsets[i] = at
}

// spot returns the offset below top at which the displaced lives cost least; ties go to the offset that leaves
// the least free space.
func (e *ejector) spot(i int32, top ir.Bytes) ir.Bytes {
	size := e.lives[i].padded()
	e.borders = e.borders[:0]
	for k, j := range e.near {
		if lies := e.offsets[j]; lies != nowhere {
			e.borders = append(e.borders, borderOf(max(0, lies-size+placeAlign), k, false), borderOf(lies+e.lives[j].padded(), k, true))
		}
	}
	e.steps += len(e.borders)
	slices.Sort(e.borders)
	e.borders = append(e.borders, borderOf(top-size+placeAlign, 0, false))
	var at, best, room ir.Bytes = 0, nowhere, 0
	lives, cost, least := 0, 0.0, 0.0
	for _, r := range e.borders {
		next := r.at()
		if next > at {
			next = min(next, top-size+placeAlign)
			if lives == 0 {
				cost = 0 // remove rounding errors
			}
			if best == nowhere || cost < least || cost == least && next-at < room {
				best, least, room = at, cost, next-at
			}
			if at = next; at > top-size {
				break
			}
		}
		if life, ends := r.life(); ends {
			lives, cost = lives-1, cost-e.cost[e.near[life]]
		} else {
			lives, cost = lives+1, cost+e.cost[e.near[life]]
		}
	}
	return best
}

// border is an offset at which the k-th life in the list near starts or stops being in the way of the life to
// place. It is packed into a single number because most of the time is spent sorting borders.
type border uint64

const borderBits = 24 // for k, and one bit that tells the two kinds of borders apart

func borderOf(at ir.Bytes, k int, ends bool) border {
	r := border(at/placeAlign)<<borderBits | border(k)<<1
	if ends {
		r |= 1
	}
	return r
}

func (r border) at() ir.Bytes             { return ir.Bytes(r>>borderBits) * placeAlign }
func (r border) life() (k int, ends bool) { return int(r >> 1 & (1<<(borderBits-1) - 1)), r&1 == 1 }

// meetings finds the lives that overlap a given one in time. It is a balanced tree of the lives, ordered by
// start. Each node is the middle life of a range and stores the latest end of all lives in the range.
type meetings struct {
	spans  []span
	order  []int32
	latest []int32 // [middle of a range of order]: latest end in the range
}

func newMeetings(spans []span) meetings {
	m := meetings{spans, make([]int32, len(spans)), make([]int32, len(spans))}
	for i := range m.order {
		m.order[i] = int32(i)
	}
	slices.SortFunc(m.order, func(i, j int32) int { return cmp.Or(cmp.Compare(spans[i].from, spans[j].from), cmp.Compare(i, j)) })
	m.build(0, len(spans))
	return m
}

func (m *meetings) build(lo, hi int) (latest int32) {
	if lo == hi {
		return 0
	}
	middle := (lo + hi) / 2
	m.latest[middle] = max(m.spans[m.order[middle]].to, m.build(lo, middle), m.build(middle+1, hi))
	return m.latest[middle]
}

// with appends the lives that overlap life i to a list.
func (m *meetings) with(i int32, list []int32) []int32 { return m.withIn(i, 0, len(m.order), list) }

func (m *meetings) withIn(i int32, lo, hi int, list []int32) []int32 {
	for s := m.spans[i]; lo < hi; {
		middle := (lo + hi) / 2
		if m.latest[middle] <= s.from {
			break
		}
		list = m.withIn(i, lo, middle, list)
		j := m.order[middle]
		if m.spans[j].from >= s.to {
			break
		}
		if j != i && m.spans[j].to > s.from {
			list = append(list, j)
		}
		lo = middle + 1
	}
	return list
}

package codegen

import (
	"cmp"
	"math"
	"slices"

	"sppo.dev/ir"
)

// ejector packs lives that are placed into a smaller extent by ejection chains (Glover, "Ejection chains, reference structures and
// alternating path methods", 1996): what sticks out is laid where it is in the way of least, what is in its way is taken out and
// laid elsewhere likewise, until all lie. A life becomes more expensive to eject each time, so that chains do not repeat.
type ejector struct {
	lives   []life
	meets   meetings
	offsets []ir.Bytes // nowhere where a life does not lie
	out     []int32    // those that do not, the last one to be laid next
	cost    []float64  // by life, of taking it out
	near    []int32    // scratch of relay: who meets the life
	rims    []rim      // scratch of spot
	steps   int        // rims looked at since the start, the same on every machine
	budget  int        // of steps
}

// nowhere is the offset of a life that does not lie.
const nowhere ir.Bytes = -1

func newEjector(lives []life, spans []span, offsets []ir.Bytes, budget int) *ejector {
	e := &ejector{lives: lives, meets: newMeetings(spans), offsets: slices.Clone(offsets), cost: make([]float64, len(lives)), budget: budget}
	for i := range lives {
		e.cost[i] = e.price(int32(i))
	}
	return e
}

// price is what a life costs to take out for the first time: the larger and longer ones are harder to lay, but not in proportion.
func (e *ejector) price(i int32) float64 { return math.Sqrt(e.lives[i].area()) }

// pack brings all lives below top, or says that it could not within the budget.
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

// relay gives a life an offset, and takes out what is in its way there.
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

// spot is the offset below top from where a life is in the way of what costs least; of several the one with the least room to spare.
func (e *ejector) spot(i int32, top ir.Bytes) ir.Bytes {
	size := e.lives[i].padded()
	e.rims = e.rims[:0]
	for k, j := range e.near {
		if lies := e.offsets[j]; lies != nowhere {
			e.rims = append(e.rims, rimOf(max(0, lies-size+placeAlign), k, false), rimOf(lies+e.lives[j].padded(), k, true))
		}
	}
	e.steps += len(e.rims)
	slices.Sort(e.rims)
	e.rims = append(e.rims, rimOf(top-size+placeAlign, 0, false))
	var at, best, room ir.Bytes = 0, nowhere, 0
	lives, cost, least := 0, 0.0, 0.0
	for _, r := range e.rims {
		next := r.at()
		if next > at {
			next = min(next, top-size+placeAlign)
			if lives == 0 {
				cost = 0 // what rounding left
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

// rim is an offset at which the life that is k-th in near begins or ends to be in the way. It is one number, since most of the time
// goes into sorting.
type rim uint64

const rimBits = 24 // for k and for what it does

func rimOf(at ir.Bytes, k int, ends bool) rim {
	r := rim(at/placeAlign)<<rimBits | rim(k)<<1
	if ends {
		r |= 1
	}
	return r
}

func (r rim) at() ir.Bytes             { return ir.Bytes(r>>rimBits) * placeAlign }
func (r rim) life() (k int, ends bool) { return int(r >> 1 & (1<<(rimBits-1) - 1)), r&1 == 1 }

// meetings finds the lives that meet one: a balanced tree of the lives in the order of their starts, in which a node stands for
// the middle of a range and knows the latest end within it.
type meetings struct {
	spans  []span
	order  []int32
	latest []int32 // by middle of a range of order
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

// with appends the lives that meet life i.
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

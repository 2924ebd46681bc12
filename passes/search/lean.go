package search

import (
	"cmp"
	"container/heap"
	"math"
	"slices"

	"sppo.dev/graph"
	"sppo.dev/ir"
	"sppo.dev/passes/estimate"
	"sppo.dev/passes/memory"
	"sppo.dev/passes/plan"
)

// The search where nobody asks for time. Nothing is priced but what it takes to deal out layers, and what is taken next is what
// holds least, so that something that fits is found soon if there is any. Before a complete candidate is planned with its copies
// timed, for which they are simulated again and again, it is lean: its copies begin as late and end as soon as they may, which
// takes no simulation, and holds no more on the device than with any other timing, but for a part of what packing loses.

// wanted says how soon a candidate has its turn: that of least memory first; where there is plenty of it, first the one that least is
// open of, then that which spreads over most ranks, and then that of fewest tasks, which is soonest planned.
type wanted struct {
	bytes ir.Bytes
	open  int
	ranks int
	tasks int
	lean  bool // the bytes are those of the plan without timing
}

func (w wanted) compare(o wanted) int {
	return cmp.Or(cmp.Compare(w.bytes, o.bytes), cmp.Compare(w.open, o.open), cmp.Compare(o.ranks, w.ranks), cmp.Compare(w.tasks, o.tasks))
}

// plenty is the part of the device below which less is no better.
const plenty = 0.5

// want says how soon a candidate has its turn that holds so much at least. What lacks on the host counts as if it lacked on the device.
func (s *search) want(n *node, least ir.Bytes, lack *plan.Lack) {
	w, p := &n.wanted, &n.schedule
	if lack != nil {
		least = max(least, ir.Bytes(s.cluster.DeviceMemory)+lack.Bytes)
	}
	w.bytes, w.open = max(least, ir.Bytes(plenty*float64(s.cluster.DeviceMemory))), len(dimensions)-n.level
	w.ranks = max(1, p.SP) * max(1, p.PP) * max(1, p.DP)
	w.tasks = p.Subsequences.Count * max(1, p.PP) * max(1, p.VirtualStages)
}

// lean bounds what a complete candidate holds, and puts it among those to come unless it surely does not fit.
func (s *search) lean(n *node) {
	n.wanted.lean = true
	if n.weighs() { // what copies take decides what is kept
		heap.Push(&s.frontier, n)
		return
	}
	p, e := s.passed(n.schedule, true)
	if p == nil {
		return
	}
	p.Memory = memory.Capacities(p)
	limit := plan.Memory{DeviceCapacityBytes: math.MaxInt64, HostCapacityBytes: math.MaxInt64}
	if !s.nearest {
		limit = mayFit(e, p.Memory)
	}
	need, fits := e.Memory().Within(limit)
	for i := range need.Host {
		need.Host[i] -= min(need.Host[i], earlier(e))
	}
	lack := need.Lack(p.Memory)
	if !fits {
		s.reject(n, *lack)
		return
	}
	device, _ := need.Peaks()
	s.want(n, device, lack)
	heap.Push(&s.frontier, n)
}

// mayFit is what a footprint may take so that placed it may fit.
func mayFit(e *estimate.Estimator, m plan.Memory) plan.Memory {
	p := e.Plan
	more := ir.Bytes(float64(max(m.DeviceCapacityBytes, m.HostCapacityBytes)) * memory.Slack(p) / (1 - memory.Slack(p)))
	m.DeviceCapacityBytes += more
	m.HostCapacityBytes += more + earlier(e)
	return m
}

// earlier are the bytes that reloads may have taken from the host where they begin earlier than they must.
func earlier(e *estimate.Estimator) (n ir.Bytes) {
	p := e.Plan
	for _, size := range e.Saved[0] {
		n += ir.Bytes(p.LongestAhead()-1) * graph.Align(size)
	}
	return n + memory.Packed(p, n)
}

// weighs reports whether the pass offload weighs fates against each other.
func (n *node) weighs() bool {
	return n.weighed || n.schedule.Offload.Policy == plan.PolicyMemory || n.schedule.Recompute == plan.PolicyAuto
}

// closestPatience is how much of a search's patience goes into what to show where nothing fits.
const closestPatience = 0.3

// keepLean drops all candidates but those whose memory is known, if there are any.
func (s *search) keepLean() {
	if lean := slices.DeleteFunc(slices.Clone(s.frontier), func(n *node) bool { return !n.wanted.lean }); len(lean) > 0 {
		s.frontier = lean
		heap.Init(&s.frontier)
	}
}

// closest returns what to show where nothing fits: the evaluated candidate with the smallest shortfall, or another that needs less
// memory, if one is found in time. That one may even fit, where the search for time ended before it found one that does.
func (s *search) closest() *node {
	b := *s.bounds
	b.timeless, b.work = true, 0
	all := &search{bounds: &b, context: s.context, verdicts: map[string]map[string]*plan.Rejection{}, nearest: true}
	all.push(&node{schedule: s.request.Schedule})
	for all.frontier.Len() > 0 {
		if all.impatience() > closestPatience {
			if s.least != nil {
				return s.least
			}
			all.keepLean()
		}
		n := heap.Pop(&all.frontier).(*node)
		switch {
		case n.level < len(dimensions):
			all.advance(n)
		case !n.wanted.lean:
			all.lean(n)
		case all.evaluate(n):
			if lack := n.need.Lack(n.plan.Memory); s.least == nil || lack == nil || lack.Bytes < s.lacking.Bytes {
				return n
			}
			return s.least
		}
	}
	return s.least
}

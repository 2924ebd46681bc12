package search

import (
	"cmp"
	"container/heap"
	"math"
	"slices"

	"sppo.dev/graph"
	"sppo.dev/ir"
	"sppo.dev/lang"
	"sppo.dev/passes/estimate"
	"sppo.dev/passes/memory"
	"sppo.dev/passes/plan"
)

// The search that ignores time. It costs only what the assignment of layers needs, and takes candidates with
// the lowest memory bound first, so that something that fits is found soon, if it exists. Before a complete
// candidate is planned with timed copies, which takes many simulations, it is lean: its copies begin as late
// and end as early as possible. That takes no simulation, and uses no more device memory than any other
// timing, up to part of the packing margin.

// wanted decides the order of candidates: least memory first. If memory is plentiful, first those with the
// fewest open dimensions, then those on the most ranks, then those with the fewest tasks, which are planned
// soonest.
type wanted struct {
	bytes ir.Bytes
	open  int
	ranks int
	tasks int
	lean  bool // the bytes are those of the plan without timed copies
}

func (w wanted) compare(o wanted) int {
	return cmp.Or(cmp.Compare(w.bytes, o.bytes), cmp.Compare(w.open, o.open), cmp.Compare(o.ranks, w.ranks), cmp.Compare(w.tasks, o.tasks))
}

// plenty is the fraction of device memory below which using less does not matter.
const plenty = 0.5

// want sets the order of a candidate given its memory bound. A shortfall on the host counts like one on the
// device.
func (s *search) want(n *node, least ir.Bytes, shortfall *plan.Shortfall) {
	w, p := &n.wanted, &n.schedule
	if shortfall != nil {
		least = max(least, ir.Bytes(s.cluster.DeviceMemory)+shortfall.Bytes)
	}
	w.bytes, w.open = max(least, ir.Bytes(plenty*float64(s.cluster.DeviceMemory))), len(dimensions)-n.level
	w.ranks = max(1, p.SP) * max(1, p.PP) * max(1, p.DP)
	w.tasks = p.Subsequences.Count * max(1, p.PP) * max(1, p.VirtualStages)
	if p.Keep != nil && len(p.Keep) < len(plan.Streamable) { // blocks of earlier tokens are many more
		w.tasks *= max(1, p.Subsequences.Count)
	}
}

// wantComplete is for a candidate whose memory is known: where it fits, no other need be looked at.
func (s *search) wantComplete(n *node, device ir.Bytes, shortfall *plan.Shortfall) {
	if s.want(n, device, shortfall); shortfall == nil && s.fitting {
		n.wanted.bytes = 0
	}
}

// lean bounds the memory of a complete candidate, and queues it unless it surely does not fit.
func (s *search) lean(n *node) {
	n.wanted.lean = true
	if n.weighs() { // its placements depend on the times of copies
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
	shortfall := need.Shortfall(p.Memory)
	if !fits {
		s.reject(n, *shortfall)
		return
	}
	device, _ := need.Peaks()
	s.wantComplete(n, device, shortfall)
	heap.Push(&s.frontier, n)
}

// mayFit returns what a footprint may use if it could fit once placed.
func mayFit(e *estimate.Estimator, m plan.Memory) plan.Memory {
	p := e.Plan
	more := ir.Bytes(float64(max(m.DeviceCapacityBytes, m.HostCapacityBytes)) * memory.Slack(p) / (1 - memory.Slack(p)))
	m.DeviceCapacityBytes += more
	m.HostCapacityBytes += more + earlier(e)
	return m
}

// earlier returns the bytes that reloads may have taken from the host if they begin earlier than necessary.
func earlier(e *estimate.Estimator) (n ir.Bytes) {
	p := e.Plan
	for _, saved := range e.Saved { // with windows the first subsequence need not be the longest
		var of ir.Bytes
		for _, size := range saved {
			of += ir.Bytes(p.LongestAhead()-1) * graph.Align(size)
		}
		n = max(n, of)
	}
	return n + memory.Packed(p, n)
}

// weighs reports whether the pass offload weighs placements against each other.
func (n *node) weighs() bool {
	return n.weighed || n.schedule.Offload.Policy == plan.PolicyMemory || n.schedule.Recompute == plan.PolicyAuto
}

// closestPatience is the share of a search's patience that is spent on finding what to show if nothing fits.
const closestPatience = 0.3

// keepLean drops all candidates except those whose memory is known, if there are any.
func (s *search) keepLean() {
	if lean := slices.DeleteFunc(slices.Clone(s.frontier), func(n *node) bool { return !n.wanted.lean }); len(lean) > 0 {
		s.frontier = lean
		heap.Init(&s.frontier)
	}
}

// closest returns what to show of a root if nothing fits: the evaluated candidate with the smallest shortfall, or
// another one that needs less memory, if it is found in time. The latter may even fit, if the search for time
// ended before it found one that does.
func (s *search) closest(root lang.Schedule) *node {
	b := *s.bounds
	b.timeless, b.work = true, 0
	all := &search{bounds: &b, context: s.context, verdicts: map[string]map[string]*plan.Rejection{}, nearest: true}
	all.push(&node{schedule: root})
	for all.frontier.Len() > 0 {
		if all.impatience() > closestPatience || s.context.Options.Stopped() {
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
			if shortfall := n.need.Shortfall(n.plan.Memory); s.least == nil || shortfall == nil || shortfall.Bytes < s.lacking.Bytes {
				return n
			}
			return s.least
		}
	}
	return s.least
}

package search

import (
	"cmp"
	"container/heap"
	"math"
	"slices"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/estimate"
	"sppo.dev/internal/passes/memory"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/walk"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// This file implements the search that ignores time. It computes only the costs that the assignment of layers
// needs, and takes candidates with the lowest memory bound first, so that it soon finds a plan that fits, if
// there is one. A complete candidate is first planned without timing its copies, which would take many
// simulations. In such an untimed plan, reloads begin as late as possible, and copies to the host end as early as
// possible. Such a plan needs no simulation, and no more device memory than one with any other timing, except
// for part of the packing margin.

// wanted determines the order of candidates: least memory first. If memory is plentiful, candidates
// with the fewest open dimensions come first, then those on the most ranks, then those with the
// fewest tasks, because they are the fastest to plan.
type wanted struct {
	bytes   ir.Bytes
	open    int
	ranks   int
	tasks   int
	untimed bool // the bytes are those of the plan without timed copies
}

func (w wanted) compare(o wanted) int {
	return cmp.Or(cmp.Compare(w.bytes, o.bytes), cmp.Compare(w.open, o.open), cmp.Compare(o.ranks, w.ranks), cmp.Compare(w.tasks, o.tasks))
}

// plenty is the fraction of device memory below which using less does not matter.
const plenty = 0.5

// want sets the place of a candidate in the order, given its memory bound. A shortfall on the host counts as
// much as one on the device.
func (s *search) want(n *node, least ir.Bytes, shortfall *plan.Shortfall) {
	w, p := &n.wanted, &n.schedule
	if shortfall != nil {
		least = max(least, ir.Bytes(s.cluster.DeviceMemory)+shortfall.Bytes)
	}
	w.bytes, w.open = max(least, ir.Bytes(plenty*float64(s.cluster.DeviceMemory))), len(dimensions)-n.level
	w.ranks = max(1, p.SP) * max(1, p.PP) * max(1, p.DP)
	w.tasks = p.Subsequences.Count * max(1, p.PP) * max(1, p.VirtualStages)
	if streams(p) { // streaming loads many more bytes than the copies of saved tensors
		w.tasks *= max(1, p.Subsequences.Count)
	}
}

// wantComplete sets the place of a candidate in the order once its memory is known. In a search for any plan
// that fits, a candidate that fits comes first.
func (s *search) wantComplete(n *node, device ir.Bytes, shortfall *plan.Shortfall) {
	if s.want(n, device, shortfall); shortfall == nil && s.fitting {
		n.wanted.bytes = 0
	}
}

// untimed bounds the memory of a complete candidate, and queues it unless it cannot fit.
func (s *search) untimed(n *node) {
	n.wanted.untimed = true
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

// mayFit returns the limits within which a footprint may still fit after placement.
func mayFit(e *estimate.Estimator, m plan.Memory) plan.Memory {
	m = memory.WithSlack(e.Plan, m)
	m.HostCapacityBytes += earlier(e)
	return m
}

// earlier returns the number of device bytes that reloads may occupy if they begin earlier than necessary.
func earlier(e *estimate.Estimator) (n ir.Bytes) {
	p := e.Plan
	for _, saved := range e.Saved { // with attention windows, the first subsequence does not always save the most
		for _, sizes := range saved {
			var of ir.Bytes
			for _, size := range sizes {
				of += ir.Bytes(p.LongestAhead()-1) * graph.Align(size)
			}
			n = max(n, of)
		}
	}
	return n + memory.Packed(p, n)
}

// weighs reports whether the offload pass compares placements with each other.
func (n *node) weighs() bool {
	return n.weighed || n.schedule.Offload.Policy == plan.PolicyMemory || n.schedule.Recompute == plan.PolicyAuto
}

// closestPatience is the fraction of a search's patience that is spent on finding a plan to report if nothing
// fits.
const closestPatience = 0.3

// keepUntimed drops all candidates except those with known memory, and reports whether there are any. If there are
// none, it drops nothing.
func (s *search) keepUntimed() bool {
	measured := slices.DeleteFunc(slices.Clone(s.frontier), func(n *node) bool { return !n.wanted.untimed })
	if len(measured) > 0 {
		s.frontier = measured
		heap.Init(&s.frontier)
	}
	return len(measured) > 0
}

// closest returns the plan to report if nothing fits: the evaluated candidate with the smallest shortfall, or another
// candidate that needs less memory, if one is found in time. The latter may even fit, if the search by time ended early.
func (s *search) closest() *node {
	n := s.weigh(s.closestWith(false))
	if n == nil {
		return nil
	}
	shortfall := n.need.Shortfall(n.plan.Memory)
	if shortfall == nil || s.fits(n) { // placement may show that it fits although its bound does not
		return n
	}
	s.least, s.lacking = n, *shortfall
	return s.closestWith(true)
}

// closestWith is like closest. With split set, it considers only candidates whose saved activations fill the host, and
// otherwise stay on the device: other policies leave one of the two empty.
func (s *search) closestWith(split bool) *node {
	c := *s.context
	c.Options.Progress, c.Options.Fitting = nil, split
	all := newSearch(&c, s.request)
	all.nearest, all.timeless = true, true
	all.push(&node{schedule: s.request.Schedule})
	defer func() { s.work += all.work }()
	for all.frontier.Len() > 0 {
		if all.impatience() > closestPatience || s.context.Options.Stopped() {
			if any := all.keepUntimed(); s.least != nil && (!any || s.context.Options.Stopped()) {
				return s.least
			}
		}
		n := heap.Pop(&all.frontier).(*node)
		switch {
		case n.level < len(dimensions):
			all.advance(n)
			continue
		case !n.wanted.untimed:
			all.untimed(n)
			continue
		}
		n = &node{schedule: n.schedule, level: len(dimensions)}
		if !s.finish(n) {
			continue
		}
		if shortfall := n.need.Shortfall(n.plan.Memory); s.least == nil || shortfall == nil || shortfall.Bytes < s.lacking.Bytes {
			return n
		}
		return s.least
	}
	return s.least
}

// anyFit returns a candidate of a request that fits, or nil. It also reports whether the answer is
// certain, which it is not if the search ended early, and how much work it took. If the search ends early and thoroughly
// is set, anyFit also tries the candidate that is closest to fitting, which can take long.
func (s *search) anyFit(request lang.Schedule, thoroughly bool) (n *node, known bool, work walk.Work) {
	c := *s.context
	c.Options.Progress = nil
	c.Options.Fitting, c.Options.Patience = true, anyShare*cmp.Or(c.Options.Patience, 1)
	p := *s.request
	p.Schedule = request
	any := newSearch(&c, &p)
	if n = any.bestFirst(); n == nil && thoroughly {
		n = any.closest()
	}
	if n == nil || n.need.Shortfall(n.plan.Memory) != nil {
		return nil, !any.ended, any.work
	}
	return n, true, any.work
}

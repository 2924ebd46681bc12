package search

import (
	"cmp"
	"container/heap"
	"math"
	"slices"

	"sppo.dev/graph"
	"sppo.dev/ir"
	"sppo.dev/lang"
	"sppo.dev/passes/plan"
)

// This file improves the plan of a search that ends at its limit. If memory is scarce, bounds on time are loose, and a
// best-first search can spend all of its work on a few classes of candidates. From a plan that fits, however slow, a
// few steps in one dimension at a time nevertheless lead to one of the fastest plans of its class.

// refine improves the plan that the search found, which may be nil. If the search ended at its limit, refine also looks
// for a plan that fits, and improves it, in each class of candidates that divide the ranks in the same way and may be
// faster.
func (s *search) refine(winner *node) *node {
	const worthwhile = 0.03 // least possible gain, relative to the time, for which plans are improved
	until := s.impatience() + refineShare
	if winner != nil {
		s.note(winner, nil)
		if s.ended && s.distance(winner) < worthwhile {
			return winner
		}
		winner = s.fastest(winner, s.climb(winner, s.impatience()+refineShare/3, s.ended))
	} else {
		until = s.impatience() + rescueShare
	}
	if !s.ended {
		return winner
	}
	for _, c := range s.classes(s.request.Schedule) {
		if s.spent(until) || s.context.Options.Stopped() {
			break
		}
		if !mayBeat(winner, c.bound) || winner != nil && sameRanks(&c.schedule, &winner.schedule) {
			continue
		}
		any, _, work := s.anyFit(c.schedule)
		s.work += work
		if any == nil || !s.finish(any) || any.need.Shortfall(any.plan.Memory) != nil {
			continue
		}
		if winner == nil {
			until = s.impatience() + refineShare
		}
		winner = s.fastest(winner, s.climb(any, (s.impatience()+until)/2, true))
	}
	if winner == nil {
		return nil
	}
	return s.fastest(winner, s.climb(winner, s.impatience()+lastShare, false))
}

// fastest takes a list of plans, each faster than the one before it. It returns the last of them that fits after
// placement and is clearly faster than the winner. If there is none, it returns the winner, which may be nil.
func (s *search) fastest(winner *node, found []*node) *node {
	for _, n := range slices.Backward(found) {
		if !mayBeat(winner, n.time()) {
			break
		}
		if s.fits(n) {
			return n
		}
	}
	return winner
}

// mayBeat reports whether a time, or a lower bound on it, is clearly less than the time of a plan, which may be nil.
func mayBeat(winner *node, t ir.Seconds) bool {
	return winner == nil || t*(1+searchHandicap) < winner.time()
}

// classes returns candidates of a root, one for each of the ways to divide the ranks that have the lowest
// bounds. Among candidates with almost equal bounds, those with the fewest stages come first, because they have
// the smallest bubbles.
func (s *search) classes(root lang.Schedule) (classes []*node) {
	const most, almost = 64, 0.05
	all := &search{bounds: s.bounds, context: s.context, verdicts: map[string]map[string]*plan.Rejection{}}
	all.push(&node{schedule: root})
	for all.frontier.Len() > 0 && len(classes) < most {
		n := heap.Pop(&all.frontier).(*node)
		if n.level < levelOfStages {
			all.advance(n)
			continue
		}
		c, of := root, &n.schedule
		c.Order, c.SPMode, c.SP, c.DP, c.PP = of.Order, of.SPMode, of.SP, of.DP, of.PP
		if n.schedule = c; !slices.ContainsFunc(classes, func(o *node) bool { return sameRanks(&n.schedule, &o.schedule) }) {
			classes = append(classes, n)
		}
	}
	rank := func(n *node) float64 { return math.Floor(math.Log(float64(n.bound)) / almost) }
	slices.SortStableFunc(classes, func(a, b *node) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a.schedule.PP, b.schedule.PP))
	})
	return classes
}

// sameRanks reports whether two schedules divide the ranks in the same way.
func sameRanks(a, b *lang.Schedule) bool {
	return a.Order == b.Order && a.SPMode == b.SPMode && a.SP == b.SP && a.DP == b.DP && a.PP == b.PP
}

// climb improves a plan, one dimension after another, as long as that makes it clearly faster, and returns all plans
// along the way. It tries the values that the search skipped or, if the search ended at its limit, all values that
// divide the ranks in the same way. If quickly is set, the offload pass decides placements only at the end.
func (s *search) climb(from *node, until float64, quickly bool) []*node {
	found := []*node{from}
	if n := s.quick(from); quickly && s.improves(n, from) {
		found = append(found, n)
	}
	found = s.steps(found, until, quickly)
	if last := found[len(found)-1]; quickly && !last.weighed {
		if w := s.weighing(last); s.finish(w) && w.need.Shortfall(w.plan.Memory) == nil && w.time() < last.time() {
			found = append(found, w)
		}
	}
	return found
}

// quick returns a copy of a candidate in which policies that are quick to plan decide the placements that the request
// leaves open.
func (s *search) quick(n *node) *node {
	n = s.weighing(n)
	n.weighed = false
	if opensRecompute(n.schedule) {
		n.schedule.Recompute = graph.RecomputeKeepAttention
	}
	if mayBe(n.schedule.Offload.Policy, "adaptive") {
		n.schedule.Offload.Policy = "adaptive"
	}
	return n
}

// steps continues a list of plans, each of which is clearly faster than the one before it. If quickly is set, the
// offload pass does not decide placements.
func (s *search) steps(found []*node, until float64, quickly bool) []*node {
	for same, i := 0, len(dimensions)-1; same < len(dimensions); same, i = same+1, (i+len(dimensions)-1)%len(dimensions) {
		if d := &dimensions[i]; d.text(&s.request.Schedule) == "" && (d.refine || s.ended && !d.weighs) {
			if better := s.stepIn(d, found[len(found)-1], until, quickly); better != nil {
				found, same = append(found, better), 0
			}
		}
	}
	return found
}

// stepIn returns a clearly faster plan that differs from a given one only in one dimension and in placements, or nil
// if it finds none. If a value may need too much memory, stepIn also tries it with K and V streamed.
func (s *search) stepIn(d *dimension, from *node, until float64, quickly bool) *node {
	for _, v := range d.values(&s.space, &from.schedule) {
		n := &node{schedule: from.schedule, level: len(dimensions), weighed: from.weighed}
		if v.set(&n.schedule); v.text == d.text(&from.schedule) || !sameRanks(&n.schedule, &from.schedule) {
			continue
		}
		if s.spent(until) || s.context.Options.Stopped() {
			return nil
		}
		if quickly && n.weighed {
			n = s.quick(n)
		}
		if s.improves(n, from) {
			return n
		}
		if keeps := s.keeps(&n.schedule); s.ended && s.request.Schedule.Keep == nil && len(keeps) > 1 && len(n.schedule.Keep) > 0 {
			n = &node{schedule: n.schedule, level: n.level, weighed: n.weighed}
			if keeps[len(keeps)-1].set(&n.schedule); s.improves(n, from) {
				return n
			}
		}
	}
	return nil
}

// improves plans a candidate, and reports whether it fits and is clearly faster than another.
func (s *search) improves(n, from *node) bool {
	s.tell(from)
	s.made++
	bound, least := s.of(n.schedule, n.level)
	if bound >= unreachable {
		return false
	}
	n.bound = bound * s.handicap(n)
	if shortfall := s.lackOf(least); shortfall != nil || s.ended && !mayBeat(from, bound) {
		s.note(n, shortfall)
		return false
	}
	if !s.finish(n) {
		return false
	}
	n.bound = s.slackened(n.time() * s.handicap(n))
	shortfall := n.need.Shortfall(n.plan.Memory)
	s.note(n, shortfall)
	return shortfall == nil && mayBeat(from, n.time())
}

package search

import (
	"cmp"
	"container/heap"
	"math"
	"slices"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// This file improves the plan of a search that ends at its limit. If memory is scarce, bounds on time are loose, and a
// best-first search can spend all of its work on a few classes of candidates. From a plan that fits, however slow, a
// few steps in one or two dimensions at a time nevertheless lead to one of the fastest plans of its class.

// refine improves the plan that the search found, which may be nil. If the search ended at its limit, refine also looks
// for a plan that fits, and improves it, in each class of candidates that may be faster.
func (s *search) refine(winner *node) *node {
	const worthwhile = 0.03 // least possible gain, relative to the time, for which plans are improved
	if winner != nil {
		s.note(winner, nil)
		if s.ended && s.distance(winner) < worthwhile {
			return winner
		}
		winner = s.fastest(winner, s.climb(winner, s.budget(refineShare/3), s.ended))
	}
	if !s.ended {
		return winner
	}
	until := s.impatience() + refineShare
	if winner == nil {
		any, known := s.anySeed()
		switch {
		case any != nil:
			until = s.impatience() + refineShare
			winner = s.fastest(nil, s.climb(any, s.budget(classShare), true))
		case known:
			return nil
		default:
			until = s.impatience() + rescueShare
		}
	}
	if winner = s.bestOfClasses(winner, until); winner == nil {
		return nil
	}
	last := s.budget(lastShare)
	last.planned = s.exact + leastTried
	return s.fastest(winner, s.climb(winner, last, false))
}

// bestOfClasses returns the fastest of a plan, which may be nil, and a plan of each class that may be faster. It ends when
// the search has spent a given amount of its patience, or more if it has no plan until then.
func (s *search) bestOfClasses(winner *node, until float64) *node {
	for _, c := range s.classes(s.request.Schedule) {
		if s.spent(until) || s.context.Options.Stopped() {
			break
		}
		if !mayBeat(winner, c.bound) || winner != nil && sameClass(&c.schedule, &winner.schedule) {
			continue
		}
		any, _ := s.seed(c.schedule, false)
		if any == nil {
			continue
		}
		if winner == nil {
			until = s.impatience() + refineShare
		}
		winner = s.fastest(winner, s.climb(any, s.budget(classShare), true))
	}
	return winner
}

// anySeed returns a plan of any class that fits, or nil if it finds none, and whether the answer is certain. It first looks
// where most jobs have their plans: in sequence order, with all of K and V on the device.
func (s *search) anySeed() (n *node, known bool) {
	usual := s.request.Schedule
	if mayBe(usual.Order, plan.OrderSequence) {
		usual.Order = plan.OrderSequence
	}
	if usual.Keep == nil {
		usual.Keep = plan.Streamable
	}
	for _, class := range []lang.Schedule{usual, s.request.Schedule} {
		if n, known = s.seed(class, true); n != nil {
			break
		}
	}
	return n, known
}

// seed returns a plan of a class that fits, however slow, or nil if it finds none. It also reports whether the answer is
// certain. If thoroughly is set, the search for the plan can take long.
func (s *search) seed(class lang.Schedule, thoroughly bool) (n *node, known bool) {
	any, known, work := s.anyFit(class, thoroughly)
	s.work += work
	if any == nil {
		return nil, known
	}
	for _, n := range []*node{s.quick(any), any} {
		if s.finish(n) && n.need.Shortfall(n.plan.Memory) == nil {
			return n, true
		}
	}
	return nil, false
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

// classes returns candidates of a root, one for each of the classes that have the lowest bounds: ways to divide the
// ranks, with optimizer state on the device or the host. Among candidates with almost equal bounds, those with the
// fewest stages come first, because they have the smallest bubbles. Values of order alternate: their plans differ most, and their
// bounds least.
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
		c.Order, c.SPMode, c.ExpertParallel, c.SP, c.Ring, c.DP, c.PP, c.OptimizerOffload = of.Order, of.SPMode, of.ExpertParallel, of.SP, of.Ring, of.DP, of.PP, of.OptimizerOffload
		if n.schedule = c; !slices.ContainsFunc(classes, func(o *node) bool { return sameClass(&n.schedule, &o.schedule) }) {
			classes = append(classes, n)
		}
	}
	rank := func(n *node) float64 { return math.Floor(math.Log(float64(n.bound/classes[0].bound)) / almost) }
	slices.SortStableFunc(classes, func(a, b *node) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a.schedule.PP, b.schedule.PP))
	})
	nth, found := map[*node]int{}, map[string]int{}
	for _, n := range classes {
		nth[n] = found[n.schedule.Order]
		found[n.schedule.Order]++
	}
	slices.SortStableFunc(classes, func(a, b *node) int { return cmp.Compare(nth[a], nth[b]) })
	return classes
}

// sameClass reports whether two schedules divide the ranks in the same way and keep optimizer state in the same memory.
func sameClass(a, b *lang.Schedule) bool {
	return sameRanks(a, b) && a.OptimizerOffload == b.OptimizerOffload
}

// sameRanks reports whether two schedules divide the ranks in the same way.
func sameRanks(a, b *lang.Schedule) bool {
	return a.Order == b.Order && a.SPMode == b.SPMode && a.ExpertParallel == b.ExpertParallel && a.SP == b.SP && a.Ring == b.Ring && a.DP == b.DP && a.PP == b.PP
}

// climb improves a plan, one dimension after another, as long as that makes it clearly faster, and returns all plans
// along the way. It tries the values that the search skipped or, if the search ended at its limit, all values that
// divide the ranks in the same way. If quickly is set, the offload pass decides placements only at the end.
func (s *search) climb(from *node, until budget, quickly bool) []*node {
	found := []*node{from}
	if !quickly {
		found = s.addWeighed(found)
	} else if n := s.quick(from); true {
		if fits, faster := s.improves(n, from); fits && faster {
			found = append(found, n)
		}
	}
	if found = s.steps(found, until, quickly); quickly {
		found = s.addWeighed(found)
	}
	return found
}

// addWeighed adds the last plan of a list with its placements decided by the offload pass, if it is then faster. A search
// that did not end at its limit has tried this.
func (s *search) addWeighed(found []*node) []*node {
	n := last(found)
	if n.weighed || !s.ended {
		return found
	}
	if w := s.weighing(n); s.finish(w) && w.need.Shortfall(w.plan.Memory) == nil && w.time() < n.time() {
		found = append(found, w)
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

func last(found []*node) *node { return found[len(found)-1] }

// steps continues a list of plans, each of which is clearly faster than the one before it. If quickly is set, the
// offload pass does not decide placements. Where no single change helps, steps tries two changes at once: a first that
// may be faster but needs too much memory, and a second.
func (s *search) steps(found []*node, until budget, quickly bool) []*node {
	var short []*node // differ from the last plan in one dimension
	for same, i := 0, len(dimensions)-1; same < len(dimensions); same, i = same+1, (i+len(dimensions)-1)%len(dimensions) {
		better, more := s.stepIn(i, last(found), last(found), until, quickly)
		if short = append(short, more...); same == len(dimensions)-1 && better == nil {
			better = s.secondStep(short, last(found), until, quickly)
		}
		if better != nil {
			found, same, short = append(found, better), -1, nil
		}
	}
	return found
}

// secondStep returns a clearly faster plan that fits and that differs in one dimension from one of the given candidates,
// which do not fit, or nil if it finds none.
func (s *search) secondStep(short []*node, than *node, until budget, quickly bool) *node {
	for _, n := range short {
		for i := range dimensions {
			if better, _ := s.stepIn(i, n, than, until, quickly); better != nil {
				return better
			}
		}
	}
	return nil
}

// stepIn returns a plan that fits, is clearly faster than another, and differs from a candidate only in one dimension
// and in placements, or nil if it finds none. If a value needs too much memory, stepIn also tries it with values that
// save memory. It also returns the candidates that may be faster but do not fit.
func (s *search) stepIn(dim int, from, than *node, until budget, quickly bool) (better *node, short []*node) {
	d := &dimensions[dim]
	if d.text(&s.request.Schedule) != "" || !d.refine && (!s.ended || d.weighs) {
		return nil, nil
	}
	for _, n := range s.neighbours(d, from) {
		if s.isSpent(until) || s.context.Options.Stopped() {
			return nil, nil
		}
		if quickly && n.weighed {
			n = s.quick(n)
		}
		fits, faster := s.improves(n, than)
		if fits && faster {
			return n, nil
		}
		if fits || !faster {
			continue
		}
		if better := s.relieved(n, than); better != nil {
			return better, nil
		}
		short = append(short, n)
	}
	return nil, short
}

// neighbours returns the complete candidates that differ from another in one dimension, but not in how they divide ranks.
func (s *search) neighbours(d *dimension, from *node) (out []*node) {
	for _, v := range d.values(&s.space, &from.schedule) {
		n := &node{schedule: from.schedule, level: len(dimensions), weighed: from.weighed}
		if v.set(&n.schedule); v.text != d.text(&from.schedule) && sameRanks(&n.schedule, &from.schedule) {
			out = append(out, n)
		}
	}
	return out
}

// relieved returns a plan that fits, is clearly faster than another, and differs from a candidate in a value that saves
// memory, or nil if it finds none.
func (s *search) relieved(n, than *node) *node {
	for i := range dimensions {
		d := &dimensions[i]
		if !d.frugal || !s.ended || d.text(&s.request.Schedule) != "" {
			continue
		}
		values := d.values(&s.space, &n.schedule)
		if least := values[len(values)-1]; least.text != d.text(&n.schedule) {
			r := &node{schedule: n.schedule, level: n.level, weighed: n.weighed}
			least.set(&r.schedule)
			if fits, faster := s.improves(r, than); fits && faster {
				return r
			}
		}
	}
	return nil
}

// improves plans a candidate if it may fit and be clearly faster than another. It reports whether it fits, and whether
// it is, or may be, clearly faster.
func (s *search) improves(n, from *node) (fits, faster bool) {
	s.tell()
	s.made++
	bound, least := s.of(n.schedule, n.level)
	if bound >= unreachable {
		return false, false
	}
	n.bound = bound * s.handicap(n)
	if shortfall := s.lackOf(least); shortfall != nil || s.ended && !mayBeat(from, bound) {
		s.note(n, shortfall)
		return shortfall == nil, mayBeat(from, bound)
	}
	if !s.finish(n) {
		return false, false
	}
	n.bound = s.slackened(n.time() * s.handicap(n))
	return n.need.Shortfall(n.plan.Memory) == nil, mayBeat(from, n.time())
}

package search

import (
	"cmp"
	"container/heap"
	"math"
	"slices"

	"sppo.dev/lang"
	"sppo.dev/passes/pass"
	"sppo.dev/passes/plan"
	"sppo.dev/passes/walk"
)

// This file divides a search into stages. Some dimensions are wide: most jobs use the default
// value, and the other values multiply the number of candidates. The first stage uses the default
// value of every open wide dimension. A later stage tries the other values with a fraction of the
// work. It starts from the plan that the first stage has found, so the result is never worse.
//
// If the first stage goes for a while without finding a plan that fits, a search over all values looks for any
// plan that fits, however slow. If there is one, the first stage goes on. If it still finds no plan that fits,
// it continues from that one. If nothing fits, the search stops.

// Fractions of a search's patience.
const (
	doubtShare  = 0.5  // that the first stage spends before it checks whether anything fits
	sureShare   = 2.5  // that the first stage spends, if something fits, before it continues from that plan
	anyShare    = 0.05 // for the check whether anything fits; its work is not counted
	probeShare  = 1.5  // that the search spends before it stops probing classes
	othersShare = 0.5  // for alternatives to the winner
	widerShare  = 0.25 // for the other values of wide dimensions, if something fits
)

// visitsWeighed limits when the offload pass decides the placements of the candidate that needs the least
// memory: only if a step has at most this many layer visits in its forward pass. For larger candidates, this
// would take longer than the rest of the search.
const visitsWeighed = 60_000

// roots returns the request with default values for its open wide dimensions, and one schedule for
// each other combination of their values. A search that ignores time has only one root, because
// memory immediately shows which choice is better.
func (s *search) roots() (first lang.Schedule, wider []lang.Schedule) {
	first = s.request.Schedule
	if s.timeless {
		return first, nil
	}
	roots := []lang.Schedule{first}
	for i := range dimensions {
		d := &dimensions[i]
		if !d.wide || d.text(&first) != "" {
			continue
		}
		var next []lang.Schedule
		for _, root := range roots {
			for _, v := range s.widely(d, root) {
				chosen := root
				v.set(&chosen)
				next = append(next, chosen)
			}
		}
		roots = next
	}
	return roots[0], roots[1:]
}

// widely returns the values of a wide dimension for a root, the default first. For a refined
// dimension it returns only the default; the others are tried on the resulting plan.
func (s *search) widely(d *dimension, root lang.Schedule) []value {
	values := d.values(&s.space, &root)
	plain := slices.IndexFunc(values, func(v value) bool { return v.text == d.plain })
	if plain < 0 || d.refine {
		return values[max(0, plain) : max(0, plain)+1]
	}
	return slices.Concat(values[plain:plain+1], values[:plain], values[plain+1:])
}

// isWider reports whether a candidate has a value other than the default in an open wide dimension.
func (s *search) isWider(n *node) bool {
	for i := range dimensions {
		if d := &dimensions[i]; d.wide && !d.refine && d.text(&s.request.Schedule) == "" {
			if text := d.text(&n.schedule); text != "" && text != d.plain {
				return true
			}
		}
	}
	return false
}

// searchStages returns the winner of all stages, or nil if nothing fits.
func (s *search) searchStages() *node {
	first, wider := s.roots()
	s.push(&node{schedule: first})
	if s.timeless {
		return s.settle(stopAt)
	}
	winner, done := s.explore(doubtShare)
	switch {
	case !done && s.holdsFit():
		winner = s.settle(stopAt)
	case winner == nil && (!done || len(wider) > 0):
		winner, wider = s.doubt(first, wider)
	}
	return s.extend(winner, wider)
}

// explore refines candidates until no other can be faster than one of them, which it returns, or
// until none is left. It stops early if the work of the search exceeds a multiple of its patience.
func (s *search) explore(most float64) (winner *node, done bool) {
	for s.frontier.Len() > 0 {
		if s.widen(); s.spent(most) || s.context.Options.Stopped() {
			return nil, false
		}
		s.tell()
		if winner := s.step(); winner != nil {
			return winner, true
		}
	}
	return nil, true
}

// tell reports the progress of the search to the caller.
func (s *search) tell() {
	if s.context.Options.Progress == nil {
		return
	}
	p := pass.Progress{Candidates: s.made, Planned: s.exact}
	for _, n := range s.frontier {
		if n.plan != nil && n.need.Shortfall(n.plan.Memory) == nil && (p.StepS == 0 || n.plan.Time.StepS < p.StepS) {
			p.StepS = n.plan.Time.StepS
		}
	}
	s.context.Options.Progress(p)
}

// settle calls explore, and takes the fastest candidate so far if explore stops early.
func (s *search) settle(most float64) *node {
	winner, done := s.explore(most)
	if !done {
		if s.ended = true; !s.timeless {
			s.weigh(s.least) // with placements from the offload pass, it may be the fastest
		}
		winner = s.soFar()
	}
	return winner
}

// holdsFit reports whether the queue contains a complete candidate that fits according to its bound.
func (s *search) holdsFit() bool {
	return slices.ContainsFunc(s.frontier, func(n *node) bool { return n.plan != nil && n.need.Shortfall(n.plan.Memory) == nil })
}

// doubt checks whether anything fits, first with the default values of wide dimensions. If something does,
// doubt continues the search from that plan. It returns the winner, if any, and the roots that it has not
// tried.
func (s *search) doubt(first lang.Schedule, wider []lang.Schedule) (winner *node, rest []lang.Schedule) {
	any, known, _ := s.anyFit(first)
	if any != nil {
		if winner, _ := s.explore(sureShare); winner != nil {
			return winner, wider
		}
		if s.startFrom(any, first) {
			return s.settle(stopAt), wider
		}
	}
	if known {
		s.frontier = nil
	}
	if len(wider) == 0 {
		return s.settle(stopAt), nil
	}
	any, anyKnown, _ := s.anyFit(s.request.Schedule)
	if any != nil || !anyKnown {
		any = cmp.Or(s.probe(s.request.Schedule), any)
	}
	switch {
	case any == nil && anyKnown:
		return nil, nil
	case any == nil:
		s.pushAll(wider)
		return s.settle(stopAt), nil
	}
	others := s.frontier
	s.frontier = nil
	root := first
	if at := slices.IndexFunc(wider, func(root lang.Schedule) bool { return sameWide(root, any.schedule) }); at >= 0 {
		root = wider[at]
		s.push(&node{schedule: root})
		wider = slices.Delete(wider, at, at+1)
	}
	if !s.startFrom(any, root) {
		return nil, nil
	}
	if known {
		return s.settle(stopAt), wider
	}
	winner = s.settle(s.impatience() + widerShare)
	s.frontier = append(s.frontier, others...)
	heap.Init(&s.frontier)
	heap.Push(&s.frontier, winner)
	return s.settle(stopAt), wider
}

// probe looks for a plan that fits in each class of candidates that divide the ranks alike, and returns the fastest of
// these plans, or nil. If memory is scarce, the candidates with the lowest bounds do not fit, and a search by time
// alone would spend all of its work on a few classes.
func (s *search) probe(root lang.Schedule) (best *node) {
	for _, c := range s.classes(root) {
		if best != nil && c.bound >= best.plan.Time.StepS || s.spent(probeShare) || s.context.Options.Stopped() {
			break
		}
		any, _, work := s.anyFit(c.schedule)
		s.work += work
		if any != nil && s.finish(any) && (best == nil || any.plan.Time.StepS < best.plan.Time.StepS) {
			best = any
		}
	}
	return best
}

// classes returns the ways to divide the ranks of a root that have the lowest bounds. Among those with almost
// equal bounds, the ones with the fewest stages come first, because they have the smallest bubbles.
func (s *search) classes(root lang.Schedule) (classes []*node) {
	const most, almost = 64, 0.05
	all := &search{bounds: s.bounds, context: s.context, verdicts: map[string]map[string]*plan.Rejection{}}
	all.push(&node{schedule: root})
	same := func(a, b *node) bool {
		x, y := &a.schedule, &b.schedule
		return x.Order == y.Order && x.SPMode == y.SPMode && x.SP == y.SP && x.DP == y.DP && x.PP == y.PP
	}
	for all.frontier.Len() > 0 && len(classes) < most {
		n := heap.Pop(&all.frontier).(*node)
		if n.level < levelOfStages {
			all.advance(n)
			continue
		}
		c, of := root, &n.schedule
		c.Order, c.SPMode, c.SP, c.DP, c.PP = of.Order, of.SPMode, of.SP, of.DP, of.PP
		if n.schedule = c; !slices.ContainsFunc(classes, func(o *node) bool { return same(n, o) }) {
			classes = append(classes, n)
		}
	}
	rank := func(n *node) float64 { return math.Floor(math.Log(float64(n.bound)) / almost) }
	slices.SortStableFunc(classes, func(a, b *node) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a.schedule.PP, b.schedule.PP))
	})
	return classes
}

// startFrom evaluates the plan that the search for any fitting plan has found: once unchanged, and once with
// open placements decided by the offload pass. If the candidate of a root that needs the least memory fits with
// timed copies, startFrom does the same with that candidate. It reports whether the unchanged plan could be
// evaluated.
func (s *search) startFrom(any *node, root lang.Schedule) bool {
	n := &node{schedule: any.schedule, level: len(dimensions), number: s.made}
	s.evaluate(s.weighing(n))
	if close := s.closest(root); close != nil && close.need.Shortfall(close.plan.Memory) == nil {
		close.bound = s.slackened(close.plan.Time.StepS * s.handicap(close))
		heap.Push(&s.frontier, close)
		if p := close.plan; !s.spent(stopAt) && int64(p.Subsequences.N)*taskLayers(p) <= visitsWeighed {
			s.weigh(close)
		}
	}
	return s.evaluate(n)
}

// sameWide reports whether two schedules have the same values in all wide dimensions that are not refined.
func sameWide(a, b lang.Schedule) bool {
	for i := range dimensions {
		if d := &dimensions[i]; d.wide && !d.refine && d.text(&a) != d.text(&b) {
			return false
		}
	}
	return true
}

// extend tries the other values of wide dimensions, given as roots. It returns the given winner unless it finds
// a better one.
func (s *search) extend(winner *node, roots []lang.Schedule) *node {
	if winner == nil || len(roots) == 0 {
		return winner
	}
	s.beat = winner
	heap.Push(&s.frontier, winner)
	s.pushAll(roots)
	return s.settle(s.impatience() + widerShare)
}

func (s *search) pushAll(roots []lang.Schedule) {
	for _, root := range roots {
		s.push(&node{schedule: root})
	}
}

// anyFit returns a candidate of a request that fits, or nil. It also reports whether the answer is
// certain, which it is not if the search ended early, and how much work it took.
func (s *search) anyFit(request lang.Schedule) (n *node, known bool, work walk.Work) {
	c := *s.context
	c.Options.Fitting, c.Options.Patience = true, anyShare*cmp.Or(c.Options.Patience, 1)
	p := *s.request
	p.Schedule = request
	any := newSearch(&c, &p)
	n, _ = any.run()
	if n == nil || n.need.Shortfall(n.plan.Memory) != nil {
		return nil, !any.ended, any.work
	}
	return n, true, any.work
}

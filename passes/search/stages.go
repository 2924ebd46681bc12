package search

import (
	"cmp"
	"container/heap"
	"slices"

	"sppo.dev/lang"
	"sppo.dev/passes/pass"
	"sppo.dev/passes/walk"
)

// This file divides a search into stages. Some dimensions are wide: most jobs use the default
// value, and the other values multiply the number of candidates. The first stage uses the default
// value of every open wide dimension. A later stage tries the other values with a fraction of the
// work. It starts from the plan that the first stage has found, so the result is never worse.
//
// If the first stage goes for a while without finding a plan that fits, a search that ignores time looks for any plan that
// fits, however slow, first with the default values and then with all values. If it finds one, the first stage continues
// with that plan in its queue. If nothing fits, the search stops.

// Fractions of a search's patience.
const (
	doubtShare  = 0.5  // that the first stage spends before it checks whether anything fits
	anyShare    = 0.05 // for the check whether anything fits; its work is not counted
	othersShare = 0.5  // for alternatives to the winner
	refineShare = 4    // for improving the plan that the search found
	rescueShare = 1    // for looking for a plan that fits in all classes, if the search found none
	lastShare   = 0.5  // for improving the best plan of all classes
	wastedShare = 1    // for placing candidates that turn out not to fit
	widerShare  = 0.25 // for the other values of wide dimensions, if something fits
)

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
		return s.settle(fitAt)
	}
	winner, done := s.explore(doubtShare)
	switch {
	case winner != nil:
	case done && len(wider) == 0:
		return nil
	case s.holdsFit() || s.doubt(first, wider):
		winner = s.settle(stopAt)
	default:
		return nil
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
	if s.context.Options.Progress != nil {
		s.context.Options.Progress(pass.Progress{Candidates: s.made, Planned: s.exact, StepS: s.shortest})
	}
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

// doubt looks for a plan that fits, however slow, and queues it. It reports whether there may be one. If no candidate
// of the first root fits, doubt drops the candidates of that root.
func (s *search) doubt(first lang.Schedule, wider []lang.Schedule) bool {
	n, known, _ := s.anyFit(first, true)
	if n == nil && known {
		s.frontier = nil
	}
	if n == nil && len(wider) > 0 {
		n, known, _ = s.anyFit(s.request.Schedule, true)
	}
	if n != nil && s.finish(n) {
		n.bound = s.slackened(n.time() * s.handicap(n))
		heap.Push(&s.frontier, n)
	}
	s.ended = n != nil || !known
	return s.ended
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
// certain, which it is not if the search ended early, and how much work it took. If the search ends early and thoroughly
// is set, anyFit also tries the candidate that is closest to fitting, which can take long.
func (s *search) anyFit(request lang.Schedule, thoroughly bool) (n *node, known bool, work walk.Work) {
	c := *s.context
	c.Options.Progress = nil
	c.Options.Fitting, c.Options.Patience = true, anyShare*cmp.Or(c.Options.Patience, 1)
	p := *s.request
	p.Schedule = request
	any := newSearch(&c, &p)
	if n = any.searchStages(); n == nil && thoroughly {
		n = any.closest()
	}
	if n == nil || n.need.Shortfall(n.plan.Memory) != nil {
		return nil, !any.ended, any.work
	}
	return n, true, any.work
}

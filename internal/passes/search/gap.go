package search

import (
	"cmp"
	"container/heap"
	"slices"

	"sppo.dev/internal/passes/walk"
	"sppo.dev/ir"
)

// This file decides when a search ends: when it has a plan within a gap of the lowest bound of the
// remaining candidates. If memory is scarce, bounds on time are loose, and many candidates are
// about equally good. The gap therefore widens as the search does more work, and beyond a certain
// amount of work the fastest plan so far is taken. Work is counted rather than timed, so that the
// same job always gets the same plan.
const (
	searchGap = 1.0 / 330 // at first
	widestGap = 0.01

	patience = 1_800_000 // visits before the gap widens, in a search with Options.Patience 1
	widestAt = 2         // multiple of that work at which the gap is widest
	stopAt   = 2         // multiple of that work at which the fastest plan so far is taken
	fitAt    = 6         // multiple at which a search for any plan that fits ends; its negative answers should be correct
)

// Fractions of a search's patience.
const (
	anyShare    = 0.05 // for the check whether anything fits; its work is not counted
	othersShare = 0.5  // for alternatives to the winner
	refineShare = 4    // for improving the plan that the search found
	classShare  = 1    // for improving the plan of a class
	rescueShare = 1    // for looking for a plan that fits in all classes, if the search found none
	lastShare   = 1    // for improving the best plan of all classes
	wastedShare = 1    // for placing candidates that turn out not to fit
)

// impatience returns the work that a search has done as a multiple of its patience.
func (s *search) impatience() float64 { return s.inPatience(s.work) }

// inPatience returns work as a multiple of the patience of a search.
func (s *search) inPatience(w walk.Work) float64 {
	return float64(w) / patience / cmp.Or(s.context.Options.Patience, 1)
}

// spent reports whether the work of a search exceeds a multiple of its patience.
func (s *search) spent(times float64) bool { return s.impatience() >= times }

// budget limits the improvement of a plan, which ends once it has taken a certain amount of work and the search has planned
// a certain number of candidates.
type budget struct {
	until   float64 // impatience
	planned int
}

// leastTried is the number of candidates that are planned to improve the best plan of all classes, however much work they
// take: if K and V are streamed or a step has many microbatches, one candidate may take more than the work that is left.
const leastTried = 6

// budget returns a share of the search's patience as a budget.
func (s *search) budget(share float64) budget { return budget{until: s.impatience() + share} }

// isSpent reports whether a budget is spent.
func (s *search) isSpent(b budget) bool { return s.spent(b.until) && s.exact >= b.planned }

// widen sets the gap for the work done so far. The gap determines when complete candidates are considered.
func (s *search) widen() {
	const steps = 8 // between the narrowest gap and the widest
	share := min(1, max(0, (s.impatience()-1)/(widestAt-1)))
	gap := searchGap + (widestGap-searchGap)*float64(int(share*steps))/steps
	if gap <= s.gap || s.timeless {
		return
	}
	s.gap = gap
	for _, n := range s.frontier {
		if n.plan != nil {
			n.bound = s.slackened(n.plan.Time.StepS * s.handicap(n))
		}
	}
	heap.Init(&s.frontier)
}

// slackened returns the lowest bound at which, given the gap, a candidate counts as no better than a plan with
// step time t.
func (s *search) slackened(t ir.Seconds) ir.Seconds { return t / ir.Seconds(1+s.gap) }

// soFar returns the fastest complete candidate so far that fits, or nil.
func (s *search) soFar() *node {
	var complete []*node
	for _, n := range s.frontier {
		if n.plan != nil {
			complete = append(complete, n)
		}
	}
	slices.SortFunc(complete, func(a, b *node) int {
		return cmp.Or(cmp.Compare(a.plan.Time.StepS*s.handicap(a), b.plan.Time.StepS*s.handicap(b)), cmp.Compare(a.number, b.number))
	})
	for _, n := range complete {
		if s.fits(n) {
			return n
		}
	}
	return nil
}

// distance returns an upper bound on how much longer the winner takes than any open candidate, relative to the
// candidate's time.
func (s *search) distance(winner *node) float64 {
	least := winner.plan.Time.StepS
	for s.frontier.Len() > 0 && s.frontier[0].level < levelOfSizes { // such candidates have no bound
		s.advance(heap.Pop(&s.frontier).(*node))
	}
	for _, n := range s.frontier {
		if n.plan == nil {
			least = min(least, s.timeOf(n))
		}
	}
	return float64(winner.plan.Time.StepS/least) - 1
}

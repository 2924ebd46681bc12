package search

import (
	"cmp"
	"container/heap"
	"fmt"
	"slices"
	"strings"

	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// This file plans candidates that the search has passed over, so that the report can compare the winner with a plan of each
// rejected value rather than with a bound.

const (
	mostOthers  = 40   // candidates to plan
	mostPerDive = 6    // candidates to plan for one value
	tied        = 1e-4 // relative difference of step times that is no reason to offload more
)

// others returns the best candidate found in each class other than the winner's, fastest first.
func (s *search) others(winner *node) []*node {
	until, most := s.impatience()+othersShare, s.exact+mostOthers
	enough := func() bool { return s.spent(until) || s.exact >= most || s.context.Options.Stopped() }
	s.whole = s.onAllGPUs(winner, enough)
	for dived, round := map[string]bool{}, 0; round < 2; round++ {
		for i := range dimensions {
			if d := &dimensions[i]; round > 0 || !d.detail {
				s.diveFor(i, dived, enough)
			}
		}
	}
	best := map[string]*node{class(winner): winner}
	for _, n := range s.frontier {
		if b := best[class(n)]; n.plan != nil && n.fits() && (b == nil || b != winner && n.time() < b.time()) {
			best[class(n)] = n
		}
	}
	delete(best, class(winner))
	var out []*node
	for _, n := range best {
		out = append(out, n)
	}
	return fastestFirst(out)[:min(len(out), mostAlternatives)]
}

// diveFor plans candidates with the most promising value of an open dimension with which no plan is known, unless it has
// dived for that value before.
func (s *search) diveFor(dim int, dived map[string]bool, enough func() bool) {
	d := &dimensions[dim]
	if d.text(&s.request.Schedule) != "" || d.refine || d.scarce != "" || enough() {
		return
	}
	pins := func(n *node) bool { return n.level > dim }
	if value := s.untried(d, pins, dived); value != "" {
		dived[d.key+"="+value] = true
		s.dive(func(n *node) bool { return pins(n) && d.text(&n.schedule) == value }, enough)
	}
}

// fastestFirst sorts complete candidates by their times.
func fastestFirst(list []*node) []*node {
	slices.SortFunc(list, func(a, b *node) int { return cmp.Or(cmp.Compare(a.time(), b.time()), cmp.Compare(a.number, b.number)) })
	return list
}

// nearTies returns the candidates that differ from a winner only in a policy of recomputation instead of a decision for each unit,
// take hardly longer, and need less memory.
func (s *search) nearTies(winner *node) (out []*node) {
	const hardly, less = 1.01, 0.95
	if !winner.weighed || !mayBe(s.request.Schedule.Recompute, plan.PolicyAuto) {
		return nil
	}
	total := func(n *node) ir.Bytes {
		device, host := n.need.Peaks()
		return device + host
	}
	until := s.impatience() + lastShare
	for i, policy := range s.recomputes(&winner.schedule) {
		if s.spent(until) || s.context.Options.Stopped() {
			break
		}
		n := s.weighing(winner)
		n.schedule.Recompute, n.number = policy, s.made+i
		if s.finish(n) && n.fits() && n.time() <= hardly*winner.time() && float64(total(n)) <= less*float64(total(winner)) {
			out = append(out, n)
		}
	}
	return out
}

// untried returns the value of a dimension with the lowest bound of all values with which no plan is known, or "" if there
// is none. It considers only candidates that pin the dimension, and omits the given values.
func (s *search) untried(d *dimension, pins func(*node) bool, omit map[string]bool) (value string) {
	tried := map[string]bool{"": true}
	for _, n := range s.frontier {
		if n.plan != nil {
			tried[d.text(&n.schedule)] = true
		}
	}
	var lowest ir.Seconds
	for _, n := range s.frontier {
		if v := d.text(&n.schedule); n.plan == nil && pins(n) && !tried[v] && !omit[d.key+"="+v] && (value == "" || n.bound < lowest) {
			value, lowest = v, n.bound
		}
	}
	return value
}

// dive refines only the candidates that match, until one of them is the best of them or enough is true. Other candidates stay
// in the queue.
func (s *search) dive(matches func(*node) bool, enough func() bool) {
	var rest frontier
	all := s.frontier
	s.frontier = nil
	for _, n := range all {
		if matches(n) {
			s.frontier = append(s.frontier, n)
		} else {
			rest = append(rest, n)
		}
	}
	heap.Init(&s.frontier)
	for most := s.exact + mostPerDive; s.frontier.Len() > 0 && s.exact < most && !enough(); {
		n := heap.Pop(&s.frontier).(*node)
		if !matches(n) {
			rest = append(rest, n)
		} else if n.short && n.level < len(dimensions) && dimensions[n.level].weighs && !n.weighed {
			rest = append(rest, n)
			s.evaluate(s.weighing(n)) // the most likely to fit
		} else if n.level < len(dimensions) {
			s.advance(n)
		} else if n.plan == nil {
			s.evaluate(n)
		} else if shortfall := n.need.Shortfall(n.plan.Memory); shortfall != nil && !n.fits() {
			s.reject(n, *shortfall)
		} else {
			rest = append(rest, n)
			break
		}
	}
	s.frontier = append(s.frontier, rest...)
	heap.Init(&s.frontier)
}

// onAllGPUs returns the best plan found on all GPUs of the cluster, or its shortfall, if the winner leaves GPUs idle. It
// returns nil if the winner leaves none idle or if the request determines the number of ranks. If the requested
// numbers of ranks prevent such a plan, only the value is set, which names them.
func (s *search) onAllGPUs(winner *node, enough func() bool) *plan.Rejection {
	gpus, asked := s.cluster.GPUs(), &s.request.Schedule
	if w := &winner.schedule; w.SP*w.DP*w.PP == gpus || asked.SP*asked.DP*asked.PP > 0 {
		return nil
	}
	if ranks, names := ranksGiven(asked); gpus%ranks != 0 {
		return &plan.Rejection{Value: fmt.Sprintf("%s = %d", names, ranks)}
	}
	s.dive(func(n *node) bool {
		c := &n.schedule
		ranks := max(1, c.SP) * max(1, c.DP) * max(1, c.PP)
		return gpus%ranks == 0 && (c.PP == 0 || n.level < levelOfStages || ranks == gpus)
	}, enough)
	out := &plan.Rejection{}
	for _, n := range s.frontier {
		c := &n.schedule
		if c.SP*c.DP*c.PP != gpus {
			continue
		}
		switch t := s.timeOf(n); {
		case n.plan == nil:
			if out.BoundS == 0 || t < out.BoundS {
				out.BoundS = t
			}
		case n.fits() && (out.StepS == 0 || t < out.StepS):
			out.Value, out.StepS = fmt.Sprintf("dp %d x pp %d x sp %s", c.DP, c.PP, spText(c)), t
		}
	}
	return out
}

// ranksGiven returns the product of the requested numbers of ranks, such as 12, and what it is a product of, such as "sp x pp".
func ranksGiven(s *lang.Schedule) (ranks int, names string) {
	ranks = 1
	for _, size := range []struct {
		name  string
		ranks int
	}{{"sp", s.SP}, {"dp", s.DP}, {"pp", s.PP}} {
		if size.ranks > 0 {
			ranks, names = ranks*size.ranks, strings.TrimPrefix(names+" x "+size.name, " x ")
		}
	}
	return ranks, names
}

// offloadsLess returns the candidate that differs from a winner only in offload and, of those whose steps take no longer,
// needs the least host memory.
func (s *search) offloadsLess(winner *node) *node {
	if d := &dimensions[len(dimensions)-1]; d.text(&s.request.Schedule) != "" || d.text(&winner.schedule) == "" {
		return winner // given, or decided by the offload pass, which offloads as little as possible
	}
	best := winner
	for _, policy := range s.offloads(&winner.schedule) {
		_, host := best.need.Peaks()
		if host == 0 || s.context.Options.Stopped() {
			break
		}
		n := &node{schedule: winner.schedule, level: winner.level, number: winner.number}
		if n.schedule.Offload.Policy = policy; policy == winner.schedule.Offload.Policy || !s.finish(n) {
			continue
		}
		if _, less := n.need.Peaks(); less < host && n.fits() && n.time() <= winner.time()*(1+tied) && s.fits(n) {
			best = n
		}
	}
	return best
}

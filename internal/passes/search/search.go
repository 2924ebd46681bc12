// Package search implements the solve pass, which chooses the values that a spec leaves open. A candidate is a
// schedule whose first dimensions are pinned. The search is best-first, by lower bounds on time and memory.
//
// space.go defines the search space, bound.go and room.go compute the bounds, and search.go runs
// the search. gap.go decides when it ends, climb.go improves its plan, timeless.go looks for any plan that
// fits, and others.go plans the alternatives of the report. solve.go computes and checks the sizes that follow from a pinned schedule.
package search

import (
	"cmp"
	"container/heap"
	"fmt"
	"math"
	"slices"
	"strings"

	"sppo.dev/internal/passes/estimate"
	"sppo.dev/internal/passes/memory"
	"sppo.dev/internal/passes/pass"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/strategy"
	"sppo.dev/internal/passes/walk"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// The search is best-first, over candidates with more and more pinned dimensions. The candidate
// with the lowest bound is refined next. The first complete candidate to reach the front of the
// queue with its exact time is therefore the best, to within a gap. Candidates that cannot fit are dropped. The
// exact time is the prediction after the remaining passes; codegen, if available, decides exactly whether a
// plan fits. gap.go decides when the search ends.

// searchHandicap is the minimum speed-up that justifies a more complex candidate: one that shares tasks, splits
// backward tasks, has an unusual grid, is in layer order or streams K or V. Such candidates need
// more memory and messages, or have tasks of less even length, and their bounds are looser. Without a handicap,
// the search would plan many of them for gains below the accuracy of predictions. Together with the gap, it
// keeps the result within 1% of the best, or within 1.6% of it once the gap is widest.
const searchHandicap = 0.006

// mostAlternatives is the maximum number of alternatives in a plan.
const mostAlternatives = 5

// node is a candidate with some pinned dimensions.
type node struct {
	schedule lang.Schedule
	level    int        // number of pinned dimensions
	bound    ir.Seconds // on the time of every plan that the candidate represents, times its handicap
	number   int        // order of creation; among equal bounds, the lowest number is first
	plan     *plan.Plan // set once all dimensions are pinned and the time is known
	need     *memory.Footprint
	short    bool       // the plan without offload does not fit
	least    ir.Bytes   // lower bound on device memory, if short
	allKept  *plan.Plan // plan of the same sizes without offload or recomputation; its time is a lower bound
	tooLarge bool       // placement has shown that it does not fit
	rough    bool       // its bound does not include streaming
	weighed  bool       // the offload pass decides the open placement dimensions
	wanted   wanted     // order in a search that ignores time
}

// fits reports whether a complete candidate fits, according to its placement or, if it is not placed, its memory bound.
func (n *node) fits() bool {
	if n.plan.Memory.Placed {
		return n.plan.Memory.Fits
	}
	return !n.tooLarge && n.need.Shortfall(n.plan.Memory) == nil
}

// time returns the step time of a complete candidate.
func (n *node) time() ir.Seconds { return n.plan.Time.StepS }

// rank returns the bound by which a candidate is queued. If memory is scarce, the bound is rounded down, in
// relative steps of searchGap, because candidates with the same sizes hardly differ in their bounds, but many
// of them do not fit.
func (n *node) rank() ir.Seconds {
	if n.short && n.plan == nil {
		return ir.Seconds(math.Exp(math.Floor(math.Log(float64(n.bound))/searchGap) * searchGap))
	}
	return n.bound
}

// frontier is a queue of candidates, ordered by rank. Among candidates of equal rank, those that need the least
// memory come first, because they are the most likely to fit. Remaining ties go to the lowest bound, and then
// to the candidate that is the fastest to plan.
type frontier []*node

func (f frontier) Len() int { return len(f) }

func (f frontier) Less(i, j int) bool {
	a, b := f[i], f[j]
	return cmp.Or(cmp.Compare(a.rank(), b.rank()), cmp.Compare(a.least, b.least), cmp.Compare(a.bound, b.bound), a.wanted.compare(b.wanted),
		cmp.Compare(count(a.weighed), count(b.weighed)), cmp.Compare(a.number, b.number)) < 0
}

func (f frontier) Swap(i, j int) { f[i], f[j] = f[j], f[i] }

func (f *frontier) Push(n any) { *f = append(*f, n.(*node)) }

func (f *frontier) Pop() any {
	last := (*f)[len(*f)-1]
	*f = (*f)[:len(*f)-1]
	return last
}

type search struct {
	*bounds
	context  *pass.Context
	frontier frontier
	made     int       // number of candidates, complete or not
	exact    int       // number of evaluated candidates
	wasted   walk.Work // on placing candidates that do not fit
	verdicts map[string]map[string]*plan.Rejection
	least    *node          // the infeasible candidate with the smallest shortfall
	lacking  plan.Shortfall // its shortfall
	nearest  bool           // also consider candidates that do not fit
	gap      float64
	ended    bool       // the search ended before all candidates were considered
	shortest ir.Seconds // estimated time of a step of the fastest complete candidate so far that seemed to fit; 0: none yet
	proved   float64    // upper bound on how much faster than the winner an unevaluated candidate may be

	whole *plan.Rejection // the best plan on all GPUs, if the winner leaves some idle
}

func newSearch(c *pass.Context, p *plan.Plan) *search {
	s := &search{bounds: newBounds(c.Cache, p), context: c, verdicts: map[string]map[string]*plan.Rejection{}, gap: searchGap}
	s.timeless, s.fitting = c.Options.Fitting, c.Options.Fitting
	return s
}

// run returns the winner, or nil if no candidate is a valid plan. If nothing fits, the winner is
// the candidate with the smallest shortfall.
func (s *search) run() (winner *node, alternatives []*node) {
	if winner = s.bestFirst(); !s.timeless {
		winner = s.refine(winner)
	}
	found := winner != nil
	if !found {
		winner = s.closest()
	}
	if winner == nil || s.timeless {
		return winner, nil
	}
	if !found {
		s.fits(winner) // placement may show that it fits although its bound does not
	} else if alternatives = s.others(winner); len(alternatives) > 0 {
		if faster := s.fastest(winner, alternatives[:1]); faster != winner {
			winner, alternatives[0] = faster, winner
		}
	}
	if found {
		winner = s.offloadsLess(winner)
		alternatives = fastestFirst(append(alternatives, s.nearTies(winner)...))
	}
	if winner.fits() {
		s.proved = s.distance(winner)
	}
	if !found {
		return winner, nil
	}
	for _, n := range slices.Concat(s.frontier, alternatives) {
		var shortfall *plan.Shortfall
		if n.plan != nil && !n.fits() {
			shortfall = n.need.Shortfall(n.plan.Memory)
		}
		s.note(n, shortfall)
	}
	return winner, alternatives
}

// bestFirst returns the best plan that a best-first search finds, or nil if it finds none that fits.
func (s *search) bestFirst() *node {
	s.push(&node{schedule: s.request.Schedule})
	if s.timeless {
		return s.settle(fitAt)
	}
	return s.settle(stopAt)
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

// step takes the first candidate from the queue and refines it. If it is complete and fits, no other can be
// faster, and step returns it.
func (s *search) step() *node {
	n := heap.Pop(&s.frontier).(*node)
	switch {
	case n.rough:
		n.rough = false
		s.push(n)
	case n.level < len(dimensions):
		s.advance(n)
	case n.plan != nil:
		if s.fits(n) {
			return n
		}
	case s.timeless && !n.wanted.untimed:
		s.untimed(n)
	default:
		s.evaluate(n)
	}
	return nil
}

// solve runs the search for a plan. If a sequence is not cut by operations, bounds take long to compute. If
// another way to cut it is pinned, solve therefore first searches with cuts by operations, and then cuts the
// sequence of the resulting plan in the pinned way. Only if that plan does not fit does solve search with the
// pinned way.
func (s *search) solve(p *plan.Plan) (winner *node, alternatives []*node) {
	const plain = "flops"
	if s.timeless || mayBe(p.Schedule.Partition, plain) {
		return s.run()
	}
	request := *p
	request.Schedule.Partition = plain
	first := newSearch(s.context, &request)
	if winner, _ := first.run(); winner != nil {
		n := &node{schedule: winner.schedule, level: len(dimensions), weighed: winner.weighed}
		n.schedule.Partition = p.Schedule.Partition
		if first.finish(n) && n.need.Shortfall(n.plan.Memory) == nil && first.fits(n) {
			*s = *first
			return n, nil
		}
	}
	return s.run()
}

// weigh returns a candidate with its open placements decided by the offload pass, if it then fits, and
// otherwise the unchanged candidate.
func (s *search) weigh(n *node) *node {
	if n == nil || n.weighed {
		return n
	}
	w := s.weighing(n)
	if !s.evaluate(w) || w.need.Shortfall(w.plan.Memory) != nil {
		return n
	}
	return w
}

// weighing returns a copy of a candidate in which the offload pass decides the placements that the request
// leaves open.
func (s *search) weighing(n *node) *node {
	w := &node{schedule: n.schedule, level: len(dimensions), number: n.number, weighed: true}
	w.schedule.Recompute, w.schedule.Offload = cmp.Or(s.request.Schedule.Recompute, plan.PolicyAuto), s.request.Schedule.Offload
	return w
}

// push computes the bound of a candidate and queues it, unless it cannot fit.
func (s *search) push(n *node) {
	for n.level < len(dimensions) && (n.weighed && dimensions[n.level].weighs || dimensions[n.level].text(&n.schedule) != "") {
		n.level++
	}
	s.made++
	s.work.Spend(50)
	n.number = s.made
	bound, least := s.of(n.schedule, n.level)
	if bound >= unreachable {
		return
	}
	if n.allKept != nil {
		bound = max(bound, n.allKept.Time.StepS)
	}
	if n.bound = bound * s.handicap(n); n.short {
		n.least = least.device
	}
	shortfall := s.lackOf(least)
	if shortfall != nil && !s.nearest {
		s.reject(n, *shortfall)
		return
	}
	if s.timeless {
		s.want(n, least.device, shortfall)
	}
	heap.Push(&s.frontier, n)
}

// putOff queues a candidate that streams K or V with the bound of the candidate without streaming, from which it was derived.
// A better bound needs the cost of every block, so it is computed only once the candidate reaches the front of the queue.
func (s *search) putOff(n, from *node) {
	s.made++
	n.number, n.allKept, n.least, n.rough = s.made, from.allKept, from.least, true
	n.bound = from.bound / s.handicap(from) * s.handicap(n)
	heap.Push(&s.frontier, n)
}

// handicap returns the factor by which a candidate must be faster than a simpler one: more than 1 if it splits
// backward tasks, shares tasks, has an unusual grid, or is in layer order or streams K or V by choice. The bounds of
// such candidates are also looser, so simpler ones are considered first.
func (s *search) handicap(n *node) ir.Seconds {
	asked, of := &s.request.Schedule, &n.schedule
	if st := strategy.Find(of.Strategy); st != nil && st.Late || of.SharesTasks() || of.Align != asked.Align ||
		of.Order == plan.OrderLayer && mayBe(asked.Order, plan.OrderSequence) || asked.Keep == nil && streams(of) {
		return 1 + searchHandicap
	}
	return 1
}

// advance pins one more dimension. Before the first placement dimension, it computes the exact bound of the
// sizes.
func (s *search) advance(n *node) {
	if n.level >= levelOfKept && n.allKept == nil && !s.timeless {
		s.keepAll(n)
		return
	}
	d := &dimensions[n.level]
	values := d.values(&s.space, &n.schedule)
	if d.refine {
		values = values[:1]
	}
	for _, v := range values {
		next := &node{schedule: n.schedule, level: n.level + 1, allKept: n.allKept, short: n.short}
		v.set(&next.schedule)
		s.push(next)
	}
	if d.scarce != "" && (n.short || s.timeless) {
		for _, v := range d.others(s.bounds, n.schedule) {
			next := &node{schedule: n.schedule, level: n.level + 1, short: n.short}
			if v.set(&next.schedule); streams(&next.schedule) && !s.timeless {
				s.putOff(next, n)
				continue
			}
			s.push(next)
		}
	}
	if d.weighs && !s.timeless { // the offload pass decides this and all later open dimensions
		s.push(&node{schedule: n.schedule, level: n.level, allKept: n.allKept, short: n.short, weighed: true})
	}
}

// keepAll plans the schedule that keeps everything of a candidate. If this plan fits, nothing with the same sizes is faster.
func (s *search) keepAll(n *node) {
	schedule := s.allKept(n.schedule)
	p, e := s.planOf(schedule)
	if p == nil {
		return
	}
	n.bound = max(n.bound, p.Time.StepS*s.handicap(n))
	need, fits := e.Memory().Within(p.Memory)
	if text := dimensions[len(dimensions)-1].text(&n.schedule); fits && (text == "" || text == "none") {
		n = &node{schedule: schedule, level: len(dimensions), bound: s.slackened(n.bound), number: n.number, plan: p, need: &need}
		s.count(n)
	}
	n.allKept, n.short = p, !fits
	heap.Push(&s.frontier, n)
}

// allKept returns the schedule without offload and, where the schedule leaves them open, without recomputation or
// streaming and with the longest chunks of the loss head.
func (s *search) allKept(schedule lang.Schedule) lang.Schedule {
	if schedule.LossChunk == 0 {
		schedule.LossChunk = s.lossChunks(&schedule)[0]
	}
	schedule.Offload = lang.Offload{Policy: "none"}
	schedule.Recompute = recomputeOf(schedule)
	if schedule.Keep == nil {
		schedule.Keep = plan.Streamable
	}
	return schedule
}

// evaluate computes the exact time of a candidate and its memory bound.
func (s *search) evaluate(n *node) bool {
	if !s.finish(n) {
		return false
	}
	if s.timeless {
		device, _ := n.need.Peaks()
		s.wantComplete(n, device, n.need.Shortfall(n.plan.Memory))
	} else {
		n.bound = s.slackened(n.plan.Time.StepS * s.handicap(n))
	}
	heap.Push(&s.frontier, n)
	return true
}

// finish plans a candidate completely, unless a pass refuses it.
func (s *search) finish(n *node) bool {
	p, e := n.allKept, (*estimate.Estimator)(nil)
	if p == nil || n.weighed || p.Schedule.Offload.Policy != n.schedule.Offload.Policy || p.Schedule.Recompute != n.schedule.Recompute || p.Schedule.LossChunk != n.schedule.LossChunk || !slices.Equal(p.Schedule.Keep, n.schedule.Keep) {
		p, e = s.planOf(n.schedule)
	} else {
		e = estimate.New(s.cache, &s.work, p)
	}
	if p == nil {
		return false
	}
	need := e.Memory().Footprint()
	n.plan, n.need = p, &need
	if t := p.Time.StepS; t > 0 && (s.shortest == 0 || t < s.shortest) && need.Shortfall(p.Memory) == nil {
		s.shortest = t
	}
	s.count(n)
	s.note(n, need.Shortfall(p.Memory))
	return true
}

// planOf sizes a candidate and runs the passes after solve on it. It returns nil if a pass refuses the
// candidate.
func (s *search) planOf(schedule lang.Schedule) (*plan.Plan, *estimate.Estimator) {
	s.exact++
	fitting := s.fitting
	p, e := s.passed(schedule, fitting)
	switch {
	case p == nil:
	case fitting:
		p.Memory = memory.Capacities(p)
	default:
		e.Predict()
	}
	return p, e
}

// passed returns a candidate's plan after the remaining passes, with or without timed copies, or nil if a pass
// refuses it.
func (s *search) passed(schedule lang.Schedule, untimed bool) (*plan.Plan, *estimate.Estimator) {
	r := s.request
	p := &plan.Plan{Name: r.Name, Spec: r.Spec, Model: r.Model, Cluster: r.Cluster, Train: r.Train, Schedule: schedule, Lines: r.Lines}
	c := &pass.Context{Cache: s.cache, Work: &s.work, Candidate: true, Untimed: untimed}
	if size(c, p, s.bounds) != nil {
		return nil, nil
	}
	for _, pass := range s.context.Later {
		switch {
		case slices.Contains(s.context.Options.Disable, pass.Name):
			pass.Off(c, p)
		case pass.Run(c, p) != nil:
			return nil, nil
		}
	}
	return p, c.Estimator(p)
}

// fits reports whether a candidate fits. If codegen is available and the candidate could fit, it places the
// buffers to find out.
func (s *search) fits(n *node) bool {
	shortfall := n.need.Shortfall(n.plan.Memory)
	if s.fitting || shortfall == nil && s.timeless { // placement never needs more
		return shortfall == nil
	}
	if n.plan.Memory.Placed {
		return n.plan.Memory.Fits
	}
	if n.tooLarge {
		return false
	}
	if shortfall == nil && strategy.Short(n.plan) != nil { // the bound is good enough
		return true
	}
	if s.context.Options.Measure != nil && (shortfall == nil || s.mayBePlaced(n)) {
		var err error
		if shortfall, err = s.context.Options.Measure(n.plan); err != nil {
			return false
		}
		if shortfall != nil {
			s.wasted.Spend(workOfPlacing * n.plan.Subsequences.N * int(taskLayers(n.plan)))
		}
	}
	if n.tooLarge = shortfall != nil; n.tooLarge {
		s.reject(n, *shortfall)
	}
	return !n.tooLarge
}

// workOfPlacing is the work of placing the buffers of a layer visit.
const workOfPlacing = 200

// mayBePlaced reports whether a candidate whose footprint does not fit may fit after placement. Once the search
// has wasted much work on placing such candidates, it gives up on them.
func (s *search) mayBePlaced(n *node) bool {
	return s.inPatience(s.wasted) < wastedShare && n.need.Shortfall(memory.WithSlack(n.plan, n.plan.Memory)) == nil
}

// reject records that a candidate does not fit.
func (s *search) reject(n *node, shortfall plan.Shortfall) {
	s.note(n, &shortfall)
	if n.plan != nil && (s.least == nil || shortfall.Bytes < s.lacking.Bytes) {
		s.least, s.lacking = n, shortfall
	}
}

// note records the time, a lower bound on it, or the shortfall of a candidate under each value that it pins.
func (s *search) note(n *node, shortfall *plan.Shortfall) {
	s.eachVerdict(n, func(v *plan.Rejection) {
		switch t := s.timeOf(n); {
		case shortfall != nil:
			if v.Shortfall == nil || shortfall.Bytes < v.Shortfall.Bytes {
				v.Shortfall = shortfall
			}
		case n.plan == nil && (v.BoundS == 0 || t < v.BoundS):
			v.BoundS = t
		case n.plan != nil && (v.StepS == 0 || t < v.StepS):
			v.StepS = t
		}
	})
}

// count records that a candidate has been planned.
func (s *search) count(n *node) { s.eachVerdict(n, func(v *plan.Rejection) { v.Planned++ }) }

// eachVerdict calls a function for the record of each open value that a candidate pins.
func (s *search) eachVerdict(n *node, do func(*plan.Rejection)) {
	for i := range dimensions {
		d := &dimensions[i]
		if i >= n.level || d.text(&s.request.Schedule) != "" {
			continue
		}
		values := s.verdicts[d.key]
		if values == nil {
			values = map[string]*plan.Rejection{}
			s.verdicts[d.key] = values
		}
		value := d.text(&n.schedule)
		if value == "" {
			continue // decided by the offload pass
		}
		if values[value] == nil {
			values[value] = &plan.Rejection{Key: d.key, Value: value}
		}
		do(values[value])
	}
}

// timeOf returns the time of a candidate, or a lower bound on it.
func (s *search) timeOf(n *node) ir.Seconds {
	if n.plan != nil {
		return n.time()
	}
	return n.bound / s.handicap(n)
}

// class returns the values that make a candidate a separate alternative.
func class(n *node) string {
	var words []string
	for i := range dimensions {
		if !dimensions[i].detail {
			words = append(words, dimensions[i].text(&n.schedule))
		}
	}
	return strings.Join(words, " ")
}

// choose writes the result of the search into the plan.
func (s *search) choose(p *plan.Plan, winner *node, alternatives []*node) {
	p.Search = &plan.Search{Candidates: s.made, Planned: s.exact, StepS: winner.plan.Time.StepS, Within: s.proved, Limited: s.ended, Stopped: s.context.Options.Stopped(), AllGPUs: s.whole}
	if s.ended && !winner.fits() {
		p.Decide("solve", "search", "not exhausted", fmt.Sprintf(
			"none of %d candidates was found to fit (%d of them were planned in full); the search stopped at its limit", s.made, s.exact))
	}
	if s.context.Options.Stopped() {
		p.Decide("solve", "search", "stopped", "the user stopped the search; this is the best plan so far")
	}
	if s.proved > searchGap+searchHandicap {
		p.Decide("solve", "search", fmt.Sprintf("within %.1f%% of the best", 100*s.proved), fmt.Sprintf(
			"%d candidates, %d of them planned in full; one of the others may be faster", s.made, s.exact))
	}
	for _, n := range alternatives {
		a := plan.Alternative{StepS: n.plan.Time.StepS}
		a.DevicePeakBytes, a.HostPeakBytes = n.need.Peaks()
		for i := range dimensions {
			if text := dimensions[i].text(&n.schedule); text != dimensions[i].text(&winner.schedule) {
				a.Set = append(a.Set, dimensions[i].key+"="+cmp.Or(text, plan.PolicyAuto))
			}
		}
		p.Alternatives = append(p.Alternatives, a)
	}
	for i := range dimensions {
		if dimensions[i].text(&p.Schedule) == "" {
			s.explain(p, i, winner)
		}
	}
	p.Schedule = winner.schedule
}

// explain records the winner's value of an open dimension, with the reason for it and the rejected values.
func (s *search) explain(p *plan.Plan, dim int, winner *node) {
	d := &dimensions[dim]
	value := d.text(&winner.schedule)
	if d.scarce != "" {
		switch value {
		case "":
		case d.values(&s.space, &winner.schedule)[0].text:
			pinned(p, d, value, d.first)
		default:
			pinned(p, d, value, d.scarce)
		}
		return
	}
	found := s.rejections(d, value)
	if value == "" { // the offload pass explains its own decisions
		found = slices.DeleteFunc(found, func(r plan.Rejection) bool { return r.StepS > 0 || r.BoundS > 0 })
	}
	p.Rejected = append(p.Rejected, found...)
	switch {
	case value == "":
	case len(found) == 0 && dim >= levelOfKept && winner.plan == winner.allKept:
		pinned(p, d, value, "auto: it fits, and no other choice is faster")
	default:
		pinned(p, d, value, reason(d.name(), found, winner))
	}
}

// pinned records the reason for the value of a dimension.
func pinned(p *plan.Plan, d *dimension, value, why string) {
	if n := p.Train.Sequence; d.key == "schedule.sp" && why == onlyPossible && n%2 == 1 && p.Cluster.GPUs() > 1 {
		why = fmt.Sprintf("auto: the only option: %d tokens are an odd number, which few numbers of ranks divide", n)
	}
	if value != d.plain || why != onlyPossible {
		p.Decide("solve", d.name(), value, why)
	}
}

// pinOnly pins dimensions with a single value, up to the first dimension with several, and reports
// whether all are pinned.
func (s *search) pinOnly(p *plan.Plan) bool {
	schedule := p.Schedule
	var found []func()
	for i := range dimensions {
		d := &dimensions[i]
		if d.text(&schedule) != "" || d.weighs {
			continue
		}
		values := d.values(&s.space, &schedule)
		if len(values) != 1 {
			return false
		}
		values[0].set(&schedule)
		found = append(found, func() { pinned(p, d, values[0].text, onlyPossible) })
	}
	for _, note := range found {
		note()
	}
	p.Schedule = schedule
	return true
}

// rejections returns the rejected values of a dimension: first those with plans that fit, fastest first, then those with
// lower bounds on the time, and then those that cannot fit.
func (s *search) rejections(d *dimension, taken string) []plan.Rejection {
	var out []plan.Rejection
	for value, v := range s.verdicts[d.key] {
		if value != taken {
			if v.StepS > 0 || v.BoundS > 0 {
				v.Shortfall = nil
			}
			out = append(out, *v)
		}
	}
	last := func(t ir.Seconds) ir.Seconds { // unknown times come last
		if t == 0 {
			return unreachable
		}
		return t
	}
	slices.SortFunc(out, func(a, b plan.Rejection) int {
		return cmp.Or(cmp.Compare(last(a.StepS), last(b.StepS)), cmp.Compare(last(a.BoundS), last(b.BoundS)), cmp.Compare(a.Missing(), b.Missing()), cmp.Compare(a.Value, b.Value))
	})
	return out
}

const onlyPossible = "auto: the only option"

// reason explains why a value was chosen for a key.
func reason(key string, others []plan.Rejection, winner *node) string {
	if len(others) == 0 {
		return onlyPossible
	}
	if !winner.fits() {
		return "auto: nothing fits; this choice has the smallest shortfall"
	}
	next, why := &others[0], "the fastest found"
	switch {
	case next.StepS == 0 && next.BoundS == 0:
		why = "nothing else fits"
	case next.StepS > 0 && next.StepS < winner.time():
		why = "the simplest of those that hardly differ"
	}
	return fmt.Sprintf("auto: %s; %s = %s: %s", why, key, next.Value, next.InWords(winner.plan.Time.StepS))
}

package offload

import (
	"fmt"
	"slices"
	"sort"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/estimate"
	"sppo.dev/internal/passes/memory"
	"sppo.dev/internal/passes/mux"
	"sppo.dev/internal/passes/pass"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
)

// This file implements the policies that compare placements with each other: `offload = memory`,
// `offload = auto`, `recompute = auto`.
//
// Units leave the device one at a time. Changes of a placement that offload a
// unit are ordered by how late the unit is needed again, and those that recompute a unit by seconds per byte. A
// rank takes the shortest prefix of an order that makes it fit. Copies that computation hides, according to
// the simulation, cost nothing and are tried first. Of all other choices that fit, the fastest is taken.

// chooser changes the placements of a plan's units and keeps track of their cost.
type chooser struct {
	context    *pass.Context
	estimator  *estimate.Estimator
	plan       *plan.Plan
	pricer     estimate.Pricer
	graph      *graph.Model
	sizes      [][][]ir.Bytes // [i][kind][unit]
	kinds      [][]int        // [rank]: of its layers
	order      []int          // units of a layer, in the order in which they are offloaded
	unitByUnit bool           // whether a unit is offloaded in all layers and subsequences before the next unit
	inputs     [][]ir.Bytes   // [rank][task]: messages held during the task; nil: not yet computed
	costs      *estimate.Costs
	trial      *estimate.Simulation // with these costs
	recompute  []recompute          // the order in which units are recomputed; empty: none are
	shared     *plan.Plan           // the plan as the mux pass will share its tasks, which takes memory; nil: no tasks are shared
	whole      *plan.Plan           // the shared plan, but with undivided tasks at the start
	memory     *memory.Meter        // measures the field whole if tasks are shared, otherwise the field plan
	stale      [][]bool             // [rank][i]: whether the costs are those of an earlier placement
	why        string               // reason for the shares, if a policy sets them

	device, host ir.Bytes // of one rank
}

func newChooser(c *pass.Context, p *plan.Plan) *chooser {
	m, h := estimate.CostModel(p), newUntimedChooser(c, p)
	h.pricer, h.costs = estimate.NewPricer(c.Cache, p, m), h.estimator.Costs(m)
	if p.Recompute == plan.PolicyAuto {
		h.recompute = h.recomputes()
		h.order, h.unitByUnit = h.mostExpensiveFirst(), len(h.recompute) > 0
	}
	return h
}

// newUntimedChooser returns a chooser that considers only bytes, not time.
func newUntimedChooser(c *pass.Context, p *plan.Plan) *chooser {
	limit, e := memory.Capacities(p), c.Estimator(p)
	h := &chooser{
		device: limit.DeviceCapacityBytes, host: limit.HostCapacityBytes,
		context: c, estimator: e, plan: p, graph: c.Model(p), memory: e.Memory(),
	}
	for _, z := range p.Sizes() {
		h.sizes = append(h.sizes, plan.UnitSizes(h.graph, z))
	}
	for rank := range p.Parallel.PP {
		h.kinds = append(h.kinds, p.KindsOn(h.graph, rank))
	}
	h.order = bySize(largest(h.sizes[0]))
	if h.shared = toBeShared(p); h.shared != nil {
		h.whole = memory.Unmuxed(h.shared)
		h.memory = h.memory.Of(h.whole)
	}
	return h
}

// change gives a unit another placement.
type change struct {
	i, at int // subsequence, letter
	to    byte
}

// letters holds a modifiable copy of the placements of a rank, by subsequence.
type letters [][]byte

func (h *chooser) lettersOf(rank int) letters {
	out := make(letters, h.plan.Subsequences.N)
	for i, placement := range h.plan.Offload.Placement[rank] {
		out[i] = []byte(placement)
	}
	return out
}

// put applies changed letters to the placement of a rank.
func (h *chooser) put(rank int, l letters) {
	o := &h.plan.Offload
	for i, placement := range l {
		if string(placement) == o.Placement[rank][i] {
			continue
		}
		if h.plan.LayerOrder() { // the set of results on the host depends on the placement
			h.inputs = nil
		}
		o.Placement[rank][i], o.Alpha[rank][i] = string(placement), placedShare(placement, plan.LetterSizes(h.kinds[rank], h.sizes[i]))
		if h.costs == nil {
			continue
		}
		if h.stale == nil {
			h.stale = make([][]bool, len(h.plan.Tasks))
		}
		if h.stale[rank] == nil {
			h.stale[rank] = make([]bool, len(l))
		}
		h.stale[rank][i] = true
	}
}

// price updates the costs, which only simulations read, for the current placements.
func (h *chooser) price() {
	for rank, changed := range h.stale {
		for i := range changed {
			if changed[i] {
				h.costs.SetPlacement(h.pricer, h.plan, rank, i, h.plan.Offload.Placement[rank][i], h.sizes[i], h.plan.Size(i))
			}
		}
	}
	h.stale = nil
}

// bound returns the memory bound of one rank with its current placement, including the bytes that
// it will borrow from others.
func (h *chooser) bound(rank int) (device, host ir.Bytes) {
	if p := h.plan; h.shared != nil {
		h.shared.Offload, h.whole.Offload = p.Offload, p.Offload
	}
	if h.inputs == nil {
		h.inputs = h.memory.WaitingInputs()
	}
	peak, host := h.memory.Rank(rank, h.inputs[rank])
	if h.shared != nil && h.shared.Mux.Left {
		peak, host = memory.WithBorrowed(h.shared, h.graph, rank, peak, host)
	}
	return peak.Bytes, host
}

// toBeShared returns the plan with its tasks shared, if this is requested and possible.
func toBeShared(p *plan.Plan) *plan.Plan {
	q := *p
	q.Decisions = nil
	mux.Off(nil, &q)
	if mux.Share(&q) != nil || !q.Mux.Left && !q.Mux.Right {
		return nil
	}
	return &q
}

// fits reports whether a rank has enough memory with its current placement.
func (h *chooser) fits(rank int) bool {
	device, host := h.bound(rank)
	return device <= h.device && host <= h.host
}

func (h *chooser) allFit() bool {
	for s := range h.plan.Tasks {
		if !h.fits(s) {
			return false
		}
	}
	return true
}

// mayLeave reports for each unit of a rank whether it may be offloaded, because another task runs
// between its forward and its backward.
func (h *chooser) mayLeave(rank int) [][]bool {
	p := h.plan
	units := len(h.graph.UnitNames)
	may := make([][]bool, p.Subsequences.N)
	for i := range may {
		may[i] = slices.Repeat([]bool{true}, p.LayersOf(rank)*units)
	}
	tasks := p.Tasks[rank]
	for n := 1; n < len(tasks); n++ {
		if !tasks[n].Undoes(tasks[n-1]) {
			continue
		}
		first, end := p.Span(tasks[n].Stage)
		for at := first * units; at < end*units; at++ {
			may[tasks[n].Subsequence][at] = false
		}
	}
	return may
}

// leave returns the order in which units are offloaded. Earlier subsequences come first, because they are the
// last to be needed again. Within a subsequence, the first layers come first, because their backward is last.
// Within a layer, units leave in the order of the field `order`. If units may also be recomputed, a unit that
// is expensive to recompute is offloaded everywhere before a cheaper one.
func (h *chooser) leave(rank int) []change {
	units := len(h.graph.UnitNames)
	may := h.mayLeave(rank)
	groups := [][]int{h.order} // groups of units, in the order in which they are offloaded
	if h.unitByUnit {
		groups = slices.Collect(slices.Chunk(h.order, 1))
	}
	var out []change
	for _, group := range groups {
		for i := range may {
			for l := range len(may[i]) / units {
				for _, u := range group {
					if at := l*units + u; may[i][at] {
						out = append(out, change{i, at, plan.PlacementOffload})
					}
				}
			}
		}
	}
	return out
}

// hide offloads, on every rank, all units whose copies are hidden by computation. It starts with all units
// that may be offloaded, and then keeps more and more of them on the device until nothing waits for a copy.
func (h *chooser) hide() {
	for s := range h.plan.Tasks {
		l := h.lettersOf(s)
		for _, t := range h.leave(s) {
			if l[t.i][t.at] == plan.PlacementKeep {
				l[t.i][t.at] = t.to
			}
		}
		h.put(s, l)
	}
	for {
		late := h.run().Late()
		waits := false
		for s := range late {
			l := h.lettersOf(s)
			for i, t := range late[s] {
				if t > noWait {
					waits = h.stay(s, l[i], i, t) || waits
				}
			}
			h.put(s, l)
		}
		if !waits {
			return
		}
	}
}

// noWait is the longest wait that is ignored.
const noWait = 1e-9

// size returns the bytes of the unit that a letter of a rank stands for.
func (h *chooser) size(rank, i, at int) ir.Bytes {
	units := len(h.graph.UnitNames)
	return h.sizes[i][h.kinds[rank][at/units]][at%units]
}

// stay keeps offloaded units of a subsequence on the device, starting with those that were offloaded last,
// until the copy time that this saves in the slower direction makes up for the wait. It reports whether it kept
// any.
func (h *chooser) stay(rank int, l []byte, i int, wait ir.Seconds) bool {
	units := len(h.graph.UnitNames)
	any := false
	for layer := len(l)/units - 1; layer >= 0; layer-- {
		for k := range h.order {
			at := layer*units + h.order[units-1-k]
			if l[at] != plan.PlacementOffload {
				continue
			}
			l[at], any = plan.PlacementKeep, true
			out, back := h.pricer.Copies(h.size(rank, i, at))
			if wait -= max(out, back); wait <= 0 {
				return true
			}
		}
	}
	return any
}

// hideBest calls hide with several lags, makes reloads as late as they can be without lengthening the step, and
// keeps the choice with the lowest peak.
func (h *chooser) hideBest() {
	p := h.plan
	base := h.snapshot()
	var best *snapshot
	var least ir.Bytes
	for lag := 1; lag <= p.Subsequences.N; lag *= 2 {
		h.restore(base)
		p.Offload.Lag, p.Offload.Ahead = lag, p.LongestAhead()
		h.hide()
		chooseAhead(p, h.simulation())
		peak := ir.Bytes(0)
		for s := range p.Tasks {
			device, _ := h.bound(s)
			peak = max(peak, device)
		}
		if best != nil && peak >= least {
			break
		}
		best, least = h.snapshot(), peak
		if h.nothingStays() {
			break
		}
	}
	h.restore(best)
}

// nothingStays reports whether every unit that may leave the device leaves it.
func (h *chooser) nothingStays() bool {
	for s := range h.plan.Tasks {
		for _, t := range h.leave(s) {
			if h.plan.Offload.Placement[s][t.i][t.at] == plan.PlacementKeep {
				return false
			}
		}
	}
	return true
}

// snapshot is a choice that can be restored.
type snapshot struct {
	placements []letters
	lag, ahead int
}

func (h *chooser) snapshot() *snapshot {
	s := &snapshot{lag: h.plan.Offload.Lag, ahead: h.plan.Offload.Ahead}
	for rank := range h.plan.Tasks {
		s.placements = append(s.placements, h.lettersOf(rank))
	}
	return s
}

func (h *chooser) restore(s *snapshot) {
	h.plan.Offload.Lag, h.plan.Offload.Ahead = s.lag, s.ahead
	for rank := range s.placements {
		h.put(rank, s.placements[rank])
	}
}

// shorten takes the shortest prefix of a rank's changes that makes the rank fit in device memory, or all changes.
func (h *chooser) shorten(rank int, changes []change) {
	from := h.lettersOf(rank)
	try := func(n int) ir.Bytes {
		h.apply(rank, from, changes[:n])
		device, _ := h.bound(rank)
		return device
	}
	few, many := attempt{0, try(0)}, attempt{len(changes), 0}
	if few.bytes <= h.device || len(changes) == 0 {
		return
	}
	if many.bytes = try(many.n); many.bytes <= h.device {
		_, many = h.narrow(rank, changes, few, many, h.device, try)
	}
	h.apply(rank, from, changes[:many.n])
}

// attempt is a number of changes of a rank, and the bytes that the rank then needs.
type attempt struct {
	n     int
	bytes ir.Bytes
}

// narrow moves two numbers of changes towards each other until they are adjacent. The rank's bytes are within a
// limit after one of these numbers of changes, but not after the other. The bytes in use are almost linear in the
// bytes that changes move. The next trial is therefore where a line through both ends meets the limit, or
// slightly beyond it so that both ends move. The search takes at most one more trial than bisection: Oliveira
// and Takahashi, "An Enhancement of the Bisection Method Average Performance Preserving Minmax Optimality",
// 2020.
func (h *chooser) narrow(rank int, changes []change, few, many attempt, limit ir.Bytes, try func(n int) ir.Bytes) (attempt, attempt) {
	const beyond = 16 // moves a trial on by 1/beyond of the distance between the ends
	moved := make([]ir.Bytes, len(changes)+1)
	for k, t := range changes {
		moved[k+1] = moved[k] + h.size(rank, t.i, t.at)
	}
	reach := 1 // the distance that the remaining trials can cover by bisection
	for reach < many.n-few.n {
		reach *= 2
	}
	for reach *= 2; many.n-few.n > 1; reach /= 2 {
		share := float64(limit-few.bytes) / float64(many.bytes-few.bytes)
		aim := moved[few.n] + ir.Bytes(share*float64(moved[many.n]-moved[few.n]))
		n, middle := sort.Search(len(moved)-1, func(n int) bool { return moved[n] >= aim }), (few.n+many.n)/2
		if push := max(1, (many.n-few.n)/beyond); n < middle {
			n = min(n+push, middle)
		} else {
			n = max(n-push, middle)
		}
		n = min(max(n, many.n-reach/2, few.n+1), few.n+reach/2, many.n-1)
		t := attempt{n, try(n)}
		if (t.bytes > limit) == (few.bytes > limit) {
			few = t
		} else {
			many = t
		}
	}
	return few, many
}

// apply applies changes to a rank with the placement `from`. They change only units that `from` keeps on the
// device.
func (h *chooser) apply(rank int, from letters, changes []change) {
	l := make(letters, len(from))
	for i := range from {
		l[i] = slices.Clone(from[i])
	}
	for _, t := range changes {
		if l[t.i][t.at] == plan.PlacementKeep {
			l[t.i][t.at] = t.to
		}
	}
	h.put(rank, l)
}

// roomOnHost returns the longest prefix of a rank's changes that fits on the host.
func (h *chooser) roomOnHost(rank int, changes []change) []change {
	from := h.lettersOf(rank)
	defer h.put(rank, from)
	return changes[:h.mostOnHost(rank, changes, from)]
}

// mostOnHost returns the largest number of changes for which host memory suffices.
func (h *chooser) mostOnHost(rank int, changes []change, from letters) int {
	try := func(n int) ir.Bytes {
		h.apply(rank, from, changes[:n])
		_, host := h.bound(rank)
		return host
	}
	many := attempt{len(changes), try(len(changes))}
	if many.bytes <= h.host { // the usual case
		return many.n
	}
	few := attempt{0, try(0)}
	if few.bytes > h.host {
		return 0
	}
	few, _ = h.narrow(rank, changes, few, many, h.host, try)
	return few.n
}

// fillHost offloads the longest prefix of a rank's changes that fits on the host.
func (h *chooser) fillHost(rank int) {
	changes, from := h.leave(rank), h.lettersOf(rank)
	h.apply(rank, from, changes[:h.mostOnHost(rank, changes, from)])
}

// recompute is a unit of a layer to recompute next, with its cost in seconds per freed byte.
type recompute struct {
	unit  int
	price float64
}

// mostExpensiveFirst returns the order in which units are offloaded if they may also be recomputed: first those
// that cannot be recomputed in the layer, then the others, the most expensive per byte first.
func (h *chooser) mostExpensiveFirst() []int {
	order := []int{plan.InputUnit}
	for _, r := range slices.Backward(h.recompute) {
		order = append(order, r.unit)
	}
	return order
}

// recomputes returns the order in which units of a layer are recomputed. The next unit is the one that takes the
// least time per freed byte, given that the earlier ones are recomputed. Costs are summed over a few
// subsequences, because attention becomes more expensive along the sequence.
func (h *chooser) recomputes() []recompute {
	const samples = 5
	n := h.plan.Subsequences.N
	at := make([]int, 0, samples)
	for k := range samples {
		at = append(at, k*(n-1)/(samples-1))
	}
	at = slices.Compact(at)
	time := func(set graph.Units) (t ir.Seconds) {
		for _, i := range at {
			t += h.costs.RecomputeTime(h.pricer, i, set, h.plan.Size(i))
		}
		return t
	}
	bytes := func(u int) (b float64) {
		for _, i := range at {
			b += float64(h.graph.Mean(func(kind int) ir.Seconds { return ir.Seconds(h.sizes[i][kind][u]) }))
		}
		return b
	}
	var order []recompute
	var set graph.Units
	for {
		best := recompute{unit: -1}
		for u := range h.graph.UnitNames {
			if u == plan.InputUnit || set.Has(u) {
				continue
			}
			price := float64(time(set|1<<u)-time(set)) / bytes(u)
			if best.unit < 0 || price < best.price {
				best = recompute{u, price}
			}
		}
		if best.unit < 0 {
			return order
		}
		order, set = append(order, best), set|1<<best.unit
	}
}

// recomputing returns the changes that recompute units on a rank, in the given order. For each unit, earlier
// subsequences come first, as in offloading.
func (h *chooser) recomputing(rank int, order []recompute) []change {
	var out []change
	units := len(h.graph.UnitNames)
	for _, r := range order {
		for i := range h.plan.Subsequences.N {
			for l, kind := range h.kinds[rank] {
				if !h.graph.Remakes(kind).Has(r.unit) {
					continue
				}
				out = append(out, change{i, l*units + r.unit, plan.PlacementRecompute})
			}
		}
	}
	return out
}

// exposedPrice returns the cost per byte of exposed copies, in seconds.
func (h *chooser) exposedPrice() float64 {
	n := largest(h.sizes[0])[h.order[0]]
	out, back := h.pricer.Copies(n)
	return float64(out+back) / float64(n)
}

// choose decides the placement of every unit and records the reason.
func (h *chooser) choose(policy string) {
	p := h.plan
	before := h.shortOfMemory()
	switch policy {
	case plan.PolicyAuto:
		h.fitWithCopies()
	case plan.PolicyMemory:
		base := h.snapshot()
		h.hideBest()
		for s, hidden := range h.hidden(base) {
			h.apply(s, h.lettersOf(s), h.roomOnHost(s, hidden))
		}
		h.fitByRecomputing()
	default:
		h.why = takeShares(p, h.context)
		h.costs = h.estimator.Costs(h.pricer.Cost)
		chooseTiming(p, h.simulation())
		h.fitByRecomputing()
	}
	h.explain(policy, before)
}

// fitByRecomputing recomputes as many units as needed on the ranks with a memory shortfall.
func (h *chooser) fitByRecomputing() {
	for s := range h.plan.Tasks {
		if len(h.recompute) > 0 && !h.fits(s) {
			h.shorten(s, h.recomputing(s, h.recompute))
		}
	}
}

// fitWithCopies decides which units leave the device so that each rank fits. If everything fits on the device,
// none do. Otherwise it tries to recompute no unit, the cheapest one, the two cheapest, and so on, and then the
// units of every named policy. Each trial uses copies for the rest, and the fastest plan that fits is taken. If
// none fits, it takes the placement that needs the least memory, regardless of time. A search for any plan that
// fits relies on this.
func (h *chooser) fitWithCopies() {
	p, kv := h.plan, h.plan.Offload.Caches
	if kv == plan.KVOnHost {
		p.Offload.Caches = plan.KVOnDevice
	}
	if h.allFit() {
		return
	}
	p.Offload.Caches = kv
	defer func() { p.Time = plan.Time{} }()
	f := &fitting{chooser: h, base: h.snapshot(), since: h.work()}
	if !h.unitByUnit || !f.tryCopies() {
		f.tryRecomputing()
	}
	if f.best == nil && kv == plan.KVOnHost && p.Recompute == plan.PolicyAuto && p.Subsequences.N > 1 && !p.Streams() {
		p.Offload.Caches = plan.KVRecomputed
		f.tryRecomputing()
	}
	if f.best == nil {
		offloadLeast(p, h.context)
		return
	}
	h.restore(f.best)
}

// fitting is a search for the fastest plan that fits.
type fitting struct {
	*chooser
	base, best *snapshot
	fastest    ir.Seconds
	since      int64 // work done before this search
}

// Amounts of work after which fitting skips the remaining trials of a large job: first those that recompute the
// cheapest units, then those of named policies. Before a plan fits, no trial is skipped.
const (
	skipsNumbers = 1_000_000
	skipsAll     = 2_000_000
)

// tired reports whether a plan that fits has been found and more than a given amount of work has been done.
func (f *fitting) tired(after int64) bool { return f.best != nil && f.work()-f.since > after }

// consider keeps the current plan if it is the best so far.
func (f *fitting) consider() {
	f.settle()
	if f.run().Report(f.plan); f.allFit() && (f.best == nil || f.plan.Time.StepS < f.fastest) {
		f.best, f.fastest = f.snapshot(), f.plan.Time.StepS
	}
}

// try recomputes some units and offloads as many others as necessary. It reports whether
// recomputing more units can only take longer, because the plan fits with copies that computation
// hides, or because it is no faster than the best plan even without its copies.
func (f *fitting) try(units []recompute) (enough bool) {
	f.recomputeFirst(units)
	switch {
	case f.best != nil && f.run().End() >= f.fastest: // before any copies
		return true
	case !f.couldFit():
		return false
	}
	from := f.snapshot()
	f.hideBest()
	hidden := f.hidden(from)
	f.copyToFit(hidden)
	enough = f.allFit() && f.nothingWaits()
	f.consider()
	if len(units) > 0 {
		f.recomputeToFit(hidden, units)
		f.consider()
	}
	return enough
}

// tryCopies recomputes nothing and offloads units as if recomputation were not allowed: the last units to be
// needed again are the first to be offloaded, regardless of the cost of recomputing them.
func (f *fitting) tryCopies() (enough bool) {
	mostExpensive := f.order
	f.order, f.unitByUnit = bySize(largest(f.sizes[0])), false
	defer func() { f.order, f.unitByUnit = mostExpensive, true }()
	return f.try(nil)
}

// tryRecomputing recomputes more and more units, in the order of their costs, until hidden copies are
// enough for the rest.
func (f *fitting) tryRecomputing() {
	for k := range len(f.recompute) + 1 {
		if f.tired(skipsNumbers) {
			break
		}
		if enough := f.try(f.recompute[:k]); enough && k == 0 {
			return
		} else if enough {
			break
		}
	}
	if len(f.recompute) > 0 {
		f.tryNamed()
	}
}

// tryNamed tries the units that named policies recompute, which may need less memory while a layer runs.
func (f *fitting) tryNamed() {
	for _, policy := range []string{graph.RecomputeSelective, graph.RecomputeKeepAttention, graph.RecomputeFull} {
		if f.tired(skipsAll) {
			break
		}
		recomputed := f.graph.RecomputedBy(policy)
		f.try(slices.DeleteFunc(slices.Clone(f.recompute), func(r recompute) bool { return !recomputed.Has(r.unit) }))
	}
}

// recomputeFirst recomputes the given units on every rank, and undoes all other changes.
func (f *fitting) recomputeFirst(units []recompute) {
	f.restore(f.base)
	for s := range f.plan.Tasks {
		f.apply(s, f.base.placements[s], f.recomputing(s, units))
	}
}

// recomputeToFit offloads units whose copies are hidden, and recomputes as few of the given units as needed.
func (f *fitting) recomputeToFit(hidden [][]change, units []recompute) {
	for s := range f.plan.Tasks {
		f.put(s, f.base.placements[s])
		f.apply(s, f.base.placements[s], f.roomOnHost(s, hidden[s]))
		f.shorten(s, f.recomputing(s, units))
	}
}

// work returns the work that the search has done so far, or 0 for a plan outside a search.
func (h *chooser) work() int64 {
	if h.context.Work == nil {
		return 0
	}
	return int64(*h.context.Work)
}

// run simulates the current plan.
func (h *chooser) run() *estimate.Simulation { return h.simulation().Run() }

func (h *chooser) simulation() *estimate.Simulation {
	h.price()
	if h.trial == nil || h.trial.Costs != h.costs {
		h.trial = h.estimator.Simulation(h.costs)
	}
	return h.trial
}

// couldFit reports whether the plan would fit with more copies, regardless of the time spent waiting for them.
func (h *chooser) couldFit() bool {
	now := h.snapshot()
	defer h.restore(now)
	h.plan.Offload.Lag, h.plan.Offload.Ahead = 1, 1
	for s := range h.plan.Tasks {
		if h.shared != nil { // the bytes that a rank borrows depend on other ranks
			h.apply(s, h.lettersOf(s), h.roomOnHost(s, h.leave(s)))
		} else if !h.copyUntilFits(s) {
			return false
		}
	}
	return h.shared == nil || h.allFit()
}

// copyUntilFits offloads units until a rank fits on the device and on the host, and reports whether it does.
// Device memory falls and host memory grows with the number of changes, so the search ends at a number of changes
// at which either both limits are exceeded or neither is. Host memory grows almost linearly, so the first
// guesses are near the number of changes that just fills the host.
func (h *chooser) copyUntilFits(rank int) bool {
	changes, from := h.leave(rank), h.lettersOf(rank)
	try := func(n int) (device, host ir.Bytes) {
		h.apply(rank, from, changes[:n])
		return h.bound(rank)
	}
	device, most := try(len(changes))
	if device > h.device || most <= h.host {
		return device <= h.device
	}
	device, least := try(0)
	if device <= h.device || least > h.host {
		return device <= h.device && least <= h.host
	}
	few, many := 0, len(changes)
	for guesses := 3; many-few > 1; guesses-- {
		n := (few + many) / 2
		if guesses > 0 { // where a line through both ends meets the host's memory, rounded alternately down and up
			share := float64(h.host-least) / float64(most-least)
			n = few + int(share*float64(many-few)) + 1 - guesses%2
			n = max(few+1, min(n, many-1))
		}
		device, host := try(n)
		switch {
		case (device <= h.device) == (host <= h.host):
			return host <= h.host
		case device > h.device:
			few, least = n, host
		default:
			many, most = n, host
		}
	}
	return false
}

// copyToFit offloads as little as needed, hidden copies first.
func (h *chooser) copyToFit(hidden [][]change) {
	for s := range h.plan.Tasks {
		if h.fits(s) {
			continue
		}
		changes := h.roomOnHost(s, hidden[s])
		if len(changes) == len(hidden[s]) {
			changes = append(slices.Clip(changes), h.roomOnHost(s, h.leave(s))...)
		}
		h.shorten(s, changes)
	}
}

// settle reduces the lag of copies and the distance of reloads as long as this costs no time.
func (h *chooser) settle() {
	p := h.plan
	if !copies(p) {
		p.Offload.Lag, p.Offload.Ahead = 1, 1
		return
	}
	const tolerance = 1.0001
	trial := h.run()
	limit := trial.End() * tolerance
	for _, setting := range []*int{&p.Offload.Lag, &p.Offload.Ahead} {
		for *setting > 1 {
			*setting--
			if !trial.Within(limit) {
				*setting++
				break
			}
		}
	}
}

func (h *chooser) nothingWaits() bool {
	return h.run().Exposed() <= noWait
}

// hidden returns the changes of each rank that lead from the earlier placements to the current ones.
// It restores the earlier placements but keeps the timing.
func (h *chooser) hidden(before *snapshot) [][]change {
	p := h.plan
	changes := make([][]change, len(p.Tasks))
	for s := range p.Tasks {
		for _, t := range h.leave(s) {
			if p.Offload.Placement[s][t.i][t.at] == plan.PlacementOffload {
				changes[s] = append(changes[s], t)
			}
		}
	}
	before.lag, before.ahead = p.Offload.Lag, p.Offload.Ahead
	h.restore(before)
	return changes
}

// shares returns, for each placement, the share of the type-1 bytes that has it. It counts only the given units
// of each layer, or all units if none are given.
func (h *chooser) shares(of ...int) map[byte]float64 {
	bytes := map[byte]ir.Bytes{}
	var all ir.Bytes
	units := len(h.graph.UnitNames)
	for rank, placements := range h.plan.Offload.Placement {
		for i, placement := range placements {
			for at := range len(placement) {
				if n := h.size(rank, i, at); len(of) == 0 || slices.Contains(of, at%units) {
					bytes[placement[at]] += n
					all += n
				}
			}
		}
	}
	out := map[byte]float64{}
	for letter, n := range bytes {
		out[letter] = float64(n) / float64(max(1, all))
	}
	return out
}

// shortOfMemory describes the memory need of the rank with the least free memory.
func (h *chooser) shortOfMemory() string {
	var most ir.Bytes
	fullest := 0
	for s := range h.plan.Tasks {
		if device, _ := h.bound(s); device > most {
			most, fullest = device, s
		}
	}
	if h.device <= 0 {
		return fmt.Sprintf("stage %d would take %s", fullest, most)
	}
	return fmt.Sprintf("stage %d would take %s, but only %s is available", fullest, most, h.device)
}

// explain records the decision and its reason. The argument `before` describes how much memory the plan needed
// before any unit left the device.
func (h *chooser) explain(policy, before string) {
	p, all := h.plan, h.shares()
	switch {
	case policy == plan.PolicyMemory:
		p.Decide("offload", "policy", policy, "the lowest peak without exposed copies")
	case policy != plan.PolicyAuto:
		p.Decide("offload", "policy", policy, h.why)
	case all[plan.PlacementOffload] == 0:
		p.Decide("offload", "policy", policy, "nothing is offloaded: with everything on the device, "+before)
	default:
		p.Decide("offload", "policy", policy, "with everything on the device, "+before+"; as little as possible is offloaded, starting with copies that computation hides")
	}
	explainTiming(p)
	if p.Recompute != plan.PolicyAuto {
		return
	}
	if all[plan.PlacementRecompute] == 0 {
		p.Decide("offload", "recompute", "none", "auto: memory suffices without recomputation")
		return
	}
	const gib = 1 << 30
	p.Decide("offload", "recompute", plan.PolicyAuto, fmt.Sprintf("the units with the lowest additional recomputation time per GiB are recomputed first; copies cost nothing if computation hides them, and otherwise %s per GiB",
		ir.Seconds(h.exposedPrice()*gib)))
	for _, r := range h.recompute {
		share := h.shares(r.unit)
		value := fmt.Sprintf("%.0f%% recomputed, %.0f%% offloaded, %.0f%% kept", 100*share[plan.PlacementRecompute], 100*share[plan.PlacementOffload], 100*share[plan.PlacementKeep])
		p.Decide("offload", h.graph.UnitNames[r.unit], value, fmt.Sprintf("recomputing it costs %s per GiB freed", ir.Seconds(r.price*gib)))
	}
}

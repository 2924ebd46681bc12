package offload

import (
	"fmt"
	"slices"
	"sort"

	"sppo.dev/graph"
	"sppo.dev/ir"
	"sppo.dev/passes/estimate"
	"sppo.dev/passes/memory"
	"sppo.dev/passes/mux"
	"sppo.dev/passes/pass"
	"sppo.dev/passes/plan"
)

// The policies that weigh fates against each other: `offload = memory`, `offload = auto`, `recompute = auto`.
//
// Units leave the device in turns, each a change of one fate, in an order: those to the host by where they return last, those that
// are made again by the time that a byte costs. A stage takes the shortest beginning of an order that fits. Copies that computation
// hides, which a simulation tells, cost nothing and come first; of what else fits the fastest is taken.

// chooser changes the fates of a plan's units, and keeps what they cost beside them.
type chooser struct {
	context   *pass.Context
	estimator *estimate.Estimator
	plan      *plan.Plan
	pricer    estimate.Pricer
	graph     *graph.Model
	sizes     [][]ir.Bytes // [i][unit]
	order     []int        // units of a layer: which go to the host first
	apart     bool         // all of a unit goes before any of the next in order
	inputs    [][]ir.Bytes // of stages: messages that are held beside each task; nil: to be found
	costs     *estimate.Costs
	trial     *estimate.Simulation // with these costs
	remake    []remake             // in which order units are made again; empty: none are
	shared    *plan.Plan           // with tasks shared as the mux pass will, since what ranks borrow takes room; nil: none are
	whole     *plan.Plan           // the same with the tasks of the start whole
	memory    *memory.Meter        // of it, or of the plan
	why       string               // of shares that were asked for

	device, host ir.Bytes // that one rank has
}

func newChooser(c *pass.Context, p *plan.Plan) *chooser {
	m, machine := estimate.CostModel(p), ir.Machine(p.Cluster)
	g, e := c.Model(p), c.Estimator(p)
	h := &chooser{
		device: ir.Bytes(machine.DeviceMemory), host: machine.HostMemoryPerRank(),
		context: c, estimator: e, plan: p, graph: g, pricer: estimate.NewPricer(c.Cache, p, m), memory: e.Memory(),
		costs: e.Costs(m),
	}
	for _, z := range p.Sizes() {
		h.sizes = append(h.sizes, plan.UnitSizes(g.Layer, z))
	}
	h.order = bySize(h.sizes[0])
	if h.shared = toBeShared(p); h.shared != nil {
		h.whole = memory.Unmuxed(h.shared)
		h.memory = h.memory.Of(h.whole)
	}
	if p.Recompute == plan.PolicyAuto {
		h.remake = h.remakes()
		h.order, h.apart = h.dearestFirst(), len(h.remake) > 0
	}
	return h
}

// turn is a unit's change of fate.
type turn struct {
	i, at int // subsequence, letter
	to    byte
}

// letters of a stage, for each subsequence, to be changed.
type letters [][]byte

func (h *chooser) lettersOf(stage int) letters {
	out := make(letters, h.plan.Subsequences.N)
	for i, fate := range h.plan.Offload.Fate[stage] {
		out[i] = []byte(fate)
	}
	return out
}

// put makes letters the fate of a stage, as far as they differ from it.
func (h *chooser) put(stage int, l letters) {
	o := &h.plan.Offload
	for i, fate := range l {
		if string(fate) == o.Fate[stage][i] {
			continue
		}
		if h.plan.LayerOrder() { // what waits where depends on it
			h.inputs = nil
		}
		o.Fate[stage][i], o.Alpha[stage][i] = string(fate), placedShare(fate, h.sizes[i])
		h.costs.SetFate(h.pricer, h.plan, stage, i, string(fate), h.sizes[i], h.plan.Size(i))
	}
}

// bound is the footprint of one stage as it stands, with what it will borrow of others.
func (h *chooser) bound(stage int) (device, host ir.Bytes) {
	if p := h.plan; h.shared != nil {
		h.shared.Offload, h.whole.Offload = p.Offload, p.Offload
	}
	if h.inputs == nil {
		h.inputs = h.memory.WaitingInputs()
	}
	peak, host := h.memory.Stage(stage, h.inputs[stage])
	if h.shared != nil && h.shared.Mux.Left {
		peak, host = memory.WithBorrowed(h.shared, h.graph, stage, peak, host)
	}
	return peak.Bytes, host
}

// toBeShared is the plan with its tasks shared, where it asks for that and they can be.
func toBeShared(p *plan.Plan) *plan.Plan {
	q := *p
	q.Decisions = nil
	mux.Off(nil, &q)
	if mux.Share(&q) != nil || !q.Mux.Left && !q.Mux.Right {
		return nil
	}
	return &q
}

// fits reports whether a stage has room as it stands.
func (h *chooser) fits(stage int) bool {
	device, host := h.bound(stage)
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

// mayLeave says for each unit of a stage whether something runs between its forward and its backward: not where one follows the
// other at once.
func (h *chooser) mayLeave(stage int) [][]bool {
	p := h.plan
	units := len(h.sizes[0])
	may := make([][]bool, p.Subsequences.N)
	for i := range may {
		may[i] = slices.Repeat([]bool{true}, p.LayersOf(stage)*units)
	}
	tasks := p.Tasks[stage]
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

// leave is the order in which units go to the host: earlier subsequences first, which have longest until they return; of a
// subsequence the first layers, whose backward comes last; of a layer what order says. Where others may be made again, all of
// a unit that is dear to make goes before any of a cheaper one.
func (h *chooser) leave(stage int) []turn {
	units := len(h.sizes[0])
	may := h.mayLeave(stage)
	groups := [][]int{h.order} // of units that go before others do
	if h.apart {
		groups = slices.Collect(slices.Chunk(h.order, 1))
	}
	var out []turn
	for _, group := range groups {
		for i := range may {
			for l := range len(may[i]) / units {
				for _, u := range group {
					if at := l*units + u; may[i][at] {
						out = append(out, turn{i, at, plan.FateOffload})
					}
				}
			}
		}
	}
	return out
}

// hide sends all units to the host that computation hides the copies of, on every stage: all that may leave, and then as many
// stay as something waited for, until nothing waits.
func (h *chooser) hide() {
	for s := range h.plan.Tasks {
		l := h.lettersOf(s)
		for _, t := range h.leave(s) {
			if l[t.i][t.at] == plan.FateKeep {
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
					waits = h.stay(l[i], i, t) || waits
				}
			}
			h.put(s, l)
		}
		if !waits {
			return
		}
	}
}

// noWait is less time than anything takes.
const noWait = 1e-9

// stay keeps units of a subsequence on the device whose copies one way take as long as something waited for them, the last to go
// first. It says whether there were any.
func (h *chooser) stay(l []byte, i int, wait ir.Seconds) bool {
	units := len(h.sizes[i])
	any := false
	for layer := len(l)/units - 1; layer >= 0; layer-- {
		for k := range h.order {
			at := layer*units + h.order[units-1-k]
			if l[at] != plan.FateOffload {
				continue
			}
			l[at], any = plan.FateKeep, true
			out, back := h.pricer.Copies(h.sizes[i][at%units])
			if wait -= max(out, back); wait <= 0 {
				return true
			}
		}
	}
	return any
}

// hideBest does so with the lag that leaves the least at the peak, and reloads that begin as late as hides them.
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

// nothingStays reports whether all that may leave does.
func (h *chooser) nothingStays() bool {
	for s := range h.plan.Tasks {
		for _, t := range h.leave(s) {
			if h.plan.Offload.Fate[s][t.i][t.at] == plan.FateKeep {
				return false
			}
		}
	}
	return true
}

// snapshot is a choice that may be returned to.
type snapshot struct {
	fates      []letters
	lag, ahead int
}

func (h *chooser) snapshot() *snapshot {
	s := &snapshot{lag: h.plan.Offload.Lag, ahead: h.plan.Offload.Ahead}
	for stage := range h.plan.Tasks {
		s.fates = append(s.fates, h.lettersOf(stage))
	}
	return s
}

func (h *chooser) restore(s *snapshot) {
	h.plan.Offload.Lag, h.plan.Offload.Ahead = s.lag, s.ahead
	for stage := range s.fates {
		h.put(stage, s.fates[stage])
	}
}

// shorten takes of a stage's turns the shortest beginning that lets the device's part fit, or all.
func (h *chooser) shorten(stage int, turns []turn) {
	from := h.lettersOf(stage)
	try := func(n int) bool {
		h.turn(stage, from, turns[:n])
		device, _ := h.bound(stage)
		return device <= h.device
	}
	try(sort.Search(len(turns), try))
}

// turn changes the fate of units that stay, and leaves the others as they are.
func (h *chooser) turn(stage int, from letters, turns []turn) {
	l := make(letters, len(from))
	for i := range from {
		l[i] = slices.Clone(from[i])
	}
	for _, t := range turns {
		if l[t.i][t.at] == plan.FateKeep {
			l[t.i][t.at] = t.to
		}
	}
	h.put(stage, l)
}

// roomOnHost cuts turns to the host where its memory ends.
func (h *chooser) roomOnHost(stage int, turns []turn) []turn {
	from := h.lettersOf(stage)
	defer h.put(stage, from)
	tooMany := func(n int) bool {
		h.turn(stage, from, turns[:n])
		_, host := h.bound(stage)
		return host > h.host
	}
	if !tooMany(len(turns)) { // as a rule
		return turns
	}
	return turns[:sort.Search(len(turns), func(n int) bool { return tooMany(n + 1) })]
}

// remake is one more unit of a layer to make again, and the seconds that it takes for every byte that it frees.
type remake struct {
	unit  int
	price float64
}

// dearestFirst is the order in which units go to the host where others may be made again: first what nothing in the layer makes,
// then what takes longest for a byte.
func (h *chooser) dearestFirst() []int {
	var order []int
	for _, u := range h.graph.Layer.Units {
		if u.Producer < 0 {
			order = append(order, u.Number)
		}
	}
	for _, r := range slices.Backward(h.remake) {
		order = append(order, r.unit)
	}
	return order
}

// remakes is the order in which units of a layer are made again: each is the one that frees a byte in the least time, given
// those before it. Prices are taken over a few subsequences of the sequence, since attention gets dearer along it.
func (h *chooser) remakes() []remake {
	const samples = 5
	n := h.plan.Subsequences.N
	at := make([]int, 0, samples)
	for k := range samples {
		at = append(at, k*(n-1)/(samples-1))
	}
	at = slices.Compact(at)
	time := func(set graph.Units) (t ir.Seconds) {
		for _, i := range at {
			t += h.costs.TimeAgain(h.pricer, i, set, h.plan.Size(i))
		}
		return t
	}
	bytes := func(u int) (b ir.Bytes) {
		for _, i := range at {
			b += h.sizes[i][u]
		}
		return b
	}
	var order []remake
	var set graph.Units
	for {
		best := remake{unit: -1}
		for _, u := range h.graph.Layer.Units {
			if u.Producer < 0 || set.Has(u.Number) {
				continue
			}
			price := float64(time(set|1<<u.Number)-time(set)) / float64(bytes(u.Number))
			if best.unit < 0 || price < best.price {
				best = remake{u.Number, price}
			}
		}
		if best.unit < 0 {
			return order
		}
		order, set = append(order, best), set|1<<best.unit
	}
}

// again are the turns of a stage by which units are made again, in that order; of a unit earlier subsequences go first, as those
// do that leave for the host.
func (h *chooser) again(stage int, order []remake) []turn {
	var out []turn
	layers, units := h.plan.LayersOf(stage), len(h.sizes[0])
	for _, r := range order {
		for i := range h.plan.Subsequences.N {
			for l := range layers {
				out = append(out, turn{i, l*units + r.unit, plan.FateRecompute})
			}
		}
	}
	return out
}

// exposedPrice is what a byte costs, in seconds, whose copies nothing hides.
func (h *chooser) exposedPrice() float64 {
	largest := h.order[0]
	out, back := h.pricer.Copies(h.sizes[0][largest])
	return float64(out+back) / float64(h.sizes[0][largest])
}

// choose gives every unit its fate, and says why.
func (h *chooser) choose(policy string) {
	p := h.plan
	before := h.tightest()
	switch policy {
	case plan.PolicyAuto:
		h.fitWithCopies()
	case plan.PolicyMemory:
		base := h.snapshot()
		h.hideBest()
		for s, hidden := range h.hidden(base) {
			h.turn(s, h.lettersOf(s), h.roomOnHost(s, hidden))
		}
		h.fitByRemaking()
	default:
		h.why = takeShares(p, h.context)
		h.costs = h.estimator.Costs(h.pricer.Cost)
		chooseTiming(p, h.simulation())
		h.fitByRemaking()
	}
	h.explain(policy, before)
}

// fitByRemaking makes units again on the stages that have no room, as many as it takes.
func (h *chooser) fitByRemaking() {
	for s := range h.plan.Tasks {
		if len(h.remake) > 0 && !h.fits(s) {
			h.shorten(s, h.again(s, h.remake))
		}
	}
}

// fitWithCopies decides what leaves the device so that each stage fits: nothing, where all fits. Of all numbers of units that are made
// again in the order of their prices, and of the policies that have a name, with copies for the rest, it takes the fastest.
func (h *chooser) fitWithCopies() {
	if h.plan.Offload.Park = false; h.allFit() {
		return
	}
	h.plan.Offload.Park = h.plan.LayerOrder()
	defer func() { h.plan.Time = plan.Time{} }()
	f := &fitting{chooser: h, base: h.snapshot()}
	if !h.apart || !f.tryCopies() {
		f.tryRemaking()
	}
	if f.best == nil {
		f.remakeFirst(h.remake)
		h.copyAll()
		f.best = h.snapshot()
	}
	h.restore(f.best)
}

// fitting is a search for the fastest plan that fits.
type fitting struct {
	*chooser
	base, best *snapshot
	fastest    ir.Seconds
}

// consider keeps the plan as it stands if it is the best so far.
func (f *fitting) consider() {
	f.settle()
	if f.run().Report(f.plan); f.allFit() && (f.best == nil || f.plan.Time.StepS < f.fastest) {
		f.best, f.fastest = f.snapshot(), f.plan.Time.StepS
	}
}

// try recomputes some units and copies what else must go. It reports whether recomputing more units could only take longer:
// the plan fits with copies that computation hides, or is no faster than the best even without its copies.
func (f *fitting) try(units []remake) (enough bool) {
	f.remakeFirst(units)
	switch {
	case f.best != nil && f.run().End() >= f.fastest: // before anything is copied
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
		f.remakeToFit(hidden, units)
		f.consider()
	}
	return enough
}

// tryCopies makes nothing again, and copies as where nothing may be made again: then units that return last leave first, whatever
// they would cost.
func (f *fitting) tryCopies() (enough bool) {
	dearest := f.order
	f.order, f.apart = bySize(f.sizes[0]), false
	defer func() { f.order, f.apart = dearest, true }()
	return f.try(nil)
}

// tryRemaking makes more and more units again, in the order of their prices, until copies that are hidden are enough for the rest.
func (f *fitting) tryRemaking() {
	for k := range len(f.remake) + 1 {
		if enough := f.try(f.remake[:k]); enough && k == 0 {
			return
		} else if enough {
			break
		}
	}
	f.tryNamed()
}

// tryNamed tries what policies with a name make again, which may need less room while a layer runs.
func (f *fitting) tryNamed() {
	for _, policy := range []string{graph.RecomputeSelective, graph.RecomputeKeepAttention, graph.RecomputeFull} {
		remade := f.graph.RemadeBy(policy)
		f.try(slices.DeleteFunc(slices.Clone(f.remake), func(r remake) bool { return !remade.Has(r.unit) }))
	}
}

// remakeFirst makes units again, everywhere.
func (f *fitting) remakeFirst(units []remake) {
	f.restore(f.base)
	for s := range f.plan.Tasks {
		f.turn(s, f.base.fates[s], f.again(s, units))
	}
}

// remakeToFit sends what is hidden to the host, and makes as few of some units again as fits.
func (f *fitting) remakeToFit(hidden [][]turn, units []remake) {
	for s := range f.plan.Tasks {
		f.put(s, f.base.fates[s])
		f.turn(s, f.base.fates[s], f.roomOnHost(s, hidden[s]))
		f.shorten(s, f.again(s, units))
	}
}

// copyAll sends all to the host that may go and has room there, and holds it no longer than it must.
func (h *chooser) copyAll() {
	h.plan.Offload.Lag, h.plan.Offload.Ahead = 1, 1
	for s := range h.plan.Tasks {
		h.copyAllOf(s)
	}
}

func (h *chooser) copyAllOf(stage int) {
	h.turn(stage, h.lettersOf(stage), h.roomOnHost(stage, h.leave(stage)))
}

// run simulates the plan as it stands.
func (h *chooser) run() *estimate.Simulation { return h.simulation().Run() }

func (h *chooser) simulation() *estimate.Simulation {
	if h.trial == nil || h.trial.Costs != h.costs {
		h.trial = h.estimator.Simulation(h.costs)
	}
	return h.trial
}

// couldFit reports whether the plan would fit with more copies, however long they were waited for.
func (h *chooser) couldFit() bool {
	now := h.snapshot()
	defer h.restore(now)
	h.plan.Offload.Lag, h.plan.Offload.Ahead = 1, 1
	for s := range h.plan.Tasks {
		if h.copyAllOf(s); h.shared == nil && !h.fits(s) { // what a stage borrows depends on others
			return false
		}
	}
	return h.shared == nil || h.allFit()
}

// copyToFit sends as little to the host as fits, first what is hidden.
func (h *chooser) copyToFit(hidden [][]turn) {
	for s := range h.plan.Tasks {
		if h.fits(s) {
			continue
		}
		turns := h.roomOnHost(s, hidden[s])
		if len(turns) == len(hidden[s]) {
			turns = append(slices.Clip(turns), h.roomOnHost(s, h.leave(s))...)
		}
		h.shorten(s, turns)
	}
}

// settle shortens how long copies may lag and how early they come back, as far as it costs no time.
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

// hidden are the turns of each stage that lead from the fates before to those now. It goes back to the fates before, and keeps the
// timing.
func (h *chooser) hidden(before *snapshot) [][]turn {
	p := h.plan
	turns := make([][]turn, len(p.Tasks))
	for s := range p.Tasks {
		for _, t := range h.leave(s) {
			if p.Offload.Fate[s][t.i][t.at] == plan.FateOffload {
				turns[s] = append(turns[s], t)
			}
		}
	}
	before.lag, before.ahead = p.Offload.Lag, p.Offload.Ahead
	h.restore(before)
	return turns
}

// shares are the parts of all type-1 bytes that have a fate; of is one unit of the layer, or all of them.
func (h *chooser) shares(of ...int) map[byte]float64 {
	bytes := map[byte]ir.Bytes{}
	var all ir.Bytes
	units := len(h.sizes[0])
	for _, stage := range h.plan.Offload.Fate {
		for i, fate := range stage {
			for at := range len(fate) {
				if u := at % units; len(of) == 0 || slices.Contains(of, u) {
					bytes[fate[at]] += h.sizes[i][u]
					all += h.sizes[i][u]
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

// tightest says what the stage with the least room needs as the plan stands.
func (h *chooser) tightest() string {
	var most ir.Bytes
	tight := 0
	for s := range h.plan.Tasks {
		if device, _ := h.bound(s); device > most {
			most, tight = device, s
		}
	}
	if h.device <= 0 {
		return fmt.Sprintf("stage %d needs %s", tight, most)
	}
	return fmt.Sprintf("stage %d needs %s of %s", tight, most, h.device)
}

// explain notes what was chosen and why. Before is what the plan needed when nothing had left the device.
func (h *chooser) explain(policy, before string) {
	p, all := h.plan, h.shares()
	switch {
	case policy == plan.PolicyMemory:
		p.Decide("offload", "policy", policy, "what leaves least at the peak, of all that no copy is waited for")
	case policy != plan.PolicyAuto:
		p.Decide("offload", "policy", policy, h.why)
	case all[plan.FateOffload] == 0:
		p.Decide("offload", "policy", policy, "nothing goes to the host: with all on the device "+before)
	default:
		p.Decide("offload", "policy", policy, "with all on the device "+before+": the least goes that fits, first what computation hides")
	}
	explainTiming(p)
	if p.Recompute != plan.PolicyAuto {
		return
	}
	if all[plan.FateRecompute] == 0 {
		p.Decide("offload", "recompute", "none", "auto: there is room without it")
		return
	}
	const gib = 1 << 30
	p.Decide("offload", "recompute", plan.PolicyAuto, fmt.Sprintf("units are made again in the order of the time that a GiB costs; copies cost nothing where computation hides them, and %s a GiB where nothing does",
		ir.Seconds(h.exposedPrice()*gib)))
	for _, r := range h.remake {
		share := h.shares(r.unit)
		value := fmt.Sprintf("%.0f%% again, %.0f%% to the host, %.0f%% kept", 100*share[plan.FateRecompute], 100*share[plan.FateOffload], 100*share[plan.FateKeep])
		p.Decide("offload", h.graph.Layer.Units[r.unit].Name, value, fmt.Sprintf("made again it costs %s for every GiB that it frees", ir.Seconds(r.price*gib)))
	}
}

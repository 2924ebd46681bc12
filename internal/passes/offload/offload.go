// Package offload decides the placement of every saved tensor between its forward and its backward: kept on the device,
// offloaded to the host, or recomputed. It also chooses how far copies may lag and how far ahead reloads begin.
//
// offload.go implements policies that specify shares, and choose.go those that compare placements.
package offload

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"sppo.dev/internal/cost"
	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/estimate"
	"sppo.dev/internal/passes/pass"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
)

// Run decides the placement of every type-1 unit.
//
// Input: Tasks, Units, Lengths, Recompute. Output: Offload. Invariant: the offloaded bytes differ from a
// requested share by at most half of a unit. Paper: section 4.1.
func Run(c *pass.Context, p *plan.Plan) error {
	if c.Winner != nil {
		adopt(p, c.Winner)
		return nil
	}
	policy := cmp.Or(p.Schedule.Offload.Policy, plan.PolicyAuto)
	if c.Untimed && policy == plan.PolicyAuto {
		offloadLeast(p, c)
		return nil
	}
	keepAll(p, c, policy)
	p.Offload.Caches = kvUnder(p, policy)
	defer explainKV(p)
	if policy == plan.PolicyAuto || policy == plan.PolicyMemory || p.Recompute == plan.PolicyAuto {
		newChooser(c, p).choose(policy)
		return nil
	}
	p.Decide("offload", "policy", policy, takeShares(p, c))
	if c.Untimed {
		p.Stream.Early = min(p.Stream.Early, 1)
		return nil
	}
	if !copies(p) && !p.Streams() { // only tasks take time
		return nil
	}
	e := c.Estimator(p)
	s := e.Simulation(e.Costs(estimate.CostModel(p)))
	chooseEarly(p, s)
	chooseTiming(p, s)
	explainTiming(p)
	return nil
}

// adopt takes over what this pass has decided for the winner of a search, a plan with the same schedule.
func adopt(p, winner *plan.Plan) {
	p.Offload, p.Stream.Early = winner.Offload, winner.Stream.Early
	for _, d := range winner.Decisions {
		if d.Pass == "offload" {
			p.Decisions = append(p.Decisions, d)
		}
	}
}

// explainKV records the reason why K and V are recomputed.
func explainKV(p *plan.Plan) {
	if p.Offload.Caches == plan.KVRecomputed {
		p.Decide("offload", "K and V", plan.KVRecomputed,
			"the first backward task of a layer recomputes them from the layer's inputs, for all subsequences; they are not stored until then")
	}
}

// kvUnder returns where an offload policy puts a layer's K and V between forward and backward.
func kvUnder(p *plan.Plan, policy string) string {
	switch {
	case !p.LayerOrder() || len(p.Stream.Caches) == len(plan.Streamable):
		return plan.KVOnDevice
	case p.Recompute == graph.RecomputeFullKV && p.Subsequences.N > 1:
		return plan.KVRecomputed
	case policy == "none":
		return plan.KVOnDevice
	}
	return plan.KVOnHost
}

// offloadLeast recomputes all units that may be recomputed, and offloads as many of the rest as fit
// on the host. This needs the least memory, regardless of time.
func offloadLeast(p *plan.Plan, c *pass.Context) {
	asked := p.Recompute
	defer func() { p.Recompute = asked }()
	p.Recompute = leastKept(p)
	keepAll(p, c, plan.PolicyAuto)
	p.Offload.Caches = kvUnder(p, plan.PolicyAuto)
	p.Stream.Early = min(p.Stream.Early, 1)
	h := newUntimedChooser(c, p)
	for s := range p.Tasks {
		h.fillHost(s)
	}
}

// leastKept returns, of the recomputation policies that the plan may use, the one that keeps the fewest bytes.
func leastKept(p *plan.Plan) string {
	switch {
	case p.Recompute != plan.PolicyAuto:
		return p.Recompute
	case p.LayerOrder() && !p.Streams():
		return graph.RecomputeFullKV
	}
	return graph.RecomputeFull
}

// takeShares offloads the requested share of each subsequence, and returns the reason.
func takeShares(p *plan.Plan, c *pass.Context) (why string) {
	alpha, why := wantedAlpha(p, c)
	g := c.Model(p)
	for i, z := range p.Sizes() {
		sizes, share := plan.UnitSizes(g, z), alpha(i)
		for s := range p.Parallel.PP {
			letters, of := []byte(p.Offload.Placement[s][i]), plan.LetterSizes(p.KindsOn(g, s), sizes)
			chooseUnits(letters, len(g.UnitNames), of, share)
			p.Offload.Placement[s][i], p.Offload.Alpha[s][i] = string(letters), placedShare(letters, of)
		}
	}
	return why
}

// chooseTiming decides when copies begin and how long they may take.
func chooseTiming(p *plan.Plan, s *estimate.Simulation) {
	if !copies(p) {
		return
	}
	p.Offload.Ahead = p.LongestAhead()
	if p.Offload.Policy == "carry" {
		chooseLag(p, s)
	}
	chooseAhead(p, s)
}

// copies reports whether anything is offloaded.
func copies(p *plan.Plan) bool {
	for _, rank := range p.Offload.Placement {
		for _, placement := range rank {
			if strings.ContainsRune(placement, plan.PlacementOffload) {
				return true
			}
		}
	}
	return false
}

func explainTiming(p *plan.Plan) {
	if !copies(p) {
		return
	}
	if p.Offload.Lag > 1 || p.Offload.Policy == "carry" {
		p.Decide("offload", "lag", fmt.Sprintf("%d of %d tasks", p.Offload.Lag, longestLag(p)),
			"copies to the host may end this many tasks after their forward task; fewer would lengthen the step")
	}
	p.Decide("offload", "ahead", fmt.Sprintf("%d of %d layers", p.Offload.Ahead, p.LongestAhead()),
		"a reload is issued this many layers in advance; more would hold its bytes longer, fewer would lengthen the step")
}

func longestLag(p *plan.Plan) int { return p.Subsequences.N * p.Parallel.VirtualStages }

// chooseLag lets copies to the host lag by as many tasks as it takes to make the step shortest, but
// no more, because freeing bytes later raises the peak. A copy that takes longer than the lag
// allows stalls the rank.
func chooseLag(p *plan.Plan, s *estimate.Simulation) {
	p.Offload.Lag = shortest(s, longestLag(p), func(lag int) { p.Offload.Lag = lag })
}

// shortest returns the smallest value of a setting, from 1 to a maximum, that makes the step as short as the
// maximum does, to within one part in ten thousand.
func shortest(s *estimate.Simulation, most int, set func(int)) int {
	const tolerance = 1.0001
	set(most)
	limit := s.Run().End() * tolerance
	for value := 1; value < most; value++ {
		if set(value); s.Within(limit) {
			return value
		}
	}
	set(most)
	return most
}

// chooseAhead issues reloads as late as possible without lengthening the step. It takes the shortest distance
// that makes the step as fast as the longest distance does. The longest distance is the number of layers of a
// task, as in the paper. Later reloads hold their bytes for a shorter time. At the turnaround and during the
// long first subsequences, these bytes determine the peak.
func chooseAhead(p *plan.Plan, s *estimate.Simulation) {
	p.Offload.Ahead = shortest(s, p.LongestAhead(), func(ahead int) { p.Offload.Ahead = ahead })
}

// chooseEarly decides how early blocks of K and V are loaded: as late as possible without lengthening the step.
func chooseEarly(p *plan.Plan, s *estimate.Simulation) {
	if !p.Streams() {
		return
	}
	const most = 4
	early := shortest(s, most, func(early int) { p.Stream.Early = early })
	p.Decide("offload", "early", fmt.Sprintf("%d of %d blocks", early, most),
		"this many blocks of K and V are in transit while one is in use; fewer would lengthen the step")
}

// wantedAlpha returns what share of each subsequence the request asks to offload, and the reason.
func wantedAlpha(p *plan.Plan, c *pass.Context) (alpha func(i int) float64, why string) {
	constant := func(v float64) func(int) float64 { return func(int) float64 { return v } }
	switch req := p.Schedule.Offload; req.Policy {
	case "none":
		return constant(0), "everything stays on the device"
	case "full":
		return constant(1), "everything is offloaded, including the last subsequence"
	case "ratio":
		return constant(req.Alpha[0]), fmt.Sprintf("about %g of the bytes of every subsequence, in whole units", req.Alpha[0])
	case "list":
		return func(i int) float64 { return req.Alpha[i] }, "about the given share of the bytes of each subsequence, in whole units"
	case "adaptive":
		return adaptiveAlpha(p, c), "for each subsequence, as much as can be copied during the next forward task; nothing for the last"
	case "carry":
		all := func(i int) float64 {
			if i == p.Subsequences.N-1 {
				return 0
			}
			return 1
		}
		return all, "everything is offloaded except the last subsequence, whose backward follows immediately; copies may lag, but finish by the turnaround"
	}
	panic("internal: no shares for offload = " + p.Schedule.Offload.Policy)
}

// adaptiveAlpha is the paper's ratio, section 4.1 with corrected indices: alpha_i = min(1, BW * T_{i+1} /
// A_i), where A_i is the number of type-1 bytes of s_i on the stage and T_{i+1} is the time of the
// forward during which they are copied; alpha_{N-1} = 0, because the backward of the last subsequence
// follows immediately.
func adaptiveAlpha(p *plan.Plan, c *pass.Context) func(i int) float64 {
	m := estimate.CostModel(p)
	pr := estimate.NewPricer(c.Cache, p, m)
	g := c.Model(p)
	forward, copied := make([]ir.Seconds, p.Subsequences.N), make([]ir.Seconds, p.Subsequences.N) // of one layer
	recomputed := g.RecomputedBy(p.Recompute)
	for i, z := range p.Sizes() {
		forward[i] = g.Mean(func(kind int) ir.Seconds { return pr.Time(g, g.Plain(kind), g.Plain(kind).Forward, g.OfKind(z, kind)) })
		sizes := plan.UnitSizes(g, z)
		copied[i] = g.Mean(func(kind int) (t ir.Seconds) {
			for u, n := range sizes[kind] {
				if g.Saves(kind).Has(u) && !(recomputed & g.Remakes(kind)).Has(u) {
					t += m.Time(ir.Work{Kind: ir.WorkD2H, Bytes: n}, cost.Link{})
				}
			}
			return t
		})
	}
	return func(i int) float64 { // stages hold as many layers for s_i as for s_{i+1}, so their number cancels
		if i == len(forward)-1 || copied[i] == 0 {
			return 0
		}
		return min(1, float64(forward[i+1]/copied[i]))
	}
}

// chooseUnits changes letters of units with the given sizes from keep to offload, so that the offloaded share of the bytes is as close to the
// given one as whole units allow. It begins with the first layers, because their backward is last and their
// reloads have the most time. Within a layer, it begins with large units; smaller ones fill the rest of the
// target.
func chooseUnits(letters []byte, units int, sizes []ir.Bytes, share float64) {
	var total ir.Bytes
	for at := range letters {
		if letters[at] == plan.PlacementKeep {
			total += sizes[at]
		}
	}
	left := share * float64(total)
	smallest := -1 // of the kept units
	for l := 0; l < len(letters); l += units {
		for _, u := range bySize(sizes[l : l+units]) {
			at := l + u
			if letters[at] != plan.PlacementKeep {
				continue
			}
			if float64(sizes[at]) <= left {
				letters[at], left = plan.PlacementOffload, left-float64(sizes[at])
			} else if smallest < 0 || sizes[at] < sizes[smallest] {
				smallest = at
			}
		}
	}
	if smallest >= 0 && float64(sizes[smallest]) < 2*left {
		letters[smallest] = plan.PlacementOffload
	}
}

// bySize lists units from largest to smallest; units of equal size keep their order.
func bySize(sizes []ir.Bytes) []int {
	order := make([]int, len(sizes))
	for u := range order {
		order[u] = u
	}
	slices.SortStableFunc(order, func(a, b int) int { return int(sizes[b] - sizes[a]) })
	return order
}

// largest returns the largest size that each unit has in any kind of layer.
func largest(sizes [][]ir.Bytes) []ir.Bytes {
	most := slices.Clone(sizes[0])
	for _, of := range sizes {
		for u, n := range of {
			most[u] = max(most[u], n)
		}
	}
	return most
}

// placedShare returns the alpha of a placement: the offloaded share of the bytes that are not recomputed.
func placedShare(letters []byte, sizes []ir.Bytes) float64 {
	var gone, total ir.Bytes
	for at, letter := range letters {
		n := sizes[at]
		switch letter {
		case plan.PlacementOffload:
			gone += n
			fallthrough
		case plan.PlacementKeep:
			total += n
		}
	}
	if total == 0 {
		return 0
	}
	return float64(gone) / float64(total)
}

// keepAll initialises a plan without offload: units are kept, except those that are recomputed.
func keepAll(p *plan.Plan, c *pass.Context, policy string) {
	g := c.Model(p)
	kinds := make([]string, g.Kinds())
	for kind := range kinds {
		kinds[kind] = keptBy(g, kind, g.RecomputedBy(p.Recompute))
	}
	p.Offload = plan.Offload{Policy: policy, Lag: 1, Ahead: 1, Caches: plan.KVOnDevice}
	for s := range p.Parallel.PP {
		var placement strings.Builder
		for _, kind := range p.KindsOn(g, s) {
			placement.WriteString(kinds[kind])
		}
		p.Offload.Alpha = append(p.Offload.Alpha, make([]float64, p.Subsequences.N))
		p.Offload.Placement = append(p.Offload.Placement, slices.Repeat([]string{placement.String()}, p.Subsequences.N))
	}
}

// keptBy returns the letters of a layer of the given kind: some units are recomputed, and all others that its
// backward reads are kept.
func keptBy(g *graph.Model, kind int, recomputed graph.Units) string {
	letters := make([]byte, len(g.UnitNames))
	for u := range letters {
		switch {
		case !g.Saves(kind).Has(u):
			letters[u] = plan.PlacementUnsaved
		case (recomputed & g.Remakes(kind)).Has(u):
			letters[u] = plan.PlacementRecompute
		default:
			letters[u] = plan.PlacementKeep
		}
	}
	return string(letters)
}

// Off keeps all units on the device, except those that are recomputed.
func Off(c *pass.Context, p *plan.Plan) { keepAll(p, c, "none") }

// Check checks that every unit of every layer has a letter that is possible for it, and that alpha lies between
// 0 and 1.
func Check(c *pass.Context, p *plan.Plan) error {
	o, stages := p.Offload, p.Parallel.PP
	if most := max(2, p.Model.Layers); o.Ahead < 1 || o.Ahead > most {
		return fmt.Errorf("offload: reloads are issued 1 to %d layers in advance, not %d", most, o.Ahead)
	}
	if err := checkKV(p); err != nil {
		return err
	}
	if len(o.Placement) != stages || len(o.Alpha) != stages {
		return fmt.Errorf("offload is given for %d stages (alpha for %d), not %d", len(o.Placement), len(o.Alpha), stages)
	}
	if most := p.MostLag(); o.Lag < 1 || o.Lag > most {
		return fmt.Errorf("offload: copies lag 1 to %d tasks, not %d", most, o.Lag)
	}
	for s := range o.Placement {
		if len(o.Placement[s]) != p.Subsequences.N || len(o.Alpha[s]) != p.Subsequences.N {
			return fmt.Errorf("offload of stage %d is given for %d subsequences (alpha for %d), not %d", s, len(o.Placement[s]), len(o.Alpha[s]), p.Subsequences.N)
		}
		for i := range o.Placement[s] {
			if err := checkPlacement(p, c.Model(p), s, i); err != nil {
				return fmt.Errorf("offload of stage %d, subsequence %d: %w", s, i, err)
			}
		}
	}
	return nil
}

// checkKV checks that K and V leave the device between forward and backward only in layer order, and that
// they are not recomputed if they are streamed.
func checkKV(p *plan.Plan) error {
	switch at := p.Offload.Caches; {
	case at == plan.KVOnDevice:
		return nil
	case at != plan.KVOnHost && at != plan.KVRecomputed:
		return fmt.Errorf("offload: caches is %q, but must be %s, %s or %s", at, plan.KVOnDevice, plan.KVOnHost, plan.KVRecomputed)
	case !p.LayerOrder():
		return fmt.Errorf("offload: K and V of a layer can be offloaded only in layer order")
	case at == plan.KVRecomputed && p.Streams():
		return fmt.Errorf("offload: K and V that are streamed from the host cannot also be recomputed")
	}
	return nil
}

func checkPlacement(p *plan.Plan, g *graph.Model, s, i int) error {
	placement, alpha, units := p.Offload.Placement[s][i], p.Offload.Alpha[s][i], g.UnitNames
	if want := p.LayersOf(s) * len(units); len(placement) != want {
		return fmt.Errorf("placement has %d letters for %d units of %d layers, which need %d", len(placement), len(units), p.LayersOf(s), want)
	}
	kinds := p.KindsOn(g, s)
	for at := range len(placement) {
		u, kind := at%len(units), kinds[at/len(units)]
		if saves := g.Saves(kind).Has(u); saves == (placement[at] == plan.PlacementUnsaved) {
			return fmt.Errorf("placement has %q at %d, for %s: use %c if and only if the backward of the layer does not read the unit", placement[at], at, units[u], plan.PlacementUnsaved)
		}
		switch placement[at] {
		case plan.PlacementOffload, plan.PlacementKeep, plan.PlacementUnsaved:
		case plan.PlacementRecompute:
			if !g.Remakes(kind).Has(u) {
				return fmt.Errorf("placement recomputes %s at %d, but the unit cannot be computed from the values that the layer keeps", units[u], at)
			}
		default:
			return fmt.Errorf("placement has the letter %q at %d; use %c for offload, %c for keep, %c for recompute", placement[at], at, plan.PlacementOffload, plan.PlacementKeep, plan.PlacementRecompute)
		}
	}
	if !(alpha >= 0 && alpha <= 1) {
		return fmt.Errorf("alpha is %g, but must be from 0 to 1", alpha)
	}
	return nil
}

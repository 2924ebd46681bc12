package passes

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"sppo.dev/graph"
	"sppo.dev/ir"
	"sppo.dev/ir/cost"
)

// offload decides the fate of every type-1 unit.
//
// Input: Tasks, Units, Lengths, Recompute. Output: Offload. Invariant: where a share is asked for, the bytes that go differ from it
// by at most half of a unit. Paper: section 4.1.
func offload(c *Context, p *Plan) error {
	policy := cmp.Or(p.Schedule.Offload.Policy, policyAuto)
	p.keepAll(c, policy)
	p.Offload.Park = p.layerOrder() && policy != "none" && len(p.Stream.Caches) < len(streamable)
	if policy == policyAuto || policy == policyMemory || p.Recompute == policyAuto {
		newChooser(c, p).choose(policy)
		return nil
	}
	p.decide("offload", "policy", policy, p.takeShares(c))
	if c.untimed {
		p.Stream.Early = min(p.Stream.Early, 1)
		return nil
	}
	if !p.copies() && !p.Streams() { // nothing takes time beside tasks
		return nil
	}
	e := c.estimator(p)
	s := e.simulation(e.costs(p.costModel()))
	p.chooseEarly(s)
	p.chooseTiming(s)
	p.explainTiming()
	return nil
}

// Policies that weigh fates against each other.
const (
	policyAuto   = "auto"
	policyMemory = "memory"
)

func (p *Plan) costModel() cost.Model { return cost.New(ir.Machine(p.Cluster), p.Parallel.Ranks()) }

// takeShares sends the share of each subsequence that the request asks for, and says why.
func (p *Plan) takeShares(c *Context) (why string) {
	alpha, why := p.wantedAlpha(c)
	for i, z := range p.Sizes() {
		sizes, share := unitSizes(c.Model(p).Layer, z), alpha(i)
		var before, after string // of the last stage: others are often like it
		var placed float64
		for s := range p.Parallel.PP {
			if fate := p.Offload.Fate[s][i]; fate != before {
				letters := []byte(fate)
				chooseUnits(letters, sizes, share)
				before, after, placed = fate, string(letters), placedShare(letters, sizes)
			}
			p.Offload.Fate[s][i], p.Offload.Alpha[s][i] = after, placed
		}
	}
	return why
}

// chooseTiming says when copies begin and how long they may last.
func (p *Plan) chooseTiming(s *simulation) {
	if !p.copies() {
		return
	}
	p.Offload.Ahead = p.longestAhead()
	if p.Offload.Policy == "carry" {
		p.chooseLag(s)
	}
	p.chooseAhead(s)
}

// copies reports whether anything goes to the host.
func (p *Plan) copies() bool {
	for _, stage := range p.Offload.Fate {
		for _, fate := range stage {
			if strings.ContainsRune(fate, FateOffload) {
				return true
			}
		}
	}
	return false
}

func (p *Plan) explainTiming() {
	if !p.copies() {
		return
	}
	if p.Offload.Lag > 1 || p.Offload.Policy == "carry" {
		p.decide("offload", "lag", fmt.Sprintf("%d of %d tasks", p.Offload.Lag, p.longestLag()),
			"copies out may lag that many tasks behind their forward: the fewest that make the step no longer")
	}
	p.decide("offload", "ahead", fmt.Sprintf("%d of %d layers", p.Offload.Ahead, p.longestAhead()),
		"a layer's reload is issued that many layers of backward before it is needed: the fewest that make the step no longer, so that bytes are held no longer than they must be")
}

// longestAhead is that of the paper, a task. One of a single layer is over when the same layer of the next begins.
func (p *Plan) longestAhead() int { return max(2, slices.Max(p.LayersPerStage)) }

func (p *Plan) longestLag() int { return p.Subsequences.N * p.Parallel.VirtualStages }

// chooseLag lets copies out lag as many tasks as makes the step shorter, and no more: a copy that is not done by then
// stalls, and bytes that are freed later are bytes more at the peak.
func (p *Plan) chooseLag(s *simulation) {
	p.Offload.Lag = s.shortest(p.longestLag(), func(lag int) { p.Offload.Lag = lag })
}

// shortest is the least value of a setting, of 1 to most, with which the step is as short as with the most, to a ten-thousandth.
func (s *simulation) shortest(most int, set func(int)) int {
	const tolerance = 1.0001
	set(most)
	limit := s.run().end() * tolerance
	for value := 1; value < most; value++ {
		if set(value); s.within(limit) {
			return value
		}
	}
	set(most)
	return most
}

// chooseAhead issues reloads as late as costs nothing: of all distances, up to the layers of a whole task as in the paper, the
// shortest whose step is as fast as with the longest. What comes back later holds its bytes for a shorter time, which at the
// turn and at the long first subsequences is what the peak is made of.
func (p *Plan) chooseAhead(s *simulation) {
	p.Offload.Ahead = s.shortest(p.longestAhead(), func(ahead int) { p.Offload.Ahead = ahead })
}

// chooseEarly brings back blocks of K and V as late as costs nothing.
func (p *Plan) chooseEarly(s *simulation) {
	if !p.Streams() {
		return
	}
	const most = 4
	early := s.shortest(most, func(early int) { p.Stream.Early = early })
	p.decide("offload", "early", fmt.Sprintf("%d of %d blocks", early, most),
		"K and V of so many blocks are on their way while one is in use: the fewest that make the step no longer")
}

// wantedAlpha is the share of each subsequence that the request asks for.
func (p *Plan) wantedAlpha(c *Context) (alpha func(i int) float64, why string) {
	constant := func(v float64) func(int) float64 { return func(int) float64 { return v } }
	switch req := p.Schedule.Offload; req.Policy {
	case "none":
		return constant(0), "everything stays on the device"
	case "full":
		return constant(1), "everything goes, of the last subsequence too"
	case "ratio":
		return constant(req.Alpha[0]), fmt.Sprintf("%g of the bytes of every subsequence, in whole units", req.Alpha[0])
	case "list":
		return func(i int) float64 { return req.Alpha[i] }, "a share for each subsequence, in whole units"
	case "adaptive":
		return p.adaptiveAlpha(c), "of each subsequence what can be copied behind the forward of the next, nothing of the last"
	case "carry":
		all := func(i int) float64 {
			if i == p.Subsequences.N-1 {
				return 0
			}
			return 1
		}
		return all, "everything goes but the last subsequence, whose backward follows at once; copies may lag and drain by the turn"
	}
	panic("internal: no shares for offload = " + p.Schedule.Offload.Policy)
}

// adaptiveAlpha is the paper's ratio, section 4.1 with the indices that it needs: alpha_i = min(1, BW * T_{i+1} / A_i),
// where A_i are the type-1 bytes of s_i on the stage and T_{i+1} is the time of the forward behind which they are copied;
// alpha_{N-1} = 0, for the backward of the last subsequence follows at once.
func (p *Plan) adaptiveAlpha(c *Context) func(i int) float64 {
	m := p.costModel()
	pr := newPricer(c.cache, p, m)
	g := c.Model(p)
	forward, copied := make([]ir.Seconds, p.Subsequences.N), make([]ir.Seconds, p.Subsequences.N) // of one layer
	remade := g.RemadeBy(p.Recompute)
	for i, z := range p.Sizes() {
		forward[i] = pr.time(g, g.Layer, g.Layer.Forward, z)
		for u, n := range unitSizes(g.Layer, z) {
			if !remade.Has(u) {
				copied[i] += m.Time(ir.Work{Kind: ir.WorkD2H, Bytes: n}, cost.Link{})
			}
		}
	}
	return func(i int) float64 { // stages hold as many layers for s_i as for s_{i+1}, so that their number cancels
		if i == len(forward)-1 || copied[i] == 0 {
			return 0
		}
		return min(1, float64(forward[i+1]/copied[i]))
	}
}

// unitSizes are the sizes of a layer's type-1 units for a subsequence, in the order of fate letters.
func unitSizes(b *graph.Block, z graph.Size) []ir.Bytes {
	sizes := make([]ir.Bytes, len(b.Units))
	for u := range b.Units {
		sizes[u] = b.UnitBytes(&b.Units[u], z)
	}
	return sizes
}

// chooseUnits turns letters of units that stay into those of units that go, so that the bytes that go are as near share as whole
// units allow. First layers go first: their backward comes last, so
// their way back is the least hurried. Within a layer large units go first, and what is left of the target is filled with
// smaller ones.
func chooseUnits(letters []byte, sizes []ir.Bytes, share float64) {
	order := bySize(sizes)
	var total ir.Bytes
	for at := range letters {
		if letters[at] == FateKeep {
			total += sizes[at%len(sizes)]
		}
	}
	left := share * float64(total)
	smallest := -1 // of those that stay
	for l := range len(letters) / len(sizes) {
		for _, u := range order {
			at := l*len(sizes) + u
			if letters[at] != FateKeep {
				continue
			}
			if float64(sizes[u]) <= left {
				letters[at], left = FateOffload, left-float64(sizes[u])
			} else if smallest < 0 || sizes[u] < sizes[smallest%len(sizes)] {
				smallest = at
			}
		}
	}
	if smallest >= 0 && float64(sizes[smallest%len(sizes)]) < 2*left {
		letters[smallest] = FateOffload
	}
}

// bySize lists units from the largest to the smallest; equal ones keep their order.
func bySize(sizes []ir.Bytes) []int {
	order := make([]int, len(sizes))
	for u := range order {
		order[u] = u
	}
	slices.SortStableFunc(order, func(a, b int) int { return int(sizes[b] - sizes[a]) })
	return order
}

// placedShare is the alpha that a fate amounts to.
func placedShare(letters []byte, sizes []ir.Bytes) float64 {
	var gone, total ir.Bytes
	for at, letter := range letters {
		n := sizes[at%len(sizes)]
		switch letter {
		case FateOffload:
			gone += n
			fallthrough
		case FateKeep:
			total += n
		}
	}
	if total == 0 {
		return 0
	}
	return float64(gone) / float64(total)
}

// keepAll is a plan without offload yet: units stay, but for those that recomputation makes again.
func (p *Plan) keepAll(c *Context, policy string) {
	g := c.Model(p)
	layer := []byte(strings.Repeat(string(FateKeep), len(g.Layer.Units)))
	remade := g.RemadeBy(p.Recompute)
	for u := range layer {
		if remade.Has(u) {
			layer[u] = FateRecompute
		}
	}
	p.Offload = Offload{Policy: policy, Lag: 1, Ahead: 1}
	for s := range p.Parallel.PP {
		fate := strings.Repeat(string(layer), p.layersOf(s))
		p.Offload.Alpha = append(p.Offload.Alpha, make([]float64, p.Subsequences.N))
		p.Offload.Fate = append(p.Offload.Fate, slices.Repeat([]string{fate}, p.Subsequences.N))
	}
}

func offloadOff(c *Context, p *Plan) { p.keepAll(c, "none") }

// checkOffload: a letter for every unit of every layer of the stage, alpha what the letters amount to.
func checkOffload(c *Context, p *Plan) error {
	o, stages := p.Offload, p.Parallel.PP
	if most := max(2, p.Model.Layers); o.Ahead < 1 || o.Ahead > most {
		return fmt.Errorf("offload: reloads are issued 1 to %d layers ahead, not %d", most, o.Ahead)
	}
	if o.Park && !p.layerOrder() {
		return fmt.Errorf("offload: K and V of a layer can wait on the host in layer order alone")
	}
	if len(o.Fate) != stages || len(o.Alpha) != stages {
		return fmt.Errorf("offload is given for %d stages (alpha for %d) of %d", len(o.Fate), len(o.Alpha), stages)
	}
	if most := 2 * p.Subsequences.N * p.Parallel.Microbatches * p.Parallel.VirtualStages; o.Lag < 1 || o.Lag > most {
		return fmt.Errorf("offload: copies lag 1 to %d tasks, not %d", most, o.Lag)
	}
	for s := range o.Fate {
		if len(o.Fate[s]) != p.Subsequences.N || len(o.Alpha[s]) != p.Subsequences.N {
			return fmt.Errorf("offload of stage %d is given for %d subsequences (alpha for %d) of %d", s, len(o.Fate[s]), len(o.Alpha[s]), p.Subsequences.N)
		}
		for i := range o.Fate[s] {
			if err := p.checkFate(c.Model(p).Layer, s, i); err != nil {
				return fmt.Errorf("offload of stage %d, subsequence %d: %w", s, i, err)
			}
		}
	}
	return nil
}

func (p *Plan) checkFate(layer *graph.Block, s, i int) error {
	fate, alpha := p.Offload.Fate[s][i], p.Offload.Alpha[s][i]
	if want := p.layersOf(s) * len(layer.Units); len(fate) != want {
		return fmt.Errorf("fate has %d letters for %d units of %d layers, which want %d", len(fate), len(layer.Units), p.layersOf(s), want)
	}
	for at := range len(fate) {
		switch u := &layer.Units[at%len(layer.Units)]; fate[at] {
		case FateOffload, FateKeep:
		case FateRecompute:
			if u.Producer < 0 {
				return fmt.Errorf("fate makes %s again at %d, and nothing in the layer makes it", u.Name, at)
			}
		default:
			return fmt.Errorf("fate has the letter %q at %d: there are %c, offload, %c, keep, and %c, recompute", fate[at], at, FateOffload, FateKeep, FateRecompute)
		}
	}
	if !(alpha >= 0 && alpha <= 1) {
		return fmt.Errorf("alpha is %g, and a share lies between 0 and 1", alpha)
	}
	return nil
}

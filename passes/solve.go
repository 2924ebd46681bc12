package passes

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"sppo.dev/graph"
	"sppo.dev/lang"
)

// Until predictions choose among sizes, `auto` is a plain value that this file states.
const (
	tokensPerTaskWanted = 8 << 10 // length of a subsequence that keeps a GPU busy and its bubbles small
	alignWanted         = 128     // rows of a tile
	stepsPerSubsequence = 4       // grid steps that the shortest subsequence has at least, so that rounding stays small
)

// solve fills in what the spec leaves to it: search.go says how.
//
// Input: the request. Output: Schedule with every dimension pinned, Parallel, LayersPerStage, Recompute, Subsequences.N and
// Align; Alternatives and Rejected.
func solve(c *Context, p *Plan) error {
	if err := c.diagnose(strategyProblems(p)); err != nil {
		return err
	}
	s := newSearch(c, p)
	if !s.settle(p) {
		if winner, alternatives := s.run(); winner != nil {
			s.choose(p, winner, alternatives)
			c.winner = winner.plan
		}
	}
	return size(c, p, s.bounds)
}

// size works out what follows from a request whose dimensions are pinned. Where no candidate is a plan some are open; then the
// least is taken, and refused.
func size(c *Context, p *Plan, b *bounds) error {
	solveParallel(p)
	solveSubsequences(p)
	solveStream(p)
	if err := c.diagnose(sizeProblems(p)); err != nil {
		return err
	}
	if err := c.diagnose(batchProblems(p)); err != nil {
		return err
	}
	p.Recompute = cmp.Or(p.Schedule.Recompute, policyAuto) // which the pass offload weighs against copies
	if p.Recompute != graph.RecomputeNone && p.Recompute != policyAuto {
		p.decide("solve", "recompute", p.Recompute, "given: that much less is kept between forward and backward, and made again")
	}
	cut := *p
	cut.Subsequences.Lengths = b.lengthsOf(p)
	b.staged(&cut)
	p.LayersPerStage = cut.LayersPerStage
	p.decide("solve", "layers_per_stage", layersInWords(p.LayersPerStage), "as even as can be in time, embedding and loss counted; of equals the first stages hold one more")
	return nil
}

// recomputeOf is the policy of a request, which is the fastest where it is open.
func recomputeOf(s lang.Schedule) string {
	if s.Recompute == "" || s.Recompute == "auto" {
		return graph.RecomputeNone
	}
	return s.Recompute
}

func solveParallel(p *Plan) {
	s, gpus := p.Schedule, p.Cluster.GPUs()
	strategy := p.chosenStrategy()
	par := Parallel{SP: s.SP, PP: s.PP, DP: s.DP, VirtualStages: s.VirtualStages, Placement: strategy.placed, Microbatch: max(1, s.Microbatch)}
	if par.VirtualStages == 0 {
		par.VirtualStages = strategy.stages.least
	}
	if par.SP == 0 {
		par.SP = 1
	}
	p.decide("solve", "sp", fmt.Sprint(par.SP), given(s.SP != 0, "auto is 1"))
	if par.DP == 0 {
		par.DP = 1
	}
	p.decide("solve", "dp", fmt.Sprint(par.DP), given(s.DP != 0, "auto is 1: ranks that are left serve the pipeline of one sequence"))
	par.Order = OrderSequence
	if s.Order == OrderLayer {
		solveLayerOrder(p, &par)
	}
	if par.PP == 0 {
		par.PP = max(1, min(gpus/(par.SP*par.DP), p.Model.Layers/par.VirtualStages))
	}
	p.decide("solve", "pp", fmt.Sprint(par.PP), given(s.PP != 0, "auto is a stage for every rank that sp and dp leave, as long as each has a layer"))
	if par.Placement == PlacedV {
		p.decide("solve", "placement", par.Placement, "of the strategy: the virtual stages lie there and back, so that the first rank also has the last")
	}
	par.Microbatches = p.Train.Batch / (par.DP * par.Microbatch)
	p.Parallel = par
	solveSPMode(p)
	solveZero(p)
}

// solveLayerOrder makes virtual stages of the one stage, which all subsequences pass one after another.
func solveLayerOrder(p *Plan, par *Parallel) {
	par.Order = OrderLayer
	par.PP = max(1, par.PP)
	why := "given: all subsequences pass a layer before the next, so that the device holds K and V of one layer"
	if p.Schedule.VirtualStages == 0 {
		par.VirtualStages = p.Model.Layers
	} else {
		why = fmt.Sprintf("given: all subsequences pass one of %d groups of layers before the next, so that the device holds K and V of one group", par.VirtualStages)
	}
	p.decide("solve", "order", OrderLayer, why)
}

func solveSubsequences(p *Plan) {
	req, seq := p.Schedule.Subsequences, p.Train.Sequence
	out := &p.Subsequences
	why := "given"
	switch {
	case !req.Auto && len(req.Lengths) > 0:
		out.N = len(req.Lengths)
	case !req.Auto && req.Count > 0:
		out.N = req.Count
	case p.chosenStrategy().sliced != "":
		out.N, why = 1, "the strategy takes whole sequences"
	case p.Schedule.Offload.Policy == "list":
		out.N, why = len(p.Schedule.Offload.Alpha), "one for each share that offload lists"
	default:
		grid := max(int64(p.Schedule.Align), p.rowGrid())
		n := max((seq+tokensPerTaskWanted-1)/tokensPerTaskWanted, int64(p.Parallel.PP))
		out.N = int(max(1, min(n, seq/grid)))
		why = "auto is one for every 8K tokens, at least one for every stage"
	}
	p.decide("solve", "subsequences", fmt.Sprint(out.N), why)
	if out.Align = int64(p.Schedule.Align); out.Align > 0 {
		p.decide("solve", "align", fmt.Sprint(out.Align), "given")
		return
	}
	out.Align = autoAlign(p)
	p.decide("solve", "align", fmt.Sprint(out.Align), fmt.Sprintf("auto is %d, or less so that the shortest subsequence has %d steps of it; a multiple of sp", alignWanted, stepsPerSubsequence))
}

// autoAlign halves the grid until every subsequence has enough steps of it, or until it is what ranks need.
func autoAlign(p *Plan) int64 {
	least := p.rowGrid()
	align := least
	for align*2 <= alignWanted {
		align *= 2
	}
	var suits func(align int64) bool
	if lengths := p.Schedule.Subsequences.Lengths; len(lengths) > 0 {
		suits = func(align int64) bool { return onGrid(lengths, align) }
	} else {
		shortest := shortestLength(p)
		suits = func(align int64) bool { return shortest >= stepsPerSubsequence*align }
	}
	for align > least && !suits(align) {
		align /= 2
	}
	return align
}

// onGrid reports whether all lengths but the last are multiples of align.
func onGrid(lengths []int64, align int64) bool {
	for _, n := range lengths[:len(lengths)-1] {
		if n%align != 0 {
			return false
		}
	}
	return true
}

// shortestLength is that of the last subsequence, before any rounding.
func shortestLength(p *Plan) int64 {
	seq, n := p.Train.Sequence, int64(p.Subsequences.N)
	if p.Schedule.Partition == "length" || n >= seq {
		return seq / n
	}
	return seq - newCut(p.Model, seq, int(n), 1).nearest(int(n)-1)
}

func evenLayers(layers, stages int) []int {
	per := make([]int, stages)
	for i := range per {
		per[i] = layers / stages
		if i < layers%stages {
			per[i]++
		}
	}
	return per
}

func given(is bool, auto string) string {
	if is {
		return "given"
	}
	return auto
}

func list[T any](items []T) string {
	return strings.Trim(fmt.Sprint(items), "[]")
}

// layersInWords is the list of layers, as long as it is short.
func layersInWords(layers []int) string {
	least, most := slices.Min(layers), slices.Max(layers)
	switch {
	case len(layers) <= 8:
		return list(layers)
	case least == most:
		return fmt.Sprintf("%d on each of %d", least, len(layers))
	}
	return fmt.Sprintf("%d to %d on %d", least, most, len(layers))
}

// problem is a fault of a request or of an edited plan.
type problem struct {
	key     string // of the spec
	code    lang.Code
	hint    string
	message string
}

func fault(key string, code lang.Code, hint, format string, args ...any) problem {
	return problem{key, code, hint, fmt.Sprintf(format, args...)}
}

// diagnose points at the keys of the spec that problems are about.
func (c *Context) diagnose(problems []problem) error {
	sp := c.spec
	if sp == nil {
		sp = &lang.Spec{}
	}
	var ds lang.Diagnostics
	for _, f := range problems {
		ds = append(ds, sp.Diagnose(f.key, f.code, "%s", f.message).WithHint("%s", f.hint))
	}
	return ds.Err()
}

// plain is the first of them, for a plan without a spec.
func plain(problems []problem) error {
	if len(problems) == 0 {
		return nil
	}
	f := problems[0]
	if f.hint != "" {
		return fmt.Errorf("%s: %s (%s)", f.key, f.message, f.hint)
	}
	return fmt.Errorf("%s: %s", f.key, f.message)
}

// sizeProblems are what is wrong with sizes, chosen or edited, that everything later relies on.
func sizeProblems(p *Plan) []problem {
	found := modelProblems(p)
	if len(found) > 0 {
		return found
	}
	add := func(wrong bool, f problem) {
		if wrong {
			found = append(found, f)
		}
	}
	par, m, seq := p.Parallel, p.Model, p.Train.Sequence
	if par.SP < 1 || par.PP < 1 || par.DP < 1 || par.VirtualStages < 1 || par.Microbatch < 1 {
		return append(found, fault("schedule.sp", lang.OutOfRange, "", "sizes are at least 1: sp %d, pp %d, dp %d, virtual_stages %d, microbatch %d",
			par.SP, par.PP, par.DP, par.VirtualStages, par.Microbatch))
	}
	gpus := p.Cluster.GPUs()
	tooMany := par.SP > gpus || par.PP > gpus || par.DP > gpus || par.Ranks() > gpus // the product alone might overflow
	add(tooMany, fault("schedule.pp", lang.TooManyRanks, fmt.Sprintf("the product of sp, pp and dp is at most %d", gpus),
		"sp %d x pp %d x dp %d make %d ranks, and the cluster has %s", par.SP, par.PP, par.DP, par.Ranks(), plural(gpus, p.Cluster.Unit())))
	add(par.Placement != PlacedRound && par.Placement != PlacedV && par.Placement != "", fault("schedule.strategy", lang.UnknownName, PlacedRound+" or "+PlacedV,
		"virtual stages have no placement %q", par.Placement))
	stages := par.PP * par.VirtualStages
	add(stages > m.Layers, fault("schedule.pp", lang.TooFewLayers, fmt.Sprintf("at most %d stages", m.Layers),
		"%d stages want as many layers, and the model has %d", stages, m.Layers))
	add(p.layerOrder() && par.PP > 1, fault("schedule.order", lang.Conflict, "pp = 1, or order = sequence", "order = layer works within one stage, and pp = %d", par.PP))
	found = append(found, splitProblems(p)...)
	found = append(found, streamProblems(p)...)
	found = append(found, zeroProblems(p)...)
	each := int64(par.DP * par.Microbatch)
	add(int64(p.Train.Batch)%each != 0 || p.Train.Batch < 1, fault("train.batch", lang.Indivisible, "batch = "+nearMultiples(int64(p.Train.Batch), each),
		"batch = %d is not a multiple of dp * microbatch = %d", p.Train.Batch, each))
	add(seq%p.rowGrid() != 0, fault("train.sequence", lang.Indivisible, "sequence = "+nearMultiples(seq, p.rowGrid()),
		"sequence = %d does not divide by %s", seq, p.gridInWords()))
	return append(found, gridProblems(p)...)
}

// modelProblems are what the language has ruled out, and an edited plan has not.
func modelProblems(p *Plan) []problem {
	m := p.Model
	const most = 1 << 40
	for _, size := range []struct {
		key string
		n   int64
	}{
		{"model.layers", int64(m.Layers)}, {"model.hidden", int64(m.Hidden)}, {"model.heads", int64(m.Heads)}, {"model.kv_heads", int64(m.KVHeads)},
		{"model.head_dim", int64(m.HeadDim)}, {"model.ffn", int64(m.FFN)}, {"model.vocab", int64(m.Vocab)},
		{"train.sequence", p.Train.Sequence}, {"train.batch", int64(p.Train.Batch)},
	} {
		if size.n < 1 || size.n > most {
			return []problem{fault(size.key, lang.OutOfRange, "", "it is %d", size.n)}
		}
	}
	var found []problem
	oneOf := func(key, value string, of ...string) {
		if !slices.Contains(of, value) {
			found = append(found, fault(key, lang.UnknownName, strings.Join(of, " or "), "there is no %q", value))
		}
	}
	oneOf("model.family", m.Family, lang.FamilyGPT, lang.FamilyLlama)
	oneOf("model.positions", m.Positions, lang.PositionsLearned, lang.PositionsRope, lang.PositionsNone)
	oneOf("model.dtype", m.DType, "f32", "bf16")
	if p.Recompute != "" { // before solve has run
		oneOf("schedule.recompute", p.Recompute, policyAuto, graph.RecomputeNone, graph.RecomputeSelective, graph.RecomputeKeepAttention, graph.RecomputeFull)
	}
	if m.Heads%m.KVHeads != 0 {
		found = append(found, fault("model.kv_heads", lang.Indivisible, "", "%d key and value heads do not divide heads = %d", m.KVHeads, m.Heads))
	}
	if m.Positions == lang.PositionsRope && m.HeadDim%2 != 0 {
		found = append(found, fault("model.head_dim", lang.Indivisible, "", "rotary positions want an even head_dim, and it is %d", m.HeadDim))
	}
	return found
}

// mostTasks bounds the forwards of layers in a step, each some 150 instructions with its backward: what a compiler holds in
// the memory of a workstation.
const mostTasks = 150_000

// taskLayers is how often each subsequence passes a layer in a step.
func taskLayers(p *Plan) int64 { return int64(max(1, p.Model.Layers*p.Parallel.Microbatches)) }

func gridProblems(p *Plan) []problem {
	seq, n, align, grid := p.Train.Sequence, int64(p.Subsequences.N), p.Subsequences.Align, p.rowGrid()
	switch {
	case n < 1:
		return []problem{fault("schedule.subsequences", lang.OutOfRange, "", "a sequence has at least one subsequence, not %d", n)}
	case n > mostTasks/taskLayers(p):
		return []problem{fault("schedule.subsequences", lang.Infeasible, fmt.Sprintf("at most %d subsequences", max(1, mostTasks/taskLayers(p))),
			"a step of %d subsequences over %d layers and %d microbatches is a program of more than 20 million instructions", n, p.Model.Layers, p.Parallel.Microbatches)}
	case align < 1 || align%grid != 0:
		return []problem{fault("schedule.align", lang.BadAlign, "align = "+nearMultiples(align, grid), "align = %d is not a multiple of %s", align, p.gridInWords())}
	case p.Subsequences.Lengths != nil:
		return nil // checked as they are
	case p.Schedule.Offload.Policy == "list" && len(p.Schedule.Offload.Alpha) != int(n):
		return []problem{fault("schedule.offload", lang.LengthOfList, fmt.Sprintf("write %d shares", n),
			"offload lists %d shares for %d subsequences", len(p.Schedule.Offload.Alpha), n)}
	case len(p.Schedule.Subsequences.Lengths) > 0:
		return lengthProblems(p)
	case n > seq/align:
		return []problem{fault("schedule.subsequences", lang.BadAlign, fmt.Sprintf("at most %d subsequences, or align at most %d", seq/align, seq/n/grid*grid),
			"a sequence of %d tokens is too short for %d subsequences of at least align = %d tokens", seq, n, align)}
	}
	return nil
}

func lengthProblems(p *Plan) []problem {
	lengths, align, grid := p.Schedule.Subsequences.Lengths, p.Subsequences.Align, p.rowGrid()
	var sum int64
	for i, n := range lengths {
		sum += n
		key := fmt.Sprintf("schedule.subsequences[%d]", i)
		if n < 1 || n%grid != 0 {
			return []problem{fault(key, lang.Indivisible, nearMultiples(n, grid), "a subsequence of %s does not divide by %s", plural(int(n), "token"), p.gridInWords())}
		}
		if n%align != 0 && i < len(lengths)-1 {
			return []problem{fault(key, lang.BadAlign, nearMultiples(n, align), "a subsequence of %s is not a multiple of align = %d", plural(int(n), "token"), align)}
		}
	}
	if sum != p.Train.Sequence {
		return []problem{fault("schedule.subsequences", lang.LengthsSum, "", "the lengths sum to %d, and sequence = %d", sum, p.Train.Sequence)}
	}
	return nil
}

// nearDivisors names the divisors of n on both sides of x.
func nearDivisors(n, x int) string {
	below, above := min(x, n), x
	for below > 1 && n%below != 0 {
		below--
	}
	for above < n && n%above != 0 {
		above++
	}
	if above > n || above == below {
		return fmt.Sprint(below)
	}
	return fmt.Sprintf("%d or %d", below, above)
}

// nearMultiples names the multiples of step on both sides of x.
func nearMultiples(x, step int64) string {
	below := x / step * step
	if below <= 0 {
		return fmt.Sprint(below + step)
	}
	return fmt.Sprintf("%d or %d", below, below+step)
}

// checkSolved: sizes fit the cluster and the model, and stages hold all layers.
func checkSolved(_ *Context, p *Plan) error {
	if err := plain(sizeProblems(p)); err != nil {
		return err
	}
	if got, want := len(p.LayersPerStage), p.Parallel.Stages(); got != want {
		return fmt.Errorf("layers_per_stage has %d entries for %d stages", got, want)
	}
	sum := 0
	for i, n := range p.LayersPerStage {
		if n < 1 {
			return fmt.Errorf("layers_per_stage: stage %d has %d layers", i, n)
		}
		sum += n
	}
	if sum != p.Model.Layers {
		return fmt.Errorf("layers_per_stage sums to %d, and the model has %d layers", sum, p.Model.Layers)
	}
	if want := p.Train.Batch / (p.Parallel.DP * p.Parallel.Microbatch); p.Parallel.Microbatches != want {
		return fmt.Errorf("microbatches is %d: batch / (dp * microbatch) is %d", p.Parallel.Microbatches, want)
	}
	return nil
}

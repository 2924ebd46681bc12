package search

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/estimate"
	"sppo.dev/internal/passes/order"
	"sppo.dev/internal/passes/partition"
	"sppo.dev/internal/passes/pass"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/strategy"
	"sppo.dev/internal/passes/words"
	"sppo.dev/lang"
)

// Default sizes for values that are auto but not searched.
const (
	tokensPerTaskWanted = 8 << 10 // subsequence length that keeps a GPU busy and its bubbles small
	alignWanted         = 128     // rows of a tile
	stepsPerSubsequence = 4       // minimum grid steps of the shortest subsequence, so that rounding stays small
)

// Run fills in what the spec leaves open, as described in search.go.
//
// Input: the request. Output: Schedule with every dimension pinned, Parallel, LayersPerStage, Recompute,
// Subsequences.N and Align; Alternatives and Rejected.
func Run(c *pass.Context, p *plan.Plan) error {
	if err := c.Diagnose(slices.Concat(p.FreezeProblems(), strategy.Problems(p), order.FileProblems(p))); err != nil {
		return err
	}
	s := newSearch(c, p)
	if !s.pinOnly(p) {
		winner, alternatives := s.solve(p)
		if winner != nil {
			s.choose(p, winner, alternatives)
			c.Winner = winner.plan
		}
	}
	return size(c, p, s.bounds)
}

// size computes the sizes that follow from a request whose dimensions are pinned. If no candidate is valid,
// some dimensions are still open; size then takes their smallest values, which later checks refuse.
func size(c *pass.Context, p *plan.Plan, b *bounds) error {
	solveParallel(p)
	solveSubsequences(c.Cache, p)
	solveStream(p)
	if err := c.Diagnose(sizeProblems(p)); err != nil {
		return err
	}
	if err := c.Diagnose(strategy.BatchProblems(p)); err != nil {
		return err
	}
	p.Recompute = cmp.Or(p.Schedule.Recompute, plan.PolicyAuto) // auto: left to the offload pass
	if p.Recompute != graph.RecomputeNone && p.Recompute != plan.PolicyAuto {
		p.Decide("solve", "recompute", p.Recompute, "given: these units are recomputed instead of being saved between forward and backward")
	}
	cut := *p
	cut.Subsequences.Lengths = b.lengthsOf(p)
	b.staged(&cut)
	p.LayersPerStage = cut.LayersPerStage
	p.Decide("solve", "layers_per_stage", layersInWords(p.LayersPerStage),
		given(len(p.Schedule.LayersPerStage) > 0, "balanced by predicted time, including embedding and loss; ties go to the first stages"))
	return nil
}

// recomputeOf returns the recomputation policy of a request, or the fastest policy if it is open.
func recomputeOf(s lang.Schedule) string {
	if opensRecompute(s) {
		return graph.RecomputeNone
	}
	return s.Recompute
}

func opensRecompute(s lang.Schedule) bool { return s.Recompute == "" || s.Recompute == plan.PolicyAuto }

func solveParallel(p *plan.Plan) {
	s, gpus := p.Schedule, p.Cluster.GPUs()
	strategy := strategy.Of(p)
	par := plan.Parallel{SP: s.SP, Ring: s.Ring, PP: s.PP, DP: s.DP, VirtualStages: s.VirtualStages, Placement: strategy.Placed, Microbatch: max(1, s.Microbatch)}
	if par.VirtualStages == 0 {
		par.VirtualStages = strategy.Stages.Least
	}
	if par.SP == 0 {
		par.SP = 1
	}
	p.Decide("solve", "sp", par.SPText(), given(s.SP != 0, "auto is 1"))
	if par.DP == 0 {
		par.DP = 1
	}
	p.Decide("solve", "dp", fmt.Sprint(par.DP), given(s.DP != 0, "auto is 1: all other ranks are used by the pipeline of one sequence"))
	par.Order = plan.OrderSequence
	if s.Order == plan.OrderLayer {
		solveLayerOrder(p, &par)
	}
	if par.PP == 0 {
		par.PP = max(1, min(gpus/(par.SP*par.DP), p.Model.Layers/par.VirtualStages))
	}
	p.Decide("solve", "pp", fmt.Sprint(par.PP), given(s.PP != 0, "auto is one stage for each rank that remains after sp and dp, but at most one per layer"))
	if par.Placement == plan.PlacedV {
		p.Decide("solve", "placement", par.Placement, "from the strategy: virtual stages are placed in a V, so that the first rank also has the last stage")
	}
	par.Microbatches = p.Train.Batch / (par.DP * par.Microbatch)
	p.Parallel = par
	solveSPMode(p)
	solveExperts(p)
	solveZero(p)
	solveOptimizerOffload(p)
}

// solveOptimizerOffload decides where the optimizer's state is stored: on the device, unless the host is requested.
func solveOptimizerOffload(p *plan.Plan) {
	if p.Parallel.OptimizerOffload = "none"; p.Schedule.OptimizerOffload == plan.OffloadHost {
		p.Parallel.OptimizerOffload = plan.OffloadHost
		p.Decide("solve", "optimizer_offload", plan.OffloadHost, "given: at the end of a step, optimizer state and master weights pass through the device in blocks")
	}
}

// solveLayerOrder divides the single stage into virtual stages, which all subsequences pass through
// one after another.
func solveLayerOrder(p *plan.Plan, par *plan.Parallel) {
	par.Order = plan.OrderLayer
	par.PP = max(1, par.PP)
	if p.Schedule.VirtualStages == 0 {
		par.VirtualStages = p.Model.Layers
	}
	p.Decide("solve", "order", plan.OrderLayer, fmt.Sprintf("given: all subsequences pass through one group of layers before any enters the next, and the device holds K and V of one group; here %s",
		words.Plural(par.VirtualStages, "group")))
}

func solveSubsequences(c *estimate.Cache, p *plan.Plan) {
	req, seq := p.Schedule.Subsequences, p.Train.Sequence
	out := &p.Subsequences
	why := "given"
	switch {
	case !req.Auto && len(req.Lengths) > 0:
		out.N = len(req.Lengths)
	case !req.Auto && req.Count > 0:
		out.N = req.Count
	case strategy.Of(p).Sliced != "":
		out.N, why = 1, "the strategy needs whole sequences"
	case p.Schedule.Offload.Policy == "list":
		out.N, why = len(p.Schedule.Offload.Alpha), "one for each share that offload lists"
	default:
		grid := max(int64(p.Schedule.Align), p.RowGrid())
		n := max((seq+tokensPerTaskWanted-1)/tokensPerTaskWanted, int64(p.Parallel.PP))
		out.N = int(max(1, min(n, seq/grid)))
		why = "auto is one per 8K tokens, but at least one per stage"
	}
	p.Decide("solve", "subsequences", fmt.Sprint(out.N), why)
	if out.Align = int64(p.Schedule.Align); out.Align > 0 {
		p.Decide("solve", "align", fmt.Sprint(out.Align), "given")
		return
	}
	out.Align = autoAlign(c, p)
	p.Decide("solve", "align", fmt.Sprint(out.Align), fmt.Sprintf("auto is %d, or less if the shortest subsequence "+
		"would be shorter than %d times that value; it must be a multiple of sp", alignWanted, stepsPerSubsequence))
}

// autoAlign halves the grid until every subsequence has enough grid steps (or, if lengths are given, until they
// are on the grid), or until the grid is as fine as the ranks allow.
func autoAlign(c *estimate.Cache, p *plan.Plan) int64 {
	least := p.RowGrid()
	align := least
	for align*2 <= alignWanted {
		align *= 2
	}
	var suits func(align int64) bool
	if lengths := p.Schedule.Subsequences.Lengths; len(lengths) > 0 {
		suits = func(align int64) bool { return onGrid(lengths, align) }
	} else {
		shortest := partition.Shortest(c.FlopsOfLayer(p), p)
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

// evenLayers distributes layers over stages. If there are fewer layers, the last stage and then the first have none.
func evenLayers(layers, stages int) []int {
	per := make([]int, stages)
	if layers < stages {
		for i := range layers {
			per[i+(stages-layers)/2] = 1
		}
		return per
	}
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

// layersInWords returns the list of layers as text, or a summary if the list is long.
func layersInWords(layers []int) string {
	least, most := slices.Min(layers), slices.Max(layers)
	switch {
	case len(layers) <= 8:
		return words.List(layers)
	case least == most:
		return fmt.Sprintf("%d on each of %d", least, len(layers))
	}
	return fmt.Sprintf("%d to %d on %d", least, most, len(layers))
}

// sizeProblems returns the problems with chosen or edited sizes. All later code relies on these checks.
func sizeProblems(p *plan.Plan) []plan.Problem {
	found := modelProblems(p)
	if len(found) > 0 {
		return found
	}
	add := func(wrong bool, f plan.Problem) {
		if wrong {
			found = append(found, f)
		}
	}
	par, m, seq := p.Parallel, p.Model, p.Train.Sequence
	if par.SP < 1 || par.PP < 1 || par.DP < 1 || par.VirtualStages < 1 || par.Microbatch < 1 {
		return append(found, plan.Fault("schedule.sp", lang.OutOfRange, "", "sizes must be at least 1: sp %d, pp %d, dp %d, virtual_stages %d, microbatch %d",
			par.SP, par.PP, par.DP, par.VirtualStages, par.Microbatch))
	}
	gpus := p.Cluster.GPUs()
	tooMany := par.SP > gpus || par.PP > gpus || par.DP > gpus || par.Ranks() > gpus // the product could overflow
	add(tooMany, plan.Fault("schedule.pp", lang.TooManyRanks, fmt.Sprintf("the product of sp, pp and dp is at most %d", gpus),
		"sp %d x pp %d x dp %d make %d ranks, but the cluster has %s", par.SP, par.PP, par.DP, par.Ranks(), words.Plural(gpus, p.Cluster.Unit())))
	add(par.Placement != plan.PlacedRound && par.Placement != plan.PlacedV && par.Placement != "", plan.Fault("schedule.strategy", lang.UnknownName, plan.PlacedRound+" or "+plan.PlacedV,
		"unknown placement %q of virtual stages", par.Placement))
	stages := par.PP * par.VirtualStages
	most := mostStages(p)
	add(stages > most, plan.Fault("schedule.pp", lang.TooFewLayers, fmt.Sprintf("at most %d stages", most),
		"%d stages need at least %d layers, but the model has %d", stages, stages-most+m.Layers, m.Layers))
	add(p.LayerOrder() && par.PP > 1, plan.Fault("schedule.order", lang.Conflict, "pp = 1, or order = sequence", "order = layer needs a single stage, not pp = %d", par.PP))
	add(emptyRank(p), plan.Fault("schedule.layers_per_stage", lang.Conflict, "", "strategy = %s places the first and the last stage on one rank, which would have no layers", p.Schedule.Strategy))
	found = append(found, recomputeProblems(p)...)
	found = append(found, splitProblems(p)...)
	found = append(found, streamProblems(p)...)
	found = append(found, zeroProblems(p)...)
	add(!slices.Contains([]string{"", "none", plan.OffloadHost}, par.OptimizerOffload), plan.Fault("schedule.optimizer_offload", lang.UnknownName, "none or host",
		"the optimizer's state cannot be stored in %q", par.OptimizerOffload))
	each := int64(par.DP * par.Microbatch)
	add(int64(p.Train.Batch)%each != 0 || p.Train.Batch < 1, plan.Fault("train.batch", lang.Indivisible, "batch = "+words.NearMultiples(int64(p.Train.Batch), each),
		"batch = %d is not a multiple of dp * microbatch = %d", p.Train.Batch, each))
	add(seq%p.RowGrid() != 0, plan.Fault("train.sequence", lang.Indivisible, "sequence = "+words.NearMultiples(seq, p.RowGrid()),
		"sequence = %d is not divisible by %s", seq, p.GridInWords()))
	return append(found, gridProblems(p)...)
}

// emptyRank reports whether the list of layers in the request leaves the first rank without layers.
func emptyRank(p *plan.Plan) bool {
	list, par := p.Schedule.LayersPerStage, p.Parallel
	return len(list) > 0 && par.Placement == plan.PlacedV && par.VirtualStages == 2 && list[0]+list[len(list)-1] == 0
}

// mostStages returns the largest number of virtual stages of a plan. It is smaller if the first and
// the last would be all that a rank has, or if the embedding may be frozen, so that nothing computes its gradient.
func mostStages(p *plan.Plan) int {
	par, most := p.Parallel, lang.MostStages(p.Model.Layers, p.Parallel.PP, p.Parallel.VirtualStages)
	if par.Placement == plan.PlacedV && par.VirtualStages == 2 || p.Tuned() {
		return min(most, p.Model.Layers+1)
	}
	return most
}

// modelProblems returns problems that the language excludes but an edited plan may have.
func modelProblems(p *plan.Plan) []plan.Problem {
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
			return []plan.Problem{plan.Fault(size.key, lang.OutOfRange, "", "it is %d", size.n)}
		}
	}
	var found []plan.Problem
	oneOf := func(key, value string, of ...string) {
		if !slices.Contains(of, value) {
			found = append(found, plan.Fault(key, lang.UnknownName, strings.Join(of, " or "), "unknown value %q", value))
		}
	}
	if p.Recompute != "" { // before solve has run
		oneOf("schedule.recompute", p.Recompute, plan.PolicyAuto, graph.RecomputeNone, graph.RecomputeSelective, graph.RecomputeKeepAttention, graph.RecomputeFull, graph.RecomputeFullKV)
	}
	for _, x := range m.Problems() {
		found = append(found, plan.Fault(x.Keys[0], x.Code, x.Hint, "%s", x.Message))
	}
	return found
}

// mostTasks limits the number of layer forwards in a step, so that the program fits into the memory of a
// workstation. Each layer forward takes about 150 instructions, including its backward.
const mostTasks = 150_000

// taskLayers returns the number of layer forwards that a step has per subsequence, over all microbatches.
func taskLayers(p *plan.Plan) int64 { return p.LayerVisits() / int64(p.Subsequences.N) }

func gridProblems(p *plan.Plan) []plan.Problem {
	seq, n, align, grid := p.Train.Sequence, int64(p.Subsequences.N), p.Subsequences.Align, p.RowGrid()
	switch {
	case n < 1:
		return []plan.Problem{plan.Fault("schedule.subsequences", lang.OutOfRange, "", "a sequence has at least one subsequence, not %d", n)}
	case n > mostTasks/taskLayers(p):
		return []plan.Problem{plan.Fault("schedule.subsequences", lang.Infeasible, fmt.Sprintf("at most %d subsequences", max(1, mostTasks/taskLayers(p))),
			"a step of %d subsequences over %d layers and %d microbatches would be a program of more than 20 million instructions",
			n, p.Model.Layers, p.Parallel.Microbatches)}
	case align < 1 || align%grid != 0:
		return []plan.Problem{plan.Fault("schedule.align", lang.BadAlign, "align = "+words.NearMultiples(align, grid), "align = %d is not a multiple of %s", align, p.GridInWords())}
	case p.Subsequences.Lengths != nil:
		return nil // already cut; the partition pass checks these lengths
	case p.Schedule.Offload.Policy == "list" && len(p.Schedule.Offload.Alpha) != int(n):
		return []plan.Problem{plan.Fault("schedule.offload", lang.LengthOfList, fmt.Sprintf("write %d shares", n),
			"offload lists %d shares for %d subsequences", len(p.Schedule.Offload.Alpha), n)}
	case len(p.Schedule.Subsequences.Lengths) > 0:
		return lengthProblems(p)
	case n > seq/align:
		return []plan.Problem{plan.Fault("schedule.subsequences", lang.BadAlign, fmt.Sprintf("at most %d subsequences, or align at most %d", seq/align, seq/n/grid*grid),
			"a sequence of %d tokens is too short for %d subsequences of at least align = %d tokens", seq, n, align)}
	}
	return nil
}

func lengthProblems(p *plan.Plan) []plan.Problem {
	lengths, align, grid := p.Schedule.Subsequences.Lengths, p.Subsequences.Align, p.RowGrid()
	var sum int64
	for i, n := range lengths {
		sum += n
		key := fmt.Sprintf("schedule.subsequences[%d]", i)
		if n < 1 || n%grid != 0 {
			return []plan.Problem{plan.Fault(key, lang.Indivisible, words.NearMultiples(n, grid), "a subsequence of %s is not divisible by %s", words.Plural(int(n), "token"), p.GridInWords())}
		}
		if n%align != 0 && i < len(lengths)-1 {
			return []plan.Problem{plan.Fault(key, lang.BadAlign, words.NearMultiples(n, align), "a subsequence of %s is not a multiple of align = %d", words.Plural(int(n), "token"), align)}
		}
	}
	if sum != p.Train.Sequence {
		return []plan.Problem{plan.Fault("schedule.subsequences", lang.LengthsSum, "", "the lengths add up to %d, but sequence = %d", sum, p.Train.Sequence)}
	}
	return nil
}

// mayBeEmpty reports whether a virtual stage may be without layers: that of the head, and that of the embedding.
func mayBeEmpty(p *plan.Plan, stage int) bool {
	return p.Parallel.PP > 1 && p.Parallel.VirtualStages > 1 && (stage == p.Parallel.Stages()-1 || stage == 0 && !p.Tuned())
}

// Check checks that sizes fit the cluster and the model, and that stages hold all layers.
func Check(c *pass.Context, p *plan.Plan) error {
	if err := plan.Plain(sizeProblems(p)); err != nil {
		return err
	}
	if got, want := len(p.LayersPerStage), p.Parallel.Stages(); got != want {
		return fmt.Errorf("layers_per_stage has %d entries for %d stages", got, want)
	}
	sum := 0
	for i, n := range p.LayersPerStage {
		if n < 0 || n == 0 && !mayBeEmpty(p, i) {
			return fmt.Errorf("layers_per_stage: stage %d has %d layers", i, n)
		}
		sum += n
	}
	for rank := range p.Parallel.PP {
		if p.LayersOf(rank) == 0 {
			return fmt.Errorf("layers_per_stage: none of the layers is on the ranks with pipeline rank %d", rank)
		}
	}
	if sum != p.Model.Layers {
		return fmt.Errorf("layers_per_stage adds up to %d, but the model has %d layers", sum, p.Model.Layers)
	}
	if want := p.Train.Batch / (p.Parallel.DP * p.Parallel.Microbatch); p.Parallel.Microbatches != want {
		return fmt.Errorf("microbatches is %d, but batch / (dp * microbatch) is %d", p.Parallel.Microbatches, want)
	}
	if err := plan.Plain(p.FreezeProblems()); err != nil {
		return err
	}
	if want := c.Model(p).Untrained; p.Untrained != want {
		return fmt.Errorf("untrained_layers is %d, but the number of initial layers with nothing to train in or before them is %d", p.Untrained, want)
	}
	return nil
}

// solveSPMode sets the requested mode, or megatron. With one rank per stage, all modes are equivalent.
func solveSPMode(p *plan.Plan) {
	p.Parallel.SPMode = graph.ModeMegatron
	if why, ok := splitDocs[p.Schedule.SPMode]; ok {
		p.Parallel.SPMode = p.Schedule.SPMode
		p.Decide("solve", "sp_mode", p.Schedule.SPMode, "given: "+why)
	}
}

// solveExperts spreads the experts over the ranks of a stage if the request says so.
func solveExperts(p *plan.Plan) {
	if p.Schedule.ExpertParallel == "on" && p.Parallel.SP > 1 {
		p.Parallel.ExpertParallel = true
		p.Decide("solve", "expert_parallel", "on", "given: each rank of a stage has some of the experts, and computes with the rows of all ranks that chose these")
	}
}

// expertProblems returns a problem if the ranks of a stage cannot have equally many experts.
func expertProblems(p *plan.Plan) []plan.Problem {
	n, ranks := p.Model.Experts, p.Split().ExpertRanks()
	if p.Parallel.ExpertParallel && n%ranks != 0 {
		_, near := lang.NearSP(p.Model, p.Train.Sequence, ranks, p.Parallel.Ring, p.Cluster.GPUs()/max(1, p.Parallel.PP*p.Parallel.DP), n)
		return []plan.Problem{plan.Fault("schedule.expert_parallel", lang.Indivisible, near, "%d experts cannot be divided evenly among %s", n, words.Plural(ranks, "rank"))}
	}
	return nil
}

// splitDocs holds the reasons for all modes except the default.
var splitDocs = map[string]string{
	graph.ModeUlysses: "every rank holds the whole weights of a layer, and rows are exchanged for heads around attention",
	graph.ModeRing:    "every rank holds the whole weights of a layer and two chunks of each subsequence in zigzag order; keys and values are passed around for attention",
}

// recomputeProblems returns problems with a request to recompute K and V.
func recomputeProblems(p *plan.Plan) (found []plan.Problem) {
	if p.Schedule.Recompute != graph.RecomputeFullKV {
		return nil
	}
	if !p.LayerOrder() {
		found = append(found, plan.Fault("schedule.recompute", lang.Conflict, "order = layer, or recompute = full",
			"recompute = %s recomputes K and V of a layer once for all subsequences, which needs order = layer", graph.RecomputeFullKV))
	}
	if p.Streams() {
		found = append(found, plan.Fault("schedule.keep", lang.Conflict, "keep = [k, v], or recompute = full",
			"K and V that are streamed from the host cannot be recomputed, as recompute = %s requires", graph.RecomputeFullKV))
	}
	return found
}

// splitProblems returns problems with the division of a layer among the ranks of a stage.
func splitProblems(p *plan.Plan) []plan.Problem {
	var found []plan.Problem
	par, m := &p.Parallel, p.Model
	if mode := p.Parallel.SPMode; mode != "" && !slices.Contains(graph.SPModes, mode) { // empty: megatron, in plans from earlier releases
		return []plan.Problem{plan.Fault("schedule.sp_mode", lang.UnknownName, strings.Join(graph.SPModes, " or "), "unknown value %q", mode)}
	}
	if r := par.Ring; r != 0 && (r < 2 || par.SP%r != 0 || par.SP/r < 2 || par.SPMode == graph.ModeRing) {
		return []plan.Problem{plan.Fault("schedule.sp", lang.OutOfRange, "a list of two numbers of at least 2, with sp_mode = megatron or ulysses",
			"%d ranks with sp_mode = %s cannot form a ring of %d groups", par.SP, par.SPMode, r)}
	}
	heads := p.Split().HeadRanks()
	ranks, near := lang.NearSP(m, p.Train.Sequence, heads, par.Ring, p.Cluster.GPUs()/max(1, par.PP*par.DP), 0)
	if m.LinearKeyHeads%heads != 0 {
		return append(found, plan.Fault("schedule.sp", lang.Indivisible, near, "%d heads of linear attention are not divisible by %s", m.LinearKeyHeads, ranks))
	}
	if m.Heads%heads != 0 {
		return append(found, plan.Fault("schedule.sp", lang.Indivisible, near, "%d heads are not divisible by %s", m.Heads, ranks))
	}
	if m.KVHeads%heads != 0 && heads%m.KVHeads != 0 {
		found = append(found, plan.Fault("schedule.sp", lang.Indivisible, near, "%d key and value heads cannot be shared evenly by %s", m.KVHeads, ranks))
	}
	found = append(found, tooFewKeys(p, heads, ranks)...)
	found = append(found, expertProblems(p)...)
	return append(found, ringProblems(p)...)
}

// tooFewKeys returns a problem if ranks share heads of keys, of which a norm needs each on a single rank.
func tooFewKeys(p *plan.Plan, heads int, ranks string) (found []plan.Problem) {
	if m := p.Model; m.QKNorm == lang.QKNormAll && p.Parallel.SPMode != graph.ModeUlysses && heads > m.KVHeads {
		found = append(found, plan.Fault("model.qk_norm", lang.Conflict, fmt.Sprintf("sp_mode = ulysses, or sp = %d at most", m.KVHeads),
			"qk_norm = all needs each key head on a single rank, but with sp_mode = megatron and %s, ranks share the %d key heads", ranks, m.KVHeads))
	}
	return found
}

// ringProblems returns problems if a request conflicts with passing K and V around the ranks of a stage. They
// name the nearest request that works.
func ringProblems(p *plan.Plan) []plan.Problem {
	if p.Split().Chunks() == 0 {
		return nil
	}
	if p.Model.LinearKeyHeads > 0 {
		return []plan.Problem{plan.Fault("schedule.sp_mode", lang.Conflict, "sp_mode = megatron or ulysses, without a ring", lang.ScansInRing)}
	}
	if heads := p.Split().HeadRanks(); p.Model.AdapterDropout > 0 && (p.Parallel.SPMode == graph.ModeUlysses || slices.Contains(p.Model.Mixers, lang.MixerLatent)) && heads > 1 && heads%2 != 0 {
		return []plan.Problem{plan.Fault("schedule.sp", lang.Conflict, "an even first number of sp, or sp_mode = megatron",
			"dropout of adapters needs consecutive rows, but a rank in the middle of %d has rows of two chunks", heads)}
	}
	if m := p.Schedule.Mux; p.Mux.Left || p.Mux.Right || m == "on" || m == "left" || m == "right" {
		return []plan.Problem{plan.Fault("schedule.mux", lang.Conflict, "mux = off, or sp_mode = ulysses without a ring",
			"in a ring, K and V pass from rank to rank within a stage, so stages cannot share tasks")}
	}
	return nil
}

// mostLoads limits the number of blocks that the forwards of a step load. Each load takes about ten
// instructions, including those in the backward.
const mostLoads = 200_000

// solveStream decides what is streamed, as requested, and sets the block length: that of an average
// subsequence, or more if there would be too many blocks.
func solveStream(p *plan.Plan) {
	p.Stream = plan.Stream{Caches: []string{}}
	for _, name := range plan.Streamable {
		if p.Schedule.Keep != nil && !slices.Contains(p.Schedule.Keep, name) {
			p.Stream.Caches = append(p.Stream.Caches, name)
		}
	}
	if p.Stream.Latents = p.Schedule.LatentCache == "on"; !p.Streams() && !p.Stream.Latents {
		return
	}
	if p.Subsequences.N == 1 {
		p.Stream = plan.Stream{Caches: []string{}}
		p.Decide("solve", "stream", "none", "K and V of an undivided sequence are ordinary activations, which offload handles")
		return
	}
	n, align, seq := int64(p.Subsequences.N), max(1, p.Subsequences.Align), p.Train.Sequence
	visits := n * int64(p.Model.Layers) * int64(max(1, p.Parallel.Microbatches))
	block := max((seq+n-1)/n, visits*seq/(2*mostLoads))
	p.Stream.Block, p.Stream.Early = (block+align-1)/align*align, 2
	if p.Stream.Latents {
		p.Decide("solve", "latent_cache", "on", "given: K and V are computed from cached latents in blocks of "+words.Tokens(p.Stream.Block))
	}
	if !p.Streams() {
		return
	}
	p.Decide("solve", "stream", words.List(p.Stream.Caches),
		fmt.Sprintf("given: for each layer of each subsequence, earlier tokens are loaded from the host in blocks of %s; "+
			"in the backward pass, their gradients are loaded as well", words.Tokens(p.Stream.Block)))
}

// streamProblems returns problems with a request for streaming, or with an edited plan.
func streamProblems(p *plan.Plan) []plan.Problem {
	s := p.Stream
	if m := p.Schedule.Mux; s.Latents && p.Schedule.SharesTasks() {
		return []plan.Problem{plan.Fault("schedule.latent_cache", lang.Conflict, "latent_cache = off, or mux = off", "stages share attention over K and V, which mux = %s requires to be kept", m)}
	}
	if all, full := p.Model.AttentionLayers(p.Train.Sequence); s.Latents && full < all {
		return []plan.Problem{plan.Fault("schedule.latent_cache", lang.Conflict, "latent_cache = off", "some layers have a window, in which K and V are kept")}
	}
	if s.Latents && len(s.Caches) == 1 {
		return []plan.Problem{plan.Fault("schedule.keep", lang.Conflict, "keep = [k, v] or []", "K and V are computed from the same latents, which cannot be kept for only one of them")}
	}
	if !p.Streams() {
		return nil
	}
	for i, name := range s.Caches {
		if !slices.Contains(plan.Streamable, name) || slices.Contains(s.Caches[:i], name) {
			return []plan.Problem{plan.Fault("schedule.keep", lang.UnknownName, "k or v, each once", "%q cannot be streamed", name)}
		}
	}
	if s.Block < 1 || s.Early < 1 {
		return []plan.Problem{plan.Fault("schedule.keep", lang.OutOfRange, "both must be at least 1", "the plan loads blocks of %d tokens, %d blocks in advance", s.Block, s.Early)}
	}
	if m := p.Schedule.Mux; p.Schedule.SharesTasks() {
		return []plan.Problem{plan.Fault("schedule.keep", lang.Conflict, "keep = [k, v], or mux = off", "K and V that are streamed from the host cannot be shared with other stages, as mux = %s requires", m)}
	}
	if s := strategy.Of(p); s.Late {
		return []plan.Problem{plan.Fault("schedule.keep", lang.Conflict, "keep = [k, v], or strategy = sppo", "streaming K and V needs undivided backward tasks, but strategy = %s splits them", s.Name)}
	}
	return nil
}

// solveZero decides the ZeRO stage.
func solveZero(p *plan.Plan) {
	shared := p.Parallel.DP > 1 || p.Split().Shares()
	why := "given"
	switch request := p.Schedule.Zero; {
	case request != "" && request != "auto":
		p.Parallel.Zero, _ = strconv.Atoi(request) // checked by zeroProblems
		why = "given: " + zeroDocs[min(p.Parallel.Zero, len(zeroDocs)-1)]
	case shared:
		p.Parallel.Zero, why = plan.ZeroState, "auto: "+zeroDocs[plan.ZeroState]
	}
	if shared {
		p.Decide("solve", "zero", fmt.Sprint(p.Parallel.Zero), why)
	}
}

// zeroDocs holds the reasons for the ZeRO stages.
var zeroDocs = [...]string{
	"every rank keeps the optimizer state of all its weights",
	"ranks that hold the same matrix divide its optimizer state, without additional traffic",
	"ranks that hold the same matrix also divide its gradient, and reduce it when the backward pass moves to another layer",
	"ranks that hold the same matrix also divide its weights, and gather them before each forward and backward of the layer",
}

func zeroProblems(p *plan.Plan) []plan.Problem {
	if z := p.Parallel.Zero; z < 0 || z >= len(zeroDocs) {
		return []plan.Problem{plan.Fault("schedule.zero", lang.OutOfRange, "0 to 3", "zero must be a ZeRO stage from 1 to 3, or 0 for none, not %d", z)}
	}
	return nil
}

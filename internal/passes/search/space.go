package search

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/strategy"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// dimension is a key of the schedule that solve searches if the request leaves it open. A complete
// candidate is a request in which every dimension is pinned, so every result of a search could also
// have been requested.
type dimension struct {
	key    string                               // of the spec
	text   func(*lang.Schedule) string          // the pinned value; empty if it is open
	values func(*space, *lang.Schedule) []value // the values worth trying once all earlier dimensions are pinned; ties go to the first
	detail bool                                 // candidates that differ only in such dimensions are the same alternative
	plain  string                               // the default value, which needs no reason if it is the only possible one
	first  string                               // the reason for the first value, if a dimension has values that are tried only if memory is short
	scarce string                               // the reason for these values
	others func(*bounds, lang.Schedule) []value // returns these values
	refine bool                                 // the search uses the first value, and tries the others on the plan that it has found
	frugal bool                                 // the last value needs the least memory
	weighs bool                                 // "auto" is also a policy: the offload pass compares units once the sizes are known
}

// name returns the key without its block.
func (d *dimension) name() string {
	_, name, _ := strings.Cut(d.key, ".")
	return name
}

// value is a possible value of a dimension.
type value struct {
	text string
	set  func(*lang.Schedule)
}

// dimensions defines the search space, in search order: dimensions that improve the bounds most come first.
var dimensions = []dimension{
	plainly(plan.OrderSequence, choice("schedule.order", func(s *lang.Schedule) *string { return &s.Order }, (*space).orders)),
	{key: "schedule.sp", text: spText, values: (*space).sps},
	choice("schedule.sp_mode", func(s *lang.Schedule) *string { return &s.SPMode }, (*space).spModes),
	plainly("off", choice("schedule.expert_parallel", func(s *lang.Schedule) *string { return &s.ExpertParallel }, (*space).expertParallels)),
	number("schedule.dp", func(s *lang.Schedule) *int { return &s.DP }, (*space).replicas),
	frugally(plainly("0", choice("schedule.zero", func(s *lang.Schedule) *string { return &s.Zero }, (*space).zeros))),
	frugally(plainly("none", choice("schedule.optimizer_offload", func(s *lang.Schedule) *string { return &s.OptimizerOffload }, (*space).optimizerOffloads))),
	number("schedule.microbatch", func(s *lang.Schedule) *int { return &s.Microbatch }, (*space).microbatches),
	number("schedule.pp", func(s *lang.Schedule) *int { return &s.PP }, (*space).stages),
	named(strategyText, choice("schedule.strategy", func(s *lang.Schedule) *string { return &s.Strategy }, (*space).strategies)),
	detail(number("schedule.virtual_stages", func(s *lang.Schedule) *int { return &s.VirtualStages }, (*space).virtualStages)),
	frugally(refined(plainly("flops", detail(choice("schedule.partition", func(s *lang.Schedule) *string { return &s.Partition }, (*space).partitions))))),
	{key: "schedule.subsequences", text: subsequencesText, values: (*space).subsequences, detail: true},
	refined(plainly("off", choice("schedule.mux", func(s *lang.Schedule) *string { return &s.Mux }, (*space).muxes))),
	{key: "schedule.align", text: alignText, values: asSizesHaveIt, others: (*bounds).coarser, detail: true,
		scarce: "auto: with the usual grid, the first subsequence is longer, and its activations do not fit or take longer to offload or recompute"},
	lossChunk,
	keep,
	weighed(choice("schedule.recompute", func(s *lang.Schedule) *string { return &s.Recompute }, (*space).recomputes)),
	weighed(detail(choice("schedule.offload", func(s *lang.Schedule) *string { return &s.Offload.Policy }, (*space).offloads))),
}

// Pins returns the keys that solve can search, with their values in a schedule, or "" for keys that are open.
func Pins(s lang.Schedule) (keys, values []string) {
	for i := range dimensions {
		keys, values = append(keys, dimensions[i].key), append(values, dimensions[i].text(&s))
	}
	return keys, values
}

// number returns a dimension whose values are positive integers.
func number(key string, field func(*lang.Schedule) *int, values func(*space, *lang.Schedule) []int) dimension {
	return dimension{
		key: key,
		text: func(s *lang.Schedule) string {
			if n := *field(s); n != 0 {
				return fmt.Sprint(n)
			}
			return ""
		},
		values: func(sp *space, s *lang.Schedule) []value {
			var out []value
			for _, n := range values(sp, s) {
				out = append(out, value{fmt.Sprint(n), func(s *lang.Schedule) { *field(s) = n }})
			}
			return out
		},
	}
}

// choice returns a dimension whose values are names.
func choice(key string, field func(*lang.Schedule) *string, values func(*space, *lang.Schedule) []string) dimension {
	return dimension{
		key: key,
		text: func(s *lang.Schedule) string {
			if *field(s) == "auto" {
				return ""
			}
			return *field(s)
		},
		values: func(sp *space, s *lang.Schedule) []value {
			var out []value
			for _, name := range values(sp, s) {
				out = append(out, value{name, func(s *lang.Schedule) { *field(s) = name }})
			}
			return out
		},
	}
}

func named(text func(*lang.Schedule) string, d dimension) dimension {
	d.text = text
	return d
}

// strategyText writes the value of strategy as in a spec.
func strategyText(s *lang.Schedule) string {
	switch {
	case s.Tasks != nil:
		return fmt.Sprintf("%s(%q)", s.Strategy, s.Tasks.Name)
	case s.Strategy == "auto":
		return ""
	}
	return s.Strategy
}

func detail(d dimension) dimension {
	d.detail = true
	return d
}

func weighed(d dimension) dimension {
	d.weighs = true
	return d
}

func refined(d dimension) dimension {
	d.refine = true
	return d
}

func frugally(d dimension) dimension {
	d.frugal = true
	return d
}

func plainly(value string, d dimension) dimension {
	d.plain = value
	return d
}

// scarcely returns a dimension whose first value is the best if memory suffices. The search tries the others only if memory
// is scarce, and on the plan that it has found.
func scarcely(first, others string, d dimension) dimension {
	d = frugally(refined(d))
	d.first, d.scarce = first, others
	d.others = func(b *bounds, s lang.Schedule) []value { return d.values(&b.space, &s)[1:] }
	return d
}

func subsequencesText(s *lang.Schedule) string {
	if s.Subsequences.Count == 0 {
		return ""
	}
	return fmt.Sprint(s.Subsequences.Count)
}

func spText(s *lang.Schedule) string {
	if s.SP == 0 {
		return ""
	}
	return plan.Parallel{SP: s.SP, Ring: s.Ring}.SPText()
}

func alignText(s *lang.Schedule) string {
	if s.Align == 0 {
		return ""
	}
	return fmt.Sprint(s.Align)
}

// lossChunk is the length of the chunks of the loss head, the longest first.
var lossChunk = scarcely(
	"auto: it fits; shorter chunks would read the output matrix and write its gradient more often",
	"auto: longer chunks need memory that is worth more elsewhere",
	plainly("0", detail(number("schedule.loss_chunk", func(s *lang.Schedule) *int { return &s.LossChunk }, (*space).lossChunks))))

// keep names the caches that stay on the device, all of them first.
var keep = scarcely(
	"auto: streaming K or V from the host would make the step longer",
	"auto: the memory of the others is worth more elsewhere",
	dimension{key: "schedule.keep", text: keepText, values: (*space).keeps, plain: keepText(&lang.Schedule{Keep: plan.Streamable})})

// lossChunks returns the numbers of tokens to try in a chunk of the loss head, the largest first; 0 is the least number
// that a plan uses by default. At 1024, even the gradient of the output matrix is limited by arithmetic on every
// predefined cluster.
func (sp *space) lossChunks(s *lang.Schedule) (chunks []int) {
	least := int((graph.Split{SP: max(1, s.SP)}).LeastChunk(sp.model.Vocab))
	if int64(least) >= sp.train.Sequence*int64(max(1, s.Microbatch)) {
		return []int{0}
	}
	for _, n := range []int{1024, 256} {
		if n > least {
			chunks = append(chunks, n)
		}
	}
	switch chunks = append(chunks, least); {
	case len(chunks) == 1:
		return []int{0}
	case sp.timeless:
		return chunks[len(chunks)-1:]
	}
	return chunks
}

// asSizesHaveIt leaves a dimension open, so that its value follows from the sizes.
func asSizesHaveIt(*space, *lang.Schedule) []value { return []value{{"", func(*lang.Schedule) {}}} }

// coarser returns grids to try for a candidate whose grid is open. Memory use peaks in the backward of the
// first subsequence, which is the longest. With each of these grids, that subsequence is clearly shorter than
// with any finer grid.
func (b *bounds) coarser(s lang.Schedule) (out []value) {
	p := b.sized(s)
	if p == nil || p.Subsequences.N == 1 || len(s.Subsequences.Lengths) > 0 {
		return nil
	}
	const clearly = 15.0 / 16
	first := p.Subsequences.Lengths[0]
	for align := 2 * p.Subsequences.Align; align <= p.Train.Sequence/int64(p.Subsequences.N); align *= 2 {
		p.Subsequences.Align = align
		if n := b.lengthsOf(p)[0]; float64(n) < clearly*float64(first) {
			first = n
			out = append(out, value{fmt.Sprint(align), func(s *lang.Schedule) { s.Align = int(align) }})
		}
	}
	return out
}

// keepText writes the value of keep as in a spec.
func keepText(s *lang.Schedule) string {
	if s.Keep == nil {
		return ""
	}
	return "[" + strings.Join(s.Keep, ", ") + "]"
}

// space contains the properties of a request that limit the values of dimensions.
type space struct {
	model   lang.Model
	cluster lang.Cluster
	train   lang.Train
	asked   lang.Schedule

	timeless bool                 // time does not matter: values that need the least memory are enough
	fitting  bool                 // only a plan that fits is wanted: try only the values that need the least memory
	states   map[stateOf]ir.Bytes // results of stateOnHost

	frugal func(s *lang.Schedule, policies []string) []string // the policies that may need the least memory
}

// mayBe reports whether a choice is open or has a given value.
func mayBe(choice, value string) bool { return choice == "" || choice == "auto" || choice == value }

// orders returns the values of order. Layer order needs a single stage and the strategy sppo.
func (sp *space) orders(s *lang.Schedule) []string {
	if s.PP > 1 || s.VirtualStages == 1 || !mayBe(s.Strategy, strategy.All[0].Name) || !mayBe(s.Mux, "off") {
		return []string{plan.OrderSequence}
	}
	if sp.fitting { // layer order needs the least device memory, unless K and V are streamed
		return []string{plan.OrderLayer, plan.OrderSequence}
	}
	return []string{plan.OrderSequence, plan.OrderLayer}
}

// mostOnRing is the maximum number of ranks on a ring. With more, a program would consist mostly of messages.
const mostOnRing = 512

// sps returns the values of sp as a dimension. The number of ranks must divide the number of heads unless sp_mode is ring. A
// ring is tried where it lets more ranks share a layer than the heads allow. Where ranks of several nodes share a layer, or more than
// the heads allow, the largest groups of ranks of a node that can divide heads may also form a ring, unless sp_mode is given.
func (sp *space) sps(s *lang.Schedule) (out []value) {
	add := func(n, ring int) {
		out = append(out, value{plan.Parallel{SP: n, Ring: ring}.SPText(), func(s *lang.Schedule) { s.SP, s.Ring = n, ring }})
	}
	counts, beyond := sp.ranksOfLayer(s)
	for _, n := range slices.Concat(counts, beyond) {
		if mayBe(s.SPMode, graph.ModeRing) || slices.Contains(counts, n) {
			add(n, 0)
		}
		if a := sp.groupOf(n); 1 < a && a < n && mayBe(s.SPMode, "") && sp.model.LinearKeyHeads == 0 && sp.train.Sequence%int64(2*n) == 0 && s.Align%(2*n) == 0 {
			add(n, n/a)
		}
	}
	return out
}

// ranksOfLayer returns the numbers of ranks that can divide heads, and further ones that only a ring allows.
func (sp *space) ranksOfLayer(s *lang.Schedule) (counts, beyond []int) {
	gpus := sp.cluster.GPUs()
	most := gpus / max(1, s.DP) / max(1, s.PP)
	counts = suiting(divisors(sp.model.Heads), func(n int) bool {
		return n <= most && sp.dividesHeads(n) && sp.train.Sequence%int64(n) == 0 && s.Align%n == 0
	})
	if sp.model.LinearKeyHeads > 0 { // whose states do not pass around a ring
		return counts, nil
	}
	least := slices.Max(append(suiting(slices.Clone(counts), func(n int) bool { return gpus%n == 0 }), 1))
	return counts, suiting(divisors(gpus), func(n int) bool {
		return least < n && n <= min(most, mostOnRing) && !slices.Contains(counts, n) && sp.train.Sequence%int64(2*n) == 0 && s.Align%(2*n) == 0
	})
}

// groupOf returns the largest number of ranks of a node that can divide heads and of which n ranks are a multiple.
func (sp *space) groupOf(n int) int {
	return slices.Max(suiting(divisors(n), func(a int) bool { return sp.cluster.GPUsPerNode%a == 0 && sp.dividesHeads(a) }))
}

// dividesHeads reports whether n ranks can share both the query heads and the key-value heads of a layer.
func (sp *space) dividesHeads(n int) bool {
	return sp.model.Heads%n == 0 && (sp.model.KVHeads%n == 0 || n%sp.model.KVHeads == 0) && sp.model.LinearKeyHeads%n == 0
}

func (sp *space) spModes(s *lang.Schedule) []string {
	switch {
	case s.SP == 1:
		return []string{graph.ModeMegatron}
	case s.Ring == 0 && !sp.dividesHeads(s.SP):
		return []string{graph.ModeRing}
	}
	return []string{graph.ModeMegatron, graph.ModeUlysses}
}

// expertParallels returns the values of expert_parallel, of which only one is possible if no ranks of a stage can divide the experts.
func (sp *space) expertParallels(s *lang.Schedule) []string {
	if ranks := splitOf(s).ExpertRanks(); ranks == 1 || sp.model.Experts == 0 || sp.model.Experts%ranks != 0 {
		return []string{"off"}
	}
	return []string{"off", "on"}
}

// splitOf returns how the ranks of a stage divide a layer, as far as the sizes say.
func splitOf(s *lang.Schedule) graph.Split {
	return graph.Split{SP: s.SP, Ring: s.Ring, Mode: s.SPMode, Spread: s.ExpertParallel == "on" && s.SP > 1}
}

func (sp *space) replicas(s *lang.Schedule) []int {
	most := sp.cluster.GPUs() / s.SP / max(1, s.PP)
	return suiting(divisors(sp.train.Batch/max(1, s.Microbatch)), func(n int) bool { return n <= most })
}

// tokensOfTask is the maximum number of tokens in a task of several sequences. More would not make kernels
// faster.
const tokensOfTask = 64 << 10

func (sp *space) microbatches(s *lang.Schedule) []int {
	return suiting(divisors(sp.train.Batch/s.DP), func(n int) bool { return n == 1 || int64(n)*sp.train.Sequence <= tokensOfTask })
}

// optimizerOffloads includes the value host only if the optimizer state that a rank would hold on the device takes a
// large part of its memory. Otherwise, offloading the state would free little, and the search would have twice as many
// candidates and less time for each.
func (sp *space) optimizerOffloads(s *lang.Schedule) []string {
	const worthwhile = 1.0 / 3 // of a device
	if sp.cluster.HostMemory == 0 || float64(sp.stateOnHost(s)) < worthwhile*float64(sp.cluster.DeviceMemory) {
		return []string{"none"}
	}
	return []string{"none", plan.OffloadHost}
}

// stateOf contains what the optimizer state of a rank depends on.
type stateOf struct {
	sp, ring, dp, stages int
	mode, zero, experts  string
}

// stateOnHost returns the bytes of optimizer state that a rank would keep in host memory if the layers were divided
// among as many stages as there are ranks for.
func (sp *space) stateOnHost(s *lang.Schedule) ir.Bytes {
	key := stateOf{s.SP, s.Ring, s.DP, cmp.Or(s.PP, min(sp.model.Layers, max(1, sp.cluster.GPUs()/(s.SP*s.DP)))), s.SPMode, s.Zero, s.ExpertParallel}
	if n, known := sp.states[key]; known {
		return n
	}
	p := plan.Plan{Model: sp.model, Train: sp.train}
	p.Parallel = plan.Parallel{DP: key.dp, PP: 1, SP: key.sp, Ring: key.ring, SPMode: key.mode, VirtualStages: 1, OptimizerOffload: plan.OffloadHost}
	p.Parallel.Zero, _ = strconv.Atoi(key.zero)
	g := graph.NewTuned(sp.model, sp.train.Freeze, splitOf(s), sp.train.Sequence)
	n := p.HostStateBytes(g, g.Embedding) + p.HostStateBytes(g, g.Head)
	for kind := range g.Kinds() {
		n += ir.Bytes(g.LayersOf(kind)) * p.HostStateBytes(g, g.LayerOf(kind))
	}
	if sp.states == nil {
		sp.states = map[stateOf]ir.Bytes{}
	}
	sp.states[key] = n / ir.Bytes(key.stages)
	return sp.states[key]
}

// zeros returns the values of zero to try. If ranks hold the same matrix, there is no reason for them to hold
// its state twice.
func (sp *space) zeros(s *lang.Schedule) []string {
	if s.DP > 1 || splitOf(s).Shares() {
		if sp.fitting { // undivided weights of one or two layers may need less memory than gathering them
			return []string{"3", "2"}
		}
		return []string{"1", "2", "3"}
	}
	return []string{"0"}
}

func (sp *space) stages(s *lang.Schedule) []int {
	if s.Order == plan.OrderLayer {
		return []int{1}
	}
	v := max(1, s.VirtualStages)
	return upTo(min(sp.cluster.GPUs()/(s.SP*s.DP), lang.MostStages(sp.model.Layers, 2, v)/v))
}

// strategies returns the values of strategy. On a single stage, all are equivalent to the first.
// With one microbatch, there is nothing to interleave, so only strategies that defer weight
// gradients remain, and terapipe, which orders the rounds of virtual stages differently.
func (sp *space) strategies(s *lang.Schedule) []string {
	names := []string{strategy.All[0].Name}
	for i := range strategy.All {
		st := &strategy.All[i]
		switch {
		case i == 0 || sp.timeless || s.PP == 1 || st.Same != "" || sp.alone(s) && !st.Late && st.Turns != strategy.LastTurn:
		case s.VirtualStages != 0 && !st.Stages.Has(s.VirtualStages):
		case s.SharesTasks(), st.Late && streams(s):
		case st.Sliced != "" && s.Subsequences.Count > 1:
		default:
			names = append(names, st.Name)
		}
	}
	return names
}

// alone reports whether each replica has only one microbatch.
func (sp *space) alone(s *lang.Schedule) bool { return sp.train.Batch == s.DP*s.Microbatch }

// breadthFirst reports whether a candidate takes an entire microbatch through one virtual stage before the
// next. The search does not try such a candidate if its rounds equal those of sppo.
func (sp *space) breadthFirst(s *lang.Schedule) bool {
	st := strategy.Find(s.Strategy)
	return st != nil && st.Turns == strategy.LastTurn && sp.alone(s) && strategy.Find(sp.asked.Strategy) == nil
}

// mostVirtualStages limits the virtual stages of a rank, because more would hardly reduce the remaining bubble.
const mostVirtualStages = 16

func (sp *space) virtualStages(s *lang.Schedule) []int {
	if s.Order == plan.OrderLayer { // virtual stages are groups of layers of the single stage
		groups := divisors(sp.model.Layers)
		slices.Reverse(groups)
		return groups
	}
	known, most := strategy.AnyStages, min(mostVirtualStages, lang.MostStages(sp.model.Layers, s.PP, 2)/s.PP)
	if st := strategy.Find(s.Strategy); st != nil {
		known = st.Stages
	}
	switch {
	case s.PP == 1 && sp.oneRound(s):
		return suiting(upTo(most), func(n int) bool { return known.Has(n) && (n == known.Least || n == most || n&(n-1) == 0) })
	case s.PP == 1, s.SharesTasks():
		return []int{known.Least}
	case sp.breadthFirst(s):
		known.Least = 2
	}
	return suiting(upTo(most), known.Has)
}

// oneRound reports whether the subsequences on a single stage may pass through the groups of its layers in a
// single round. Gradients of K and V then exist for one group at a time, as in layer order.
func (sp *space) oneRound(s *lang.Schedule) bool {
	st := strategy.Find(s.Strategy)
	return (st == nil || st.Rounds) && (s.Subsequences.Auto || s.Subsequences.Count > 0 && s.Subsequences.Count <= roundOfOne)
}

// roundOfOne is the length of a round in a pipeline with one stage.
const roundOfOne = 2

func (sp *space) partitions(s *lang.Schedule) []string {
	if st := strategy.Find(s.Strategy); st != nil && st.Sliced != "" || s.Subsequences.Count == 1 || len(s.Subsequences.Lengths) > 0 {
		return []string{"flops"}
	}
	if sp.timeless { // equal lengths need the least memory: the first subsequence, whose backward determines the peak, is shorter than with equal work
		return []string{"length"}
	}
	if s.Ring > 0 || s.SPMode == graph.ModeRing { // the times of a ring, with a message from every rank, take long to compute
		return []string{"flops", "length"}
	}
	return []string{"flops", "time", "length"}
}

// shortestWanted is the average length of subsequences below which slower kernels cost more than
// smaller bubbles save. For short sequences, up to fewPerSequence subsequences are tried anyway.
//
// A step with fewVisits layer visits in its forward pass takes a few seconds to place and simulate. A candidate
// has more visits only if its bubble would otherwise be larger than smallBubble.
//
// Memory hardly decreases with subsequences shorter than shortestFitting, or with more than mostFitting of them.
const (
	shortestWanted  = 1 << 10
	shortestFitting = 16 << 10
	mostFitting     = 512
	fewPerSequence  = 64
	mostInRing      = 32
	fewVisits       = strategy.LongStep
	smallBubble     = searchGap
)

// muxes returns the values of mux. Mux fills the bubbles of pipelines with one virtual stage per rank; the mux
// pass checks its other requirements.
func (sp *space) muxes(s *lang.Schedule) []string {
	switch n := s.Subsequences.Count; {
	case sp.timeless, s.Order == plan.OrderLayer, s.PP == 1, s.VirtualStages > 1, n > 0 && n < s.PP,
		!mayBe(s.Strategy, strategy.All[0].Name), streams(s), s.LatentCache == "on":
		return []string{"off"}
	}
	var out []string
	whole, _ := plan.Indivisible(&sp.model)
	_, full := sp.model.AttentionLayers(sp.train.Sequence)
	for _, mux := range []string{"off", "left", "right", "on"} {
		left, right := mux == "left" || mux == "on", mux == "right" || mux == "on"
		if !(left && whole != "" || right && full == 0) {
			out = append(out, mux)
		}
	}
	return out
}

// streams reports whether a schedule pins the streaming of K or V.
func streams(s *lang.Schedule) bool { return s.Keep != nil && len(s.Keep) < len(plan.Streamable) }

// keeps returns the values of keep. Streaming never saves time, so values that stream less come first.
func (sp *space) keeps(s *lang.Schedule) (out []value) {
	all := [][]string{{"k", "v"}, {"v"}, {"k"}, {}}
	if s.LatentCache == "on" {
		all = [][]string{{"k", "v"}, {}}
	}
	if s.Order == plan.OrderLayer && sp.fitting { // K and V of one layer are on the device or streamed; those of other layers are recomputed
		all = [][]string{{"k", "v"}, {}}
	}
	if st := strategy.Find(s.Strategy); s.SharesTasks() || st != nil && st.Late || s.Subsequences.Count == 1 || sp.cluster.HostMemory == 0 {
		all = all[:1]
	}
	for _, keep := range all {
		out = append(out, value{keepText(&lang.Schedule{Keep: keep}), func(s *lang.Schedule) { s.Keep = keep }})
	}
	return out
}

// recomputing returns the policies that recompute something in every layer. The one that recomputes the most is
// last.
var recomputing = []string{graph.RecomputeSelective, graph.RecomputeKeepAttention, graph.RecomputeFull}

// recomputes returns the values of recompute. A plan needs the least memory if everything possible is
// recomputed.
func (sp *space) recomputes(s *lang.Schedule) []string {
	names := append([]string{graph.RecomputeNone}, recomputing...)
	if s.Order == plan.OrderLayer && len(s.Keep) == len(plan.Streamable) && s.Subsequences.Count > 1 {
		names = append(names, graph.RecomputeFullKV)
	}
	if sp.fitting {
		return sp.frugal(s, names)
	}
	return names
}

// offloads returns the values of offload. If the least memory is wanted, the offload pass decides which units
// fit on the host.
func (sp *space) offloads(*lang.Schedule) []string {
	if sp.fitting {
		return []string{plan.PolicyAuto}
	}
	return []string{"none", "carry", "adaptive", "full"}
}

// subsequences returns numbers of subsequences to try, which increase by a factor of √2. Choosing the best
// number between two of them would change the loss to bubbles and kernel inefficiency by at most 1%. With
// virtual stages, subsequences form groups, and the numbers are multiples of the group size.
func (sp *space) subsequences(s *lang.Schedule) []value {
	var out []value
	for _, n := range sp.counts(s) {
		out = append(out, value{fmt.Sprint(n), func(s *lang.Schedule) { s.Subsequences = lang.Subsequences{Count: n} }})
	}
	return out
}

func (sp *space) counts(s *lang.Schedule) []int {
	st := strategy.Find(s.Strategy)
	if st != nil && st.Sliced != "" {
		return []int{1}
	}
	if s.Offload.Policy == "list" {
		return []int{len(s.Offload.Alpha)}
	}
	group, most := sp.rounds(s, st, sp.mostSubsequences(s))
	factor := math.Sqrt2
	if sp.fitting {
		factor = 2
	}
	var out []int
	for x := 1.0; ; x *= factor {
		n := (int(math.Round(x)) + group - 1) / group * group
		if n > most {
			return out
		}
		if sp.breadthFirst(s) && n%(2*s.PP) == 0 {
			continue
		}
		if len(out) == 0 || n > out[len(out)-1] {
			out = append(out, n)
		}
	}
}

// rounds returns how many subsequences pass through a virtual stage before the next, of which their number is a multiple, and
// the largest number of subsequences to try.
func (sp *space) rounds(s *lang.Schedule, st *strategy.Strategy, most int) (group, atMost int) {
	switch {
	case s.VirtualStages <= 1 || s.Order == plan.OrderLayer || st != nil && !st.Rounds:
		return 1, most
	case s.PP == 1 && sp.asked.VirtualStages == 0 && (st == nil || st.Stages.Least == 1):
		// With several rounds, virtual stages on one rank need at least as much memory as a single virtual stage.
		return 1, min(most, roundOfOne)
	}
	return max(1, 2*s.PP), most
}

// mostSubsequences returns the largest number of subsequences to try, regardless of how they pass through virtual stages.
func (sp *space) mostSubsequences(s *lang.Schedule) int {
	visits := int64(max(1, sp.model.Layers*sp.train.Batch/(s.DP*s.Microbatch))) // of a subsequence
	tasks, few := mostTasks/visits, max(fewVisits/visits, fewPerSequence)
	switch {
	case sp.timeless:
		tasks = min(tasks, few)
	case s.PP > 0:
		tasks = min(tasks, max(few, int64(float64(s.PP-1)/smallBubble)/int64(max(1, s.VirtualStages))))
	}
	shortest := int64(shortestWanted)
	if sp.fitting {
		shortest, tasks = shortestFitting, min(tasks, mostFitting)
	}
	if s.Ring > 0 || s.SPMode == graph.ModeRing { // every subsequence passes K and V of its entire prefix around the ring
		tasks = min(tasks, mostInRing)
	}
	seq := sp.train.Sequence
	return int(min(seq/int64(max(s.Align, s.SP)), tasks, max(seq/shortest, fewPerSequence)))
}

func divisors(n int) []int { return suiting(upTo(n), func(d int) bool { return n%d == 0 }) }

func upTo(n int) []int {
	out := make([]int, max(0, n))
	for i := range out {
		out[i] = i + 1
	}
	return out
}

func suiting(ns []int, suits func(int) bool) []int {
	return slices.DeleteFunc(ns, func(n int) bool { return !suits(n) })
}

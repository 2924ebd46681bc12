package passes

import (
	"fmt"
	"math"
	"slices"

	"sppo/graph"
	"sppo/ir"
	"sppo/lang"
)

// dimension is a key of the schedule that solve searches where the request leaves it open. A candidate is a request in which
// every dimension is pinned, so that whatever is searched can be asked for, too.
type dimension struct {
	key    string                               // of the spec
	text   func(*lang.Schedule) string          // what it is pinned to; empty where it is open
	values func(*space, *lang.Schedule) []value // worth a try where the dimensions before it are pinned; of equals the first is taken
	detail bool                                 // candidates that differ in nothing else are one alternative
	plain  string                               // needs no reason where it is all that is possible
	weighs bool                                 // "auto" is a policy, too: the pass offload weighs unit against unit once the sizes are known
}

// value is a way to pin a dimension.
type value struct {
	text string
	set  func(*lang.Schedule)
}

// dimensions are the space in the order in which it is searched: what bounds time and memory most comes first.
var dimensions = []dimension{
	number("schedule.sp", func(s *lang.Schedule) *int { return &s.SP }, (*space).sp),
	choice("schedule.sp_mode", func(s *lang.Schedule) *string { return &s.SPMode }, (*space).spModes),
	number("schedule.dp", func(s *lang.Schedule) *int { return &s.DP }, (*space).replicas),
	plainly("0", choice("schedule.zero", func(s *lang.Schedule) *string { return &s.Zero }, (*space).zeros)),
	number("schedule.microbatch", func(s *lang.Schedule) *int { return &s.Microbatch }, (*space).microbatches),
	number("schedule.pp", func(s *lang.Schedule) *int { return &s.PP }, (*space).stages),
	choice("schedule.strategy", func(s *lang.Schedule) *string { return &s.Strategy }, (*space).strategies),
	number("schedule.virtual_stages", func(s *lang.Schedule) *int { return &s.VirtualStages }, (*space).virtualStages),
	{key: "schedule.subsequences", text: subsequencesText, values: (*space).subsequences, detail: true},
	plainly("off", choice("schedule.mux", func(s *lang.Schedule) *string { return &s.Mux }, (*space).muxes)),
	weighed(choice("schedule.recompute", func(s *lang.Schedule) *string { return &s.Recompute }, always(
		graph.RecomputeNone, graph.RecomputeSelective, graph.RecomputeKeepAttention, graph.RecomputeFull))),
	weighed(detail(choice("schedule.offload", func(s *lang.Schedule) *string { return &s.Offload.Policy }, always("none", "carry", "adaptive", "full")))),
}

// Pins are the keys of a schedule that solve searches where they are open, with what they are pinned to; "" where they are open.
func Pins(s lang.Schedule) (keys, values []string) {
	for i := range dimensions {
		keys, values = append(keys, dimensions[i].key), append(values, dimensions[i].text(&s))
	}
	return keys, values
}

// number is a dimension of positive integers.
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

// choice is a dimension of names.
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

func detail(d dimension) dimension {
	d.detail = true
	return d
}

func weighed(d dimension) dimension {
	d.weighs = true
	return d
}

func plainly(value string, d dimension) dimension {
	d.plain = value
	return d
}

// always are names that are worth a try whatever else is pinned.
func always(names ...string) func(*space, *lang.Schedule) []string {
	return func(*space, *lang.Schedule) []string { return names }
}

func subsequencesText(s *lang.Schedule) string {
	if s.Subsequences.Count == 0 {
		return ""
	}
	return fmt.Sprint(s.Subsequences.Count)
}

// space is what of the request bounds the values of dimensions.
type space struct {
	model   lang.Model
	cluster lang.Cluster
	train   lang.Train
	asked   lang.Schedule
}

// sp: a stage stays inside a node, where its collectives are cheap, and divides it.
func (sp *space) sp(s *lang.Schedule) []int {
	most := sp.cluster.GPUs() / max(1, s.DP) / max(1, s.PP)
	return suiting(divisors(sp.cluster.GPUsPerNode), func(n int) bool {
		return n <= most && sp.model.Heads%n == 0 && (sp.model.KVHeads%n == 0 || n%sp.model.KVHeads == 0) && sp.train.Sequence%int64(n) == 0 && s.Align%n == 0
	})
}

func (sp *space) spModes(s *lang.Schedule) []string {
	if s.SP == 1 {
		return []string{graph.ModeMegatron}
	}
	return []string{graph.ModeMegatron, graph.ModeUlysses}
}

func (sp *space) replicas(s *lang.Schedule) []int {
	most := sp.cluster.GPUs() / s.SP / max(1, s.PP)
	return suiting(divisors(sp.train.Batch/max(1, s.Microbatch)), func(n int) bool { return n <= most })
}

// tokensOfTask is how many tokens of several sequences one task may carry: more would not make kernels faster.
const tokensOfTask = 64 << 10

func (sp *space) microbatches(s *lang.Schedule) []int {
	return suiting(divisors(sp.train.Batch/s.DP), func(n int) bool { return n == 1 || int64(n)*sp.train.Sequence <= tokensOfTask })
}

// zeros: where ranks hold the same matrix there is no reason to hold its state twice.
func (sp *space) zeros(s *lang.Schedule) []string {
	if s.DP > 1 || (graph.Split{SP: s.SP, Mode: s.SPMode}).Replicates() {
		return []string{"1", "2", "3"}
	}
	return []string{"0"}
}

func (sp *space) stages(s *lang.Schedule) []int {
	if s.Order == OrderLayer {
		return []int{1}
	}
	return upTo(min(sp.cluster.GPUs()/(s.SP*s.DP), sp.model.Layers/max(1, s.VirtualStages)))
}

// strategies: without a pipeline, or with one microbatch, those that weave sequences come down to the first.
func (sp *space) strategies(s *lang.Schedule) []string {
	alone := s.PP == 1 || sp.train.Batch == s.DP*s.Microbatch
	var names []string
	for i := range strategies {
		st := &strategies[i]
		if i == 0 || !alone && st.sought && (st.rounds || s.VirtualStages <= 1) {
			names = append(names, st.name)
		}
	}
	return names
}

// mostVirtualStages bounds the virtual stages of a rank: more hardly shrink what is left of the bubble.
const mostVirtualStages = 16

func (sp *space) virtualStages(s *lang.Schedule) []int {
	if s.Order == OrderLayer { // groups of layers of the one stage
		return []int{sp.model.Layers}
	}
	least := 1
	if st := findStrategy(s.Strategy); st != nil {
		if least = st.stages.least; s.PP == 1 || !st.rounds {
			return []int{least}
		}
	}
	return suiting(upTo(min(mostVirtualStages, sp.model.Layers/s.PP)), func(n int) bool { return n >= least })
}

// shortestWanted is the average length of subsequences below which kernels lose more than bubbles win; fewPerSequence
// of a short sequence are tried all the same.
const (
	shortestWanted = 1 << 10
	fewPerSequence = 64
)

// muxes: virtual stages shrink the same bubbles with nothing borrowed, so where there may be any, borrowing is not tried. What
// more it takes the mux pass knows.
func (sp *space) muxes(s *lang.Schedule) []string {
	interleaves := sp.asked.VirtualStages == 0 && sp.model.Layers >= 2*s.PP
	if interleaves || s.PP == 1 || s.VirtualStages > 1 || s.Strategy != strategies[0].name || s.Zero > "1" || s.Subsequences.Count < s.PP {
		return []string{"off"}
	}
	return []string{"off", "left"}
}

// subsequences are numbers that grow by the root of two: between two of them the best one is within a part in a hundred of
// what the bubble and the kernels' efficiency take from the step. With virtual stages they come in whole groups.
func (sp *space) subsequences(s *lang.Schedule) []value {
	var out []value
	for _, n := range sp.counts(s) {
		out = append(out, value{fmt.Sprint(n), func(s *lang.Schedule) { s.Subsequences = lang.Subsequences{Count: n} }})
	}
	return out
}

func (sp *space) counts(s *lang.Schedule) []int {
	st := findStrategy(s.Strategy)
	if st != nil && st.sliced != "" {
		return []int{1}
	}
	if s.Offload.Policy == "list" {
		return []int{len(s.Offload.Alpha)}
	}
	seq, group := sp.train.Sequence, 1
	if s.VirtualStages > 1 && s.Order != OrderLayer && (st == nil || st.rounds) {
		group = max(1, 2*s.PP)
	}
	tasks := int64(mostTasks / max(1, sp.model.Layers*sp.train.Batch/(s.DP*s.Microbatch)))
	most := int(min(seq/int64(max(s.Align, s.SP)), tasks, max(seq/shortestWanted, fewPerSequence)))
	var out []int
	for x := 1.0; ; x *= math.Sqrt2 {
		n := (int(math.Round(x)) + group - 1) / group * group
		if n > most {
			return out
		}
		if len(out) == 0 || n > out[len(out)-1] {
			out = append(out, n)
		}
	}
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

// Lack is a lack of memory.
type Lack struct {
	Stage int      `json:"stage"`
	Arena string   `json:"arena"` // device or host
	Bytes ir.Bytes `json:"bytes"` // that one rank has too few
}

func (l Lack) String() string {
	return fmt.Sprintf("stage %d lacks %s on the %s", l.Stage, l.Bytes, l.Arena)
}

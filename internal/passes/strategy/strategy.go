// Package strategy defines the orders in which ranks can run their tasks. Each order is an element of All.
package strategy

import (
	"fmt"
	"slices"
	"strings"

	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/words"
	"sppo.dev/lang"
)

// Strategy is a named order of tasks.
type Strategy struct {
	Name     string
	doc      string                            // its advantage, given as the reason for the decision
	Sliced   string                            // the strategy to use for subsequences; empty: this one
	Stages   StageCount                        // virtual stages per rank
	Placed   string                            // placement of the virtual stages on the ranks
	Rounds   bool                              // processes one sequence at a time, in rounds of subsequences through the virtual stages of a rank
	Late     bool                              // defers weight gradients (zero-bubble)
	Same     string                            // the strategy that the search tries instead, because with other keys it gives the same orders
	Reversed bool                              // backwards run from the last microbatch to the first
	Turns    Turning                           // microbatches at whose turnaround a rank has nothing else to do
	batch    func(p *plan.Plan) []plan.Problem // returns problems with batches that the order does not support; nil: it supports all
	order    func(p *plan.Plan, rank int) []plan.Task
}

// Turning describes the turnarounds at which a rank must wait because all forwards of one
// microbatch, or of all microbatches, come before any other work.
type Turning int

const (
	noTurn   Turning = iota // forwards and backwards of several microbatches alternate
	LastTurn                // all forwards come before all backwards
	EachTurn                // microbatches run one after another
)

// StageCount is the supported range of virtual stages; Most = 0 means as many as there are layers.
type StageCount struct{ Least, Most int }

// Has reports whether a strategy supports n virtual stages.
func (c StageCount) Has(n int) bool { return n >= c.Least && (c.Most == 0 || n <= c.Most) }

var (
	AnyStages   = StageCount{Least: 1}
	interleaved = StageCount{Least: 2}
	oneStage    = StageCount{1, 1}
	twoStages   = StageCount{2, 2}
)

// All lists the orders, named after the papers and systems that introduced them.
var All = []Strategy{
	{
		Name: "sppo", Stages: AnyStages, Placed: plan.PlacedRound, Rounds: true, Turns: EachTurn, order: OneSequence,
		doc: "one sequence at a time: all subsequences forward, then all backward in reverse order; K and V of only one microbatch are live at a time",
	},
	{
		Name: "interleaved-sppo", Same: "sppo", Stages: interleaved, Placed: plan.PlacedRound, Rounds: true, Turns: EachTurn, order: OneSequence,
		doc: "sppo with several virtual stages per rank: the bubble is divided by their number, and the number of live activations does not increase",
	},
	{
		Name: "overlapped-sppo", Stages: AnyStages, Placed: plan.PlacedRound, Rounds: true, order: overlapped,
		doc: "one sequence after another, each beginning while the previous one turns around: one bubble per batch; K and V of at most two microbatches are live",
	},
	{
		Name: "terapipe", Stages: AnyStages, Placed: plan.PlacedRound, Turns: LastTurn, order: allForward,
		doc: "all subsequences of all microbatches forward, then all backward: one bubble per batch, and all activations are live at the turnaround",
	},
	{
		Name: "gpipe", Same: "terapipe", Sliced: "terapipe", Stages: oneStage, Placed: plan.PlacedRound, Turns: LastTurn, order: allForward,
		doc: "all microbatches forward, then all backward: one bubble per batch, and all activations are live at the turnaround",
	},
	{
		Name: "looped-bfs", Same: "terapipe", Sliced: "terapipe", Stages: AnyStages, Placed: plan.PlacedRound, Reversed: true, Turns: LastTurn, order: loopedBFS,
		doc: "all microbatches forward through one virtual stage after another, then all backward from the last microbatch to the first: one bubble per batch, and all activations are live at the turnaround",
	},
	{
		Name: "1f1b", Same: "seq1f1b", Sliced: "seq1f1b", Stages: AnyStages, Placed: plan.PlacedRound, batch: roundsProblem, order: oneForwardOneBackward,
		doc: "forwards and backwards alternate once the pipeline is full: one bubble per batch; activations of at most pp microbatches are live",
	},
	{
		Name: "interleaved-1f1b", Same: "seq1f1b", Sliced: "seq1f1b", Stages: interleaved, Placed: plan.PlacedRound, batch: roundsProblem, order: oneForwardOneBackward,
		doc: "1f1b with v virtual stages per rank: the bubble is divided by v, with slightly more activations and v times as many messages",
	},
	{
		Name: "seq1f1b", Stages: AnyStages, Placed: plan.PlacedRound, batch: roundsProblem, order: oneForwardOneBackward,
		doc: "forwards and backwards of subsequences alternate: one bubble per batch; K and V of about two microbatches are live",
	},
	{
		Name: "zb-h1", Stages: AnyStages, Placed: plan.PlacedRound, batch: roundsProblem, Late: true, order: func(p *plan.Plan, rank int) []plan.Task { return zeroBubble(p, rank, 1) },
		doc: "1f1b with weight gradients deferred until the pipeline would wait: a third of the bubble of 1f1b, with as many activations",
	},
	{
		Name: "zb-h2", Stages: oneStage, Placed: plan.PlacedRound, Late: true, order: func(p *plan.Plan, rank int) []plan.Task { return zeroBubble(p, rank, 2) },
		doc: "zb-h1 with twice as many forwards at the start: no bubble between the first and last task of a stage, but twice as many activations",
	},
	{
		Name: "zb-v", Sliced: "zb-h1", Stages: twoStages, Placed: plan.PlacedV, Late: true, order: zeroBubbleV,
		doc: "two virtual stages per rank in a V, and deferred weight gradients: no bubble if the three kinds of tasks " +
			"take equally long, with as many activations as 1f1b",
	},
	{
		Name: "dualpipe-v", Sliced: "zb-h1", Stages: twoStages, Placed: plan.PlacedV, batch: fullPipelineProblem, Late: true, order: dualPipeV,
		doc: "two virtual stages per rank in a V: forwards of one alternate with backwards of the other; weight gradients are deferred at both ends",
	},
}

// Find returns the strategy with that name, or nil.
func Find(name string) *Strategy {
	for i := range All {
		if All[i].Name == name {
			return &All[i]
		}
	}
	return nil
}

// Of returns the requested strategy.
func Of(p *plan.Plan) *Strategy {
	if p.Schedule.Strategy == lang.StrategyCSV {
		return fromFile(p)
	}
	if s := Find(p.Schedule.Strategy); s != nil {
		return s
	}
	return &All[0]
}

// Problems returns a problem for each request that the strategy does not support.
func Problems(p *plan.Plan) []plan.Problem {
	if name := p.Schedule.Strategy; name != "" && name != "auto" && name != lang.StrategyCSV && Find(name) == nil {
		return []plan.Problem{plan.Fault("schedule.strategy", lang.UnknownName, "there are "+strings.Join(Names(), ", "), "unknown strategy %q", name)}
	}
	s, v, n := Of(p), p.Schedule.VirtualStages, max(p.Schedule.Subsequences.Count, len(p.Schedule.Subsequences.Lengths))
	if s.Name != All[0].Name && p.Schedule.Order == plan.OrderLayer {
		return []plan.Problem{plan.Fault("schedule.strategy", lang.Conflict, "strategy = sppo, or order = sequence", "strategy = %s interleaves sequences, but order = layer processes them one by one", s.Name)}
	}
	if known := s.Stages; v != 0 && !known.Has(v) {
		words := fmt.Sprintf("virtual_stages = %d", known.Least)
		if known.Most == 0 {
			words += " or more"
		}
		return []plan.Problem{plan.Fault("schedule.virtual_stages", lang.Conflict, words, "strategy = %s does not support virtual_stages = %d", s.Name, v)}
	}
	if s.Sliced != "" && n > 1 {
		return []plan.Problem{plan.Fault("schedule.subsequences", lang.Conflict, "subsequences = 1, or strategy = "+s.Sliced,
			"strategy = %s needs whole sequences, not %d subsequences", s.Name, n)}
	}
	return nil
}

// BatchProblems returns a problem if the strategy does not support the batch.
func BatchProblems(p *plan.Plan) []plan.Problem {
	if s := Of(p); s.batch != nil {
		return s.batch(p)
	}
	return nil
}

// roundsProblem checks that microbatches pass through virtual stages in rounds of equal size.
func roundsProblem(p *plan.Plan) []plan.Problem {
	m, rounds := p.Parallel.Microbatches, rounds(p)
	if m%rounds == 0 {
		return nil
	}
	each := int64(p.Parallel.DP * p.Parallel.Microbatch)
	return []plan.Problem{plan.Fault("train.batch", lang.Indivisible, "batch = "+words.NearMultiples(int64(m)*each, int64(rounds)*each),
		"%d microbatches cannot be divided into %d equal rounds of at least pp = %d each, for %d virtual stages", m, rounds, p.Parallel.PP, p.Parallel.VirtualStages)}
}

// fullPipelineProblem checks that there is a microbatch for every virtual stage.
func fullPipelineProblem(p *plan.Plan) []plan.Problem {
	m, stages := p.Parallel.Microbatches, p.Parallel.Stages()
	if m >= stages {
		return nil
	}
	return []plan.Problem{plan.Fault("train.batch", lang.Conflict, fmt.Sprintf("batch of at least %d, or strategy = zb-v", stages*p.Parallel.DP*p.Parallel.Microbatch),
		"strategy = %s needs a microbatch for each of 2 * pp = %d virtual stages, but there are %d", p.Schedule.Strategy, stages, m)}
}

// Names returns the names of all strategies.
func Names() []string {
	names := make([]string, len(All))
	for i := range All {
		names[i] = All[i].Name
	}
	return names
}

// OneSequence returns the paper's order, one microbatch after another.
func OneSequence(p *plan.Plan, rank int) []plan.Task {
	var order []plan.Task
	for m := range p.Parallel.Microbatches {
		forward := forwardOrder(p, rank, m)
		order = append(order, forward...)
		order = append(order, Mirrored(forward)...)
	}
	return order
}

// overlapped returns the paper's order with an early start of the next microbatch. Between the last forward and
// the first backward of a microbatch, a rank would otherwise wait until the last subsequence has been to the
// end of the pipeline and back. During that time it runs forwards of the next microbatch, which later ranks
// need in order to continue without a gap. If a forward task takes f, a backward task takes b, and at most N
// forwards are early, then the makespan of M microbatches of N subsequences is (M N + PP - 1) (f + b). With
// virtual stages, one round can start early.
func overlapped(p *plan.Plan, rank int) []plan.Task {
	var order []plan.Task
	var early int // forwards of the microbatch that have already run
	for m := range p.Parallel.Microbatches {
		forward := forwardOrder(p, rank, m)
		order = append(order, forward[early:]...)
		if early = 0; m+1 < p.Parallel.Microbatches {
			next := forwardOrder(p, rank, m+1)
			early = min((1+backwardInForwards)*(p.Parallel.PP-1-rank), firstRound(next))
			order = append(order, next[:early]...)
		}
		order = append(order, Mirrored(forward)...)
	}
	return order
}

// firstRound returns the number of forwards before the first one that waits for the end of the pipeline.
func firstRound(forward []plan.Task) int {
	n := slices.IndexFunc(forward, func(t plan.Task) bool { return t.Stage != forward[0].Stage })
	if n < 0 {
		return len(forward)
	}
	return n
}

// backwardInForwards is the duration of a backward divided by that of a forward: two by operation count, and
// more if attention dominates, because its backward has 2.5 times the operations at a lower rate.
const backwardInForwards = 3

// Mirrored returns the backwards of the given forwards in reverse order.
func Mirrored(forward []plan.Task) []plan.Task {
	back := slices.Clone(forward)
	slices.Reverse(back)
	for i := range back {
		back[i].Kind = plan.Backward
	}
	return back
}

// forwardOrder returns the forwards of one microbatch on a rank. With virtual stages, the forwards
// form rounds: a group of 2*PP subsequences passes through the first virtual stage, then the same
// group through the second, and so on. Groups of PP would stall on the latency of messages. In
// layer order the group is the whole sequence.
func forwardOrder(p *plan.Plan, rank, microbatch int) []plan.Task {
	n, v := p.Subsequences.N, p.Parallel.VirtualStages
	group := n
	if v > 1 && !p.LayerOrder() {
		group = 2 * p.Parallel.PP
	}
	order := make([]plan.Task, 0, n*v)
	for first := 0; first < n; first += group {
		for _, stage := range p.StagesOf(rank) {
			for i := first; i < min(first+group, n); i++ {
				order = append(order, plan.Task{Kind: plan.Forward, Microbatch: microbatch, Subsequence: i, Stage: stage})
			}
		}
	}
	return order
}

// inRounds returns the forwards and the backwards of all microbatches on a rank, both in rounds of
// microbatches, first to last. Each round passes through the rank's virtual stages one after another.
func inRounds(p *plan.Plan, rank, rounds int) (forward, backward []plan.Task) {
	stages, n, size := p.StagesOf(rank), p.Subsequences.N, p.Parallel.Microbatches/rounds
	most := len(stages) * n * p.Parallel.Microbatches
	forward, backward = make([]plan.Task, 0, most), make([]plan.Task, 0, most)
	for first := 0; first < p.Parallel.Microbatches; first += size {
		for c := range stages {
			for m := first; m < first+size; m++ {
				for i := range n {
					forward = append(forward, plan.Task{Kind: plan.Forward, Microbatch: m, Subsequence: i, Stage: stages[c]})
					backward = append(backward, plan.Task{Kind: plan.Backward, Microbatch: m, Subsequence: n - 1 - i, Stage: stages[len(stages)-1-c]})
				}
			}
		}
	}
	return forward, backward
}

// allForward returns the order of GPipe (Huang et al. 2019) and, over subsequences, of TeraPipe (Li et al. 2021).
func allForward(p *plan.Plan, rank int) []plan.Task {
	forward, backward := inRounds(p, rank, 1)
	return slices.Concat(forward, backward)
}

// loopedBFS returns the breadth-first order of virtual stages (Lamy-Poirier 2022). As in PyTorch's
// ScheduleLoopedBFS, each virtual stage runs its backwards from the last microbatch to the first.
func loopedBFS(p *plan.Plan, rank int) []plan.Task {
	forward, _ := inRounds(p, rank, 1)
	return append(forward, Mirrored(forward)...)
}

// rounds returns the number of rounds into which the microbatches are divided, each of at least PP
// microbatches. With a single virtual stage, there is only one round.
func rounds(p *plan.Plan) int {
	if p.Parallel.VirtualStages == 1 {
		return 1
	}
	return max(1, p.Parallel.Microbatches/p.Parallel.PP)
}

// oneForwardOneBackward returns the order of PipeDream-flush and, with virtual stages, Megatron's interleaved order
// (Narayanan et al. 2021); over subsequences it is the order of Seq1F1B (Sun et al. 2024).
func oneForwardOneBackward(p *plan.Plan, rank int) []plan.Task {
	order, _ := weave(p, rank, min(2, p.Parallel.VirtualStages))
	return order
}

// zeroBubble returns the order of ZB-H1, with one hop, or ZB-H2, with two (Qi et al. 2023). This is 1f1b,
// except that a rank defers its weight gradients so that backwards reach the first rank earlier. They are
// deferred by a number of backwards that is hops times the number of ranks before this one.
func zeroBubble(p *plan.Plan, rank, hops int) []plan.Task {
	woven, backward := weave(p, rank, hops)
	late, done := hops*rank, 0
	order := make([]plan.Task, 0, len(woven)+len(backward))
	for _, t := range woven {
		order = append(order, t)
		if t.Kind != plan.Backward {
			continue
		}
		if done++; done > late {
			order = append(order, backward[done-1-late].As(plan.WeightGrad))
		}
	}
	for _, t := range backward[max(0, done-late):] {
		order = append(order, t.As(plan.WeightGrad))
	}
	return order
}

// weave runs a number of initial forwards, and then alternates forwards and backwards. On the last rank, the
// initial forwards are a whole round on every virtual stage except the last, and on the last virtual stage all
// subsequences of the first microbatch except one. Every other rank has more initial forwards than the next
// rank; the difference is the given number of hops. weave also returns the backwards separately.
func weave(p *plan.Plan, rank, hops int) (order, backward []plan.Task) {
	v, n := p.Parallel.VirtualStages, p.Subsequences.N
	forward, backward := inRounds(p, rank, rounds(p))
	warmUp := (v-1)*n*(p.Parallel.Microbatches/rounds(p)) + n - 1 + hops*(p.Parallel.PP-1-rank)
	warmUp = min(warmUp, len(forward))
	order = append(make([]plan.Task, 0, len(forward)+len(backward)), forward[:warmUp]...)
	for i, b := range backward {
		if warmUp+i < len(forward) {
			order = append(order, forward[warmUp+i])
		}
		order = append(order, b)
	}
	return order, backward
}

// folded builds the order of a rank with two virtual stages: 0 in the first half of the V and 1 in the second.
type folded struct {
	order  []plan.Task
	stages []int
	done   [2]map[plan.TaskKind]int
	most   int         // number of microbatches
	late   []plan.Task // deferred weight gradients
}

func newFolded(p *plan.Plan, rank int) *folded {
	return &folded{stages: p.StagesOf(rank), done: [2]map[plan.TaskKind]int{{}, {}}, most: p.Parallel.Microbatches}
}

// do appends the next task of the given kind. It omits tasks of microbatches that do not exist.
func (f *folded) do(kind plan.TaskKind, side int) {
	m := f.done[side][kind]
	f.done[side][kind]++
	if m < f.most {
		f.order = append(f.order, plan.Task{Kind: kind, Microbatch: m, Stage: f.stages[side]})
	}
}

// putOff appends the next backward and defers its weight gradients.
func (f *folded) putOff(side int) {
	f.late = append(f.late, plan.Task{Kind: plan.WeightGrad, Microbatch: f.done[side][plan.Backward], Stage: f.stages[side]})
	f.do(plan.Backward, side)
}

// catchUp appends the task of the weight gradients that have been deferred longest, if there are any.
func (f *folded) catchUp() {
	if len(f.late) > 0 {
		f.order, f.late = append(f.order, f.late[0]), f.late[1:]
	}
}

// zeroBubbleV returns the order of ZB-V (Qi et al. 2023, section 6). That order needs at least 2*PP-1
// microbatches; if there are fewer, the tasks of the missing ones are omitted.
func zeroBubbleV(p *plan.Plan, rank int) []plan.Task {
	f, pp := newFolded(p, rank), p.Parallel.PP
	m := max(2*pp-1, f.most)
	both := func(side int) {
		f.do(plan.Backward, side)
		f.do(plan.WeightGrad, side)
	}
	for range 2*(pp-rank) - 1 {
		f.do(plan.Forward, 0)
	}
	for range rank {
		f.do(plan.Forward, 1)
		f.do(plan.Forward, 0)
	}
	for range pp - rank {
		f.do(plan.Forward, 1)
		both(1)
	}
	for f.done[1][plan.Forward] < f.done[0][plan.Forward] || f.done[0][plan.Forward] < m {
		if f.done[0][plan.Forward] < m {
			f.do(plan.Forward, 0)
		}
		both(0)
		f.do(plan.Forward, 1)
		both(1)
	}
	for range rank {
		f.do(plan.Backward, 0)
		f.do(plan.Backward, 1)
	}
	for range pp - rank {
		both(0)
	}
	for side := 1; side >= 0; side-- {
		for f.done[side][plan.WeightGrad] < f.done[side][plan.Backward] {
			f.do(plan.WeightGrad, side)
		}
	}
	return f.order
}

// dualPipeV returns the order of DeepSeek's DualPipeV (2025). Unlike in the original, tasks do not overlap but
// run one after another.
func dualPipeV(p *plan.Plan, rank int) []plan.Task {
	f, pp := newFolded(p, rank), p.Parallel.PP
	for range 2 * (pp - 1 - rank) {
		f.do(plan.Forward, 0)
	}
	for range rank + 1 {
		f.do(plan.Forward, 0)
		f.do(plan.Forward, 1)
	}
	for range pp - 1 - rank {
		f.putOff(1)
		f.catchUp()
		f.do(plan.Forward, 1)
	}
	for range f.most - 2*pp + rank + 1 {
		f.do(plan.Forward, 0)
		f.do(plan.Backward, 1)
		f.do(plan.Forward, 1)
		f.do(plan.Backward, 0)
	}
	for range pp - 1 - rank {
		f.do(plan.Backward, 1)
		f.do(plan.Forward, 1)
		f.do(plan.Backward, 0)
	}
	half := rank + 1 // in the second half of the last pairs of backwards, weight gradients are deferred
	for i := range 2 * (rank + 1) {
		side := 1 - i%2
		if i >= half {
			f.putOff(side)
		} else {
			f.do(plan.Backward, side)
		}
	}
	for range pp - 1 - rank {
		f.catchUp()
		f.putOff(0)
	}
	for range rank + 1 {
		f.catchUp()
	}
	return f.order
}

// Order fills Tasks.
func Order(p *plan.Plan) {
	s := Of(p)
	p.Tasks = make([][]plan.Task, p.Parallel.PP)
	for rank := range p.Tasks {
		p.Tasks[rank] = s.order(p, rank)
	}
	p.Decide("schedule", "strategy", s.Name, s.doc)
	if v := p.Parallel.VirtualStages; v > 1 && !p.LayerOrder() {
		why := "number of layer groups on each rank"
		group := 2 * p.Parallel.PP
		switch {
		case p.Parallel.PP == 1:
			why = "number of layer groups on the only stage, which has no bubble to shorten"
		case s.Rounds && p.Subsequences.N%group == 0:
			why = fmt.Sprintf("groups of %d subsequences pass through the virtual stages of a rank one after another: the bubble is 1/%d of that of the plain pipeline", group, v)
		case s.Rounds:
			why = fmt.Sprintf("groups of at most %d subsequences pass through the virtual stages of a rank one after another, for a smaller bubble", min(group, p.Subsequences.N))
		}
		p.Decide("schedule", "virtual_stages", fmt.Sprint(v), why)
	}
}

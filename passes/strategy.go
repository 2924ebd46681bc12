package passes

import (
	"fmt"
	"slices"
	"strings"

	"sppo.dev/lang"
)

// strategy is an order of tasks that has a name.
type strategy struct {
	name   string
	doc    string                  // why one would want it: the reason of the decision
	sliced string                  // what to take instead for subsequences; empty where it knows them
	stages stageCount              // virtual stages of a rank
	placed string                  // how they lie on the ranks
	rounds bool                    // takes a sequence as one, in rounds of subsequences through the virtual stages of a rank
	late   bool                    // puts gradients of weights off
	same   string                  // the strategy that solve tries instead: the same orders with other values of other keys
	turns  turning                 // microbatches between whose forwards and backwards a rank has nothing else to do
	batch  func(p *Plan) []problem // batches that the order does not go with; nil: there are none
	order  func(p *Plan, rank int) []Task
}

// turning says which microbatches turn round with the rank waiting: all forwards of it, or of all, come before what follows.
type turning int

const (
	noTurn   turning = iota // forwards and backwards of several microbatches alternate
	lastTurn                // all forwards come before all backwards
	eachTurn                // one microbatch follows another
)

// stageCount are the virtual stages that a strategy knows: as many as layers are there for where most is 0.
type stageCount struct{ least, most int }

func (c stageCount) has(n int) bool { return n >= c.least && (c.most == 0 || n <= c.most) }

var (
	anyStages   = stageCount{least: 1}
	interleaved = stageCount{least: 2}
	oneStage    = stageCount{1, 1}
	twoStages   = stageCount{2, 2}
)

// strategies are the orders that schedule knows, by the names of the papers and systems that brought them.
var strategies = []strategy{
	{
		name: "sppo", stages: anyStages, placed: PlacedRound, rounds: true, turns: eachTurn, order: oneSequence,
		doc: "one sequence at a time, all subsequences forward, then all backward in reverse: K and V of one microbatch live at a time",
	},
	{
		name: "interleaved-sppo", same: "sppo", stages: interleaved, placed: PlacedRound, rounds: true, turns: eachTurn, order: oneSequence,
		doc: "sppo with several virtual stages a rank: the bubble shrinks by as much, and no more activations live",
	},
	{
		name: "overlapped-sppo", stages: anyStages, placed: PlacedRound, rounds: true, order: overlapped,
		doc: "one sequence behind another, the next one begun while this one turns round: one bubble for the batch, K and V of at most two microbatches live",
	},
	{
		name: "terapipe", stages: anyStages, placed: PlacedRound, turns: lastTurn, order: allForward,
		doc: "all subsequences of all microbatches forward, then all backward: one bubble for the batch, and all activations live at the turn",
	},
	{
		name: "gpipe", same: "terapipe", sliced: "terapipe", stages: anyStages, placed: PlacedRound, turns: lastTurn, order: allForward,
		doc: "all microbatches forward, then all backward: one bubble for the batch, and all activations live at the turn",
	},
	{
		name: "1f1b", same: "seq1f1b", sliced: "seq1f1b", stages: anyStages, placed: PlacedRound, batch: roundsProblem, order: oneForwardOneBackward,
		doc: "one forward, one backward in turn once the pipeline is full: one bubble for the batch, activations of at most pp microbatches live",
	},
	{
		name: "interleaved-1f1b", same: "seq1f1b", sliced: "seq1f1b", stages: interleaved, placed: PlacedRound, batch: roundsProblem, order: oneForwardOneBackward,
		doc: "1f1b with several virtual stages a rank: the bubble shrinks by as much, for a few activations more and as many times the messages",
	},
	{
		name: "seq1f1b", stages: anyStages, placed: PlacedRound, batch: roundsProblem, order: oneForwardOneBackward,
		doc: "one forward, one backward in turn at the grain of subsequences: one bubble for the batch, K and V of at most two or so microbatches live",
	},
	{
		name: "zb-h1", stages: anyStages, placed: PlacedRound, batch: roundsProblem, late: true, order: func(p *Plan, rank int) []Task { return p.zeroBubble(rank, 1) },
		doc: "1f1b whose gradients of weights run later, where the pipeline would wait: a third of its bubble, and no more activations live",
	},
	{
		name: "zb-h2", stages: oneStage, placed: PlacedRound, late: true, order: func(p *Plan, rank int) []Task { return p.zeroBubble(rank, 2) },
		doc: "zb-h1 with twice the forwards at the start: no bubble between the first and the last task of a stage, for twice the activations",
	},
	{
		name: "zb-v", sliced: "zb-h1", stages: twoStages, placed: PlacedV, late: true, order: zeroBubbleV,
		doc: "two virtual stages a rank, there and back, and late gradients of weights: no bubble where the three kinds of tasks take equally long, with the activations of 1f1b",
	},
	{
		name: "dualpipe-v", sliced: "zb-h1", stages: twoStages, placed: PlacedV, batch: fullPipelineProblem, late: true, order: dualPipeV,
		doc: "two virtual stages a rank, there and back: forwards of one alternate with backwards of the other, gradients of weights run late at both ends",
	},
}

// findStrategy is the strategy of that name, or nil.
func findStrategy(name string) *strategy {
	for i := range strategies {
		if strategies[i].name == name {
			return &strategies[i]
		}
	}
	return nil
}

// chosenStrategy is what the request asks for.
func (p *Plan) chosenStrategy() *strategy {
	if s := findStrategy(p.Schedule.Strategy); s != nil {
		return s
	}
	return &strategies[0]
}

// strategyProblems are requests that a strategy does not know.
func strategyProblems(p *Plan) []problem {
	if name := p.Schedule.Strategy; name != "" && name != "auto" && findStrategy(name) == nil {
		return []problem{fault("schedule.strategy", lang.UnknownName, "there are "+strings.Join(strategyNames(), ", "), "there is no strategy %q", name)}
	}
	s, v, n := p.chosenStrategy(), p.Schedule.VirtualStages, max(p.Schedule.Subsequences.Count, len(p.Schedule.Subsequences.Lengths))
	if s.name != strategies[0].name && p.Schedule.Order == OrderLayer {
		return []problem{fault("schedule.strategy", lang.Conflict, "strategy = sppo, or order = sequence", "strategy = %s weaves sequences, and order = layer takes them one by one", s.name)}
	}
	if known := s.stages; v != 0 && !known.has(v) {
		words := fmt.Sprintf("virtual_stages = %d", known.least)
		if known.most == 0 {
			words += " or more"
		}
		return []problem{fault("schedule.virtual_stages", lang.Conflict, words, "strategy = %s does not go with virtual_stages = %d", s.name, v)}
	}
	if s.sliced != "" && n > 1 {
		return []problem{fault("schedule.subsequences", lang.Conflict, "subsequences = 1, or strategy = "+s.sliced,
			"strategy = %s takes whole sequences, not %d subsequences of one", s.name, n)}
	}
	return nil
}

// batchProblems are batches that the order of the strategy does not go with.
func batchProblems(p *Plan) []problem {
	if s := p.chosenStrategy(); s.batch != nil {
		return s.batch(p)
	}
	return nil
}

// roundsProblem: microbatches go through virtual stages in rounds of equal size.
func roundsProblem(p *Plan) []problem {
	m, rounds := p.Parallel.Microbatches, p.rounds()
	if m%rounds == 0 {
		return nil
	}
	each := int64(p.Parallel.DP * p.Parallel.Microbatch)
	return []problem{fault("train.batch", lang.Indivisible, "batch = "+nearMultiples(int64(m)*each, int64(rounds)*each),
		"%d microbatches do not make %d rounds of equal size, of at least pp = %d each, through %d virtual stages", m, rounds, p.Parallel.PP, p.Parallel.VirtualStages)}
}

// fullPipelineProblem: there is a microbatch for every virtual stage.
func fullPipelineProblem(p *Plan) []problem {
	m, stages := p.Parallel.Microbatches, p.Parallel.Stages()
	if m >= stages {
		return nil
	}
	return []problem{fault("train.batch", lang.Conflict, fmt.Sprintf("batch = %d at least, or strategy = zb-v", stages*p.Parallel.DP*p.Parallel.Microbatch),
		"strategy = %s wants a microbatch for each of 2 * pp = %d virtual stages, and there are %d", p.Schedule.Strategy, stages, m)}
}

func strategyNames() []string {
	names := make([]string, len(strategies))
	for i := range strategies {
		names[i] = strategies[i].name
	}
	return names
}

// oneSequence is the paper's order, microbatch after microbatch.
func oneSequence(p *Plan, rank int) []Task {
	var order []Task
	for m := range p.Parallel.Microbatches {
		forward := p.forwardOrder(rank, m)
		order = append(order, forward...)
		order = append(order, mirrored(forward)...)
	}
	return order
}

// overlapped is the paper's order with the next microbatch begun early. Between its last forward and its first backward of a
// microbatch a rank waits until the subsequence has been to the end of the pipeline and back; the forwards that fit into that
// time are the start that the ranks behind it need in order to go on with the next microbatch as soon as they are through with
// this one. With f and b for a task forward and backward, M microbatches of N subsequences, and starts no longer than N, the
// makespan is (M N + PP - 1) (f + b). Virtual stages leave room for a start of one round.
func overlapped(p *Plan, rank int) []Task {
	var order []Task
	var early int // forwards of the microbatch that have gone before
	for m := range p.Parallel.Microbatches {
		forward := p.forwardOrder(rank, m)
		order = append(order, forward[early:]...)
		if early = 0; m+1 < p.Parallel.Microbatches {
			next := p.forwardOrder(rank, m+1)
			early = min((1+backwardInForwards)*(p.Parallel.PP-1-rank), firstRound(next))
			order = append(order, next[:early]...)
		}
		order = append(order, mirrored(forward)...)
	}
	return order
}

// firstRound is how many forwards come before the first that waits for the end of the pipeline.
func firstRound(forward []Task) int {
	n := slices.IndexFunc(forward, func(t Task) bool { return t.Stage != forward[0].Stage })
	if n < 0 {
		return len(forward)
	}
	return n
}

// backwardInForwards is how many forwards a backward takes: two of the same operations, and more where attention rules, which
// goes back over twice and a half of them at a lower rate.
const backwardInForwards = 3

// mirrored are the backwards of forwards, last first.
func mirrored(forward []Task) []Task {
	back := slices.Clone(forward)
	slices.Reverse(back)
	for i := range back {
		back[i].Kind = Backward
	}
	return back
}

// forwardOrder is what a rank forwards of one microbatch. With virtual stages it takes rounds: a group of 2*PP
// subsequences through its first virtual stage, the same group through its second, and so on; groups of PP would stall on
// the latency of messages. In layer order the group is the whole sequence.
func (p *Plan) forwardOrder(rank, microbatch int) []Task {
	n, v := p.Subsequences.N, p.Parallel.VirtualStages
	group := n
	if v > 1 && !p.layerOrder() {
		group = 2 * p.Parallel.PP
	}
	order := make([]Task, 0, n*v)
	for first := 0; first < n; first += group {
		for _, stage := range p.StagesOf(rank) {
			for i := first; i < min(first+group, n); i++ {
				order = append(order, Task{Kind: Forward, Microbatch: microbatch, Subsequence: i, Stage: stage})
			}
		}
	}
	return order
}

// inRounds are the forwards of all microbatches and their backwards, each kind in the order of microbatches. A round of
// microbatches passes through one virtual stage of the rank after another.
func (p *Plan) inRounds(rank, rounds int) (forward, backward []Task) {
	stages, n, size := p.StagesOf(rank), p.Subsequences.N, p.Parallel.Microbatches/rounds
	most := len(stages) * n * p.Parallel.Microbatches
	forward, backward = make([]Task, 0, most), make([]Task, 0, most)
	for first := 0; first < p.Parallel.Microbatches; first += size {
		for c := range stages {
			for m := first; m < first+size; m++ {
				for i := range n {
					forward = append(forward, Task{Kind: Forward, Microbatch: m, Subsequence: i, Stage: stages[c]})
					backward = append(backward, Task{Kind: Backward, Microbatch: m, Subsequence: n - 1 - i, Stage: stages[len(stages)-1-c]})
				}
			}
		}
	}
	return forward, backward
}

// allForward is the order of GPipe (Huang et al. 2019) and, over subsequences, of TeraPipe (Li et al. 2021). With virtual
// stages it is breadth-first (Lamy-Poirier 2022).
func allForward(p *Plan, rank int) []Task {
	forward, backward := p.inRounds(rank, 1)
	return slices.Concat(forward, backward)
}

// rounds is how many rounds of at least PP microbatches there are. One virtual stage wants no rounds.
func (p *Plan) rounds() int {
	if p.Parallel.VirtualStages == 1 {
		return 1
	}
	return max(1, p.Parallel.Microbatches/p.Parallel.PP)
}

// oneForwardOneBackward is the order of PipeDream-flush and, with virtual stages, Megatron's interleaved one (Narayanan et
// al. 2021); over subsequences it is that of Seq1F1B (Sun et al. 2024).
func oneForwardOneBackward(p *Plan, rank int) []Task {
	order, _ := p.weave(rank, min(2, p.Parallel.VirtualStages))
	return order
}

// zeroBubble is ZB-H1, with one hop, or ZB-H2, with two (Qi et al. 2023): 1f1b whose gradients of weights come as many
// backwards late as the rank has hops behind it, so that the backwards themselves reach the first rank sooner.
func (p *Plan) zeroBubble(rank, hops int) []Task {
	woven, backward := p.weave(rank, hops)
	late, done := hops*rank, 0
	order := make([]Task, 0, len(woven)+len(backward))
	for _, t := range woven {
		order = append(order, t)
		if t.Kind != Backward {
			continue
		}
		if done++; done > late {
			order = append(order, backward[done-1-late].As(WeightGrad))
		}
	}
	for _, t := range backward[max(0, done-late):] {
		order = append(order, t.As(WeightGrad))
	}
	return order
}

// weave alternates forwards and backwards after a number of forwards: those that come before the first backward on the last
// rank, which are all subsequences on all virtual stages but the last, and some for every hop from there. It also gives the
// backwards alone.
func (p *Plan) weave(rank, hops int) (order, backward []Task) {
	v, n := p.Parallel.VirtualStages, p.Subsequences.N
	forward, backward := p.inRounds(rank, p.rounds())
	warmUp := (v-1)*n*(p.Parallel.Microbatches/p.rounds()) + n - 1 + hops*(p.Parallel.PP-1-rank)
	warmUp = min(warmUp, len(forward))
	order = append(make([]Task, 0, len(forward)+len(backward)), forward[:warmUp]...)
	for i, b := range backward {
		if warmUp+i < len(forward) {
			order = append(order, forward[warmUp+i])
		}
		order = append(order, b)
	}
	return order, backward
}

// folded writes the order of a rank whose two virtual stages lie there (0) and back (1).
type folded struct {
	order  []Task
	stages []int
	done   [2]map[TaskKind]int
	most   int    // microbatches
	late   []Task // gradients of weights that have been put off
}

func newFolded(p *Plan, rank int) *folded {
	return &folded{stages: p.StagesOf(rank), done: [2]map[TaskKind]int{{}, {}}, most: p.Parallel.Microbatches}
}

// do appends the next task of a kind; those of microbatches that are not there are left out.
func (f *folded) do(kind TaskKind, side int) {
	m := f.done[side][kind]
	f.done[side][kind]++
	if m < f.most {
		f.order = append(f.order, Task{Kind: kind, Microbatch: m, Stage: f.stages[side]})
	}
}

// putOff appends the next backward without its gradients of weights.
func (f *folded) putOff(side int) {
	f.late = append(f.late, Task{Kind: WeightGrad, Microbatch: f.done[side][Backward], Stage: f.stages[side]})
	f.do(Backward, side)
}

// catchUp appends the gradients of weights that were put off first.
func (f *folded) catchUp() {
	if len(f.late) > 0 {
		f.order, f.late = append(f.order, f.late[0]), f.late[1:]
	}
}

// zeroBubbleV is ZB-V (Qi et al. 2023, section 6), for at least 2*PP-1 microbatches, of which some may be missing.
func zeroBubbleV(p *Plan, rank int) []Task {
	f, pp := newFolded(p, rank), p.Parallel.PP
	m := max(2*pp-1, f.most)
	both := func(side int) {
		f.do(Backward, side)
		f.do(WeightGrad, side)
	}
	for range 2*(pp-rank) - 1 {
		f.do(Forward, 0)
	}
	for range rank {
		f.do(Forward, 1)
		f.do(Forward, 0)
	}
	for range pp - rank {
		f.do(Forward, 1)
		both(1)
	}
	for f.done[1][Forward] < f.done[0][Forward] || f.done[0][Forward] < m {
		if f.done[0][Forward] < m {
			f.do(Forward, 0)
		}
		both(0)
		f.do(Forward, 1)
		both(1)
	}
	for range rank {
		f.do(Backward, 0)
		f.do(Backward, 1)
	}
	for range pp - rank {
		both(0)
	}
	for side := 1; side >= 0; side-- {
		for f.done[side][WeightGrad] < f.done[side][Backward] {
			f.do(WeightGrad, side)
		}
	}
	return f.order
}

// dualPipeV is the order of DeepSeek's DualPipeV (2025): what overlaps there follows one upon the other here.
func dualPipeV(p *Plan, rank int) []Task {
	f, pp := newFolded(p, rank), p.Parallel.PP
	for range 2 * (pp - 1 - rank) {
		f.do(Forward, 0)
	}
	for range rank + 1 {
		f.do(Forward, 0)
		f.do(Forward, 1)
	}
	for range pp - 1 - rank {
		f.putOff(1)
		f.catchUp()
		f.do(Forward, 1)
	}
	for range f.most - 2*pp + rank + 1 {
		f.do(Forward, 0)
		f.do(Backward, 1)
		f.do(Forward, 1)
		f.do(Backward, 0)
	}
	for range pp - 1 - rank {
		f.do(Backward, 1)
		f.do(Forward, 1)
		f.do(Backward, 0)
	}
	half := rank + 1 // of the last pairs of backwards, from the middle on gradients of weights are put off
	for i := range 2 * (rank + 1) {
		side := 1 - i%2
		if i >= half {
			f.putOff(side)
		} else {
			f.do(Backward, side)
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

// decideOrder fills Tasks.
func (p *Plan) decideOrder() {
	s := p.chosenStrategy()
	p.Tasks = make([][]Task, p.Parallel.PP)
	for rank := range p.Tasks {
		p.Tasks[rank] = s.order(p, rank)
	}
	p.decide("schedule", "strategy", s.name, s.doc)
	if v := p.Parallel.VirtualStages; v > 1 && !p.layerOrder() {
		why := "groups of layers of each rank"
		group := 2 * p.Parallel.PP
		switch {
		case p.Parallel.PP == 1:
			why = "groups of the layers of the only stage, which has no bubble that they could shorten"
		case s.rounds && p.Subsequences.N%group == 0:
			why = fmt.Sprintf("groups of %d subsequences pass through one virtual stage of a rank after another: the bubble is 1/%d of the plain pipeline's", group, v)
		case s.rounds:
			why = fmt.Sprintf("groups of at most %d subsequences pass through one virtual stage of a rank after another, for a smaller bubble", min(group, p.Subsequences.N))
		}
		p.decide("schedule", "virtual_stages", fmt.Sprint(v), why)
	}
}

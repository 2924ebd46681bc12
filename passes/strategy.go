package passes

import (
	"fmt"
	"slices"
	"strings"

	"sppo/lang"
)

// strategy is an order of tasks that has a name.
type strategy struct {
	name    string
	doc     string // why one would want it: the reason of the decision
	slices  bool   // knows subsequences
	virtual bool   // knows virtual stages
	order   func(p *Plan, rank int) []Task
}

// strategies are the orders that schedule knows, by the names of the papers and systems that brought them.
var strategies = []strategy{
	{
		name: "sppo", slices: true, virtual: true, order: oneSequence,
		doc: "one sequence at a time, all subsequences forward, then all backward in reverse: K and V of one microbatch live at a time",
	},
	{
		name: "overlapped-sppo", slices: true, virtual: true, order: overlapped,
		doc: "one sequence behind another, the next one begun while this one turns round: one bubble for the batch, K and V of at most two microbatches live",
	},
	{
		name: "terapipe", slices: true, order: allForward,
		doc: "all subsequences of all microbatches forward, then all backward: one bubble for the batch, and all activations live at the turn",
	},
	{
		name: "gpipe", order: allForward,
		doc: "all microbatches forward, then all backward: one bubble for the batch, and all activations live at the turn",
	},
	{
		name: "1f1b", order: oneForwardOneBackward,
		doc: "one forward, one backward in turn once the pipeline is full: one bubble for the batch, activations of at most pp microbatches live",
	},
	{
		name: "seq1f1b", slices: true, order: oneForwardOneBackward,
		doc: "one forward, one backward in turn at the grain of subsequences: one bubble for the batch, K and V of at most two or so microbatches live",
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
	s := p.Schedule.Strategy
	if s != "" && s != "auto" && findStrategy(s) == nil {
		return []problem{fault("schedule.strategy", lang.NotYet, "for now "+strings.Join(strategyNames(), ", "), "strategy = %s is not implemented yet", s)}
	}
	chosen := p.chosenStrategy()
	if chosen.name != strategies[0].name && p.Schedule.Order == OrderLayer {
		return []problem{fault("schedule.strategy", lang.Conflict, "strategy = sppo, or order = sequence", "strategy = %s weaves sequences, and order = layer takes them one by one", chosen.name)}
	}
	if !chosen.virtual && p.Schedule.VirtualStages > 1 {
		return []problem{fault("schedule.virtual_stages", lang.NotYet, "for now strategy = sppo", "virtual_stages = %d with strategy = %s is not implemented yet", p.Schedule.VirtualStages, chosen.name)}
	}
	if n := p.Schedule.Subsequences.Count; !chosen.slices && n > 1 {
		with := "terapipe"
		if chosen.name == "1f1b" {
			with = "seq1f1b"
		}
		return []problem{fault("schedule.subsequences", lang.Conflict, "subsequences = 1, or strategy = "+with, "strategy = %s takes whole sequences, not %d subsequences of one", chosen.name, n)}
	}
	return nil
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
				order = append(order, Task{Forward, microbatch, i, stage, 0})
			}
		}
	}
	return order
}

// bothDirections are the forwards of all microbatches and their backwards, each kind in the order of microbatches.
func bothDirections(p *Plan, rank int) (forward, backward []Task) {
	for m := range p.Parallel.Microbatches {
		f := p.forwardOrder(rank, m)
		forward = append(forward, f...)
		backward = append(backward, mirrored(f)...)
	}
	return forward, backward
}

// allForward is the order of GPipe (Huang et al. 2019) and, over subsequences, of TeraPipe (Li et al. 2021).
func allForward(p *Plan, rank int) []Task {
	forward, backward := bothDirections(p, rank)
	return append(forward, backward...)
}

// oneForwardOneBackward is the order of PipeDream-flush (Narayanan et al. 2021) and, over subsequences, of Seq1F1B (Sun
// et al. 2024): a rank begins with as many forwards as its distance from the end of the pipeline asks for, and N-1 more,
// since the first backward is that of the last subsequence.
func oneForwardOneBackward(p *Plan, rank int) []Task {
	forward, backward := bothDirections(p, rank)
	warmUp := min(p.Parallel.PP-1-rank+p.Subsequences.N-1, len(forward))
	order := slices.Clone(forward[:warmUp])
	for i, b := range backward {
		if warmUp+i < len(forward) {
			order = append(order, forward[warmUp+i])
		}
		order = append(order, b)
	}
	return order
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
		p.decide("schedule", "virtual_stages", fmt.Sprint(v),
			fmt.Sprintf("groups of %d subsequences pass through one virtual stage of a rank after another: the bubble is 1/%d of the plain pipeline's", 2*p.Parallel.PP, v))
	}
}

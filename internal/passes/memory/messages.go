package memory

import (
	"cmp"
	"slices"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/schedule"
	"sppo.dev/ir"
)

// WaitingInputs returns, for every task of every stage, the bytes of messages that are held while the task
// runs: the result of the previous task, which is being sent, and inputs of later tasks that have arrived or
// might arrive meanwhile.
func (m *Meter) WaitingInputs() [][]ir.Bytes {
	w, p, g := inputs{Meter: m}, m.Plan, m.Model
	for _, z := range w.Sizes {
		w.hidden = append(w.hidden, graph.Align(g.HiddenBytes(z)))
	}
	w.starts, w.ends = w.Times(g)
	w.held, w.arrivals = make([]ir.Bytes, len(w.Nodes)), make([][]arrival, len(p.Tasks))
	held := make([][]ir.Bytes, len(p.Tasks))
	for rank, tasks := range p.Tasks {
		w.arrivals[rank] = make([]arrival, 0, len(tasks))
	}
	for rank := range p.Tasks {
		w.send(rank)
	}
	for rank, tasks := range p.Tasks {
		w.wait(rank)
		held[rank] = w.held[w.Firsts[rank] : w.Firsts[rank]+len(tasks)]
	}
	return held
}

// inputs holds the messages of a plan's tasks. Lists are indexed by task number, and the lists of arrivals by
// rank.
type inputs struct {
	*Meter
	hidden       []ir.Bytes // [i]
	starts, ends []int
	held         []ir.Bytes
	arrivals     [][]arrival
}

// arrival is the time at which the input of a task, given by its number, arrives.
type arrival struct{ time, task int }

// send records where the results of a rank's tasks go, and the bytes held while they are sent.
func (w *inputs) send(rank int) {
	p, first := w.Plan, w.Firsts[rank]
	tasks := p.Tasks[rank]
	list := w.Schedule(rank)
	for i := range tasks {
		n := first + i
		t := &w.Nodes[n]
		to, next := int(t.To), int(t.Next)
		switch {
		case t.Feeds:
		case t.Kind == plan.Forward: // the result is the input of the backward, which begins with the head
			to, next = rank, int(w.NumberOf(w.Task(int32(n)).As(plan.Backward)))
		default:
			continue
		}
		size := w.hidden[t.Subsequence]
		if a := list.Last(i); a.Op == schedule.EndOnHost && p.ResultOnHost(tasks[i], tasks[a.Of]) { // copied to the host, and back
			w.held[n+1] += size
			w.held[next-1] += size
			continue
		}
		if to == rank { // stays on the rank: the task itself holds it until the task ends
			w.arrivals[to] = append(w.arrivals[to], arrival{w.starts[n+1] + 1, next})
			continue
		}
		w.arrivals[to] = append(w.arrivals[to], arrival{w.ends[n], next})
		if i+1 < len(tasks) {
			w.held[n+1] += size
		}
	}
}

// wait adds up, for each task of a rank, the inputs of later tasks that have arrived or might arrive while the
// task runs.
func (w *inputs) wait(rank int) {
	arrivals, first := w.arrivals[rank], w.Firsts[rank]
	slices.SortFunc(arrivals, func(a, b arrival) int { return cmp.Compare(a.time, b.time) })
	come := make([]bool, len(w.Tasks[rank]))
	var waiting ir.Bytes
	next := 0
	for i := range come {
		n := first + i
		for next < len(arrivals) && (i+1 == len(come) || arrivals[next].time <= w.starts[n+1]) {
			at := arrivals[next].task
			come[at-first] = true
			waiting += w.hidden[w.Nodes[at].Subsequence]
			next++
		}
		if come[i] { // counted with the running layer
			waiting -= w.hidden[w.Nodes[n].Subsequence]
		}
		w.held[n] += waiting
	}
}

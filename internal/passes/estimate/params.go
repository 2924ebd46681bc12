package estimate

import (
	"sppo.dev/internal/cost"
	"sppo.dev/internal/schedule"
	"sppo.dev/ir"
)

// This file estimates when the collectives of replicas on weights and gradients end. They have a stream of their own, on
// which they run one after another. Without replicas, or if ranks share processors, those of visits are part of the times of
// visits, and the others take the time of the rank.

// paramCosts holds the durations of collectives on weights and gradients.
type paramCosts struct {
	kinds     []paramTimes // by kind of layers, and of the head
	ownStream bool         // whether they have their own stream
	byVisit   bool         // whether weights are gathered for each visit
	cost      cost.Model
}

// paramTimes holds the durations for a layer of one kind, or for the head.
type paramTimes struct {
	weights   series     // to gather weights
	gradients series     // to reduce the gradients of a visit
	sum       series     // to sum whole gradients
	add       ir.Seconds // to add reduced gradients to those of earlier visits
}

func (u Updater) params() paramCosts {
	c := paramCosts{ownStream: u.ownStream(), byVisit: u.byVisit(), cost: u.cost}
	for kind := range u.graph.Kinds() {
		b := u.graph.Plain(kind)
		c.kinds = append(c.kinds, paramTimes{u.weights(b), u.gradients(b), u.summed(b), u.added(b)})
	}
	c.kinds = append(c.kinds, paramTimes{sum: u.summed(u.graph.Head)})
	return c
}

// kindAt returns the index in paramCosts of an action's layer, or of the head.
func (s *Simulation) kindAt(n int32, a schedule.Action) int {
	stage := int(s.Nodes[n].Stage)
	if int(a.Layer) == s.Plan.LayersPerStage[stage] {
		return len(s.params.kinds) - 1
	}
	return s.graph.KindOf(s.Plan.LayerAt(stage, int(a.Layer)))
}

// simParams tracks a rank's stream of collectives on weights and gradients.
type simParams struct {
	through  ir.Seconds              // when the last one issued ends
	owed     ir.Seconds              // when the last Reduce ends
	owes     ir.Seconds              // how long it takes to add the results of the last Reduce to earlier ones
	reduced  map[[2]int32]bool       // [stage, layer]: whether a Reduce has been
	gathered map[[2]int32]ir.Seconds // [stage, layer]: when its weights are whole
	beside   cost.Beside
}

// issue adds collectives to the stream, after the kernels before them, and returns when they end.
func (st *simStage) issue(s *series) ir.Seconds {
	st.run(s.kernels)
	for _, p := range s.parts {
		if p.d > 0 {
			c := cost.Collective{Stream: ir.Params, Link: p.link, Share: st.job.params.cost.Share(p.link), Begin: max(st.through, st.now), D: p.d}
			st.through = c.Begin + p.d
			st.beside.Add(&c, p.d, st.now, func(ir.Stream, ir.Seconds) {})
		}
	}
	return st.through
}

// actOnParams simulates an action on weights or gradients of a layer, or of the head.
func (s *Simulation) actOnParams(st *simStage, n int32, a schedule.Action) {
	switch a.Op {
	case schedule.Gather:
		s.gather(st, a)
	case schedule.Reduce:
		s.reduce(st, n, a)
	default:
		s.sum(st, n, a)
	}
}

// gather gathers the weights of a layer. Without a stream of their own, they are part of the visit before, or the rank waits.
func (s *Simulation) gather(st *simStage, a schedule.Action) {
	n := st.first + a.Task
	weights := &s.params.kinds[s.kindAt(n, a)].weights
	switch {
	case s.params.ownStream:
		if st.gathered == nil {
			st.gathered = map[[2]int32]ir.Seconds{}
		}
		st.gathered[[2]int32{s.Nodes[n].Stage, a.Layer}] = st.issue(weights)
	case !s.params.byVisit:
		st.run(weights.alone())
	}
}

// reduce reduces the gradients of a visit, once those of the previous visit have been added up. The few of the first half of a backward are
// counted with those of the second.
func (s *Simulation) reduce(st *simStage, n int32, a schedule.Action) {
	of, layer := &s.params.kinds[s.kindAt(n, a)], [2]int32{s.Nodes[n].Stage, a.Layer}
	if s.Nodes[n].Split {
		return
	}
	if st.owes > 0 {
		st.now = max(st.now, st.owed)
		st.run(st.owes)
	}
	if st.reduced == nil {
		st.reduced = map[[2]int32]bool{}
	}
	if st.owes = 0; st.reduced[layer] {
		st.owes = of.add
	}
	st.reduced[layer] = true
	if s.params.ownStream {
		st.owed = st.issue(&of.gradients)
	}
}

// sum sums whole gradients of a layer, or of the head.
func (s *Simulation) sum(st *simStage, n int32, a schedule.Action) {
	sum := &s.params.kinds[s.kindAt(n, a)].sum
	if !s.params.ownStream {
		st.run(sum.alone())
		return
	}
	st.issue(sum)
}

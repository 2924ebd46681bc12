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
	link      cost.Link    // among replicas
	share     float64      // of their speed that kernels lose beside them
}

// paramTimes holds the durations for a layer of one kind, or for the head.
type paramTimes struct {
	visit VisitTime  // to gather and to reduce what ZeRO divides, for a visit
	once  ir.Seconds // to gather weights for all visits
	sum   ir.Seconds // to sum whole gradients
}

func (u Updater) params() paramCosts {
	c := paramCosts{ownStream: u.ownStream(), link: u.replicas, share: u.cost.Share(u.replicas)}
	for kind := range u.graph.Kinds() {
		of := paramTimes{once: u.Once(u.graph.Plain(kind)), sum: u.Summed(u.graph.Plain(kind))}
		of.visit.Weights, of.visit.Gradients = u.Visit(kind)
		c.kinds = append(c.kinds, of)
	}
	c.kinds = append(c.kinds, paramTimes{sum: u.Summed(u.graph.Head)})
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
	gathered map[[2]int32]ir.Seconds // [stage, layer]: when its weights are whole
	beside   cost.Beside
}

// issue adds a collective to the stream and returns when it ends.
func (st *simStage) issue(d ir.Seconds) ir.Seconds {
	if d > 0 {
		of := &st.job.params
		c := cost.Collective{Stream: ir.Params, Link: of.link, Share: of.share, Begin: max(st.through, st.now), D: d}
		st.through = c.Begin + d
		st.beside.Add(&c, d, st.now, func(ir.Stream, ir.Seconds) {})
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

func (s *Simulation) gather(st *simStage, a schedule.Action) {
	n := st.first + a.Task
	of := &s.params.kinds[s.kindAt(n, a)]
	if !s.params.ownStream {
		st.run(of.once)
		return
	}
	if st.gathered == nil {
		st.gathered = map[[2]int32]ir.Seconds{}
	}
	st.gathered[[2]int32{s.Nodes[n].Stage, a.Layer}] = st.issue(of.visit.Weights + of.once)
}

// reduce reduces the gradients of a visit, once those of the previous visit have been added up. The few of the first half of a backward are
// counted with those of the second.
func (s *Simulation) reduce(st *simStage, n int32, a schedule.Action) {
	if s.params.ownStream && !s.Nodes[n].Split {
		st.now = max(st.now, st.owed)
		st.owed = st.issue(s.params.kinds[s.kindAt(n, a)].visit.Gradients)
	}
}

// sum sums whole gradients of a layer, or of the head.
func (s *Simulation) sum(st *simStage, n int32, a schedule.Action) {
	d := s.params.kinds[s.kindAt(n, a)].sum
	if !s.params.ownStream {
		st.run(d)
		return
	}
	st.issue(d)
}

package estimate

import (
	"sppo.dev/ir"
	"sppo.dev/ir/cost"
	"sppo.dev/passes/walk"
)

// simStaging is what of a rank's hidden states, K and V waits on the host in layer order, and where K and V stream. Lists are by task
// of the rank.
type simStaging struct {
	waits         []bool // the task's input waits there; nil: nothing does
	gone, fetched []ir.Seconds
	caches        map[int32][]ir.Seconds // [k], by stage: when K and V of a layer are back
	lagging       ir.Seconds             // when the result that the last task sent away has left
}

func newSimStaging(tasks int) simStaging {
	return simStaging{
		waits: make([]bool, tasks), gone: make([]ir.Seconds, tasks), fetched: make([]ir.Seconds, tasks),
		caches: map[int32][]ir.Seconds{},
	}
}

// await is for the input of the task that comes.
func (st *simStage) await() {
	if st.waits != nil {
		st.waitFor(st.fetched[st.done])
	}
}

// stageOut sends a task's result to the host, where it waits for its reader.
func (s *Simulation) stageOut(st *simStage, t *walk.Node, reader int32) {
	left := st.link.Copies(cost.Out, st.now, s.hiddenOut[t.Subsequence])
	st.waits[reader], st.gone[reader], st.lagging = true, left, left
}

// stageIn brings back what a task, the rank's next, starts from.
func (s *Simulation) stageIn(st *simStage, at int) {
	if st.waits[at] {
		st.fetched[at] = st.link.Copies(cost.Back, max(st.now, st.gone[at]), s.hiddenBack[st.tasks[at].Subsequence])
	}
}

// cachesIn brings back K and V of the stage that a task, the rank's next, begins to take backward.
func (s *Simulation) cachesIn(st *simStage, at int) {
	stage := st.tasks[at].Stage
	if !s.Plan.StagesCaches(stage) {
		return
	}
	layers := make([]ir.Seconds, s.Plan.LayersPerStage[stage])
	for k := len(layers) - 1; k >= 0; k-- {
		layers[k] = st.link.Copies(cost.Back, st.now, s.cacheBack)
	}
	st.caches[int32(stage)] = layers
}

// waitCaches waits for K and V of the k-th layer of a backward's stage.
func (s *Simulation) waitCaches(st *simStage, t *walk.Node, k int) {
	if layers := st.caches[t.Stage]; k < len(layers) {
		st.waitFor(layers[k])
	}
}

// out is how long the copies of a forward's k-th layer take. What came from the host is there already.
func (s *Simulation) out(st *simStage, t *walk.Node, k int) ir.Seconds {
	d := s.d2h[t.Home][t.At][int(t.First)+k]
	if st.waits == nil {
		return d
	}
	if st.waits[st.done] && k == 0 {
		d -= s.hiddenOut[t.Subsequence]
	}
	if s.Plan.StagesCaches(int(t.Stage)) {
		d += s.cacheOut[t.Subsequence]
	}
	if s.streams {
		d += s.stream.rows[t.Subsequence]
	}
	return d
}

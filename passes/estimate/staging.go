package estimate

import (
	"sppo.dev/ir"
	"sppo.dev/ir/cost"
	"sppo.dev/passes/plan"
	"sppo.dev/passes/walk"
)

// simStaging tracks the hidden states, K and V that a rank keeps on the host if tasks are in layer order or K and
// V are streamed. Lists are indexed by the rank's tasks.
type simStaging struct {
	waits         []bool // whether the task's input is on the host; nil: no task's input is
	gone, fetched []ir.Seconds
	caches        map[int32][]ir.Seconds // by stage, [k]: when K and V of a layer are on the device again
	lagging       ir.Seconds             // when the copy of the last task's result to the host is done
}

func newSimStaging(tasks int) simStaging {
	return simStaging{
		waits: make([]bool, tasks), gone: make([]ir.Seconds, tasks), fetched: make([]ir.Seconds, tasks),
		caches: map[int32][]ir.Seconds{},
	}
}

// await simulates the wait for the input of the next task.
func (st *simStage) await() {
	if st.waits != nil {
		st.waitFor(st.fetched[st.done])
	}
}

// stageOut sends a task's result to the host, where it stays until it is read.
func (s *Simulation) stageOut(st *simStage, t *walk.Node, reader int32) {
	left := st.link.Copies(cost.Out, st.now, s.hiddenOut[t.Subsequence])
	st.waits[reader], st.gone[reader], st.lagging = true, left, left
}

// stageIn loads the input of the rank's next task.
func (s *Simulation) stageIn(st *simStage, at int) {
	if st.waits[at] {
		st.fetched[at] = st.link.Copies(cost.Back, max(st.now, st.gone[at]), s.hiddenBack[st.tasks[at].Subsequence])
	}
}

// cachesIn loads K and V of the stage whose backward begins with the rank's next task.
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

// waitCaches simulates the wait for K and V of the k-th layer of a backward's stage.
func (s *Simulation) waitCaches(st *simStage, t *walk.Node, k int) {
	if layers := st.caches[t.Stage]; k < len(layers) {
		st.waitFor(layers[k])
	}
}

// out returns the time of a forward's copies to the host in its k-th layer. Inputs that were loaded from the
// host need no copy.
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

// recomputeCaches simulates the recomputation of K and V of the k-th layer of a backward's stage from the
// inputs of all subsequences, if the backward begins by recomputing them. Inputs on the host are loaded a few
// at a time.
func (s *Simulation) recomputeCaches(st *simStage, t *walk.Node, k int) {
	task := st.tasks[st.done]
	if !s.Plan.RecomputesCaches(task) {
		return
	}
	came, used := make([]ir.Seconds, len(s.cacheAgain)), make([]ir.Seconds, len(s.cacheAgain))
	begun := st.now
	load := func(i int) {
		if i >= len(came) || s.hiddenBack[i] == 0 {
			return
		}
		if task.Subsequence = i; !s.Plan.InputOffloaded(task, k) {
			return
		}
		free := begun
		if i >= plan.CacheLoads {
			free = used[i-plan.CacheLoads]
		}
		came[i] = st.link.Copies(cost.Back, free, s.hiddenBack[i])
	}
	for i := range plan.CacheLoads - 1 {
		load(i)
	}
	for i, d := range s.cacheAgain {
		load(i + plan.CacheLoads - 1)
		st.waitFor(came[i])
		st.run(d)
		used[i] = st.now
	}
}

package estimate

import (
	"sppo.dev/internal/cost"
	"sppo.dev/internal/passes/walk"
	"sppo.dev/internal/schedule"
	"sppo.dev/ir"
)

// simStaging tracks the hidden states, K and V that a rank keeps on the host if tasks are in layer order or K and
// V are streamed. Lists are indexed by the rank's tasks, unless a comment
// says otherwise.
type simStaging struct {
	waits         []bool // whether the task's input is on the host; nil: no task's input is
	gone, fetched []ir.Seconds
	kv            map[[2]int32]ir.Seconds // by stage and layer of the stage: when K and V are on the device again
	inputs        []ir.Seconds            // [i]: when a layer's input is on the device to recompute K and V
	lagging       ir.Seconds              // when the copy of the last task's result to the host is done
}

func newSimStaging(tasks, subsequences int) simStaging {
	return simStaging{
		waits: make([]bool, tasks), gone: make([]ir.Seconds, tasks), fetched: make([]ir.Seconds, tasks),
		kv: map[[2]int32]ir.Seconds{}, inputs: make([]ir.Seconds, subsequences),
	}
}

// await simulates the wait for the input of the next task.
func (st *simStage) await() {
	if st.waits != nil {
		st.waitFor(st.fetched[st.done])
	}
}

// resultToHost sends a task's result to the host, where it stays until it is read.
func (s *Simulation) resultToHost(st *simStage, t *walk.Node, reader int32) {
	left := st.copies(cost.Out, st.now, s.hiddenOut[t.Subsequence])
	st.waits[reader], st.gone[reader], st.lagging = true, left, left
}

// inputFromHost loads the input of the rank's next task.
func (s *Simulation) inputFromHost(st *simStage, at int) {
	if st.waits[at] {
		st.fetched[at] = st.copies(cost.Back, max(st.now, st.gone[at]), s.hiddenBack[st.tasks[at].Subsequence])
	}
}

// kvFromHost loads K and V of a layer of the stage whose backward begins with the rank's next task.
func (s *Simulation) kvFromHost(st *simStage, a schedule.Action) {
	if stage := st.tasks[a.Task].Stage; s.Plan.HoldsKVOnHost(stage) {
		st.kv[[2]int32{int32(stage), a.Layer}] = st.copies(cost.Back, st.now, s.layer(int32(stage), int(a.Layer)).kvBack)
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
	if s.Plan.HoldsKVOnHost(int(t.Stage)) {
		d += s.layer(t.Stage, k).kvOut[t.Subsequence]
	}
	if s.streams {
		d += s.layer(t.Stage, k).stream.rows[t.Subsequence]
	}
	return d
}

// loadInput loads the input of a layer for a subsequence, if it is on the host.
func (s *Simulation) loadInput(st *simStage, a schedule.Action) {
	of := st.tasks[a.Task]
	of.Subsequence = int(a.Of)
	st.inputs[a.Of] = 0
	if s.Plan.InputOffloaded(of, int(a.Layer)) {
		st.inputs[a.Of] = st.copies(cost.Back, st.now, s.hiddenBack[a.Of])
	}
}

package passes

import (
	"sppo.dev/ir"
	"sppo.dev/ir/cost"
)

// simStaging is what of a rank's hidden states, K and V waits on the host in layer order, and where K and V stream. Lists are by task
// of the rank.
type simStaging struct {
	staged        []bool // the task's result goes there; nil: nothing does
	waits         []bool // the task's input does
	gone, fetched []ir.Seconds
	caches        map[int32][]ir.Seconds // [k], by stage: when K and V of a layer are back
	lagging       ir.Seconds             // when the result that the last task sent away has left
}

func newSimStaging(staged []bool) simStaging {
	n := len(staged)
	return simStaging{staged: staged, waits: make([]bool, n), gone: make([]ir.Seconds, n), fetched: make([]ir.Seconds, n), caches: map[int32][]ir.Seconds{}}
}

// await is for the input of the task that comes.
func (st *simStage) await() {
	if st.staged != nil {
		st.waitFor(st.fetched[st.done])
	}
}

// stageOut sends a task's result to the host.
func (s *simulation) stageOut(st *simStage, n int32) {
	t := s.task(n)
	_, reader, _ := s.plan.Reader(t)
	at := s.position(s.numberOf(reader))
	left := st.link.Copies(cost.Out, st.now, s.hiddenOut[t.Subsequence])
	st.waits[at], st.gone[at], st.lagging = true, left, left
}

// stageIn brings back what a task, the rank's next, starts from.
func (s *simulation) stageIn(st *simStage, at int) {
	if st.staged == nil {
		return
	}
	next := st.tasks[at]
	if st.waits[at] {
		st.fetched[at] = st.link.Copies(cost.Back, max(st.now, st.gone[at]), s.hiddenBack[next.Subsequence])
	}
	if !s.plan.StagesCachesIn(next) {
		return
	}
	layers := make([]ir.Seconds, s.plan.LayersPerStage[next.Stage])
	for k := range layers {
		layers[len(layers)-1-k] = st.link.Copies(cost.Back, st.now, s.cacheBack)
	}
	st.caches[int32(next.Stage)] = layers
}

// waitCaches waits for K and V of the k-th layer of a backward's stage.
func (s *simulation) waitCaches(st *simStage, t *stop, k int) {
	if st.staged != nil && s.plan.StagesCachesIn(st.tasks[st.done]) {
		st.waitFor(st.caches[t.stage][k])
	}
}

// out is how long the copies of a forward's k-th layer take. What came from the host is there already.
func (s *simulation) out(st *simStage, t *stop, k int) ir.Seconds {
	d := s.d2h[t.home][t.at][int(t.first)+k]
	if st.staged == nil {
		return d
	}
	if st.waits[st.done] && k == 0 {
		d -= s.hiddenOut[t.subsequence]
	}
	if s.plan.StagesCachesOut(int(t.stage)) {
		d += s.cacheOut[t.subsequence]
	}
	if s.streams {
		d += s.stream.rows[t.subsequence]
	}
	return d
}

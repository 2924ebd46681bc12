package passes

import (
	"sppo/ir"
	"sppo/ir/cost"
)

// simHost is what of a rank's hidden states, K and V waits on the host in layer order.
type simHost struct {
	detours []bool               // by task
	gone    map[Task]ir.Seconds  // by reader: when its input has left
	fetched map[Task]ir.Seconds  // when a task's input is back
	caches  map[int][]ir.Seconds // [k], by stage: when K and V of a layer are back
	lagging ir.Seconds           // when the result that the last task sent away has left
}

func newSimHost(detours []bool) simHost {
	return simHost{detours: detours, gone: map[Task]ir.Seconds{}, fetched: map[Task]ir.Seconds{}, caches: map[int][]ir.Seconds{}}
}

// depart sends a task's result to the host.
func (s *simulation) depart(st *simStage, t Task) {
	_, reader, _ := s.plan.Reader(t)
	left := st.link.Copies(cost.Out, st.now, s.hiddenOut[t.Subsequence])
	st.gone[reader], st.lagging = left, left
}

// fetch brings back what the task after this one starts from.
func (s *simulation) fetch(st *simStage) {
	if st.done+1 == len(st.tasks) {
		return
	}
	next := st.tasks[st.done+1]
	if gone, ok := st.gone[next]; ok {
		st.fetched[next] = st.link.Copies(cost.Back, max(st.now, gone), s.hiddenBack[next.Subsequence])
	}
	if !s.plan.Unparks(next) {
		return
	}
	layers := make([]ir.Seconds, s.plan.LayersPerStage[next.Stage])
	for k := range layers {
		layers[len(layers)-1-k] = st.link.Copies(cost.Back, st.now, s.cacheBack)
	}
	st.caches[next.Stage] = layers
}

// waitCaches waits for K and V of the k-th layer of a backward's stage.
func (s *simulation) waitCaches(st *simStage, t Task, k int) {
	if s.plan.Unparks(t) {
		st.waitFor(st.caches[t.Stage][k])
	}
}

// out is how long the copies of a forward's k-th layer take. What came from the host is there already.
func (s *simulation) out(st *simStage, t Task, k int) ir.Seconds {
	first, _ := st.span(t)
	d := s.d2h[s.plan.Home(t.Stage)][s.plan.rangeOf(t)][first+k]
	if _, ok := st.fetched[t]; ok && k == 0 {
		d -= s.hiddenOut[t.Subsequence]
	}
	if s.plan.Parks(t.Stage) {
		d += s.cacheOut[t.Subsequence]
	}
	if s.plan.Streams() {
		d += s.stream.rows[t.Subsequence]
	}
	return d
}

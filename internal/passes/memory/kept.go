package memory

import (
	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/walk"
	"sppo.dev/internal/schedule"
	"sppo.dev/ir"
)

// kept holds what forwards leave in memory until their backwards.
type kept struct {
	*gauge
	units   []*unitsLeft // [i]; nil before the first forward of subsequence i
	leaving []bool       // [layer of a task, numbered over all tasks as in Walk, minus begun]: its offloaded tensors still hold their device bytes
	begun   int          // number of layers of all tasks of earlier ranks
	last    blockOf
	kinds   []int // of the rank's layers
}

func newKept(g *gauge) kept {
	nodes, firsts, end := g.meter.Nodes, g.meter.Firsts, g.meter.Layers
	if g.rank+1 < len(firsts) && firsts[g.rank+1] < len(nodes) {
		end = int(nodes[firsts[g.rank+1]].Layers)
	}
	begun := int(nodes[firsts[g.rank]].Layers)
	return kept{gauge: g, units: make([]*unitsLeft, len(g.sizes)), leaving: make([]bool, end-begun), begun: begun}
}

// unitsLeft holds the bytes that the forwards of a subsequence leave in memory, for each layer of the rank.
type unitsLeft struct{ kept, offloaded []ir.Bytes }

// blockOf is a dataflow and the placement letters that it was built for.
type blockOf struct {
	kind    int
	letters string
	block   *graph.Block
}

// block returns the dataflow of the k-th layer of a task.
func (m *kept) block(t plan.Task, k int) *graph.Block {
	units := len(m.graph.UnitNames)
	own := m.first[t.Stage] + k
	at, kind := own*units, m.kindOf(own)
	if letters := m.plan.Offload.Placement[m.rank][t.Subsequence][at : at+units]; letters != m.last.letters || kind != m.last.kind {
		m.last = blockOf{kind, letters, m.graph.LayerWithout(kind, plan.RecomputedBy(letters))}
	}
	return m.last.block
}

// kindOf returns the kind of a layer of the rank.
func (m *kept) kindOf(own int) int {
	if m.graph.Kinds() == 1 {
		return 0
	}
	if m.kinds == nil {
		m.kinds = m.plan.KindsOn(m.graph, m.rank)
	}
	return m.kinds[own]
}

// leave returns the bytes that a forward will leave in memory.
func (m *kept) leave(t plan.Task) *unitsLeft {
	if u := m.units[t.Subsequence]; u != nil {
		return u
	}
	n, units := m.plan.LayersOf(m.rank), len(m.graph.UnitNames)
	u := &unitsLeft{make([]ir.Bytes, n), make([]ir.Bytes, n)}
	placement, before := m.plan.Offload.Placement[m.rank][t.Subsequence], blockOf{}
	for k := range n {
		letters := blockOf{kind: m.kindOf(k), letters: placement[k*units : (k+1)*units]}
		if letters == before {
			u.kept[k], u.offloaded[k] = u.kept[k-1], u.offloaded[k-1]
			continue
		}
		before = letters
		for at, size := range m.meter.Saved[t.Subsequence][letters.kind] {
			switch letters.letters[at] {
			case plan.PlacementOffload:
				u.offloaded[k] += graph.Align(size)
			case plan.PlacementKeep:
				u.kept[k] += graph.Align(size)
			}
		}
	}
	m.units[t.Subsequence] = u
	return u
}

// isLeaving returns a flag to read or set: whether the tensors that a forward has offloaded from its k-th layer
// still hold their device bytes.
func (m *kept) isLeaving(t *walk.Node, k int) *bool { return &m.leaving[int(t.Layers)-m.begun+k] }

// release frees the device bytes of a forward's layer after their copy to the host.
func (m *kept) release(t *walk.Node, a schedule.Action) {
	if is := m.isLeaving(t, int(a.Layer)); *is {
		m.now[TermCopies] -= m.units[t.Subsequence].offloaded[t.First+a.Layer]
		*is = false
	}
}

// reload begins the copies that reload a layer for a backward.
func (m *kept) reload(t *walk.Node, a schedule.Action) {
	n := m.units[t.Subsequence].offloaded[t.First+a.Layer]
	m.now[TermCopies] += n
	m.most = max(m.most, m.host)
	m.host -= n
}

package estimate

import (
	"sppo.dev/graph"
	"sppo.dev/ir"
	"sppo.dev/ir/cost"
	"sppo.dev/passes/plan"
	"sppo.dev/passes/walk"
)

// streamCosts holds the durations of streamed transfers.
type streamCosts struct {
	rows []ir.Seconds // [i], to copy a layer's own rows of K and V to the host
	in   func(walk.Load) ir.Seconds
	out  func(walk.Load) ir.Seconds // dK and dV of a block
}

// stretches holds the times of attention in a layer of one kind. The again list is for the forward attention
// that the backward recomputes.
type stretches struct{ forward, again, backward []stretch } // [i]

// stretch holds the times of attention over a subsequence's own rows and over blocks, and of the part of a
// layer before attention.
type stretch struct {
	before, own ir.Seconds
	blocks      []ir.Seconds
}

func (s *stretch) total() ir.Seconds {
	t := s.before + s.own
	for _, d := range s.blocks {
		t += d
	}
	return t
}

// add computes the times of a subsequence in a layer. Collectives that are still in progress when a pass begins
// delay those of the pass; forwardFinds and backwardFinds are their remaining times.
func (s *stretches) add(pr Pricer, b *graph.Block, z graph.Size, forwardFinds, backwardFinds ir.Seconds) {
	forward, backward := pr.stretch(b, b.Forward, z, forwardFinds), stretch{}
	if b.Attends {
		backward = pr.stretch(b, b.Backward, z, backwardFinds)
	}
	again := forward
	again.before = 0
	s.forward, s.backward, s.again = append(s.forward, forward), append(s.backward, backward), append(s.again, again)
}

// rowsOut returns the time to copy a layer's own rows of K and V to the host.
func rowsOut(pr Pricer, g *graph.Model, z graph.Size) (rows ir.Seconds) {
	for i := range g.Layer.Values {
		if v := &g.Layer.Values[i]; v.Kind == graph.Cache && v.Rows == graph.Full {
			rows += pr.Cost.Time(ir.Work{Kind: ir.WorkD2H, Bytes: v.Bytes(z)}, cost.Link{})
		}
	}
	return rows
}

// stretch returns the times of attention in a pass.
func (pr Pricer) stretch(b *graph.Block, nodes []graph.Node, z graph.Size, taken ir.Seconds) stretch {
	for i := range nodes {
		if nodes[i].Attends() {
			pieces := pr.pieces(b, &nodes[i], z)
			return stretch{pr.Makespan(b, nodes[:i], z, taken), pieces[0], pieces[1:]}
		}
	}
	panic("internal: a layer without attention")
}

// CopyCosts returns functions for the time of a load, and for the time to copy a block's gradients back to the
// host. Each buffer is copied by one instruction.
func CopyCosts(p *plan.Plan, g *graph.Model, m cost.Model) (in, out func(walk.Load) ir.Seconds) {
	price := func(work ir.WorkKind, of graph.Kind) func(walk.Load) ir.Seconds {
		known := map[int64]ir.Seconds{} // by tokens
		return func(l walk.Load) ir.Seconds {
			t, ok := known[l.End-l.First]
			if !ok {
				z := graph.Size{Tokens: l.End - l.First, Batch: int64(p.Parallel.Microbatch), SP: 1}
				for i := range g.Layer.Values {
					if v := &g.Layer.Values[i]; v.Kind == of && v.Rows == graph.Full {
						t += m.Time(ir.Work{Kind: work, Bytes: v.Bytes(z)}, cost.Link{})
					}
				}
				known[z.Tokens] = t
			}
			return t
		}
	}
	caches, grads := price(ir.WorkH2D, graph.Cache), price(ir.WorkH2D, graph.CacheGrad)
	in = func(l walk.Load) ir.Seconds {
		t := caches(l)
		if l.Grads {
			t += grads(walk.Load{First: l.Begun, End: l.End})
		}
		return t
	}
	return in, price(ir.WorkD2H, graph.CacheGrad)
}

// simStream tracks the copies of a rank's streamed rows.
type simStream struct {
	queue  *walk.LoadQueue
	coming []ir.Seconds  // end times of issued loads that have not been used yet
	rows   []ir.Seconds  // [LoadQueue.Place]: when the last rows of K and V were on the host
	grads  []ir.Seconds  // [LoadQueue.Place]: when the last rows of dK and dV were on the host
	freed  [2]ir.Seconds // when the copies of the last two blocks of dK and dV ended: a load reuses the bytes of the earlier one
}

func newSimStream(q *walk.LoadQueue) simStream {
	return simStream{queue: q, rows: make([]ir.Seconds, len(q.Rows)), grads: make([]ir.Seconds, len(q.Rows))}
}

// take issues the loads that should be in transit by now, and waits for the next one.
func (s *Simulation) take(st *simStage) {
	for l, ok := st.queue.Next(); ok; l, ok = st.queue.Next() {
		start, at := max(st.now, st.freed[0]), st.queue.Place(l)
		if l.Own || l.End == st.queue.Sizes[l.Task.Subsequence].Prefix {
			start = max(start, st.rows[at])
		}
		if l.Own && l.Grads {
			start = max(start, st.grads[at])
		}
		st.coming = append(st.coming, st.link.Copies(cost.Back, start, s.stream.in(l)))
	}
	st.queue.Take()
	st.waitFor(st.coming[0])
	st.coming = st.coming[1:]
}

// runLayer simulates the k-th layer of a task, in which attention processes blocks as they arrive.
func (s *Simulation) runLayer(st *simStage, at *walk.Node, k int, whole ir.Seconds) {
	if !s.streams {
		s.sharedLayer(st, at, k, whole)
		return
	}
	t, i := st.tasks[st.done], at.Subsequence
	costs := s.Costs.layer(at.Stage, k)
	if t.Kind == plan.Forward {
		whole -= s.attend(st, &costs.stream.forward[i])
		st.run(max(0, whole))
		return
	}
	if !s.graph.LayerOf(s.graph.KindOf(s.Plan.LayerAt(int(at.Stage), k))).Attends {
		st.run(whole)
		return
	}
	s.take(st)
	if again := whole - costs.backward[i].Whole; s.makesAttention(t, k) {
		a := &costs.stream.again[i]
		st.run(max(0, again-a.total()))
		whole -= again
		s.attend(st, a)
	}
	b := &costs.stream.backward[i]
	st.run(b.before + b.own)
	layer := s.Plan.Layers(t.Stage)[k]
	for j, l := range walk.Blocks(s.Plan.Stream.Block, s.graph.OfLayer(st.queue.Sizes[i], layer)) {
		s.take(st)
		st.run(b.blocks[j])
		l.Task, l.Layer = t, layer
		s.sendGrads(st, l)
	}
	st.run(max(0, whole-b.total()))
}

// attend simulates a layer up to the end of attention and returns the time that this takes without waits.
func (s *Simulation) attend(st *simStage, a *stretch) ir.Seconds {
	st.run(a.before + a.own)
	for _, d := range a.blocks {
		s.take(st)
		st.run(d)
	}
	return a.total()
}

func (s *Simulation) sendGrads(st *simStage, l walk.Load) {
	left := st.link.Copies(cost.Out, st.now, s.stream.out(l))
	st.grads[st.queue.Place(l)] = left
	st.freed = [2]ir.Seconds{st.freed[1], left}
	st.queue.SentGrads(l)
}

// sentRows records when the copies of a forward's layer, including its rows of K and V, are done.
func (s *Simulation) sentRows(st *simStage, k int, left ir.Seconds) {
	if s.streams {
		t := st.tasks[st.done]
		l := walk.Load{Task: t, Layer: s.Plan.Layers(t.Stage)[k]}
		st.rows[st.queue.Place(l)] = left
		st.queue.SentRows(t, l.Layer)
	}
}

func (s *Simulation) makesAttention(t plan.Task, k int) bool {
	return walk.MakesAttention(s.Plan.LayerOf(s.graph, t, k))
}

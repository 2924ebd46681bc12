package estimate

import (
	"sppo.dev/internal/cost"
	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/walk"
	"sppo.dev/ir"
)

// streamCosts holds the durations of streamed transfers.
type streamCosts struct {
	in  func(walk.Load) ir.Seconds
	out func(walk.Load) ir.Seconds // dK and dV of a block
}

// stretches holds the times of attention in a layer of one kind. The recompute list is for the forward attention
// that the backward recomputes.
type stretches struct {
	forward, recompute, backward []stretch    // [i]
	rows                         []ir.Seconds // [i], to copy the layer's own rows of K and V to the host
}

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
	recompute := forward
	recompute.before = 0
	s.rows = append(s.rows, rowsOut(pr, b, z))
	s.forward, s.backward, s.recompute = append(s.forward, forward), append(s.backward, backward), append(s.recompute, recompute)
}

// rowsOut returns the time to copy a layer's own rows of K and V to the host.
func rowsOut(pr Pricer, b *graph.Block, z graph.Size) (rows ir.Seconds) {
	for i := range b.Values {
		if v := &b.Values[i]; v.Kind == graph.Cache && v.Rows == graph.Full {
			rows += pr.Cost.Time(ir.Work{Kind: ir.WorkD2H, Bytes: v.Bytes(z)}, cost.Link{})
		}
	}
	return rows
}

// stretch returns the times of attention in a pass: none in a layer without attention.
func (pr Pricer) stretch(b *graph.Block, nodes []graph.Node, z graph.Size, taken ir.Seconds) stretch {
	for i := range nodes {
		if nodes[i].Attends() {
			pieces := pr.pieces(b, &nodes[i], z)
			return stretch{pr.Makespan(b, nodes[:i], z, taken), pieces[0], pieces[1:]}
		}
	}
	return stretch{}
}

// CopyCosts returns functions for the time of a load, and for the time to copy a block's gradients back to the
// host. Each buffer is copied by one instruction.
func CopyCosts(p *plan.Plan, g *graph.Model, m cost.Model) (in, out func(walk.Load) ir.Seconds) {
	kv := g.WithKV().Values
	price := func(work ir.WorkKind, of graph.Kind) func(walk.Load) ir.Seconds {
		known := map[int64]ir.Seconds{} // by tokens
		return func(l walk.Load) ir.Seconds {
			t, ok := known[l.End-l.First]
			if !ok {
				z := graph.Size{Tokens: l.End - l.First, Batch: int64(p.Parallel.Microbatch), SP: 1}
				for i := range kv {
					if v := &kv[i]; v.Kind == of && v.Rows == graph.Full {
						t += m.Time(ir.Work{Kind: work, Bytes: v.Bytes(z)}, cost.Link{})
					}
				}
				known[z.Tokens] = t
			}
			return t
		}
	}
	rows, grads := price(ir.WorkH2D, graph.Cache), price(ir.WorkH2D, graph.CacheGrad)
	in = func(l walk.Load) ir.Seconds {
		t := rows(l)
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

func newSimStream(p *plan.Plan, q *walk.LoadQueue) simStream {
	return simStream{queue: q, rows: make([]ir.Seconds, walk.Places(p)), grads: make([]ir.Seconds, walk.Places(p))}
}

// runLayer simulates the k-th layer of a task, in which attention processes blocks as they arrive. The rest of the
// layer runs at the end, except what precedes the attention that a backward recomputes.
func (s *Simulation) runLayer(st *simStage, at *walk.Node, k int, whole ir.Seconds) {
	if !s.streams {
		s.sharedLayer(st, at, k, whole)
		return
	}
	costs, i := s.Costs.layer(at.Stage, k), at.Subsequence
	var of *stretch
	block := 0
	for _, x := range st.queue.Visit() {
		switch x.Op {
		case walk.Attend:
			block = 0
			switch {
			case x.Recomputed:
				of = &costs.stream.recompute[i]
				st.run(max(0, whole-costs.backward[i].Whole-of.total()))
				whole = costs.backward[i].Whole
			case at.Kind == plan.Backward:
				of = &costs.stream.backward[i]
				whole -= of.total()
			default:
				of = &costs.stream.forward[i]
				whole -= of.total()
			}
			st.run(of.before + of.own)
		case walk.Issue:
			st.coming = append(st.coming, st.copies(cost.Back, st.ready(x), s.stream.in(*x.Load)))
		case walk.Use:
			st.waitFor(st.coming[0])
			st.coming = st.coming[1:]
			if !x.Own {
				st.run(of.blocks[block])
				block++
			}
		case walk.Send:
			left := st.copies(cost.Out, st.now, s.stream.out(*x.Load))
			st.grads[st.queue.Place(x.Visited)] = left
			st.freed = [2]ir.Seconds{st.freed[1], left}
		}
	}
	st.run(max(0, whole))
}

// ready returns when a load can begin.
func (st *simStage) ready(x walk.Transfer) ir.Seconds {
	start, at := max(st.now, st.freed[0]), st.queue.Place(x.Visited)
	if x.Own || x.End == st.queue.Sizes[x.Task.Subsequence].Prefix {
		start = max(start, st.rows[at])
	}
	if x.Own && x.Grads {
		start = max(start, st.grads[at])
	}
	return start
}

// sentRows records when the copies of a forward's layer, including its rows of K and V, are done.
func (s *Simulation) sentRows(st *simStage, k int, left ir.Seconds) {
	if s.streams {
		t := st.tasks[st.done]
		st.rows[st.queue.Place(&walk.Visited{Task: t, Layer: s.Plan.LayerAt(t.Stage, k)})] = left
	}
}

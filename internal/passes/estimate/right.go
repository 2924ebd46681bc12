package estimate

import (
	"slices"

	"sppo.dev/internal/cost"
	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/walk"
	"sppo.dev/ir"
)

// sharedCosts are the times of tasks with helpers. A task and its helpers run together, layer by layer.
type sharedCosts struct {
	layer   map[plan.Task]ir.Seconds // for a task of the first microbatch: its time per layer
	helping map[plan.Task]ir.Seconds // for a task of the first microbatch: time per layer of each helper
}

// sharedCosts computes the costs of the slots in which stages help others. In each layer, a stage sends its queries
// and computes its own part while its helpers compute theirs. A helper computes its own attention first, then
// its parts for all the stages that it helps, one after another. Finally the stage receives and merges the
// results.
func (pr Pricer) sharedCosts(p *plan.Plan, g *graph.Model, t *Costs, far cost.Link) *sharedCosts {
	out := &sharedCosts{layer: map[plan.Task]ir.Seconds{}, helping: map[plan.Task]ir.Seconds{}}
	n := p.Subsequences.N
	for slot := n; slot < n+p.Parallel.PP-1; slot++ {
		for _, kind := range []plan.TaskKind{plan.Forward, plan.Backward} {
			var longest ir.Seconds
			tasks := p.HelpedTasks(kind, slot)
			parts, load := make([]sharedLayer, len(tasks)), make([]ir.Seconds, p.Parallel.PP)
			for k, task := range tasks {
				parts[k] = pr.shareLayer(p, g, task, far)
				out.helping[task] = parts[k].helping
				pieces := ir.Seconds(len(p.Pieces(task))) // which run one after another
				load[task.Stage] += parts[k].own / pieces
				for j := range p.Helpers(task) {
					load[j] += parts[k].helping / pieces
				}
			}
			for k, task := range tasks {
				part := parts[k]
				out.layer[task] = t.plain(p, task) - part.whole + max(part.own, part.messages+slices.Max(load[:p.Helpers(task)])) + part.join
				if task.Piece == 0 {
					longest = max(longest, out.layer[task])
				}
			}
			for _, task := range tasks {
				if task.Piece == 0 {
					out.layer[task] = longest
				}
			}
		}
	}
	return out
}

// plain returns the time that a task takes, without recomputation, for a layer that has no window.
func (c *Costs) plain(p *plan.Plan, t plan.Task) ir.Seconds {
	if t.Kind == plan.Forward {
		return c.kinds[c.graph.FullKind()].Forward[walk.RangeOf(p, t)]
	}
	return c.kinds[c.graph.FullKind()].backward[walk.RangeOf(p, t)].Whole
}

// sharedLayer simulates a layer of a task and the work of its helpers. The parameter `alone` is the layer's time
// without help.
func (s *Simulation) sharedLayer(st *simStage, at *walk.Node, k int, alone ir.Seconds) {
	if s.shared == nil || s.kindOf != nil && s.kindOf[at.Stage][k] != s.graph.FullKind() {
		st.run(alone)
		return
	}
	t := st.tasks[st.done]
	t.Microbatch = 0
	helpers := s.Plan.Helpers(t)
	if helpers == 0 {
		st.run(alone)
		return
	}
	st.run(s.shared.layer[t] + alone - s.plain(s.Plan, t)) // plus recomputation
	for j := range helpers {
		s.stages[j].busy += s.shared.helping[t]
	}
}

// sharedLayer holds the times of a layer's attention, as a whole and in parts.
type sharedLayer struct{ whole, own, helping, messages, join ir.Seconds }

func (pr Pricer) shareLayer(p *plan.Plan, g *graph.Model, t plan.Task, far cost.Link) (out sharedLayer) {
	z, helpers, m := p.SizeOf(t), p.Helpers(t), pr.Cost
	borders := p.HelpedBlocks(t)
	layer := g.Plain(g.FullKind())
	nodes, op := layer.Forward, ir.Attention
	if t.Kind == plan.Backward {
		nodes, op = layer.Backward, ir.AttentionGrad
	}
	for i := range nodes {
		if nodes[i].Op != op {
			continue
		}
		in := graph.BlockInstr(layer, &nodes[i], z)
		out.whole = m.Time(in.Work(), pr.links.stage)
		own := graph.OverKeys(in, z, borders[helpers], z.Prefix+z.Tokens)
		out.own = m.Time(own.Work(), pr.links.stage)
		for j := range helpers {
			if j > 0 && borders[j+1]-borders[j] == borders[j]-borders[j-1] {
				continue // as many keys as in the previous block, all visible to every query
			}
			part := graph.OverKeys(in, z, borders[j], borders[j+1])
			out.helping = max(out.helping, m.Time(part.Work(), pr.links.stage))
		}
		send := func(name string) ir.Seconds {
			return m.Time(ir.Work{Kind: ir.WorkP2P, Bytes: in.Arg(name).Bytes()}, far)
		}
		rows := in.Arg("q").Bytes()
		if op == ir.Attention {
			out.messages = ir.Seconds(helpers) * (send("q") + send("o") + send("lse"))
			rows *= ir.Bytes(helpers + 2)
		} else {
			out.messages = ir.Seconds(helpers) * (3*send("q") + 2*send("lse"))
			rows *= ir.Bytes(3*helpers + 2)
		}
		out.join = m.Time(ir.Work{Kind: ir.WorkMemory, Bytes: rows}, pr.links.stage)
	}
	return out
}

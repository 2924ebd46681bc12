package plan

import (
	"fmt"
	"hash/fnv"
	"slices"
	"strings"
)

// Sums lists, as KEY = VALUE, the decisions that determine the order in which numbers are added. Two plans for
// the same model give identical bits on the same kind of device if their lists are equal. All other decisions
// only move bytes or repeat arithmetic.
func (p *Plan) Sums() []string {
	par := &p.Parallel
	list := []string{
		fmt.Sprint("dp = ", par.DP), fmt.Sprint("sp = ", par.SP), fmt.Sprint("microbatch = ", par.Microbatch),
		"subsequences = " + strings.Trim(fmt.Sprint(p.Subsequences.Lengths), "[]"),
	}
	if par.SP > 1 {
		list = append(list, "sp_mode = "+par.SPMode)
	}
	if par.Ring > 0 {
		list = append(list, fmt.Sprint("ring = ", par.Ring))
	}
	if par.ExpertParallel {
		list = append(list, "expert_parallel = on")
	}
	shared, streamed, divided := p.Mux.Left || p.Mux.Right, p.Streams(), par.Zero >= ZeroGradients
	gradients, common := p.gradientOrder()
	if shared {
		list = append(list, "mux = "+digest(p.Mux))
	}
	if streamed { // all of these determine where blocks of K and V end
		list = append(list, "keep = "+digest(p.Stream), "recompute = "+p.Recompute, "offload = "+digest(p.Offload))
	}
	if shared || streamed || !common {
		list = append(list, fmt.Sprint("pp = ", par.PP), fmt.Sprint("virtual_stages = ", par.VirtualStages))
	}
	if shared { // only the last subsequences in the layers of some stages are shared
		list = append(list, "layers_per_stage = "+strings.Trim(fmt.Sprint(p.LayersPerStage), "[]"))
	}
	if streamed || divided { // divided gradients are summed over ranks during the step, at times that depend on the order
		list = append(list, fmt.Sprint("zero = ", par.Zero), "order = "+par.Order)
	}
	if p.Schedule.LossChunk > 0 {
		list = append(list, fmt.Sprint("loss_chunk = ", p.Schedule.LossChunk))
	}
	return append(list, "order of gradients = "+gradients)
}

// gradientOrder returns a digest of the order in which tasks add to the gradients of parameters, and reports
// whether this order is the same on all stages.
func (p *Plan) gradientOrder() (order string, common bool) {
	orders := make([][]string, p.Parallel.Stages())
	add := func(t Task) {
		orders[t.Stage] = append(orders[t.Stage], fmt.Sprintf("%d.%d.%d", t.Microbatch, t.Subsequence, t.Piece))
	}
	for _, tasks := range p.Tasks {
		late := map[Task]bool{}
		for _, t := range tasks {
			if t.Kind == WeightGrad {
				late[t.As(Backward)] = true
			}
		}
		for _, t := range tasks {
			if t.Kind == WeightGrad || t.Kind == Backward && !late[t] {
				add(t)
			}
		}
	}
	common = !slices.ContainsFunc(orders, func(x []string) bool { return !slices.Equal(x, orders[0]) })
	if common {
		orders = orders[:1]
	}
	return digest(orders), common
}

// digest returns a short hash of a value that people compare but do not read. The names of fields are part of it: after
// one of them is renamed, programs seem to add in another order.
func digest(value any) string {
	h := fnv.New64a()
	fmt.Fprintf(h, "%+v", value)
	return fmt.Sprintf("%016x", h.Sum64())
}

// Package estimate predicts the time of a step from its plan. Costs holds the durations of layers, copies and
// messages, computed with the cluster's cost model. A Simulation runs the actions of all ranks with these
// costs. An Estimator holds what the estimates of a plan's time and of its memory have in common.
package estimate

import (
	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/memory"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/walk"
	"sppo.dev/ir"
)

// Cache holds values that are shared by the estimates of all plans for a job: the dataflow of the model for
// each split over the ranks of a stage, the times of nodes, and the bytes that blocks hold while they run.
// Entries never change.
type Cache struct {
	graphs map[graph.Split]*graph.Model
	prices *prices
	flops  *LayerFlops
	head   ir.Flops // forward pass of the head for one token
	tuned  float64  // FLOPs of a step that trains only part of the model; 0: not yet known
	Blocks memory.Blocks
}

// NewCache returns an empty cache.
func NewCache() *Cache {
	return &Cache{graphs: map[graph.Split]*graph.Model{}, prices: newPrices(), Blocks: memory.Blocks{}}
}

// Model returns the dataflow of a plan's model on one rank.
func (c *Cache) Model(p *plan.Plan) *graph.Model {
	split := p.Split()
	if c.graphs[split] == nil {
		c.graphs[split] = p.Graph()
	}
	return c.graphs[split]
}

// FlopsOfLayer returns the result of the function FlopsOfLayer for a plan's model.
func (c *Cache) FlopsOfLayer(p *plan.Plan) LayerFlops {
	if c.flops == nil {
		f := FlopsOfLayer(p.Model)
		c.flops = &f
		c.head = sumFlops(graph.New(p.Model, graph.Split{SP: 1}, 1).Head, graph.Size{Sequence: 1, Tokens: 1, Batch: 1, SP: 1})
	}
	return *c.flops
}

// tunedFlops returns the FLOPs of a step that trains only part of the model, which are the same for all plans
// for a job.
func (c *Cache) tunedFlops(p *plan.Plan) float64 {
	if c.tuned == 0 {
		c.tuned = tunedFlops(p)
	}
	return c.tuned
}

// Estimator predicts the time and memory of one plan. The plan's stages, lengths and tasks must not
// change after the estimator is created; the placements of saved tensors and the timing of copies
// may change.
type Estimator struct {
	*walk.Walk
	*walk.Shapes
	cache *Cache
	work  *walk.Work
}

// New returns an estimator for a plan, which counts its work in w, unless w is nil.
func New(c *Cache, w *walk.Work, p *plan.Plan) *Estimator {
	e := &Estimator{walk.Must(p), walk.NewShapes(p, c.Model(p)), c, w}
	w.Spend(e.Layers) // to arrange the tasks
	return e
}

// Memory returns a meter for the plan's memory.
func (e *Estimator) Memory() *memory.Meter {
	return memory.NewMeter(e.Walk, e.Shapes, e.cache.Blocks, e.work)
}

// Simulation returns a simulation of the plan's tasks with the given costs.
func (e *Estimator) Simulation(t *Costs) *Simulation { return newSimulation(e.Walk, t, e.work) }

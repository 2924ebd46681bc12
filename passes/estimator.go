package passes

import (
	"sppo.dev/graph"
	"sppo.dev/ir"
)

// cache is what estimates of plans of one job have in common: the dataflow of its model for each split over
// the ranks of a stage, the times of nodes, the bytes of blocks that run. What it keeps never changes.
type cache struct {
	graphs map[graph.Split]*graph.Model
	prices *catalogue
	blocks blockBytes
}

func newCache() *cache {
	return &cache{graphs: map[graph.Split]*graph.Model{}, prices: newCatalogue(), blocks: blockBytes{}}
}

// model is the dataflow of a plan's model on one rank.
func (c *cache) model(p *Plan) *graph.Model {
	split := p.Split()
	if c.graphs[split] == nil {
		c.graphs[split] = p.Graph()
	}
	return c.graphs[split]
}

// estimator predicts the time and the memory of one plan, whose stages, lengths and tasks are those that it had
// when the estimator was made. Placements of saved tensors and the timing of copies may change meanwhile.
type estimator struct {
	*course
	*shapes
	cache *cache
	work  *work
}

func newEstimator(c *cache, w *work, p *Plan) *estimator {
	return &estimator{p.mustCourse(), newShapes(p, c.model(p)), c, w}
}

// memory bounds the plan's memory.
func (e *estimator) memory() *meter { return newMeter(e.course, e.shapes, e.cache.blocks, e.work) }

// simulation runs the plan's tasks with some costs.
func (e *estimator) simulation(t *costs) *simulation { return newSimulation(e.course, t, e.work) }

// shapes are the sizes of a plan's subsequences on one rank, whatever becomes of what they leave.
type shapes struct {
	model *graph.Model
	sizes []graph.Size
	saved [][]ir.Bytes // units of a layer
}

func newShapes(p *Plan, g *graph.Model) *shapes {
	s := &shapes{model: g, sizes: p.Sizes()}
	for _, z := range s.sizes {
		s.saved = append(s.saved, unitSizes(g.Layer, z))
	}
	return s
}

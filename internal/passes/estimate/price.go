package estimate

import (
	"sync"

	"sppo.dev/internal/cost"
	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/walk"
	"sppo.dev/ir"
)

// Pricer computes the times of a block's nodes.
type Pricer struct {
	Cost  cost.Model
	links links
	block int64 // tokens of K and V per block in attention; 0: all
	alone bool  // collectives run alone, without computation beside them
	known *nodePrices
}

// links connect groups of the ranks of a stage: all of them; those that divide heads; and those of a ring. The last two are
// only set if a node names their groups.
type links struct{ stage, heads, ring cost.Link }

func (l links) of(n *graph.Node) cost.Link {
	if l.ring.Ranks == 0 {
		return l.stage
	}
	switch n.Group() {
	case graph.GroupHeads:
		return l.heads
	case graph.GroupRing, graph.GroupBack:
		return l.ring
	}
	return l.stage
}

// NewPricer returns a pricer for the stages of a plan, which shares the times in the cache.
func NewPricer(c *Cache, p *plan.Plan, m cost.Model) Pricer {
	pr := Pricer{Cost: m, links: links{stage: WidestLink(p, m, groupOf(p, graph.GroupSP))}, alone: !p.Overlaps()}
	if p.Parallel.Ring > 0 {
		pr.links.heads, pr.links.ring = WidestLink(p, m, groupOf(p, graph.GroupHeads)), WidestLink(p, m, groupOf(p, graph.GroupRing))
	}
	if p.Streams() || p.Stream.Latents {
		pr.block = p.Stream.Block
	}
	pr.known = c.prices.of(pr)
	return pr
}

// prices caches the times of nodes for all candidates of a search, most of which have many nodes in
// common.
type prices struct {
	mutex  sync.Mutex
	prices map[pricedFor]*nodePrices
}

// pricedFor is everything that times depend on, except the dataflow and the machine.
type pricedFor struct {
	ranksPerNode int
	links        links
	block        int64
}

// newPrices returns an empty cache.
func newPrices() *prices { return &prices{prices: map[pricedFor]*nodePrices{}} }

func (c *prices) of(pr Pricer) *nodePrices {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	key := pricedFor{pr.Cost.RanksPerNode(), pr.links, pr.block}
	if c.prices[key] == nil {
		c.prices[key] = &nodePrices{lists: map[listOfNodes][]ir.Seconds{}, back: map[graph.Size]map[*graph.Node]ir.Seconds{}}
	}
	return c.prices[key]
}

// nodePrices are the times of individual nodes. Only attention and, in a ring, rotations depend on the
// number of tokens before the subsequence.
type nodePrices struct {
	mutex sync.Mutex
	lists map[listOfNodes][]ir.Seconds
	back  map[graph.Size]map[*graph.Node]ir.Seconds
}

// looksBack marks a node whose time also depends on the number of tokens before the subsequence.
const looksBack ir.Seconds = -1

type listOfNodes struct {
	first *graph.Node
	n     int
	size  graph.Size // without the prefix
}

// list returns the times of nodes, and looksBack for those whose time also depends on the prefix.
func (pr Pricer) list(b *graph.Block, nodes []graph.Node, z graph.Size) []ir.Seconds {
	z.Prefix, z.Piece = 0, 0
	key := listOfNodes{&nodes[0], len(nodes), z}
	pr.known.mutex.Lock()
	defer pr.known.mutex.Unlock()
	times, known := pr.known.lists[key]
	if !known {
		times = make([]ir.Seconds, len(nodes))
		for i := range nodes {
			if times[i] = looksBack; !b.LooksBack(&nodes[i]) {
				times[i] = pr.Cost.Time(b.Work(&nodes[i], z), pr.links.of(&nodes[i]))
			}
		}
		pr.known.lists[key] = times
	}
	return times
}

// Back returns the time of a node that looks back.
func (pr Pricer) Back(b *graph.Block, n *graph.Node, z graph.Size) ir.Seconds {
	pr.known.mutex.Lock()
	defer pr.known.mutex.Unlock()
	of := pr.known.back[z]
	if of == nil {
		of = map[*graph.Node]ir.Seconds{}
		pr.known.back[z] = of
	}
	t, known := of[n]
	if !known {
		if pr.block == 0 || !n.Attends() {
			t = pr.Cost.Time(b.Work(n, z), pr.links.of(n))
		} else {
			for _, d := range pr.pieces(b, n, z) {
				t += d
			}
		}
		of[n] = t
	}
	return t
}

// pieces returns the times of attention over the subsequence's own rows, then over each earlier block with the other nodes of its loop.
func (pr Pricer) pieces(b *graph.Block, n *graph.Node, z graph.Size) []ir.Seconds {
	around := b.AroundOf(n)
	piece := func(first, end int64) ir.Seconds {
		in := b.Piece(n, z, first, end, func(_ graph.Arg, v ir.View) ir.View { return v }, func(graph.Attr) ir.Attr { return ir.Int(1) })
		t := pr.Cost.Time(in.Work(), pr.links.stage)
		for i := range around {
			if other := &around[i]; other != n && first < z.Prefix {
				t += pr.Cost.Time(b.Work(other, z.OfPiece(first, end)), pr.links.stage)
			}
		}
		return t
	}
	times := []ir.Seconds{piece(z.Prefix, z.Prefix+z.Tokens)}
	for i, l := range walk.Blocks(pr.block, z) {
		if i > 0 && z.Window == 0 && l.End-l.First == pr.block { // every query sees all of a full block
			times = append(times, times[1])
		} else {
			times = append(times, piece(l.First, l.End))
		}
	}
	return times
}

// Makespan returns the time until the computation and the collectives of nodes are done. Collectives that are
// in progress at the start run for the time given by taken, and delay those of the nodes.
func (pr Pricer) Makespan(b *graph.Block, nodes []graph.Node, z graph.Size, taken ir.Seconds) ir.Seconds {
	if len(nodes) == 0 {
		return taken
	}
	run := running{free: pr.takenBy(taken)}
	run.collective(pr, pr.links.stage, 0, run.free[1])
	const usual = 128 // typical number of values in a block
	var few [usual]ir.Seconds
	ready := few[:]
	if len(b.Values) > usual {
		ready = make([]ir.Seconds, len(b.Values))
	}
	for i, took := range pr.list(b, nodes, z) {
		n := &nodes[i]
		op := &ir.Ops[n.Op]
		stream := pr.stream(op)
		end := run.free[stream]
		for _, a := range n.Args {
			if a.Value != graph.Missing {
				end = max(end, ready[a.Value])
			}
		}
		if took == looksBack {
			took = pr.Back(b, n, z)
		}
		end = run.node(pr, pr.links.of(n), stream, end, took)
		for k, a := range n.Args {
			if a.Value != graph.Missing && op.Operands[k].Dir != ir.Read {
				ready[a.Value] = end
			}
		}
	}
	return max(run.free[0], run.free[1])
}

// running tracks the nodes of a block that run on the two streams, computation and collectives.
type running struct {
	free   [2]ir.Seconds
	beside cost.Beside
}

// node runs a node that can begin at a given time, and returns when it ends.
func (r *running) node(pr Pricer, link cost.Link, stream int, begin, took ir.Seconds) (end ir.Seconds) {
	if stream == 0 {
		r.free[0] = begin + r.beside.Kernel(begin, took)
	} else {
		r.free[1] = begin + took
		r.collective(pr, link, begin, r.free[1])
	}
	return r.free[stream]
}

func (r *running) collective(pr Pricer, link cost.Link, begin, end ir.Seconds) {
	if share := pr.Cost.Share(link); share > 0 {
		c := cost.Collective{Stream: ir.Coll, Link: link, Share: share, Begin: begin, D: end - begin}
		r.beside.Add(&c, c.D, r.free[0], func(_ ir.Stream, late ir.Seconds) { r.free[0] += late })
	}
}

// Time returns the time that nodes take if they run as in the program: each stream in order, collectives during
// computation, and each instruction as soon as its inputs are ready. Chunked nodes run once for every chunk of
// rows.
func (pr Pricer) Time(g *graph.Model, b *graph.Block, nodes []graph.Node, z graph.Size) ir.Seconds {
	var t ir.Seconds
	for first := 0; first < len(nodes); {
		end := first
		for end < len(nodes) && nodes[end].Chunked == nodes[first].Chunked {
			end++
		}
		if !nodes[first].Chunked {
			t += pr.Makespan(b, nodes[first:end], z, 0)
		} else {
			t += pr.chunks(g, b, nodes[first:end], z)
		}
		first = end
	}
	return t
}

func (pr Pricer) chunks(g *graph.Model, b *graph.Block, nodes []graph.Node, z graph.Size) ir.Seconds {
	rows, step := z.Tokens*z.Batch, g.ChunkRows(z)
	z.Rows = step
	t := pr.Makespan(b, nodes, z, 0) * ir.Seconds(rows/step)
	if z.Rows = rows % step; z.Rows > 0 {
		t += pr.Makespan(b, nodes, z, 0)
	}
	return t
}

// layerBackward returns the times of a layer's backward pass. If its halves run separately, weights are
// gathered during the first, and gradients reduced during the second.
func (pr Pricer) layerBackward(b *graph.Block, z graph.Size, under VisitTime) backwardTime {
	input, weights := pr.Halves(b, z, under)
	return backwardTime{pr.Makespan(b, b.Backward, z, under.Weights+under.Gradients), input, weights}
}

// Halves returns the times of the two halves of a layer's backward pass.
func (pr Pricer) Halves(b *graph.Block, z graph.Size, under VisitTime) (input, weights ir.Seconds) {
	return pr.Makespan(b, b.Halves[graph.InputGradient], z, under.Weights), pr.abreast(b, b.Halves[graph.WeightGradient], z, under.Gradients)
}

// abreast returns the time per block of several similar blocks whose collectives do not depend on
// their computation. The collectives of the next block then run during the computation of the
// current one, so the longer of the two determines the time.
func (pr Pricer) abreast(b *graph.Block, nodes []graph.Node, z graph.Size, taken ir.Seconds) ir.Seconds {
	if len(nodes) == 0 {
		return taken
	}
	busy := pr.takenBy(taken)
	lost := busy[1] * ir.Seconds(pr.Cost.Share(pr.links.stage)) // by computation beside collectives
	for i, took := range pr.list(b, nodes, z) {
		stream := pr.stream(&ir.Ops[nodes[i].Op])
		if took == looksBack {
			took = pr.Back(b, &nodes[i], z)
		}
		if busy[stream] += took; stream == 1 {
			lost += took * ir.Seconds(pr.Cost.Share(pr.links.of(&nodes[i])))
		}
	}
	return max(busy[0]+lost, busy[1])
}

// takenBy returns how long computation and collectives are busy at first, given the time that collectives in progress take.
func (pr Pricer) takenBy(t ir.Seconds) [2]ir.Seconds {
	if pr.alone {
		return [2]ir.Seconds{t, 0}
	}
	return [2]ir.Seconds{0, t}
}

// stream returns the index of an opcode's stream: computation or collectives.
func (pr Pricer) stream(op *ir.OpInfo) int {
	if op.Class == ir.ClassComm && !pr.alone {
		return 1
	}
	return 0
}

func (pr Pricer) embedGrad(g *graph.Model, z graph.Size) backwardTime {
	b := g.Embedding
	return backwardTime{pr.Time(g, b, b.Backward, z), pr.Time(g, b, b.Halves[graph.InputGradient], z), pr.Time(g, b, b.Halves[graph.WeightGradient], z)}
}

// Copies returns the times of a copy to the host and of a copy back.
func (pr Pricer) Copies(n ir.Bytes) (out, back ir.Seconds) {
	return pr.Cost.Time(ir.Work{Kind: ir.WorkD2H, Bytes: n}, cost.Link{}), pr.Cost.Time(ir.Work{Kind: ir.WorkH2D, Bytes: n}, cost.Link{})
}

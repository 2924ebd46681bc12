package estimate

import (
	"math/big"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// LayerFlops counts the multiply-adds of the forward pass of layers as a function of the number of tokens x, in
// the same way as the opcodes' work functions. Products with weights are linear in x. Causal attention has
// x(x+1)/2 query-key pairs, and attention with a window of w < x tokens has w(w+1)/2 + (x-w)*w.
type LayerFlops struct {
	Linear, Quadratic *big.Int
	kinds             []kindFlops // all layers of a model, if they differ; empty: one layer without a window
}

// kindFlops counts the layers that have the same window, where 0 means no window, and the same work otherwise.
type kindFlops struct {
	window, layers    int64
	linear, quadratic *big.Int
}

// FlopsOfLayer derives the linear and the quadratic part from the FLOPs of a layer for a chunk of a scan, with fewer tokens than which a
// scan has less work for each, and for two chunks. If layers differ, the result is for all layers together.
func FlopsOfLayer(m lang.Model) LayerFlops {
	const n = ir.ScanChunk
	g := graph.New(m, graph.Split{SP: 1}, 2*n)
	work := func(b *graph.Block) kindFlops {
		one := sumFlops(b, graph.Size{Sequence: 2 * n, Tokens: n, Batch: 1, SP: 1})
		two := sumFlops(b, graph.Size{Sequence: 2 * n, Tokens: 2 * n, Batch: 1, SP: 1})
		pair := (two - 2*one) / (n * n) // the work of one query-key pair
		return kindFlops{linear: big.NewInt(int64(one/n-pair*(n+1)/2) / 2), quadratic: big.NewInt(int64(pair) / 4)}
	}
	first := work(g.Plain(0))
	f := LayerFlops{Linear: first.linear, Quadratic: first.quadratic}
	if len(m.Windows) == 0 && !g.Mixed() {
		return f
	}
	type of struct {
		window int64
		plain  *graph.Block
	}
	at := map[of]int{}
	for layer := range m.Layers {
		key := of{m.WindowOf(layer), g.Plain(g.KindOf(layer))}
		if _, ok := at[key]; !ok {
			at[key] = len(f.kinds)
			f.kinds = append(f.kinds, work(key.plain))
			f.kinds[at[key]].window = key.window
		}
		f.kinds[at[key]].layers++
	}
	return f
}

// tunedFlops counts the FLOPs of the forward and backward passes of a step that trains only part of the model
// and therefore omits part of the backward pass. As in a step that trains all of it, attention counts twice as
// much in the backward pass as in the forward pass.
func tunedFlops(p *plan.Plan) float64 {
	g := graph.NewTuned(p.Model, p.Train.Freeze, graph.Split{SP: 1}, p.Train.Sequence)
	z := graph.Size{Sequence: p.Train.Sequence, Tokens: p.Train.Sequence, Batch: 1, SP: 1, Rows: p.Train.Sequence}
	total := float64(backwardFlops(g.Head, z))
	for kind := range g.Kinds() {
		b, z := g.LayerOf(kind), g.OfKind(z, kind)
		total += float64(g.LayersOf(kind)) * float64(sumFlops(b, z)+backwardFlops(b, z))
	}
	return total * float64(p.Train.Batch)
}

// backwardFlops returns the FLOPs of the backward pass of a block as its opcodes count them, except that
// attention counts twice as much as in the forward pass.
func backwardFlops(b *graph.Block, z graph.Size) (sum ir.Flops) {
	for i := range b.Backward {
		n := &b.Backward[i]
		if n.Op != ir.AttentionGrad {
			sum += b.Work(n, z).Flops
			continue
		}
		for j := range b.Forward {
			if f := &b.Forward[j]; f.Op == ir.Attention {
				sum += 2 * b.Work(f, z).Flops
			}
		}
	}
	return sum
}

// sumFlops returns the FLOPs of the forward pass of a block.
func sumFlops(b *graph.Block, s graph.Size) (sum ir.Flops) {
	for _, flops := range b.ForwardFlops(s) {
		sum += flops
	}
	return sum
}

// UpTo returns the multiply-adds of tokens 0 .. x-1.
func (f LayerFlops) UpTo(x int64) *big.Int {
	b := big.NewInt(x)
	if !f.Differ() {
		u := new(big.Int).Mul(f.Quadratic, new(big.Int).Add(b, big.NewInt(1)))
		return u.Mul(u.Add(u, f.Linear), b)
	}
	sum := new(big.Int)
	for _, k := range f.kinds {
		u := new(big.Int).Mul(k.quadratic, k.pairs(x))
		u.Add(u, new(big.Int).Mul(k.linear, b))
		sum.Add(sum, u.Mul(u, big.NewInt(k.layers)))
	}
	return sum
}

// Differ reports whether the result is for all layers of the model together, because they differ.
func (f LayerFlops) Differ() bool { return len(f.kinds) > 0 }

// pairs returns twice the number of visible query-key pairs among tokens 0 .. x-1.
func (f kindFlops) pairs(x int64) *big.Int {
	w := f.window
	if w == 0 || w > x {
		w = x
	}
	n := new(big.Int).Mul(big.NewInt(w), big.NewInt(w+1))
	return n.Add(n, new(big.Int).Mul(big.NewInt(2*w), big.NewInt(x-w)))
}

// inModel returns the FLOPs of the forward pass of x tokens through all layers of a model.
func (f LayerFlops) inModel(x int64, layers int) float64 {
	v, _ := new(big.Float).SetInt(f.UpTo(x)).Float64()
	if f.Differ() {
		return 2 * v
	}
	return 2 * v * float64(layers)
}

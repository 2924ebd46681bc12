package estimate

import (
	"math/big"

	"sppo.dev/graph"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// LayerFlops is the forward of one layer as a function of tokens, in whole multiply-adds, as its opcodes count them: products with
// weights are linear in x, causal attention sees x(x+1)/2 pairs.
type LayerFlops struct{ Linear, Quadratic *big.Int }

// FlopsOfLayer takes both parts from a layer of one token and a layer of two.
func FlopsOfLayer(m lang.Model) LayerFlops {
	g := graph.New(m, graph.Split{SP: 1}, 2)
	one := sumFlops(g.Layer, graph.Size{Sequence: 2, Tokens: 1, Batch: 1, SP: 1})
	two := sumFlops(g.Layer, graph.Size{Sequence: 2, Tokens: 2, Batch: 1, SP: 1})
	pair := two - 2*one // what a query does with one more key
	return LayerFlops{big.NewInt(int64(one-pair) / 2), big.NewInt(int64(pair) / 4)}
}

// sumFlops is the forward of a block.
func sumFlops(b *graph.Block, s graph.Size) (sum ir.Flops) {
	for _, flops := range b.ForwardFlops(s) {
		sum += flops
	}
	return sum
}

// UpTo is the multiply-adds of tokens 0 .. x-1.
func (f LayerFlops) UpTo(x int64) *big.Int {
	b := big.NewInt(x)
	u := new(big.Int).Mul(f.Quadratic, new(big.Int).Add(b, big.NewInt(1)))
	return u.Mul(u.Add(u, f.Linear), b)
}

// of is the FLOPs of a sequence of x tokens in one layer.
func (f LayerFlops) of(x int64) float64 {
	v, _ := new(big.Float).SetInt(f.UpTo(x)).Float64()
	return 2 * v
}

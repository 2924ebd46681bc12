package estimate

import (
	"math/big"

	"sppo.dev/lang"
)

// LayerFlops is the forward of one layer as a function of tokens, in whole multiply-adds: products with weights are
// linear in x, causal attention sees x(x+1)/2 pairs, twice, of the width of Q. Up to the factor h, where Q is as wide
// as the residual stream, this is U(x) = g2*x + x*(x+1) with g2 = 2h + 2h_kv + m*ffn.
type LayerFlops struct{ Linear, Quadratic *big.Int }

// FlopsOfLayer counts the forward of one layer of a model.
func FlopsOfLayer(m lang.Model) LayerFlops {
	matrices := int64(2)
	if m.Family == lang.FamilyLlama {
		matrices = 3
	}
	h, q, kv := int64(m.Hidden), int64(m.Heads)*int64(m.HeadDim), int64(m.KVHeads)*int64(m.HeadDim)
	return LayerFlops{big.NewInt(h * (2*q + 2*kv + matrices*int64(m.FFN))), big.NewInt(q)}
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

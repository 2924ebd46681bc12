package passes

import (
	"fmt"
	"math"
	"math/big"

	"sppo.dev/lang"
)

// partition cuts the sequence.
//
// Input: Subsequences.N and Align. Output: Lengths, Imbalance. Paper: section 4, with the order of lengths corrected:
// later tokens cost more, so later subsequences are shorter.
func partition(c *Context, p *Plan) error {
	defer c.forget()
	seq, n, align := p.Train.Sequence, p.Subsequences.N, p.Subsequences.Align
	given := p.Schedule.Subsequences.Lengths
	why := ""
	switch {
	case len(given) > 0:
		p.Subsequences.Lengths, why = append([]int64(nil), given...), "given"
	case p.Schedule.Partition == "length":
		p.Subsequences.Lengths, why = lengthsOf(evenBoundaries(seq, n, align)), "equal lengths, to the nearest step of align"
	case p.Schedule.Partition == "time":
		p.Subsequences.Lengths, why = lengthsOf(timeBoundaries(c.cache, p)), "equal predicted time, forward and backward: the longest task is as short as the grid allows"
	default:
		p.Subsequences.Lengths = lengthsOf(flopsBoundaries(p.Model, seq, n, align))
		why = "equal forward operations, to the nearest step of align: causal attention makes later tokens dearer"
	}
	p.Subsequences.Imbalance = imbalance(p.Model, p.Subsequences.Lengths)
	why += fmt.Sprintf("; in operations the dearest is %.2f%% above the mean", 100*p.Subsequences.Imbalance)
	p.decide("partition", "lengths", lengthsInWords(p.Subsequences.Lengths), why)
	return nil
}

// lengthsInWords keeps long lists short.
func lengthsInWords(lengths []int64) string {
	n := len(lengths)
	if n <= 8 {
		return list(lengths)
	}
	return fmt.Sprintf("%s ... %s", list(lengths[:4]), list(lengths[n-2:]))
}

// layerFlops is the forward of one layer as a function of tokens, in whole multiply-adds: products with weights are
// linear in x, causal attention sees x(x+1)/2 pairs, twice, of the width of Q. Up to the factor h, where Q is as wide
// as the residual stream, this is U(x) = g2*x + x*(x+1) with g2 = 2h + 2h_kv + m*ffn.
type layerFlops struct{ linear, quadratic *big.Int }

func flopsOfLayer(m lang.Model) layerFlops {
	matrices := int64(2)
	if m.Family == lang.FamilyLlama {
		matrices = 3
	}
	h, q, kv := int64(m.Hidden), int64(m.Heads)*int64(m.HeadDim), int64(m.KVHeads)*int64(m.HeadDim)
	return layerFlops{big.NewInt(h * (2*q + 2*kv + matrices*int64(m.FFN))), big.NewInt(q)}
}

// upTo is the multiply-adds of tokens 0 .. x-1.
func (f layerFlops) upTo(x int64) *big.Int {
	b := big.NewInt(x)
	u := new(big.Int).Mul(f.quadratic, new(big.Int).Add(b, big.NewInt(1)))
	return u.Mul(u.Add(u, f.linear), b)
}

// of is the FLOPs of a sequence of x tokens in one layer.
func (f layerFlops) of(x int64) float64 {
	v, _ := new(big.Float).SetInt(f.upTo(x)).Float64()
	return 2 * v
}

// cut places borders of equal work on a grid.
type cut struct {
	work    layerFlops
	total   *big.Int // of the whole sequence
	parts   *big.Int
	align   int64
	maxStep int64 // the last step that leaves something behind it
}

func newCut(m lang.Model, seq int64, n int, align int64) *cut {
	f := flopsOfLayer(m)
	return &cut{f, f.upTo(seq), big.NewInt(int64(n)), align, (seq - 1) / align}
}

// nearest is the step of the grid that minimises |N*U(x) - k*U(S)|, ties to the smaller.
func (c *cut) nearest(k int) int64 {
	target := new(big.Int).Mul(c.total, big.NewInt(int64(k)))
	distance := func(step int64) *big.Int { // negative below the target
		d := new(big.Int).Mul(c.parts, c.work.upTo(step*c.align))
		return d.Sub(d, target)
	}
	above := min(c.about(k), c.maxStep)
	for above > 0 && distance(above-1).Sign() > 0 {
		above--
	}
	for above < c.maxStep && distance(above).Sign() <= 0 {
		above++
	}
	if above > 0 && distance(above).CmpAbs(distance(above-1)) >= 0 {
		return above - 1
	}
	return above
}

// about is the step at which the work is k parts of the total, to what rounding leaves of it.
func (c *cut) about(k int) int64 {
	of := func(n *big.Int) float64 {
		v, _ := new(big.Float).SetInt(n).Float64()
		return v
	}
	quadratic, half := of(c.work.quadratic), (of(c.work.quadratic)+of(c.work.linear))/2
	work := of(c.total) * float64(k) / of(c.parts)
	x := work / (half + math.Sqrt(half*half+quadratic*work))
	return max(0, int64(x)/c.align)
}

// flopsBoundaries are the N+1 borders whose k-th is the multiple of align that minimises |N*U(x) - k*U(S)|, strictly
// increasing: a border that would meet its neighbour moves on. The last is S, on the grid or not.
func flopsBoundaries(m lang.Model, seq int64, n int, align int64) []int64 {
	c := newCut(m, seq, n, align)
	x := make([]int64, n+1)
	for k := 1; k < n; k++ {
		least, most := x[k-1]/align+1, c.maxStep-int64(n-1-k)
		x[k] = align * min(max(c.nearest(k), least), most)
	}
	x[n] = seq
	return x
}

// evenBoundaries deal out whole steps, the first subsequences getting what is left over.
func evenBoundaries(seq int64, n int, align int64) []int64 {
	steps, parts := seq/align, int64(n)
	x := make([]int64, n+1)
	for k := range x {
		x[k] = align * ((int64(k)*steps + parts - 1) / parts)
	}
	x[n] = seq
	return x
}

func lengthsOf(x []int64) []int64 {
	lengths := make([]int64, len(x)-1)
	for k := range lengths {
		lengths[k] = x[k+1] - x[k]
	}
	return lengths
}

// imbalance is the largest forward work of a subsequence over the mean, minus 1.
func imbalance(m lang.Model, lengths []int64) float64 {
	f := flopsOfLayer(m)
	most, before, end := new(big.Int), new(big.Int), int64(0)
	for _, n := range lengths {
		end += n
		u := f.upTo(end)
		if d := new(big.Int).Sub(u, before); d.Cmp(most) > 0 {
			most = d
		}
		before = u
	}
	over := new(big.Rat).SetFrac(most.Mul(most, big.NewInt(int64(len(lengths)))), before)
	v, _ := over.Sub(over, big.NewRat(1, 1)).Float64()
	return v
}

// checkPartition: N lengths that sum to S, each divisible by what the ranks of a stage need, all but the last on the grid.
func checkPartition(_ *Context, p *Plan) error {
	s, grid := p.Subsequences, p.rowGrid()
	if len(s.Lengths) != s.N {
		return fmt.Errorf("%d lengths for %d subsequences", len(s.Lengths), s.N)
	}
	var sum int64
	for i, n := range s.Lengths {
		if n < 1 || n%grid != 0 {
			return fmt.Errorf("subsequence %d has %d tokens, which is no positive multiple of %s", i, n, p.gridInWords())
		}
		if n%s.Align != 0 && i < s.N-1 {
			return fmt.Errorf("subsequence %d has %d tokens, which is no multiple of align = %d", i, n, s.Align)
		}
		sum += n
	}
	if sum != p.Train.Sequence {
		return fmt.Errorf("lengths sum to %d, and the sequence has %d tokens", sum, p.Train.Sequence)
	}
	return nil
}

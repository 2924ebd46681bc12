// Package partition implements the pass that cuts the sequence into subsequences: by operations, by
// length or by predicted time.
package partition

import (
	"fmt"
	"math"
	"math/big"
	"sort"

	"sppo.dev/internal/passes/estimate"
	"sppo.dev/internal/passes/pass"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/words"
)

// Run cuts the sequence.
//
// Input: Subsequences.N and Align. Output: Lengths, Imbalance. Paper: section 4, with the order of lengths
// corrected: later tokens cost more, so later subsequences are shorter.
func Run(c *pass.Context, p *plan.Plan) error {
	defer c.Forget()
	seq, n, align := p.Train.Sequence, p.Subsequences.N, p.Subsequences.Align
	given := p.Schedule.Subsequences.Lengths
	why := ""
	switch {
	case len(given) > 0:
		p.Subsequences.Lengths, why = append([]int64(nil), given...), "given"
	case p.Schedule.Partition == "length":
		p.Subsequences.Lengths, why = Lengths(ByLength(seq, n, align)), "equal lengths, rounded to multiples of align"
	case p.Schedule.Partition == "time":
		p.Subsequences.Lengths, why = Lengths(ByTime(c.Cache, p)), "equal predicted time of forward and backward: the longest task is as short as the grid allows"
	default:
		p.Subsequences.Lengths = Lengths(ByFlops(c.Cache.FlopsOfLayer(p), seq, n, align))
		why = "equal forward operations, rounded to multiples of align: causal attention makes later tokens more expensive"
	}
	p.Subsequences.Imbalance = imbalance(c.Cache.FlopsOfLayer(p), p.Subsequences.Lengths)
	why += fmt.Sprintf("; the most expensive subsequence takes %.2f%% more operations than the average", 100*p.Subsequences.Imbalance)
	p.Decide("partition", "lengths", lengthsInWords(p.Subsequences.Lengths), why)
	return nil
}

// lengthsInWords shortens long lists.
func lengthsInWords(lengths []int64) string {
	n := len(lengths)
	if n <= 8 {
		return words.List(lengths)
	}
	return fmt.Sprintf("%s ... %s", words.List(lengths[:4]), words.List(lengths[n-2:]))
}

// cut places boundaries on a grid, so that the N parts between them have about equal work. U(x) is the work of
// the first x tokens, and S is the length of the sequence.
type cut struct {
	work    estimate.LayerFlops
	total   *big.Int // of the whole sequence
	parts   *big.Int
	align   int64
	maxStep int64 // the last step of the grid that is before the end of the sequence
}

func newCut(f estimate.LayerFlops, seq int64, n int, align int64) *cut {
	return &cut{f, f.UpTo(seq), big.NewInt(int64(n)), align, (seq - 1) / align}
}

// nearest returns the step of the grid whose position x minimises |N*U(x) - k*U(S)|. Ties go to the smaller
// step.
func (c *cut) nearest(k int) int64 {
	target := new(big.Int).Mul(c.total, big.NewInt(int64(k)))
	distance := func(step int64) *big.Int { // negative below the target
		d := new(big.Int).Mul(c.parts, c.work.UpTo(step*c.align))
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

// about returns the step at which the work is approximately k/N of the total.
func (c *cut) about(k int) int64 {
	of := func(n *big.Int) float64 {
		v, _ := new(big.Float).SetInt(n).Float64()
		return v
	}
	quadratic, half := of(c.work.Quadratic), (of(c.work.Quadratic)+of(c.work.Linear))/2
	if c.work.Differ() {
		below := func(step int) bool {
			return new(big.Int).Mul(c.parts, c.work.UpTo(int64(step)*c.align)).Cmp(new(big.Int).Mul(c.total, big.NewInt(int64(k)))) > 0
		}
		return int64(sort.Search(int(c.maxStep), below))
	}
	work := of(c.total) * float64(k) / of(c.parts)
	x := work / (half + math.Sqrt(half*half+quadratic*work))
	return max(0, int64(x)/c.align)
}

// ByFlops returns N+1 strictly increasing boundaries. The k-th is the multiple x of align that minimises
// |N*U(x) - k*U(S)|, or the nearest one that leaves room for all other subsequences. The last boundary is S,
// whether or not it is on the grid.
func ByFlops(f estimate.LayerFlops, seq int64, n int, align int64) []int64 {
	c := newCut(f, seq, n, align)
	x := make([]int64, n+1)
	for k := 1; k < n; k++ {
		least, most := x[k-1]/align+1, c.maxStep-int64(n-1-k)
		x[k] = align * min(max(c.nearest(k), least), most)
	}
	x[n] = seq
	return x
}

// ByLength returns boundaries whose distances, in steps of the grid, differ by at most one. The last
// subsequence also gets the tokens that do not fill a step.
func ByLength(seq int64, n int, align int64) []int64 {
	steps, parts := seq/align, int64(n)
	x := make([]int64, n+1)
	for k := range x {
		x[k] = align * ((int64(k)*steps + parts - 1) / parts)
	}
	x[n] = seq
	return x
}

// Lengths returns the distances between boundaries.
func Lengths(x []int64) []int64 {
	lengths := make([]int64, len(x)-1)
	for k := range lengths {
		lengths[k] = x[k+1] - x[k]
	}
	return lengths
}

// imbalance returns the largest forward work of a subsequence divided by the mean, minus 1.
func imbalance(f estimate.LayerFlops, lengths []int64) float64 {
	most, before, end := new(big.Int), new(big.Int), int64(0)
	for _, n := range lengths {
		end += n
		u := f.UpTo(end)
		if d := new(big.Int).Sub(u, before); d.Cmp(most) > 0 {
			most = d
		}
		before = u
	}
	over := new(big.Rat).SetFrac(most.Mul(most, big.NewInt(int64(len(lengths)))), before)
	v, _ := over.Sub(over, big.NewRat(1, 1)).Float64()
	return v
}

// Check checks that the lengths of the N subsequences add up to that of the sequence, that each can be divided
// evenly among the ranks of a stage, and that all boundaries inside the sequence are on the grid.
func Check(_ *pass.Context, p *plan.Plan) error {
	s, grid := p.Subsequences, p.RowGrid()
	if len(s.Lengths) != s.N {
		return fmt.Errorf("%d lengths for %d subsequences", len(s.Lengths), s.N)
	}
	var sum int64
	for i, n := range s.Lengths {
		if n < 1 || n%grid != 0 {
			return fmt.Errorf("subsequence %d has %d tokens, which is not a positive multiple of %s", i, n, p.GridInWords())
		}
		if n%s.Align != 0 && i < s.N-1 {
			return fmt.Errorf("subsequence %d has %d tokens, which is not a multiple of align = %d", i, n, s.Align)
		}
		sum += n
	}
	if sum != p.Train.Sequence {
		return fmt.Errorf("lengths add up to %d, but the sequence has %d tokens", sum, p.Train.Sequence)
	}
	return nil
}

// Shortest returns the length of the last subsequence, the shortest, before it is rounded to the grid.
func Shortest(f estimate.LayerFlops, p *plan.Plan) int64 {
	seq, n := p.Train.Sequence, int64(p.Subsequences.N)
	if p.Schedule.Partition == "length" || n >= seq {
		return seq / n
	}
	return seq - newCut(f, seq, int(n), 1).nearest(int(n)-1)
}

package passes

import (
	"math/big"
	"testing"
)

// TestMuxMakespans: the paper's and the fluid shares on equal chunks with f = 1, b = 2 and free copies.
func TestMuxMakespans(t *testing.T) {
	fluid, even := MuxShares{Left: true, Right: true}, MuxShares{Left: true, Right: true, Even: true}
	for _, c := range []struct {
		pp, n             int
		plain, fluid      int64
		even              *big.Rat
		leftOnly, rightly *big.Rat
	}{
		{2, 4, 15, 12, big.NewRat(12, 1), big.NewRat(27, 2), big.NewRat(27, 2)},
		{4, 8, 33, 24, big.NewRat(25, 1), big.NewRat(57, 2), big.NewRat(57, 2)},
		{3, 7, 27, 21, big.NewRat(22, 1), big.NewRat(24, 1), big.NewRat(24, 1)},
		{8, 16, 69, 48, nil, big.NewRat(117, 2), big.NewRat(117, 2)},
	} {
		for _, k := range []struct {
			what   string
			shares MuxShares
			want   *big.Rat
		}{
			{"plain", MuxShares{}, big.NewRat(c.plain, 1)}, {"fluid", fluid, big.NewRat(c.fluid, 1)}, {"even", even, c.even},
			{"left", MuxShares{Left: true}, c.leftOnly}, {"right", MuxShares{Right: true}, c.rightly},
		} {
			if got := Makespan(c.pp, c.n, k.shares, 1, 2); k.want != nil && got.Cmp(k.want) != 0 {
				t.Errorf("pp %d, n %d, %s: makespan %s, want %s", c.pp, c.n, k.what, got, k.want)
			}
		}
	}
}

// TestEvenShares: what the even split takes longer than the ideal, in times of a whole task of either pass, does not depend on
// the number of subsequences.
func TestEvenShares(t *testing.T) {
	even := MuxShares{Left: true, Right: true, Even: true}
	for _, c := range []struct {
		pp     int
		excess string
	}{{2, "0.00"}, {4, "0.33"}, {8, "2.11"}, {16, "7.99"}} {
		for _, n := range []int{c.pp, 2 * c.pp, 2*c.pp + 3} {
			excess := new(big.Rat).Sub(Makespan(c.pp, n, even, 1, 2), big.NewRat(int64(3*n), 1))
			if got := excess.Quo(excess, big.NewRat(3, 1)).FloatString(2); got != c.excess {
				t.Errorf("pp %d, n %d: %s more than the ideal, want %s", c.pp, n, got, c.excess)
			}
		}
	}
}

// TestSharesAddUp: of every task, and in every slot evenly over all ranks where shares are fluid.
func TestSharesAddUp(t *testing.T) {
	one := big.NewRat(1, 1)
	for _, m := range []MuxShares{{Left: true, Right: true}, {Left: true, Right: true, Even: true}, {Left: true}, {}} {
		for _, size := range [][2]int{{2, 4}, {4, 8}, {3, 7}, {8, 8}, {5, 5}} {
			pp, n := size[0], size[1]
			for i := range pp {
				for x := range n {
					sum := new(big.Rat)
					for _, share := range m.Of(pp, n, i, x) {
						sum.Add(sum, share)
					}
					if sum.Cmp(one) != 0 {
						t.Errorf("%+v, pp %d, n %d: shares of (%d, %d) make %s", m, pp, n, i, x, sum)
					}
				}
			}
		}
	}
}

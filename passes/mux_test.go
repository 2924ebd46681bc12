package passes

import (
	"math/big"
	"slices"
	"strings"
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

// TestBrokenSharing edits a good plan and expects Verify to say what is wrong.
func TestBrokenSharing(t *testing.T) {
	for _, c := range []struct {
		want string
		edit func(p *Plan)
	}{
		{"where mux wants", func(p *Plan) { p.Tasks[0] = p.Tasks[0][1:] }},
		{"where mux wants", func(p *Plan) { p.Tasks[1][0], p.Tasks[1][1] = p.Tasks[1][1], p.Tasks[1][0] }},
		{"has 1 pieces for 2 stages", func(p *Plan) { p.Mux.Pieces[0] = p.Mux.Pieces[0][1:] }},
		{"pieces are given for 0 subsequences", func(p *Plan) { p.Mux.Pieces = nil }},
		{"multiples of sp", func(p *Plan) { p.Mux.Pieces[0] = []int64{9, 9} }},
		{"make 20 tokens of 18", func(p *Plan) { p.Mux.Pieces[0] = []int64{10, 10} }},
		{"no such microbatch", func(p *Plan) { p.Mux.Left = false }},
		{"virtual stages fill the same", func(p *Plan) { p.Parallel.VirtualStages, p.LayersPerStage = 2, []int{1, 1, 1, 1}; p.Model.Layers = 4 }},
		{"applied is false", func(p *Plan) { p.Mux.Stages[0].Applied = false }},
	} {
		p := planOf(t, "tiny.sppo", "schedule.mux=left")
		if !slices.Equal(p.Mux.Pieces[0], []int64{10, 8}) {
			t.Fatalf("18 tokens over two stages of two ranks are cut into %v", p.Mux.Pieces[0])
		}
		c.edit(p)
		if err := Verify(p); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want it to say %q", err, c.want)
		}
	}
}

// TestEvenPieces: with even shares pieces end where the parts of each stage do that shares the subsequence, and nowhere else.
func TestEvenPieces(t *testing.T) {
	p := planOf(t, "gpt-docs.sppo", "schedule.pp=4", "schedule.sp=1", "schedule.subsequences=4", "schedule.partition=length", "model.layers=4", "train.sequence=48",
		"schedule.align=12", "schedule.mux=left", "schedule.mux_shares=even", "cluster.nodes=4")
	for x, want := range [][]int64{{3, 1, 2, 2, 1, 3}, {3, 1, 2, 2, 1, 3}, {3, 3, 3, 3}} {
		if !slices.Equal(p.Mux.Pieces[x], want) {
			t.Errorf("12 tokens of subsequence %d are cut into %v, want %v", x, p.Mux.Pieces[x], want)
		}
	}
	for piece, want := range []int{1, 1, 2, 2, 3, 3} { // thirds
		if got := p.Runner(Task{Kind: Forward, Subsequence: 1, Stage: 1, Piece: piece + 1}); got != want {
			t.Errorf("piece %d of subsequence 1 on stage 1 is rank %d's, want %d", piece+1, got, want)
		}
	}
	p.Mux.Pieces[2] = []int64{4, 2, 3, 3}
	if err := Verify(p); err == nil || !strings.Contains(err.Error(), "even shares want [3 3 3 3]") {
		t.Errorf("pieces that are not even: %v", err)
	}
}

// TestMuxRefusals: what mux cannot do, at its key, with the nearest thing that works.
func TestMuxRefusals(t *testing.T) {
	for set, hint := range map[string]string{
		"schedule.pp=1":             "mux = off, or pp of at least 2",
		"schedule.subsequences=1":   "subsequences = 2, or mux = off",
		"schedule.strategy=seq1f1b": "strategy = sppo, or mux = off",
	} {
		sp := load(t, "tiny.sppo", "schedule.mux=left", set)
		if err := Run(sp, New(sp), Options{}); err == nil || !strings.Contains(err.Error(), hint) {
			t.Errorf("%s: %v, want the hint %q", set, err, hint)
		}
	}
}

package ir_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"sppo.dev/internal/irtest"
	"sppo.dev/ir"
)

// sides returns, by name, a random instruction of each collective for a group of n.
func sides(r *rand.Rand, n int) map[string]*ir.Instr {
	each, rows, cols := 1+r.Int64N(9), 1+r.Int64N(4), 1+r.Int64N(4)
	copies := 1 + r.Int64N(int64(n))
	for int64(n)%copies != 0 {
		copies--
	}
	part, all := []int64{each}, []int64{each * int64(n)}
	tall, wide := []int64{rows * int64(n), cols}, []int64{rows, cols * int64(n) / copies}
	return map[string]*ir.Instr{
		"all_gather":         irtest.Collective(ir.AllGather, ir.BF16, [][]int64{all, part}),
		"reduce_scatter":     irtest.Collective(ir.ReduceScatter, ir.F32, [][]int64{part, all}),
		"all_reduce":         irtest.Collective(ir.AllReduce, ir.F32, [][]int64{part}),
		"rotate":             irtest.Collective(ir.Rotate, ir.I32, [][]int64{part, part}),
		"all_to_all":         irtest.Collective(ir.AllToAll, ir.F32, [][]int64{tall, wide}, ir.Int(copies), ir.Bool(false)),
		"all_to_all inverse": irtest.Collective(ir.AllToAll, ir.BF16, [][]int64{wide, tall}, ir.Int(copies), ir.Bool(true)),
	}
}

// The bytes that one member gives to another are the bytes that the other gets. Every byte of the results is
// written once: by one member's sums or, if results go everywhere, by the sums of all members together.
func TestTransfersFillResults(t *testing.T) {
	const seed = 5
	r := rand.New(rand.NewPCG(seed, 0))
	covered := map[ir.Op]bool{}
	for range 200 {
		n := 1 + r.IntN(9)
		for name, in := range sides(r, n) {
			covered[in.Op] = true
			if err := fills(in, n); err != nil {
				t.Fatalf("%s among %d (seed %d): %v", name, n, seed, err)
			}
		}
	}
	for op := range ir.NumOps {
		row := &ir.Ops[op]
		if takes := row.Class == ir.ClassComm && row.Attrs[0].Kind == ir.KindGroup; takes != (op.Collective() != nil) || takes != covered[op] {
			t.Errorf("%s: a row of collectives %t, covered here %t", row.Name, op.Collective() != nil, covered[op])
		}
	}
}

func fills(in *ir.Instr, n int) error {
	var meetings []ir.Meeting
	for member := range n {
		m, err := in.Meeting(member, n)
		if err != nil {
			return err
		}
		meetings = append(meetings, m)
	}
	written := make([]int, in.Y().Bytes())
	for to, m := range meetings {
		for from, get := range m.Gets {
			if get != meetings[from].Gives[to] {
				return fmt.Errorf("member %d gets %+v, and %d gives it %+v", to, get, from, meetings[from].Gives[to])
			}
		}
		if !m.Everywhere {
			clear(written)
		}
		err := m.Sums(func(first, _ int) error {
			for g, row := m.Gets[first], ir.Bytes(0); row < g.Rows; row++ {
				for i := range g.Width {
					written[g.Y+row*g.YStride+i]++
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		for i, times := range written {
			if times != 1 && (!m.Everywhere || to == n-1) {
				return fmt.Errorf("byte %d of the result of member %d is written %d times", i, to, times)
			}
		}
	}
	return nil
}

// Meeting returns an error for an unverified instruction with the wrong group size, or with elements that
// cannot be added.
func TestMeetingsRefuse(t *testing.T) {
	for n := 2; n < 6; n++ {
		for name, in := range sides(rand.New(rand.NewPCG(7, uint64(n))), n) {
			ratio := in.Op != ir.AllReduce && in.Op != ir.Rotate
			if _, err := in.Meeting(0, n+1); (err != nil) != ratio {
				t.Errorf("%s for %d ranks among %d: %v", name, n, n+1, err)
			}
		}
	}
	if _, err := irtest.Collective(ir.AllReduce, ir.I32, [][]int64{{4}}).Meeting(0, 2); err == nil {
		t.Error("integers are added")
	}
}

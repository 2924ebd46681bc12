package vm

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"sppo.dev/internal/irtest"
	"sppo.dev/ir"
)

// together runs f for all ranks concurrently and returns their errors. It fails the test if they hang.
func together(t *testing.T, ranks int, f func(rank int) error) []error {
	t.Helper()
	errs := make([]error, ranks)
	var all sync.WaitGroup
	for r := range ranks {
		all.Go(func() { errs[r] = f(r) })
	}
	done := make(chan struct{})
	go func() { all.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Fatal("the ranks hang")
	}
	return errs
}

func expectNone(t *testing.T, errs []error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func TestMessagesKeepTheirOrderByChannel(t *testing.T) {
	local := NewLocal()
	const n = 200
	// Two channels from rank 0 to rank 1 and one back, all in use concurrently.
	expectNone(t, together(t, 6, func(i int) error {
		from, to, channel := i/2%2, 1-i/2%2, Channel(i/4)
		link := local.Link(from, to, channel)
		for k := range n {
			message := []byte{byte(k), byte(i / 2)}
			if i%2 == 0 {
				if err := link.Send(message); err != nil {
					return err
				}
				continue
			}
			got := make([]byte, 2)
			if err := link.Recv(got); err != nil {
				return err
			}
			if string(got) != string(message) {
				return fmt.Errorf("message %d is %v, want %v", k, got, message)
			}
		}
		return nil
	}))
}

// TestSendReturnsAfterReceipt checks NCCL's semantics for a send: the buffer may change once Send returns.
func TestSendReturnsAfterReceipt(t *testing.T) {
	link := NewLocal().Link(0, 1, ChannelNext)
	x, y := []byte{1}, []byte{0}
	expectNone(t, together(t, 2, func(rank int) error {
		for i := range 1000 {
			if rank == 0 {
				x[0] = byte(i)
				if err := link.Send(x); err != nil {
					return err
				}
				continue
			}
			if err := link.Recv(y); err != nil {
				return err
			}
			if y[0] != byte(i) {
				return fmt.Errorf("received %d, want %d", y[0], i)
			}
		}
		return nil
	}))
}

func TestMessageSizesMustAgree(t *testing.T) {
	local := NewLocal()
	link := local.Link(0, 1, ChannelNext)
	errs := together(t, 2, func(rank int) error {
		if rank == 0 {
			return link.Send(make([]byte, 3))
		}
		err := link.Recv(make([]byte, 4))
		local.Abort(err)
		return err
	})
	if errs[1] == nil || !strings.Contains(errs[1].Error(), "rank 0 sends 3 bytes, rank 1 receives 4") {
		t.Errorf("receiver: %v", errs[1])
	}
	if !errors.Is(errs[0], ErrAborted) {
		t.Errorf("sender: %v", errs[0])
	}
}

// TestCollectives compares results, bit by bit, with sums taken in the order of the group's members, for odd
// sizes and both types.
func TestCollectives(t *testing.T) {
	for _, dtype := range []ir.DType{ir.F32, ir.BF16} {
		for _, members := range [][]int32{{0}, {1, 0}, {2, 0, 1}, {0, 1, 2, 3, 4}} {
			for _, each := range []int{1, 7, 300} {
				t.Run(fmt.Sprint(dtype, members, each), func(t *testing.T) { collectives(t, dtype, members, each) })
			}
		}
	}
}

// collective binds a collective and runs it once.
func collective(tr Transport, rank int, members []int32, in *ir.Instr, y, x []byte) error {
	run, err := tr.Collective(rank, members, in, y, x)
	if err != nil {
		return err
	}
	return run()
}

func collectives(t *testing.T, dtype ir.DType, members []int32, each int) {
	const seed = 11
	rng := rand.New(rand.NewPCG(seed, 0))
	local, size, n := NewLocal(), int(dtype.Bytes()), len(members)
	inputs, sum := make([][]float32, n), make([]float32, n*each)
	for m := range inputs {
		inputs[m] = make([]float32, n*each)
		for i := range inputs[m] {
			v := float32(rng.NormFloat64())
			if dtype == ir.BF16 {
				v = FromBF16(BF16(v))
			}
			inputs[m][i] = v
			sum[i] += v
		}
	}
	want := make([]byte, n*each*size)
	Narrow(want, sum, dtype)
	part, all := []int64{int64(each)}, []int64{int64(n * each)}
	expectNone(t, together(t, n, func(rank int) error {
		index := slices.Index(members, int32(rank))
		call := func(op ir.Op, y, x []byte, shapes ...[]int64) error {
			return collective(local, rank, members, irtest.Collective(op, dtype, shapes), y, x)
		}
		x, share, whole := make([]byte, n*each*size), make([]byte, each*size), make([]byte, n*each*size)
		Narrow(x, inputs[index], dtype)
		for range 3 {
			if err := call(ir.ReduceScatter, share, x, part, all); err != nil {
				return err
			}
			if string(share) != string(want[index*each*size:][:each*size]) {
				return fmt.Errorf("rank %d: wrong share of the sum (seed %d)", rank, seed)
			}
			before := make([]byte, len(x))
			if err := call(ir.Rotate, before, x, all, all); err != nil {
				return err
			}
			handed := make([]byte, len(x))
			if Narrow(handed, inputs[(index+n-1)%n], dtype); string(before) != string(handed) {
				return fmt.Errorf("rank %d: not what the rank before has (seed %d)", rank, seed)
			}
			if err := call(ir.AllGather, whole, share, all, part); err != nil {
				return err
			}
			if string(whole) != string(want) {
				return fmt.Errorf("rank %d: shares gathered in the wrong order (seed %d)", rank, seed)
			}
		}
		if err := call(ir.AllReduce, x, x, all); err != nil {
			return err
		}
		if string(x) != string(want) {
			return fmt.Errorf("rank %d: wrong sum (seed %d)", rank, seed)
		}
		return nil
	}))
}

// TestAllToAll checks every element on the way there and back, with and without columns that members share.
func TestAllToAll(t *testing.T) {
	for _, dtype := range []ir.DType{ir.F32, ir.BF16} {
		for _, members := range [][]int32{{0}, {1, 0}, {2, 0, 1}, {3, 1, 0, 2}} {
			for copies := 1; copies <= len(members); copies++ {
				if len(members)%copies == 0 {
					t.Run(fmt.Sprint(dtype, members, copies), func(t *testing.T) { allToAll(t, dtype, members, copies) })
				}
			}
		}
	}
}

func allToAll(t *testing.T, dtype ir.DType, members []int32, copies int) {
	const rows, cols = 3, 5
	local, n, size := NewLocal(), len(members), int(dtype.Bytes())
	wide := n / copies * cols
	// The element at a row and a column of the whole matrix; small integers are exact in both types.
	value := func(row, col int) float32 { return float32((row*wide + col) % 61) }
	expectNone(t, together(t, n, func(rank int) error {
		k := slices.Index(members, int32(rank))
		var byRows, byCols, back []float32
		for row := range rows {
			for col := range wide {
				byRows = append(byRows, value(k*rows+row, col))
				back = append(back, float32(copies)*value(k*rows+row, col))
			}
		}
		for row := range n * rows {
			for col := range cols {
				byCols = append(byCols, value(row, k/copies*cols+col))
			}
		}
		x, y, z := make([]byte, len(byRows)*size), make([]byte, len(byCols)*size), make([]byte, len(byRows)*size)
		Narrow(x, byRows, dtype)
		sides := [][]int64{{int64(n * rows), cols}, {rows, int64(wide)}}
		for _, leg := range []struct {
			y, x    []byte
			want    []float32
			inverse bool
		}{{y, x, byCols, false}, {z, y, back, true}} {
			in := irtest.Collective(ir.AllToAll, dtype, sides, ir.Int(int64(copies)), ir.Bool(leg.inverse))
			if leg.inverse {
				in.Args[0], in.Args[1] = in.Args[1], in.Args[0]
			}
			if err := collective(local, rank, members, in, leg.y, leg.x); err != nil {
				return err
			}
			want := make([]byte, len(leg.y))
			Narrow(want, leg.want, dtype)
			if string(leg.y) != string(want) {
				return fmt.Errorf("rank %d, inverse %t: wrong elements", rank, leg.inverse)
			}
		}
		sides[0][0]++
		if err := collective(local, rank, members, irtest.Collective(ir.AllToAll, dtype, sides, ir.Int(int64(copies)), ir.Bool(false)), y, x); err == nil {
			return errors.New("wrong sizes are accepted")
		}
		return nil
	}))
}

func TestCollectivesMustAgree(t *testing.T) {
	local := NewLocal()
	errs := together(t, 2, func(rank int) error {
		x := make([]byte, 8+4*rank)
		in := irtest.Collective(ir.AllReduce, ir.F32, [][]int64{{int64(2 + rank)}})
		return collective(local, rank, []int32{0, 1}, in, x, x)
	})
	if errs[0] == nil || !strings.Contains(errs[0].Error(), "rank 0 calls all_reduce of 8 bytes of f32, but rank 1 calls all_reduce of 12") {
		t.Error(errs)
	}
	if err := collective(local, 3, []int32{0, 1}, irtest.Collective(ir.AllReduce, ir.F32, [][]int64{{1}}), nil, nil); err == nil {
		t.Error("rank 3 joins a group that it is not in")
	}
}

func TestAbortFreesEveryone(t *testing.T) {
	local := NewLocal()
	errs := together(t, 4, func(rank int) error {
		gather := func() error {
			in := irtest.Collective(ir.AllGather, ir.F32, [][]int64{{4}, {1}})
			return collective(local, rank, []int32{0, 1, 2, 3}, in, make([]byte, 16), make([]byte, 4))
		}
		switch rank {
		case 0:
			return local.Link(0, 3, ChannelNext).Send([]byte{1})
		case 1:
			return local.Link(3, 1, ChannelMux).Recv([]byte{1})
		case 2:
			return gather()
		}
		time.Sleep(10 * time.Millisecond)
		local.Abort(errors.New("rank 3: out of luck"))
		local.Abort(errors.New("too late"))
		return gather()
	})
	for rank, err := range errs {
		if !errors.Is(err, ErrAborted) || !strings.Contains(err.Error(), "out of luck") {
			t.Errorf("rank %d: %v", rank, err)
		}
	}
}

func TestTransportAllocatesNothing(t *testing.T) {
	local := NewLocal()
	link := local.Link(0, 1, ChannelNext)
	x, y := make([]byte, 1024), make([]byte, 1024)
	var calls [2][]func() error
	for r := range calls {
		z := make([]byte, 2048)
		for _, c := range []struct {
			in   *ir.Instr
			y, x []byte
		}{
			{irtest.Collective(ir.AllReduce, ir.F32, [][]int64{{512}}), z, z},
			{irtest.Collective(ir.AllGather, ir.F32, [][]int64{{512}, {256}}), z, x},
			{irtest.Collective(ir.AllToAll, ir.F32, [][]int64{{16, 8}, {8, 16}}, ir.Int(1), ir.Bool(false)), z, x},
		} {
			call, err := local.Collective(r, []int32{0, 1}, c.in, c.y, c.x)
			if err != nil {
				t.Fatal(err)
			}
			calls[r] = append(calls[r], call)
		}
	}
	const runs = 200
	done := make(chan error, 1)
	go func() {
		for range runs + 1 { // one more, because AllocsPerRun warms up once
			err := link.Recv(y)
			for _, call := range calls[1] {
				err = cmp.Or(err, call())
			}
			if err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	allocs := testing.AllocsPerRun(runs, func() {
		link.Send(x)
		for _, call := range calls[0] {
			call()
		}
	})
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if allocs > 1 { // the counter covers the whole process
		t.Errorf("%v allocations by a message and three collectives", allocs)
	}
}

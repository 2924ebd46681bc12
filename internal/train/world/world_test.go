package world

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"sppo.dev/internal/irtest"
	"sppo.dev/internal/train"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/vmtest"
	"sppo.dev/ir"
)

// within fails the test if f hangs.
func within(t *testing.T, limit time.Duration, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { f(); close(done) }()
	select {
	case <-done:
	case <-time.After(limit):
		t.Fatal("it hangs")
	}
}

// joined connects several processes of a job, all of them running inside this process, and returns their worlds
// and errors.
func joined(t *testing.T, processes, ranks int, change func(*Options)) ([]*World, []error) {
	t.Helper()
	place := vmtest.FreePlace(t)
	worlds, errs := make([]*World, processes), make([]error, processes)
	within(t, time.Minute, func() {
		var all sync.WaitGroup
		for process := range processes {
			all.Go(func() {
				o := Options{Process: process, Processes: processes, Ranks: ranks, Rendezvous: place, Timeout: 20 * time.Second,
					Job: "test", Terms: []Term{{"program", "one"}}, Local: -1, Wires: true}
				if change != nil {
					change(&o)
				}
				worlds[process], errs[process] = Join(t.Context(), o)
			})
		}
		all.Wait()
	})
	return worlds, errs
}

func mustJoin(t *testing.T, processes, ranks int) []*World {
	t.Helper()
	worlds, errs := joined(t, processes, ranks, nil)
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	return worlds
}

// closeAll ends all worlds and returns the error of each process.
func closeAll(t *testing.T, worlds []*World, err error) []error {
	t.Helper()
	errs := make([]error, len(worlds))
	within(t, time.Minute, func() {
		var all sync.WaitGroup
		for i, w := range worlds {
			all.Go(func() { errs[i] = w.Close(err) })
		}
		all.Wait()
	})
	return errs
}

// transports returns a transport for each process.
func transports(worlds []*World) []*vm.Local {
	var out []*vm.Local
	for _, w := range worlds {
		local := vm.NewWired(w)
		w.OnFailure(local.Abort)
		out = append(out, local)
	}
	return out
}

// script makes every rank run collectives in several groups, then exchange matrices, and then send messages around
// a ring. It returns everything that each rank received.
func script(ranks int, of func(rank int) vm.Transport) (results [][]byte, err error) {
	results, errs := make([][]byte, ranks), make([]error, ranks)
	var all sync.WaitGroup
	for rank := range ranks {
		all.Go(func() {
			for _, part := range []func(int, int, vm.Transport) ([]byte, error){collect, exchange, ring} {
				out, err := part(rank, ranks, of(rank))
				if results[rank] = append(results[rank], out...); err != nil {
					errs[rank] = fmt.Errorf("rank %d: %w", rank, err)
					return
				}
			}
		})
	}
	all.Wait()
	return results, errors.Join(errs...)
}

const seed = 5

// numbers returns n random numbers of either type, different for each rank.
func numbers(rank, n int, t ir.DType) []byte {
	rng := rand.New(rand.NewPCG(seed, uint64(rank*1000+n)))
	out := make([]byte, n*int(t.Bytes()))
	for i := range n {
		f := rng.Float32() - 0.5
		if t == ir.F32 {
			vm.Float32s(out)[i] = f
		} else {
			vm.Uint16s(out)[i] = vm.BF16(f)
		}
	}
	return out
}

// collect runs the collectives in three groups: every second rank and all ranks, both in descending order, and the
// rank by itself.
func collect(rank, ranks int, tr vm.Transport) (got []byte, err error) {
	even, odd, all := []int32{}, []int32{}, []int32{}
	for r := ranks - 1; r >= 0; r-- {
		all = append(all, int32(r))
		if r%2 == 0 {
			even = append(even, int32(r))
		} else {
			odd = append(odd, int32(r))
		}
	}
	mine := map[int][]int32{0: even, 1: odd}[rank%2]
	for _, group := range [][]int32{mine, all, {int32(rank)}} {
		n := len(group)
		for _, t := range []ir.DType{ir.F32, ir.BF16} {
			for _, each := range []int{1, 3, 2000} {
				size := int(t.Bytes())
				x, share, whole, before := numbers(rank, n*each, t), make([]byte, each*size), make([]byte, n*each*size), make([]byte, n*each*size)
				odd := numbers(rank, n*each+n/2, t) // not divisible by n if n > 1
				part, all := []int64{int64(each)}, []int64{int64(n * each)}
				for _, c := range []struct {
					op     ir.Op
					y, x   []byte
					shapes [][]int64
				}{
					{ir.ReduceScatter, share, x, [][]int64{part, all}}, {ir.AllGather, whole, share, [][]int64{all, part}},
					{ir.Rotate, before, x, [][]int64{all, all}}, {ir.AllReduce, odd, odd, [][]int64{{int64(n*each + n/2)}}},
				} {
					if err := collective(tr, rank, group, irtest.Collective(c.op, t, c.shapes), c.y, c.x); err != nil {
						return nil, err
					}
				}
				got = slices.Concat(got, share, whole, before, odd)
			}
		}
	}
	return got, nil
}

// collective binds a collective and runs it once.
func collective(tr vm.Transport, rank int, group []int32, in *ir.Instr, y, x []byte) error {
	run, err := tr.Collective(rank, group, in, y, x)
	if err != nil {
		return err
	}
	return run()
}

// exchange turns a matrix that is split by rows into one that is split by columns, and back. Each block of columns
// goes to one rank or to several.
func exchange(rank, ranks int, tr vm.Transport) (got []byte, err error) {
	const rows, cols = 3, 5
	var group []int32
	for r := range ranks {
		group = append(group, int32(r))
	}
	for copies := 1; copies <= ranks; copies++ {
		if ranks%copies != 0 {
			continue
		}
		for _, t := range []ir.DType{ir.F32, ir.BF16} {
			wide, tall := rows*ranks/copies*cols, rows*ranks*cols
			y, z := make([]byte, tall*int(t.Bytes())), make([]byte, wide*int(t.Bytes()))
			byCols, byRows := []int64{int64(rows * ranks), cols}, []int64{rows, int64(ranks / copies * cols)}
			there := irtest.Collective(ir.AllToAll, t, [][]int64{byCols, byRows}, ir.Int(int64(copies)), ir.Bool(false))
			back := irtest.Collective(ir.AllToAll, t, [][]int64{byRows, byCols}, ir.Int(int64(copies)), ir.Bool(true))
			err := cmp.Or(collective(tr, rank, group, there, y, numbers(rank, wide, t)), collective(tr, rank, group, back, z, numbers(rank, tall, t)))
			if err != nil {
				return nil, err
			}
			got = slices.Concat(got, y, z)
		}
	}
	return got, nil
}

// ring sends messages of all sizes in both directions at once, on two channels.
func ring(rank, ranks int, tr vm.Transport) ([]byte, error) {
	next, before := (rank+1)%ranks, (rank+ranks-1)%ranks
	sizes := []int{0, 1, 17, 1 << 10, 3<<18 + 5}
	var all sync.WaitGroup
	got, errs := make([][]byte, 2), make([]error, 4)
	for way, peers := range [][2]int{{next, before}, {before, next}} {
		to, from := tr.Link(rank, peers[0], vm.Channel(way)), tr.Link(peers[1], rank, vm.Channel(way))
		all.Go(func() {
			for _, n := range sizes {
				errs[way] = errors.Join(errs[way], to.Send(bytes.Repeat([]byte{byte(rank), byte(way)}, (n+1)/2)[:n]))
			}
		})
		all.Go(func() {
			for _, n := range sizes {
				y := make([]byte, n)
				errs[2+way] = errors.Join(errs[2+way], from.Recv(y))
				got[way] = append(got[way], y...)
			}
		})
	}
	all.Wait()
	return slices.Concat(got...), errors.Join(errs...)
}

// Ranks in several processes receive the same bits as in one process.
func TestRanksOfSeveralProcesses(t *testing.T) {
	for _, c := range []struct{ ranks, processes int }{{4, 2}, {4, 4}, {6, 3}, {3, 3}} {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			local := vm.NewLocal()
			want, err := script(c.ranks, func(int) vm.Transport { return local })
			if err != nil {
				t.Fatal(err)
			}
			worlds := mustJoin(t, c.processes, c.ranks)
			over := transports(worlds)
			within(t, time.Minute, func() {
				got, err := script(c.ranks, func(rank int) vm.Transport { return over[rank/(c.ranks/c.processes)] })
				if err != nil {
					t.Error(err)
				}
				for rank := range want {
					if !bytes.Equal(got[rank], want[rank]) {
						t.Errorf("rank %d: %d bytes are not the %d of one process (seed %d)", rank, len(got[rank]), len(want[rank]), seed)
					}
				}
			})
			if err := errors.Join(closeAll(t, worlds, nil)...); err != nil {
				t.Error(err)
			}
		})
	}
}

// If a message's sender and receiver expect different sizes, both get the same error.
func TestSizesAcrossProcesses(t *testing.T) {
	worlds := mustJoin(t, 2, 2)
	over := transports(worlds)
	errs := make([]error, 2)
	within(t, time.Minute, func() {
		var all sync.WaitGroup
		all.Go(func() { errs[0] = over[0].Link(0, 1, vm.ChannelNext).Send(make([]byte, 3)) })
		all.Go(func() { errs[1] = over[1].Link(0, 1, vm.ChannelNext).Recv(make([]byte, 4)) })
		all.Wait()
	})
	want := "rank 0 sends 3 bytes, rank 1 receives 4"
	for i, err := range errs {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("process %d: %v", i, err)
		}
	}
	if !errors.Is(errs[1], vm.ErrAborted) {
		t.Errorf("%v is no consequence", errs[1])
	}
	closeAll(t, worlds, nil)
}

// When a process fails or disappears, the others stop waiting and get an error.
func TestFailureReachesAll(t *testing.T) {
	for _, killed := range []bool{false, true} {
		for process := range 3 {
			t.Run(fmt.Sprintf("process %d, killed %t", process, killed), func(t *testing.T) {
				worlds := mustJoin(t, 3, 3)
				over := transports(worlds)
				errs := make([]error, 3)
				within(t, 20*time.Second, func() {
					var all sync.WaitGroup
					for i := range over {
						if i == process {
							continue
						}
						all.Go(func() {
							x := make([]byte, 4<<20)
							errs[i] = collective(over[i], i, []int32{0, 1, 2}, irtest.Collective(ir.AllReduce, ir.F32, [][]int64{{1 << 20}}), x, x)
						})
					}
					time.Sleep(10 * time.Millisecond)
					if killed {
						kill(worlds[process])
					} else {
						over[process].Abort(fmt.Errorf("rank %d: out of luck", process))
					}
					all.Wait()
				})
				want := map[bool]string{false: fmt.Sprintf(" failed: rank %d: out of luck", process), true: " was lost: its connection closed"}[killed]
				for i, err := range errs {
					if i != process && (!errors.Is(err, vm.ErrAborted) || !strings.Contains(err.Error(), fmt.Sprintf("process %d (rank %d, on ", process, process)) || !strings.Contains(err.Error(), want)) {
						t.Errorf("process %d: %v", i, err)
					}
				}
				for i, err := range closeAll(t, worlds, nil) {
					if err == nil && !(killed && i == process) {
						t.Errorf("process %d ends as if nothing had been", i)
					}
				}
			})
		}
	}
}

// A connection for bytes that breaks while both processes are alive is a failure too, and is reported to every
// rank that waits for bytes.
func TestBrokenWire(t *testing.T) {
	t.Parallel()
	worlds := mustJoin(t, 2, 2)
	over := transports(worlds)
	errs := make([]error, 2)
	within(t, 20*time.Second, func() {
		var all sync.WaitGroup
		for i := range over {
			all.Go(func() { errs[i] = over[i].Link(1-i, i, vm.ChannelNext).Recv(make([]byte, 4)) })
		}
		time.Sleep(10 * time.Millisecond)
		worlds[0].wires.links[1].Close()
		all.Wait()
	})
	for i, err := range errs {
		if !errors.Is(err, vm.ErrAborted) || !strings.Contains(err.Error(), "process 0 (rank 0, on ") || !strings.Contains(err.Error(), "failed: the connection to process 1 (rank 1, on ") {
			t.Errorf("process %d: %v", i, err)
		}
	}
	closeAll(t, worlds, nil)
}

// changing is a connection that changes one bit of the bytes that are sent.
type changing struct {
	net.Conn
	at int // the byte that it changes, counted from the next one
}

func (c *changing) Write(b []byte) (int, error) {
	if c.at >= 0 && c.at < len(b) {
		b = bytes.Clone(b)
		b[c.at] ^= 4
	}
	c.at -= len(b)
	return c.Conn.Write(b)
}

// A bit that changes on the way, anywhere in a frame or in a message of the control plane, ends the job with an error
// that names the sender.
func TestChangedBits(t *testing.T) {
	t.Parallel()
	const size = 600
	for _, at := range []int{0, 3, 9, 11, 18, 22, frameBytes, frameBytes + size/2, frameBytes + size - 1} {
		t.Run(fmt.Sprintf("byte %d of a frame", at), func(t *testing.T) {
			t.Parallel()
			worlds := mustJoin(t, 2, 2)
			to := worlds[0].wires.links[1]
			to.Conn = &changing{to.Conn, at}
			over := transports(worlds)
			errs := make([]error, 2)
			within(t, 20*time.Second, func() {
				var all sync.WaitGroup
				all.Go(func() {
					errs[0] = errors.Join(over[0].Link(0, 1, vm.ChannelNext).Send(make([]byte, size)), over[0].Link(1, 0, vm.ChannelNext).Recv(make([]byte, 1)))
				})
				all.Go(func() { errs[1] = over[1].Link(0, 1, vm.ChannelNext).Recv(make([]byte, size)) })
				all.Wait()
			})
			for i, err := range errs {
				if err == nil || !strings.Contains(err.Error(), "process 1 (rank 1, on ") || !strings.Contains(err.Error(), "failed: received from process 0 (rank 0, on ") || !strings.Contains(err.Error(), "changed on the way") {
					t.Errorf("process %d: %v", i, err)
				}
			}
			closeAll(t, worlds, nil)
		})
	}
	for _, at := range []int{0, 5, 13, 17, 21, headBytes + 3, -1} {
		t.Run(fmt.Sprintf("byte %d of a message", at), func(t *testing.T) {
			t.Parallel()
			worlds := mustJoin(t, 2, 2)
			order, data := train.Order{What: "a"}, []byte("some data")
			if at < 0 {
				text, err := json.Marshal(message{Kind: kindOrder, Order: &order})
				if err != nil {
					t.Fatal(err)
				}
				at = headBytes + len(text) + 1
			}
			to := worlds[0].conns[1]
			to.Conn = &changing{to.Conn, at}
			order.Data = data
			within(t, 20*time.Second, func() {
				_ = worlds[0].Order(order) // the failure may already be known
				if o, err := worlds[1].Next(); err == nil {
					t.Errorf("it receives %v", o)
				}
				<-worlds[0].failed
			})
			for i, err := range closeAll(t, worlds, nil) {
				if err == nil || !strings.Contains(err.Error(), "process 1 (rank 1, on ") || !strings.Contains(err.Error(), "failed: received from process 0 (rank 0, on ") || !strings.Contains(err.Error(), "changed on the way") {
					t.Errorf("process %d: %v", i, err)
				}
			}
		})
	}
}

// kill closes the connections of a process, as the system does when the process dies.
func kill(w *World) {
	w.end() // a dead process sends nothing more
	for _, c := range w.conns {
		if c != nil {
			c.Close()
		}
	}
	for _, l := range w.wires.links {
		if l != nil {
			l.Close()
		}
	}
}

func TestOrders(t *testing.T) {
	worlds := mustJoin(t, 3, 6)
	within(t, 20*time.Second, func() {
		var all sync.WaitGroup
		for _, w := range worlds[1:] {
			all.Go(func() {
				for {
					o, err := w.Next()
					if err != nil {
						if err != io.EOF {
							t.Error(err)
						}
						if err := w.Close(nil); err != nil {
							t.Error(err)
						}
						return
					}
					if err := w.Answer(fmt.Appendf(nil, "%d: %s %d %s", w.Process(), o.What, o.Rank, o.Data)); err != nil {
						t.Error(err)
					}
				}
			})
		}
		lead := worlds[0]
		for i := range 100 {
			if err := lead.Order(train.Order{What: "a", Data: []byte{'0' + byte(i%10)}}); err != nil {
				t.Fatal(err)
			}
			got, err := lead.Answers()
			if err != nil || fmt.Sprintf("%s", got) != fmt.Sprintf("[1: a 0 %d 2: a 0 %d]", i%10, i%10) {
				t.Fatalf("%s, %v", got, err)
			}
		}
		got, err := lead.Ask(3, train.Order{What: "b", Rank: 3})
		if err != nil || string(got) != "1: b 3 " {
			t.Errorf("%s, %v", got, err)
		}
		worlds[2].Stop()
		<-lead.Stopped()
		var sharing sync.WaitGroup
		for i, w := range worlds {
			sharing.Go(func() {
				create := func() ([]byte, error) { return []byte("made"), nil }
				for maker := range worlds {
					f := create
					if i != maker {
						f = nil
					}
					if got, err := w.Share(fmt.Sprint("of ", maker), f); err != nil || string(got) != "made" {
						t.Errorf("%q, %v", got, err)
					}
				}
			})
		}
		sharing.Wait()
		if err := lead.Close(nil); err != nil {
			t.Error(err)
		}
		all.Wait()
	})
}

// Every reason why processes cannot connect is one sentence, reported to all processes concerned.
func TestRendezvous(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*Options)
		want   []string // by process
	}{
		{"another program", func(o *Options) {
			if o.Secret = "s"; o.Process == 1 {
				o.Terms = []Term{{"program", "two"}}
			}
		}, []string{"process 1 on HOST has a different program from process 0 on HOST: two instead of one", "process 1 on " +
			"HOST has a different program", "process 1 on HOST has a different program"}},
		{"another number", func(o *Options) {
			if o.Secret = "s"; o.Process == 1 {
				o.Processes = 4
			}
		}, []string{"process 1 on HOST is one of 4 processes, but process 0 is one of 3", "is one of 4 processes", "is one of 4 processes"}},
		{"twice", func(o *Options) { o.Secret, o.Process = "s", min(o.Process, 1) }, []string{"process 1 connected twice, from HOST and from HOST", "connected twice", "connected twice"}},
		{"another program, without a secret", func(o *Options) {
			if o.Timeout = 300 * time.Millisecond; o.Process == 1 {
				o.Terms = []Term{{"program", "two"}}
			}
		}, []string{"process 1 of 3 did not connect to PLACE within 300ms; one was turned away: process 1 on HOST has a different program from process 0 on HOST: two instead of one",
			"process 1 on HOST has a different program", "process 1 of 3 did not connect"}},
		{"missing", func(o *Options) {
			o.Timeout = 300 * time.Millisecond
			if o.Process == 2 {
				o.Job = "other"
			}
		}, []string{`process 2 of 3 did not connect to PLACE within 300ms; process 2 of job "other" from HOST, which is not job "test", did`, "process 2 of 3 did not connect", `PLACE is the rendezvous of a job other than "other"`}},
		{"no process 0", func(o *Options) {
			o.Timeout = 300 * time.Millisecond
			o.Process = max(o.Process, 1)
		}, []string{"process 0 was not found at PLACE within 300ms: dial", "connection refused", "connection refused"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			place := ""
			var mu sync.Mutex
			_, errs := joined(t, 3, 3, func(o *Options) {
				c.change(o)
				mu.Lock()
				place = o.Rendezvous
				mu.Unlock()
			})
			for i, err := range errs {
				want := strings.NewReplacer("HOST", (&World{}).hello(nil).Host, "PLACE", place).Replace(c.want[i])
				if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
					t.Errorf("process %d: %v, want %s", i, err, want)
				}
			}
		})
	}
}

func TestPortTaken(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, err = Join(t.Context(), Options{Processes: 2, Ranks: 2, Rendezvous: l.Addr().String(), Timeout: time.Second})
	if want := fmt.Sprintf("process 0 cannot listen at %s, to which the others connect: bind: address already in use", l.Addr()); err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
	// The listener at that address is not a process of a job and stays silent.
	_, err = Join(t.Context(), Options{Process: 1, Processes: 2, Ranks: 2, Rendezvous: l.Addr().String(), Timeout: 200 * time.Millisecond})
	if err == nil || !strings.Contains(err.Error(), "its reply is not that of process 0 of a job") {
		t.Error(err)
	}
}

// A process that is asked to stop while it waits names the missing processes in its error.
func TestStopWhileWaiting(t *testing.T) {
	for process, want := range []string{"stopped while waiting for process 1 at ", "stopped while waiting for process 0 at "} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		time.AfterFunc(50*time.Millisecond, cancel)
		_, err := Join(ctx, Options{Process: process, Processes: 2, Ranks: 2, Rendezvous: vmtest.FreePlace(t), Timeout: time.Hour})
		if err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

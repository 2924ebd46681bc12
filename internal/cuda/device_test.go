package cuda

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"sppo.dev/internal/cuda/driver"
	"sppo.dev/internal/cuda/emu"
	"sppo.dev/internal/train"
	"sppo.dev/internal/train/probe"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// builder assembles the code of a program by hand.
type builder struct{ code ir.Code }

// buffer places a new buffer after the last one in its arena.
func (b *builder) buffer(arena ir.Arena, t ir.DType, shape ...int64) ir.View {
	v := ir.View{Buffer: uint32(len(b.code.Buffers)), DType: t}
	copy(v.Shape[:], shape)
	start := (b.code.Arenas[arena] + 63) &^ 63
	b.code.Buffers = append(b.code.Buffers, ir.Buffer{Name: fmt.Sprint("b", v.Buffer), Arena: arena, Offset: start, Size: v.Bytes()})
	b.code.Arenas[arena] = start + v.Bytes()
	return v
}

func (b *builder) put(op ir.Op, stream ir.Stream, args []ir.View, attrs ...ir.Attr) {
	for len(args) < len(ir.Ops[op].Operands) && ir.Ops[op].Operands[len(args)].Optional {
		args = append(args, ir.Absent())
	}
	s := &b.code.Sections[ir.SectionStep]
	*s = append(*s, ir.Instr{Op: op, Stream: stream, Args: args, Attrs: attrs})
}

// event makes one stream wait for all work issued to another so far.
func (b *builder) event(from, to ir.Stream) {
	event := ir.Int(int64(b.code.Events[ir.SectionStep]))
	b.code.Events[ir.SectionStep]++
	b.put(ir.Record, from, nil, event)
	b.put(ir.Wait, to, nil, event)
}

// ranks is the number of ranks of the program meeting.
const ranks = 4

// meeting is a program for four ranks that loads tokens, copies to the host and back, sends around the ring,
// and calls every collective in both types. None of its instructions is a kernel.
func meeting() *ir.Program {
	b := &builder{}
	view := func(t ir.DType, shape ...int64) ir.View { return b.buffer(ir.Device, t, shape...) }
	group, next, prev := ir.Int(0), ir.ConstRef(0), ir.ConstRef(1)

	tokens := view(ir.I32, 12)
	b.put(ir.LoadTokens, ir.Compute, []ir.View{tokens}, ir.Int(1), ir.ConstRef(2), ir.Int(5), ir.Int(3), ir.Int(0), ir.Int(0))
	b.put(ir.LoadTokens, ir.Compute, []ir.View{view(ir.I32, 24)}, ir.Int(1), ir.ConstRef(2), ir.Int(5), ir.Int(3), ir.Int(4), ir.Int(0))
	x, y, away := view(ir.F32, 1000), view(ir.F32, 1000), b.buffer(ir.Host, ir.F32, 1000)
	b.put(ir.CopyD2H, ir.D2H, []ir.View{away, x})
	b.event(ir.D2H, ir.H2D)
	b.put(ir.CopyH2D, ir.H2D, []ir.View{y, away})
	b.event(ir.H2D, ir.Compute)
	copied := view(ir.F32, 1000)
	b.put(ir.CopyD2D, ir.Compute, []ir.View{copied, y})
	b.event(ir.Compute, ir.Coll)
	b.event(ir.Compute, ir.SendNext)

	// Even ranks send first, so that no two wait for each other. For odd ranks, jobOf makes a second code with
	// the opposite order.
	got := view(ir.F32, 1000)
	b.put(ir.Send, ir.SendNext, []ir.View{copied}, next)
	b.put(ir.Recv, ir.RecvPrev, []ir.View{got}, prev)

	for _, t := range []ir.DType{ir.F32, ir.BF16} {
		part, all := view(t, 7, 3), view(t, ranks*7, 3)
		b.put(ir.AllGather, ir.Coll, []ir.View{all, part}, group)
		whole, share := view(t, ranks*5, 3), view(t, 5, 3)
		b.put(ir.ReduceScatter, ir.Coll, []ir.View{share, whole}, group)
		b.put(ir.Rotate, ir.Coll, []ir.View{view(t, 7, 3), part}, group)
		sum := view(t, 333)
		b.put(ir.AllReduce, ir.Coll, []ir.View{sum}, group)
		for _, copies := range []int64{1, 2} {
			wide, tall := view(t, 3, ranks/copies*5), view(t, 3*ranks, 5)
			b.put(ir.AllToAll, ir.Coll, []ir.View{tall, wide}, group, ir.Int(copies), ir.Int(0))
			back := view(t, 3, ranks/copies*5)
			b.put(ir.AllToAll, ir.Coll, []ir.View{back, tall}, group, ir.Int(copies), ir.Int(1))
		}
	}
	return jobOf(b)
}

// jobOf returns a program that runs a code on four ranks. Odd ranks get a copy that receives its first message
// before it sends one.
func jobOf(b *builder) *ir.Program {
	odd := b.code
	section := append([]ir.Instr(nil), odd.Sections[ir.SectionStep]...)
	for i := range section {
		if section[i].Op == ir.Send {
			section[i], section[i+1] = section[i+1], section[i]
			break
		}
	}
	odd.Sections[ir.SectionStep] = section
	p := &ir.Program{
		Name: "meeting", Codes: []ir.Code{b.code, odd}, Lines: []string{"", "spec:3: the line"}, Groups: []string{"all"},
		Consts: []string{"next", "prev", "replica"}, Run: ir.Run{Sequence: 64, Batch: 8, Vocab: 1000, Steps: 3},
	}
	for r := range int64(ranks) {
		p.Ranks = append(p.Ranks, ir.Rank{Code: int32(r % 2), Groups: [][]int32{{0, 1, 2, 3}},
			Consts: []int64{(r + 1) % ranks, (r + ranks - 1) % ranks, r}})
	}
	return p
}

// tokens is a data set in which every token encodes its position.
type tokens struct{}

func (tokens) Tokens(_ ir.Section, round, sequence, position int64, out []int32, stride int) error {
	for i := 0; i < len(out); i += stride {
		out[i] = int32((round*100+sequence)*1000 + position)
		position++
	}
	return nil
}

// filled wraps a device, fills its memory before every step and reads the memory back afterwards.
type filled struct {
	vm.Device
	p    *ir.Program
	rank int
	code *ir.Code
	got  *[][]byte
}

func (f *filled) Load(p *ir.Program, rank int, env *vm.Env) error {
	f.p, f.rank, f.code = p, rank, &p.Codes[p.Ranks[rank].Code]
	return f.Device.Load(p, rank, env)
}

func (f *filled) view(i int) ir.View {
	return ir.View{Buffer: uint32(i), DType: ir.U8, Shape: [ir.MaxDims]int64{int64(f.code.Buffers[i].Size)}}
}

func (f *filled) Begin(s ir.Section, round int64) error {
	rng := rand.New(rand.NewPCG(uint64(f.rank), uint64(round)))
	for i := range f.code.Buffers {
		in := make([]byte, f.code.Buffers[i].Size)
		for j := 0; j+1 < len(in); j += 2 { // numbers of moderate size, viewed as f32 or as bf16
			in[j], in[j+1] = byte(rng.IntN(256)), byte(0x3e+rng.IntN(3))
		}
		if err := f.Write(f.view(i), in); err != nil {
			return err
		}
	}
	return f.Device.Begin(s, round)
}

func (f *filled) Join() error {
	if err := f.Device.Join(); err != nil {
		return err
	}
	var all []byte
	for i := range f.code.Buffers {
		out := make([]byte, f.code.Buffers[i].Size)
		if err := f.Read(f.view(i), out); err != nil {
			return err
		}
		all = append(all, out...)
	}
	(*f.got)[f.rank] = all
	return nil
}

// runSteps runs the given number of steps of a program and returns every rank's memory after each step.
func runSteps(p *ir.Program, steps int, newDevice func(rank int) vm.Device, transport vm.Transport) (out [][][]byte, err error) {
	got := make([][]byte, len(p.Ranks))
	open := func(rank int) (vm.Device, error) { return &filled{Device: newDevice(rank), got: &got}, nil }
	job, err := train.Open(p, open, train.Options{Transport: transport, Tokens: tokens{}})
	if err != nil {
		return nil, err
	}
	for range steps {
		if _, err := job.Step(context.Background()); err != nil {
			return out, errors.Join(err, job.Close())
		}
		out = append(out, append([][]byte(nil), got...))
	}
	return out, job.Close()
}

// hanging is the time after which a test counts as hanging. Work that usually takes a second may take minutes
// if many other processes are running.
const hanging = 10 * time.Minute

// within runs f, and fails the test with the stacks of all goroutines if f hangs.
func within(t *testing.T, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
	case <-time.After(hanging):
		buffer := make([]byte, 1<<20)
		t.Fatalf("it hangs:\n%s", buffer[:runtime.Stack(buffer, true)])
	}
}

func TestMeetingsAreThoseOfTheCPU(t *testing.T) {
	fake := useFake(t)
	p := meeting()
	const steps = 3
	want, err := runSteps(p, steps, func(int) vm.Device { return cpu.New(nil) }, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, gpus := range []int32{1, 2} {
		for _, delay := range []int32{0, 300} {
			t.Run(fmt.Sprintf("%d GPUs, delay %d", gpus, delay), func(t *testing.T) {
				fake.reset(gpus, 1<<30, delay)
				within(t, func() {
					m := fake.open(t, Options{})
					got, err := runSteps(p, steps, m.New, m)
					if err != nil {
						t.Error(err)
						return
					}
					for step := range want {
						for rank := range want[step] {
							if !bytes.Equal(got[step][rank], want[step][rank]) {
								t.Errorf("step %d: the memory of rank %d is not the cpu's", step+1, rank)
							}
						}
					}
				})
				if n := fake.live(); n != 0 {
					t.Errorf("%d things were not given back", n)
				}
			})
		}
	}
}

// Copies across the boundary between two pieces of pinned memory are split: the driver would refuse them.
func TestPinnedPieces(t *testing.T) {
	fake := useFake(t)
	b := &builder{}
	tokens, behind := b.buffer(ir.Device, ir.I32, 12), b.buffer(ir.Device, ir.I32, 5000)
	b.put(ir.LoadTokens, ir.Compute, []ir.View{tokens}, ir.Int(1), ir.Int(0), ir.Int(5), ir.Int(3), ir.Int(0), ir.Int(0))
	b.put(ir.LoadTokens, ir.Compute, []ir.View{behind}, ir.Int(1), ir.Int(0), ir.Int(5), ir.Int(3), ir.Int(0), ir.Int(0))
	x, y, _, away := b.buffer(ir.Device, ir.F32, 5000), b.buffer(ir.Device, ir.F32, 5000), b.buffer(ir.Host, ir.F32, 100), b.buffer(ir.Host, ir.F32, 5000)
	b.put(ir.CopyD2H, ir.D2H, []ir.View{away, x})
	b.event(ir.D2H, ir.H2D)
	b.put(ir.CopyH2D, ir.H2D, []ir.View{y, away})
	p := &ir.Program{Name: "pieces", Codes: []ir.Code{b.code}, Ranks: []ir.Rank{{}}, Run: ir.Run{Sequence: 8192, Batch: 8, Vocab: 1000, Steps: 2}}
	want, err := runSteps(p, 2, func(int) vm.Device { return cpu.New(nil) }, nil)
	if err != nil {
		t.Fatal(err)
	}
	m := fake.open(t, Options{OwnProducts: true})
	m.piece = 4096
	got, err := runSteps(p, 2, m.New, m)
	if err != nil {
		t.Fatal(err)
	}
	for step := range want {
		if !bytes.Equal(got[step][0], want[step][0]) {
			t.Errorf("step %d: memory is not the cpu's", step+1)
		}
	}
	if n := fake.live(); n != 0 {
		t.Errorf("%d things were not given back", n)
	}
}

// A kernel may use as much shared memory as the most demanding of its instructions needs, regardless of their
// order.
func TestSharedMemoryIsTheMost(t *testing.T) {
	m := useFake(t).open(t, Options{OwnProducts: true})
	d := m.New(0).(*Device)
	if err := d.Load(alone(), 0, &vm.Env{Transport: m}); err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	f, err := d.kernel(sumSource, "sum_ranks_f32")
	if err != nil {
		t.Fatal(err)
	}
	launch := func(shared int) error {
		zeros := make([][]byte, 6)
		for i := range zeros {
			zeros[i] = make([]byte, 8) // no rows
		}
		call := d.api.Launch(driver.Launch{Func: f, Grid: [3]int{1, 1, 1}, Block: [3]int{32, 1, 1}, Shared: shared, Stream: d.streams[ir.Compute]}, zeros...)
		return call.Make()
	}
	if launch(100<<10) == nil {
		t.Error("the stand-in does not mind")
	}
	for _, bytes := range []int64{100 << 10, 60 << 10} {
		if err := d.allowShared(f, bytes); err != nil {
			t.Fatal(err)
		}
	}
	if err := launch(100 << 10); err != nil {
		t.Error(err)
	}
}

// In each run, a single call fails while the program is loaded, run or closed: there is one error that names
// the call, no rank hangs, and everything is released. The test tries about sixty calls; with SPPO_LONG, every call.
func TestEveryCallMayFail(t *testing.T) {
	t.Run("copies", func(t *testing.T) { everyCallMayFail(t, meeting(), 1, Options{OwnProducts: true}) })
	t.Run("NCCL", func(t *testing.T) { everyCallMayFail(t, meeting(), 1, Options{OwnProducts: true, NCCL: true}) })
	t.Run("graphs", func(t *testing.T) { everyCallMayFail(t, alone(), 3, Options{OwnProducts: true, Graphs: true}) })
}

func everyCallMayFail(t *testing.T, p *ir.Program, steps int, options Options) {
	fake := useFake(t)
	fake.reset(ranks, 1<<30, 0)
	run := func() error {
		m, err := open(options, fixedCode(fake.stubs))
		if err != nil {
			return err
		}
		_, err = runSteps(p, steps, m.New, m)
		return err
	}
	if err := run(); err != nil {
		t.Fatal(err)
	}
	calls := fake.calls()
	stride := max(1, calls/60)
	if os.Getenv("SPPO_LONG") != "" {
		stride = 1
	}
	for at := int64(1); at <= calls; at += stride {
		within(t, func() {
			fake.fail(at, 719)
			err := run()
			if fake.calls() < at { // this run made fewer calls, because it polled less often
				return
			}
			if why := notOneError(err); why != "" {
				t.Errorf("call %d of %d failed: %s: %v", at, calls, why, err)
			}
			if n, c := fake.live(), fake.comms(); n != 0 || c != 0 {
				t.Errorf("call %d of %d failed (%v): %d things and %d communicators were not given back", at, calls, err, n, c)
			}
		})
		if t.Failed() {
			t.FailNow()
		}
	}
	t.Logf("%d calls", calls)
}

// notOneError describes how an error differs from a single report of one failed call, or returns "" if it does not.
func notOneError(err error) string {
	var call *driver.Error
	switch {
	case err == nil:
		return "nobody noticed"
	case !errors.As(err, &call) || call.Code != 719 || !strings.HasPrefix(call.Call, "cu"):
		return "it names no call"
	case strings.Count(err.Error(), "719") != 1:
		return "it is told more than once"
	}
	return ""
}

// TestViewsOutsideAreRefused loads unverified programs with impossible views.
func TestViewsOutsideAreRefused(t *testing.T) {
	fake := useFake(t)
	for want, spoil := range map[string]func(v *ir.View){
		"of i32 does not fit":           func(v *ir.View) { v.Shape = [ir.MaxDims]int64{1<<62 + 1, 4} },
		"bytes 9223372036854775804 to ": func(v *ir.View) { v.Offset = 1<<63 - 4 },
		"buffer 1000000 of":             func(v *ir.View) { v.Buffer = 1000000 },
		"[0 -1 0 0] of i32 at byte":     func(v *ir.View) { v.Shape = [ir.MaxDims]int64{0, -1} },
	} {
		p := meeting()
		spoil(&p.Codes[0].Sections[ir.SectionStep][0].Args[0])
		fake.reset(1, 1<<30, 0)
		m := fake.open(t, Options{})
		if _, err := runSteps(p, 1, m.New, m); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, not %q", err, want)
		}
	}
}

func TestOutOfMemory(t *testing.T) {
	fake := useFake(t)
	p := meeting()
	fake.reset(1, 30_000, 0)
	m := fake.open(t, Options{OwnProducts: true})
	if err := m.Check(p); err == nil || !strings.Contains(err.Error(), "29.3 KiB") {
		t.Errorf("Check says %v", err)
	}
	within(t, func() {
		_, err := runSteps(p, 1, m.New, m)
		if err == nil || !strings.Contains(err.Error(), "free of") || !strings.Contains(err.Error(), "the host arena") {
			t.Errorf("loading says %v", err)
		}
	})
	if n := fake.live(); n != 0 {
		t.Errorf("%d things were not given back", n)
	}
}

// A fault of the GPU is reported when the host waits for the stream; with Sync, at the instruction that caused
// it.
func TestFaultNamesItsInstruction(t *testing.T) {
	fake := useFake(t)
	for _, sync := range []bool{false, true} {
		fake.reset(1, 1<<30, 0)
		b := &builder{}
		x, y := b.buffer(ir.Device, ir.F32, 10), b.buffer(ir.Device, ir.F32, 10)
		b.put(ir.CopyD2D, ir.Compute, []ir.View{y, x})
		b.code.Sections[ir.SectionStep][0].Prov.Line = 1
		p := &ir.Program{Name: "fault", Codes: []ir.Code{b.code}, Ranks: []ir.Rank{{}}, Lines: []string{"", "spec:3: the line"}}
		m := fake.open(t, Options{OwnProducts: true, Sync: sync})
		job, err := train.Open(p, func(rank int) (vm.Device, error) {
			d := m.New(rank).(*Device)
			return &sabotaged{d}, nil
		}, train.Options{Transport: m})
		if err != nil {
			t.Fatal(err)
		}
		_, err = job.Step(context.Background())
		want := "run with " + SyncVariable
		if sync {
			want = "section step, pc 0 (d2d), from spec:3: the line: cuStreamSynchronize: an illegal memory access"
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("sync %t: %v, want %q", sync, err, want)
		}
		if err := job.Close(); err != nil {
			t.Errorf("closing: %v", err)
		}
		if n := fake.live(); n != 0 {
			t.Errorf("%d things were not given back", n)
		}
	}
}

// sabotaged is a device whose first copy uses invalid addresses.
type sabotaged struct{ *Device }

func (s *sabotaged) Begin(section ir.Section, round int64) error {
	s.bound[section][0].actions[0].(*driver.Call).SetCopy(0x1000, 0x2000, 8)
	return s.Device.Begin(section, round)
}

func TestSpans(t *testing.T) {
	fake := useFake(t)
	fake.reset(1, 1<<30, 200)
	m := fake.open(t, Options{OwnProducts: true})
	p := meeting()
	traces := make([]*vm.Trace, ranks)
	all, err := runSteps(p, 2, func(rank int) vm.Device {
		traces[rank] = vm.NewTrace(m.New(rank))
		traces[rank].Wanted = func(_ ir.Section, step int64) bool { return step == 2 }
		return traces[rank]
	}, m)
	if err != nil {
		t.Fatal(err)
	}
	again, err := fake.open(t, Options{OwnProducts: true}).Again()
	if err != nil {
		t.Fatal(err)
	}
	want, err := runSteps(p, 2, again.New, again)
	if err != nil {
		t.Fatal(err)
	}
	for step := range want {
		for rank := range want[step] {
			if !bytes.Equal(all[step][rank], want[step][rank]) {
				t.Errorf("step %d: timing changes the memory of rank %d", step+1, rank)
			}
		}
	}
	if n := len(traces[0].Timelines); n != 1 || traces[0].Timelines[0].Round != 2 {
		t.Fatalf("%d sections were timed, one was wanted", n)
	}
	timelines := []*vm.Timeline{}
	for _, trace := range traces {
		timelines = append(timelines, &trace.Timelines[0])
	}
	measured, err := sim.Measured(p, ir.SectionStep, "fake", sim.SpansOf(p, timelines))
	if err != nil || measured.Makespan <= 0 || measured.Rank(1).Busy[ir.D2H] <= 0 {
		t.Errorf("measured: %v, %v", measured, err)
	}
	for rank, trace := range traces {
		n := 0
		for _, spans := range trace.Timelines[0].Streams {
			last := time.Duration(0)
			for _, s := range spans {
				if s.Begin < last || s.End < s.Begin {
					t.Errorf("rank %d: instruction %d lasts from %v to %v, the one before ended at %v", rank, s.PC, s.Begin, s.End, last)
				}
				last = s.End
				n++
			}
		}
		if want := len(p.Codes[p.Ranks[rank].Code].Sections[ir.SectionStep]); n != want {
			t.Errorf("rank %d: %d spans of %d instructions", rank, n, want)
		}
	}
}

// Issuing allocates nothing: everything was prepared when the program was loaded.
func TestIssueAllocatesNothing(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	fake := useFake(t)
	b := &builder{}
	x, y, h := b.buffer(ir.Device, ir.F32, 10), b.buffer(ir.Device, ir.F32, 10), b.buffer(ir.Host, ir.F32, 10)
	b.put(ir.CopyD2D, ir.Compute, []ir.View{y, x})
	b.event(ir.Compute, ir.D2H)
	b.put(ir.CopyD2H, ir.D2H, []ir.View{h, y})
	p := &ir.Program{Name: "allocs", Codes: []ir.Code{b.code}, Ranks: []ir.Rank{{}}, Lines: []string{""}}
	m := fake.open(t, Options{OwnProducts: true})
	d := m.New(0).(*Device)
	if err := d.Load(p, 0, &vm.Env{Transport: m}); err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	n := testing.AllocsPerRun(100, func() {
		if err := d.Begin(ir.SectionStep, 1); err != nil {
			t.Fatal(err)
		}
		d.Copy(0)
		d.Record(1)
		d.Wait(2)
		d.Copy(3)
		if err := d.Join(); err != nil {
			t.Fatal(err)
		}
	})
	if n > 0 {
		t.Errorf("a section allocates %v times", n)
	}
	if got := d.Peak(ir.Host); got != 40 {
		t.Errorf("the peak of the host arena is %d", got)
	}
}

// Every item of the probe is loaded and issued, each on a new machine, and everything is released.
func TestProbe(t *testing.T) {
	fake, kernels := useFake(t), emu.Need(t)
	fake.reset(2, 1<<30, 0)
	m := fake.open(t, Options{OwnProducts: true})
	m.code = fixedCode(kernels.Path)
	bench := probe.Bench{Open: func(*ir.Program) (func(int) vm.Device, vm.Transport, error) {
		again, err := m.Again()
		return again.New, again, err
	}}
	scale := probe.Scale{DType: ir.BF16, Inner: 64, Rows: []int64{16}, Tokens: []int64{16}, Prefix: 32, Heads: probe.Heads{Heads: 2, KVHeads: 1, Dim: 64}, Bytes: 8192, Cols: 64}
	got, err := bench.Probe(context.Background(), probe.Facts{Ranks: 2}, scale)
	if err != nil {
		t.Fatal(err)
	}
	for _, timing := range got.Timings {
		if !(timing.Seconds > 0) {
			t.Errorf("%s: %v", timing.Item.Name, timing)
		}
	}
	if n := fake.live(); n != 0 {
		t.Errorf("%d things were not given back", n)
	}
}

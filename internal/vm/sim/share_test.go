package sim_test

import (
	"errors"
	"fmt"
	"math"
	"testing"

	"sppo.dev/internal/irtest"
	"sppo.dev/internal/train"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// shared returns the program on a machine where the ranks of a node share the given number of processors.
func shared(p *ir.Program, processors float64) *ir.Program {
	q := *p
	q.Machine.Parallelism = processors
	return &q
}

// TestSharedWithoutNeed checks that, with a processor for every rank and kernels that use only one, a common
// clock gives the same times as separate clocks, apart from rounding.
func TestSharedWithoutNeed(t *testing.T) {
	for seed := range uint64(100) {
		p := irtest.Random(seed, 300)
		p.Machine = machine
		p.Machine.PeakF32 *= 1e4                // attention without kernels for its heads, which only processors do not slow down, is as fast
		p.Machine.GPUsPerNode = 1 + int(seed%5) // without latencies, which groups of collectives have once, except among processors
		a := run(t, p, sim.Options{Spans: true, NoFold: true, Seed: seed, Jitter: float64(seed%2) / 10})
		b := run(t, shared(p, 1e6), sim.Options{Spans: true, Seed: seed, Jitter: float64(seed%2) / 10})
		what := fmt.Sprint("seed ", seed)
		near(t, what+": makespan", float64(b.Makespan), float64(a.Makespan))
		for r := range p.Ranks {
			x, y := a.Rank(r), b.Rank(r)
			near(t, what+": idle", float64(y.Idle), float64(x.Idle))
			for s := range ir.NumStreams {
				near(t, what+": busy", float64(y.Busy[s]), float64(x.Busy[s]))
				near(t, what+": waits", float64(y.Waits[s]), float64(x.Waits[s]))
			}
			for pc := range x.Spans {
				near(t, what+": begin", float64(y.Spans[pc].Begin), float64(x.Spans[pc].Begin))
				near(t, what+": end", float64(y.Spans[pc].End), float64(x.Spans[pc].End))
			}
		}
	}
}

// Two kernels on one processor run at half speed until the shorter one is done.
func TestSharedByHand(t *testing.T) {
	a, b := &script{}, &script{}
	a.work(ir.Compute, 4)      // 0 .. 8: half speed
	a.then(ir.Compute, ir.D2H) // 8
	a.d2h(6)                   // 8 .. 17: half speed until 14, when 3 of its 6 s are done; then alone
	b.work(ir.Compute, 7)      // 0 .. 14: 4 of its 7 s are done at 8, all 7 at 14
	tl := run(t, shared(program(a, b), 1), sim.Options{Spans: true})
	near(t, "the first kernel's end", float64(tl.Rank(0).Spans[0].End), 8)
	near(t, "the second kernel's end", float64(tl.Rank(1).Spans[0].End), 14)
	near(t, "the copy's end", float64(tl.Rank(0).Spans[3].End), 17)
	// On 1.5 processors, the kernels end at 16/3 and 28/3, and the copy's last 3 s run alone.
	near(t, "the makespan with one and a half", float64(run(t, shared(program(a, b), 1.5), sim.Options{}).Makespan), 37.0/3)
}

// TestSpreadByHand checks that a kernel gets the workers if no other kernel has them when it begins: they run
// parts of it while processors are idle. A copy takes one processor. The scripts give times on one processor.
func TestSpreadByHand(t *testing.T) {
	a, b := &script{}, &script{}
	a.work(ir.Compute, 12) // on all 3, at three quarters of their rate: 2.25 per second; latency adds 1 s
	b.recv(ir.RecvNext, 2, 0)
	a.send(ir.SendPrev, 2, 1) // 0 .. 2; two processors are left for the kernel, which does 3 s of its 14.25 s
	b.then(ir.RecvNext, ir.Compute)
	b.work(ir.Compute, 4) // 2 .. 6 on one processor: no worker is free. The long kernel, on two, does 6 s
	p := shared(program(a, b), 3)
	p.Machine.SpreadEfficiency, p.Machine.KernelLatency = 0.75, 1
	tl := run(t, p, sim.Options{Spans: true})
	near(t, "the message's end", float64(tl.Rank(0).Spans[1].End), 2)
	near(t, "the short kernel's end", float64(tl.Rank(1).Spans[3].End), 6)
	near(t, "the long kernel's end", float64(tl.Rank(0).Spans[0].End), 6+5.25/2.25)
}

// TestSpreadBesideACopy checks that a worker starts late if no processor is idle when its kernel begins.
func TestSpreadBesideACopy(t *testing.T) {
	a, b := &script{}, &script{}
	a.d2h(4)              // 0 .. 4
	b.work(ir.Compute, 2) // 0 .. 2: on one processor, during the copy
	b.work(ir.Compute, 8) // 2 .. 7: its worker begins at 4, when 6 s are left
	b.work(ir.Compute, 4) // 7 .. 9.5: on both processors, after the latency
	p := shared(program(a, b), 2)
	p.Machine.SpreadEfficiency, p.Machine.KernelLatency = 1, 0.5
	tl := run(t, p, sim.Options{Spans: true})
	near(t, "the copy's end", float64(tl.Rank(0).Spans[0].End), 4)
	near(t, "the short kernel's end", float64(tl.Rank(1).Spans[0].End), 2)
	near(t, "the long kernel's end", float64(tl.Rank(1).Spans[1].End), 7)
	near(t, "the last kernel's end", float64(tl.Rank(1).Spans[2].End), 9.5)
}

// When a kernel ends, its workers continue with the one that has run longest among those that can use them.
func TestWorkersGoOn(t *testing.T) {
	a, b, c := &script{}, &script{}, &script{}
	a.d2h(30)              // 0 .. 40: two thirds of full speed until 30
	b.work(ir.Compute, 1)  // 0 .. 1.5: too short for workers
	b.work(ir.Compute, 50) // 31 s are left at 30, when it gets the workers, but they have no processor until 40
	c.work(ir.Compute, 20) // 0 .. 30, with the workers
	p := shared(program(a, b, c), 2)
	p.Machine.SpreadEfficiency, p.Machine.KernelLatency = 1, 1
	tl := run(t, p, sim.Options{Spans: true})
	near(t, "the copy's end", float64(tl.Rank(0).Spans[0].End), 40)
	near(t, "the short kernel's end", float64(tl.Rank(1).Spans[0].End), 1.5)
	near(t, "the long kernel's end", float64(tl.Rank(1).Spans[1].End), 40+21.0/2)
	near(t, "the end of the kernel that has the workers first", float64(tl.Rank(2).Spans[0].End), 30)
}

// On a single processor that is never idle, every schedule takes the total time of all work.
func TestSharedConservesWork(t *testing.T) {
	f, b := []int{3, 1, 2, 4}, []int{5, 2, 6, 1}
	for _, stages := range []int{1, 2, 3, 4} {
		tl := run(t, shared(pipeline(stages, f, b), 1), sim.Options{})
		near(t, fmt.Sprint("the makespan of ", stages, " stages"), float64(tl.Makespan), float64(stages*24))
	}
}

// Copies that share a node's bandwidth slow each other down while they run together, and only then.
func TestContention(t *testing.T) {
	a, b := &script{}, &script{}
	a.d2h(4)
	b.work(ir.Compute, 2)
	b.then(ir.Compute, ir.D2H)
	b.d2h(4) // 2 .. 6: both at half speed, until a is done; alone until 8
	b.h2d(3) // the other direction is free: 0 .. 3
	p := program(a, b)
	p.Machine.NodeCopyBandwidth = 1
	tl := run(t, p, sim.Options{Spans: true, Contention: true})
	near(t, "the first copy's end", float64(tl.Rank(0).Spans[0].End), 6)
	near(t, "the second copy's end", float64(tl.Rank(1).Spans[3].End), 8)
	near(t, "the copy back's end", float64(tl.Rank(1).Spans[4].End), 3)
	near(t, "the makespan with parts for all", float64(run(t, p, sim.Options{}).Makespan), 2+8)
}

func TestSharedDeadlock(t *testing.T) {
	for name, c := range deadlocks() {
		if name == "circle" {
			continue // streams run independently here, so the messages get through
		}
		_, err := sim.Run(shared(c.p, 1), ir.SectionStep, sim.Options{})
		var d *sim.DeadlockError
		if err == nil || name == "alone" != errors.As(err, &d) {
			t.Errorf("%s: the error is %v", name, err)
		}
		j := openSimulated(t, shared(c.p, 1))
		if _, err := j.Step(t.Context()); err == nil {
			t.Errorf("%s: the step has no error", name)
		}
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	}
}

func openSimulated(t *testing.T, p *ir.Program) *train.Job {
	t.Helper()
	job, err := sim.New(p, sim.Options{})
	if err != nil {
		t.Fatal(err)
	}
	j, err := train.Open(p, func(r int) (vm.Device, error) { return job.Device(r), nil }, train.Options{Tokens: sim.NoTokens{}})
	if err != nil {
		t.Fatal(err)
	}
	return j
}

// In the interpreter loop, devices share processors exactly as in Run, step after step.
func TestSharedDeviceEqualsRun(t *testing.T) {
	_, p := compile(t, "tiny.sppo", "cluster.parallelism=1.25")
	want := run(t, p, sim.Options{})
	j := openSimulated(t, p)
	if err := j.Init(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		r, err := j.Step(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if math.Abs(r.Seconds-float64(want.Makespan)) > 1e-9 {
			t.Errorf("a step takes %g s, Run says %s", r.Seconds, want.Makespan)
		}
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	own := shared(p, 4)
	own.Machine.SpreadEfficiency = 0
	if alone := run(t, own, sim.Options{}).Makespan; want.Makespan < alone*2 {
		t.Errorf("four ranks on 1.25 processors take %s, on one each %s", want.Makespan, alone)
	}
}

// half returns the program with copies in the two directions taking turns.
func half(p *ir.Program) *ir.Program {
	q := *p
	q.Machine.CopyDuplex = "half"
	return &q
}

// Copies in opposite directions run side by side or, with half duplex, take turns. In both cases, a wait of the
// compute stream for them is a wait for a transfer.
func TestHalfDuplex(t *testing.T) {
	s := &script{}
	s.work(ir.Compute, 2)      // 0 .. 2
	s.then(ir.Compute, ir.D2H) //
	s.d2h(4)                   // 2 .. 6 both ways
	s.h2d(3)                   // 0 .. 3; in turns 6 .. 9, because it is too long for the gap before the d2h
	s.h2d(1)                   // 3 .. 4; in turns 9 .. 10: 0 .. 1 is free, but a direction keeps its order
	s.then(ir.H2D, ir.Compute) //
	s.work(ir.Compute, 1)      // 4 .. 5; 10 .. 11
	p := program(s)
	near(t, "the makespan with both ways at once", float64(run(t, p, sim.Options{}).Makespan), 6)
	tl := run(t, half(p), sim.Options{Spans: true})
	near(t, "the makespan in turns", float64(tl.Makespan), 11)
	near(t, "the copy out", float64(tl.Rank(0).Spans[3].End), 6)
	near(t, "the first copy back", float64(tl.Rank(0).Spans[4].Begin), 6)
	near(t, "the wait of the compute stream for it", float64(tl.Rank(0).Waits[ir.H2D]), 8)
	near(t, "idle time", float64(tl.Rank(0).Idle), 0)
	near(t, "time of copies", float64(tl.Rank(0).Busy[ir.D2H]+tl.Rank(0).Busy[ir.H2D]), 8)
}

// With one clock for all ranks, the copy that is ready first goes first: a 3 s copy to the device precedes the
// one to the host.
func TestHalfDuplexShared(t *testing.T) {
	s := &script{}
	s.work(ir.Compute, 2)
	s.then(ir.Compute, ir.D2H)
	s.d2h(4) // 3 .. 7
	s.h2d(3) // 0 .. 3
	s.h2d(1) // 7 .. 8
	other := &script{}
	other.d2h(5)
	p := half(shared(program(s, other), 1e6))
	tl := run(t, p, sim.Options{Spans: true})
	for pc, want := range map[int][2]float64{3: {3, 7}, 4: {0, 3}, 5: {7, 8}} {
		near(t, "begin", float64(tl.Rank(0).Spans[pc].Begin), want[0])
		near(t, "end", float64(tl.Rank(0).Spans[pc].End), want[1])
	}
	near(t, "the other rank's copy", float64(tl.Rank(1).Spans[0].End), 5)
}

// With half duplex, both directions share a node's limit: a copy from one rank's device slows down a copy to
// another's.
func TestHalfDuplexContention(t *testing.T) {
	a, b := &script{}, &script{}
	a.d2h(4) // 0 .. 7: half speed until 6
	b.h2d(3) // 0 .. 6
	p := program(a, b)
	p.Machine.NodeCopyBandwidth = 1
	near(t, "both ways at once", float64(run(t, p, sim.Options{Contention: true}).Makespan), 4)
	tl := run(t, half(p), sim.Options{Contention: true, Spans: true})
	near(t, "the copy back", float64(tl.Rank(1).Spans[0].End), 6)
	near(t, "the copy out", float64(tl.Rank(0).Spans[0].End), 7)
	p.Machine.H2DBandwidth = 0.5 // 6 s alone, at half the limit; at full speed, both would need 1.5 times the limit
	tl = run(t, half(p), sim.Options{Contention: true, Spans: true})
	near(t, "the copy out beside a slow one", float64(tl.Rank(0).Spans[0].End), 6)
	near(t, "the slow copy back", float64(tl.Rank(1).Spans[0].End), 8)
}

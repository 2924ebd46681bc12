// Package probe measures how long instructions take on a device by running tiny programs, and derives the
// figures of a cluster file from these times.
//
//	probe.go    Bench and Measure: one instruction, repeated, on any device
//	program.go  Item: an instruction with its operands, and the program that repeats it
//	items.go    the items
//	turns.go    measurements that take turns
//	calm.go     Sample and Calm: which measurements to use on a computer shared with other programs
//	training.go compares the losses and gradient norms of training runs
//	figures.go  Probe: derives the figures for package cost from measurements, by inverting that package's formulas
//
// A device runs these programs in the interpreter loop of package vm, as in training. The package does not
// depend on particular devices; its caller provides data-sheet figures and memory sizes as Facts.
package probe

import (
	"context"
	"errors"
	"fmt"
	"time"

	"sppo.dev/internal/train"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// Bench measures items.
type Bench struct {
	// Open returns the devices that a program runs on, one for each rank, and the transport (nil: all ranks are
	// in this process).
	Open func(p *ir.Program) (device func(rank int) vm.Device, transport vm.Transport, err error)
	// Span is the target duration of one run: the run repeats an instruction often enough to reach it.
	Span time.Duration
	// Rounds is the number of rounds in which Probe takes its measurements; 0: one.
	Rounds int
	// Pulse times a fixed piece of work, which takes longer while other programs run; nil: no other programs run.
	Pulse func() time.Duration
	// Between is called after each round; may be nil.
	Between func()
	// Begin is called before each of the measurements that Probe takes, numbered from 1; may be nil.
	Begin func(item Item, ranks, number, of int)
	// Say receives every measurement; may be nil.
	Say func(Timing)

	fastest         time.Duration // fastest pulse so far
	waited, sampled time.Duration // time spent waiting for a calm computer, and measuring
}

// Timing is the measurement of an item.
type Timing struct {
	Item    Item
	Ranks   int       // number of ranks that ran it at the same time
	Copies  int       // copies of the instruction in a run
	Seconds float64   // per repetition: the median of calm runs
	Spread  float64   // longest minus shortest calm run, divided by the median
	Works   []ir.Work // of one repetition, by instruction: the item, then those in its Then
}

// Work returns the total work of one repetition, with the kind, size and type of the first instruction.
func (t Timing) Work() (all ir.Work) {
	for i, w := range t.Works {
		if i == 0 {
			all = w
			continue
		}
		all.Flops += w.Flops
		all.Bytes += w.Bytes
	}
	return all
}

// Bytes returns the rate in B/s, after subtracting the time of an empty instruction.
func (t Timing) Bytes(latency float64) float64 {
	return over(float64(t.Work().Bytes), t.Seconds-latency)
}

// Flops returns the rate of arithmetic in FLOP/s.
func (t Timing) Flops(latency float64) float64 {
	return over(float64(t.Work().Flops), t.Seconds-latency)
}

// over divides by a time, or by a small positive time if noise has made it zero or negative.
func over(amount, seconds float64) float64 { return amount / max(seconds, 1e-9) }

const (
	// mostCopies limits the size of programs.
	mostCopies = 4096
	// runs is the minimum number of timed runs, after one warm-up run.
	runs = 5
)

// Measure times an item that runs on the given number of ranks at the same time.
func (b *Bench) Measure(ctx context.Context, item Item, ranks int) (Timing, error) {
	t := Timing{Item: item, Ranks: ranks}
	job, err := b.start(ctx, &t)
	if err != nil {
		return t, err
	}
	took, err := t.run(ctx, b, job, runs)
	if err := errors.Join(err, job.Close()); err != nil {
		return t, err
	}
	t.settle(took)
	b.say(t)
	return t, nil
}

// start opens a program that repeats an item often enough to reach the target duration, and runs it once.
func (b *Bench) start(ctx context.Context, t *Timing) (*train.Job, error) {
	t.Copies = 1
	job, err := b.open(ctx, t)
	if err != nil {
		return nil, err
	}
	_, err = t.warm(ctx, job)
	seconds := 0.0
	if err == nil {
		seconds, err = t.warm(ctx, job)
	}
	t.Copies = int(min(b.Span.Seconds()/max(seconds, 1e-7), mostCopies)) + 1
	if err == nil && t.Copies == 1 {
		return job, nil
	}
	if err := errors.Join(err, job.Close()); err != nil {
		return nil, err
	}
	if job, err = b.open(ctx, t); err != nil {
		return nil, err
	}
	if _, err := t.warm(ctx, job); err != nil {
		return nil, errors.Join(err, job.Close())
	}
	return job, nil
}

func (b *Bench) say(t Timing) {
	if b.Say != nil {
		b.Say(t)
	}
}

// open compiles the item's program and initialises its operands.
func (b *Bench) open(ctx context.Context, t *Timing) (job *train.Job, err error) {
	defer func() { err = t.failed(err) }()
	p, err := t.Item.program(t.Ranks, t.Copies)
	if err != nil {
		return nil, err
	}
	t.Works = t.Item.works(p)
	device, transport, err := b.Open(p)
	if err != nil {
		return nil, err
	}
	job, err = train.Open(p, func(rank int) (vm.Device, error) { return device(rank), nil }, train.Options{Transport: transport})
	if err != nil {
		return nil, err
	}
	if err := job.Init(ctx); err != nil {
		return nil, errors.Join(err, job.Close())
	}
	return job, nil
}

// run executes steps of the item's program and measures how long they take.
func (t *Timing) run(ctx context.Context, b *Bench, job *train.Job, times int) (took []Sample, err error) {
	for range times {
		s, err := b.Sample(func() (train.StepResult, error) { return job.Step(ctx) })
		if err != nil {
			return nil, t.failed(err)
		}
		took = append(took, s)
	}
	return took, nil
}

func (t *Timing) failed(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("measuring %s: %w", t.Item.Name, err)
}

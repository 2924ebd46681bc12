// Package probe measures devices: how long instructions take, as tiny programs of nothing else, and what figures of a
// cluster follow from that.
//
//	probe.go    Bench and Measure: one instruction, repeated, on any device
//	program.go  Item: an instruction with operands of its own, and the program that repeats it
//	items.go    the items that there are
//	turns.go    measurements take turns
//	calm.go     Sample and Calm: which of them count on a computer that others use, too
//	figures.go  Probe: from measurements to the figures of package cost, by whose formulas they are taken
//
// A device is measured through vm's loop, as training uses it. The package knows no device by name; data sheets and
// memory sizes come from its caller as Facts.
package probe

import (
	"context"
	"errors"
	"fmt"
	"time"

	"sppo.dev/ir"
	"sppo.dev/vm"
)

// Bench is where items are measured.
type Bench struct {
	// Open makes what a program runs on: a device for each rank, and how they meet (nil: in this process).
	Open func(p *ir.Program) (device func(rank int) vm.Device, transport vm.Transport, err error)
	// Span is how long a measurement should take at least: an instruction is repeated until it does.
	Span time.Duration
	// Rounds is how often Probe goes through its measurements; 0: once.
	Rounds int
	// Pulse is what a piece of work that is always the same takes at the moment; nil: the computer is nobody else's.
	Pulse func() time.Duration
	// Between is called behind each round; nil: nothing is.
	Between func()
	// Say is told of every measurement; nil: nobody is.
	Say func(Timing)

	fastest         time.Duration // pulse so far
	waited, sampled time.Duration // for a calm computer, and then
}

// Timing is what came of an item.
type Timing struct {
	Item    Item
	Ranks   int       // that did it at the same time
	Copies  int       // of the instruction in a run
	Seconds float64   // of one: the median of calm runs
	Spread  float64   // of these: longest less shortest, over the median
	Works   []ir.Work // what one does, each by itself: the item and what follows it
}

// Work is what one does in all. Its kind, size and type are those of the first.
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

// Bytes is the rate of bytes in B/s, once what an empty instruction takes is taken away.
func (t Timing) Bytes(latency float64) float64 {
	return over(float64(t.Work().Bytes), t.Seconds-latency)
}

// Flops is the rate of arithmetic in FLOP/s.
func (t Timing) Flops(latency float64) float64 {
	return over(float64(t.Work().Flops), t.Seconds-latency)
}

// over divides by what is above 0 even where noise makes it less.
func over(amount, seconds float64) float64 { return amount / max(seconds, 1e-9) }

const (
	// mostCopies bounds the size of programs.
	mostCopies = 4096
	// runs are timed at least, behind one that warms up.
	runs = 5
)

// Measure repeats an item on so many ranks at once.
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

// start opens an item's program with as many copies of it as take long enough, and runs it once.
func (b *Bench) start(ctx context.Context, t *Timing) (*vm.Job, error) {
	t.Copies = 1
	job, err := b.open(ctx, t)
	if err != nil {
		return nil, err
	}
	took, err := t.run(ctx, b, job, 2) // the first of which warms up
	if err := errors.Join(err, job.Close()); err != nil {
		return nil, err
	}
	t.Copies = int(min(max(b.Span.Seconds()/max(took[1].Seconds, 1e-7), 1), mostCopies)) + 1
	if job, err = b.open(ctx, t); err != nil {
		return nil, err
	}
	if _, err := t.run(ctx, b, job, 1); err != nil {
		return nil, errors.Join(err, job.Close())
	}
	return job, nil
}

func (b *Bench) say(t Timing) {
	if b.Say != nil {
		b.Say(t)
	}
}

// open makes the item's program and gives its operands values.
func (b *Bench) open(ctx context.Context, t *Timing) (job *vm.Job, err error) {
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
	job, err = vm.Open(p, func(rank int) (vm.Device, error) { return device(rank), nil }, vm.Options{Transport: transport})
	if err != nil {
		return nil, err
	}
	if err := job.Init(ctx); err != nil {
		return nil, errors.Join(err, job.Close())
	}
	return job, nil
}

// run times steps of the item's program.
func (t *Timing) run(ctx context.Context, b *Bench, job *vm.Job, times int) (took []Sample, err error) {
	for range times {
		s, err := b.Sample(func() (vm.StepResult, error) { return job.Step(ctx) })
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

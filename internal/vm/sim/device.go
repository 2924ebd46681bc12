package sim

import (
	"fmt"
	"sync"
	"time"

	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// Job provides the ranks of a program as devices for a train.Job. All ranks run in one process, each in its own
// interpreter loop. At messages and collectives they compare their clocks.
type Job struct {
	program *ir.Program
	worlds  [ir.NumSections]*world
	prices  *prices
	options Options
	shares  bool // ranks affect each other's durations: Join simulates the whole section for all ranks at once

	mu      sync.Mutex
	running int // number of ranks that neither wait for others nor have finished the section
	blocked map[*rank]bool
	last    ir.Section // the section begun last
	failed  error
}

// New returns a job. Options that apply to a single call to Run are ignored.
func New(p *ir.Program, o Options) (*Job, error) {
	if err := o.Check(p); err != nil {
		return nil, err
	}
	o.NoFold, o.Spans = true, false
	return &Job{program: p, prices: newPrices(p, o.shares(p), o.Scale), options: o, shares: o.shares(p), running: len(p.Ranks), blocked: map[*rank]bool{}}, nil
}

// Device returns the device of a rank.
func (j *Job) Device(rank int) vm.Device { return &device{job: j, index: rank} }

// Timeline returns the timeline of the section begun last, which all ranks must have finished.
func (j *Job) Timeline() *Timeline {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.worlds[j.last] == nil {
		return nil
	}
	return j.worlds[j.last].timeline()
}

// world returns the world of a section, created when the first rank begins it.
func (j *Job) world(s ir.Section, round int64) (*world, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	w := j.worlds[s]
	if w == nil {
		var err error
		if w, err = newWorld(j.program, s, j.prices, j.options); err != nil {
			return nil, err
		}
		for _, r := range w.ranks {
			r.wake = make(chan error, 1)
		}
		j.worlds[s] = w
	}
	j.last = s
	return w, nil
}

// meet makes a rank arrive at its meeting, and blocks it until the others have also arrived.
func (j *Job) meet(w *world, r *rank) error {
	j.mu.Lock()
	if j.failed != nil {
		defer j.mu.Unlock()
		return j.failed
	}
	done, err := w.meet(r, func(x *rank) {
		delete(j.blocked, x)
		j.running++
		x.wake <- nil
	})
	if err == nil && !done {
		j.blocked[r] = true
		err = j.rest(w)
	}
	if err != nil {
		j.fail(err)
	}
	j.mu.Unlock()
	if err != nil || done {
		return err
	}
	return <-r.wake
}

// rest removes a rank from the running ranks. If none is left running, any blocked ranks would wait forever, so
// it reports a deadlock.
func (j *Job) rest(w *world) error {
	if j.running--; j.running > 0 {
		return nil
	}
	if len(j.blocked) > 0 {
		return w.deadlock()
	}
	j.running = len(j.program.Ranks) // all ranks are done, so the next section may begin
	return nil
}

// share makes ranks block until the last one arrives, which simulates the section for all of them.
func (j *Job) share(w *world, r *rank) error {
	j.mu.Lock()
	if j.failed != nil {
		defer j.mu.Unlock()
		return j.failed
	}
	if j.running--; j.running > 0 {
		j.blocked[r] = true
		j.mu.Unlock()
		return <-r.wake
	}
	defer j.mu.Unlock()
	if err := w.share(); err != nil {
		j.fail(err)
		return err
	}
	j.running = len(j.program.Ranks)
	for x := range j.blocked {
		delete(j.blocked, x)
		x.wake <- nil
	}
	return nil
}

// fail wakes all blocked ranks with the same error.
func (j *Job) fail(err error) {
	j.failed = fmt.Errorf("%w: %w", vm.ErrAborted, err)
	for r := range j.blocked {
		delete(j.blocked, r)
		select {
		case r.wake <- j.failed:
		default: // the rank that reported the error
		}
	}
}

// device is one rank of a Job.
type device struct {
	job   *Job
	index int
	env   *vm.Env
	world *world // world of the current section
	rank  *rank
	peaks [ir.NumArenas]ir.Bytes
	err   error
}

// Load implements vm.Device.
func (d *device) Load(p *ir.Program, rank int, env *vm.Env) error {
	if p != d.job.program || rank != d.index {
		return fmt.Errorf("the device belongs to rank %d of program %q", d.index, d.job.program.Name)
	}
	d.env = env
	return nil
}

// Begin implements vm.Device.
func (d *device) Begin(section ir.Section, round int64) error {
	w, err := d.job.world(section, round)
	if err != nil {
		d.err = err
		return err
	}
	d.world, d.rank, d.err = w, w.ranks[d.index], nil
	d.rank.round = round
	w.begin(d.rank, d.env.Spans != nil)
	return nil
}

// Launch implements vm.Device.
func (d *device) Launch(pc int) {
	if !d.job.shares {
		d.world.work(d.rank, pc, &d.rank.binding.steps[pc])
	}
}

// Copy implements vm.Device.
func (d *device) Copy(pc int) { d.Launch(pc) }

// Comm implements vm.Device.
func (d *device) Comm(pc int) {
	if d.err != nil || d.job.shares {
		return
	}
	d.rank.pc = pc
	d.err = d.job.meet(d.world, d.rank)
}

// Record implements vm.Device.
func (d *device) Record(pc int) {
	if !d.job.shares {
		d.rank.record(pc, &d.rank.binding.steps[pc])
	}
}

// Wait implements vm.Device.
func (d *device) Wait(pc int) {
	if !d.job.shares {
		d.rank.wait(pc, &d.rank.binding.steps[pc])
	}
}

// Join implements vm.Device.
func (d *device) Join() error {
	if d.rank == nil {
		return d.err
	}
	if d.job.shares {
		if d.err = d.job.share(d.world, d.rank); d.err != nil {
			return d.err
		}
	}
	d.rank.pc = len(d.rank.binding.steps)
	for a := range d.peaks {
		d.peaks[a] = max(d.peaks[a], d.rank.binding.peaks[a])
	}
	d.report()
	if d.job.shares {
		return nil
	}
	d.job.mu.Lock()
	defer d.job.mu.Unlock()
	if d.job.failed != nil {
		return d.err
	}
	if err := d.job.rest(d.world); err != nil {
		d.job.fail(err)
		d.err = err
	}
	return d.err
}

// report delivers the spans of each stream in order.
func (d *device) report() {
	if d.env.Spans == nil {
		return
	}
	for pc, s := range d.rank.spans {
		list := &d.env.Spans.Streams[d.rank.binding.steps[pc].stream]
		*list = append(*list, vm.Span{PC: int32(pc), Begin: duration(s.Begin), End: duration(s.End)})
	}
}

func duration(s ir.Seconds) time.Duration { return time.Duration(float64(s)*1e9 + 0.5) }

// Elapsed implements vm.Clock.
func (d *device) Elapsed() (time.Duration, bool) { return duration(ir.Seconds(d.rank.finish())), true }

// Read implements vm.Device. There is no data: the bytes are NaN in any floating-point type.
func (d *device) Read(_ ir.View, out []byte) error {
	for i := range out {
		out[i] = 0xff
	}
	return nil
}

// Write implements vm.Device.
func (d *device) Write(ir.View, []byte) error { return nil }

// Peak implements vm.Device.
func (d *device) Peak(a ir.Arena) ir.Bytes { return d.peaks[a] }

// Close implements vm.Device.
func (d *device) Close() error { return nil }

// NoTokens is a source for runs that read no data. It implements vm.Documents, because simulated programs may also load
// labels and positions. Attention takes as long as in sequences without document boundaries.
type NoTokens struct{}

// Tokens implements vm.Tokens.
func (NoTokens) Tokens(ir.Section, int64, int64, int64, []int32, int) error { return nil }

// Marks implements vm.Documents.
func (NoTokens) Marks(int, ir.Section, int64, int64, int64, []int32, int) error { return nil }

// Labels implements vm.Documents.
func (NoTokens) Labels(ir.Section, int64) (int64, error) { return 1, nil }

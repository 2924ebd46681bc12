package sppo

import (
	"context"
	"iter"

	"sppo.dev/internal/compile"
	"sppo.dev/internal/train"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu"
	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/ir"
)

// Devices are what the ranks of a program compute on: CPU or CUDA. The zero value is CPU(0).
type Devices struct {
	open func(*ir.Program) (*machine, error)
}

// machine holds the devices of one job.
type machine struct {
	device  func(rank int) vm.Device
	options train.Options
	close   func()
}

// CPU computes on the processor. The ranks share the given number of threads, or GOMAXPROCS threads if it is 0.
func CPU(threads int) Devices {
	return Devices{func(*ir.Program) (*machine, error) {
		pool := simd.NewPool(threads)
		return &machine{device: func(int) vm.Device { return cpu.New(pool) }, options: train.Options{Kind: simd.ISA()}, close: pool.Close}, nil
	}}
}

// A Job is a program loaded on its devices. It must be used by one goroutine at a time. If a step or a validation
// fails, the job has failed: further calls return an error that wraps the first one.
type Job struct {
	job     *train.Job
	close   func()
	last    int
	started bool // the weights have values
}

// StepResult is the result of a training step.
type StepResult struct {
	Step            int // the first is 1
	Loss            float64
	GradNorm        float64 // before clipping
	Skipped         bool    // the weights are unchanged: the gradients were not finite or were too large
	LR              float64
	Seconds         float64
	TokensPerSecond float64
	ExpertLoad      [][]float64 // by layer: how often tokens of the batch chose each expert; empty for layers without experts
}

// Open verifies a program and loads it on the devices: every stream of every rank becomes a goroutine. Relative
// paths of data files are resolved against the working directory. Close frees the devices.
func Open(p *ir.Program, on Devices) (*Job, error) {
	if err := compile.Verify(p); err != nil {
		return nil, err
	}
	if on.open == nil {
		on = CPU(0)
	}
	m, err := on.open(p)
	if err != nil {
		return nil, err
	}
	job, err := train.Open(p, func(rank int) (vm.Device, error) { return m.device(rank), nil }, m.options)
	if err != nil {
		m.close()
		return nil, err
	}
	return &Job{job: job, close: m.close, last: p.Run.Steps}, nil
}

// start sets the initial weights, unless they have values.
func (j *Job) start(ctx context.Context) error {
	if j.started {
		return nil
	}
	err := j.job.Init(ctx)
	j.started = err == nil
	return err
}

// Train returns an iterator that trains to the program's last step, from the initial weights or from where the job is. It
// yields the result of each step, or an error, which ends it. When ctx is done, the step in progress is finished. After
// the loop, Train can go on where it stopped, unless the job has failed.
func (j *Job) Train(ctx context.Context) iter.Seq2[StepResult, error] {
	return func(yield func(StepResult, error) bool) {
		if err := j.start(ctx); err != nil {
			yield(StepResult{}, err)
			return
		}
		for j.job.Steps() < j.last {
			r, err := j.job.Step(ctx)
			if !yield(StepResult(r), err) || err != nil {
				return
			}
		}
	}
}

// Eval returns the validation loss, in nats per token. If the program has no validation, it returns an error.
func (j *Job) Eval(ctx context.Context) (float64, error) {
	if err := j.start(ctx); err != nil {
		return 0, err
	}
	return j.job.Eval(ctx)
}

// Steps returns the number of steps done, including those before a restored checkpoint.
func (j *Job) Steps() int { return j.job.Steps() }

// Tensor assembles a whole tensor from the parts that ranks hold, such as a weight, or the state that an optimizer keeps
// for it. It returns the values, row by row, and the shape. Program.Tensors lists the names.
func (j *Job) Tensor(name string, role ir.Role) ([]float32, [2]int64, error) {
	return j.job.Tensor(name, role)
}

// Save writes a checkpoint to a folder of checkpoints, without removing older ones.
func (j *Job) Save(folder string) error { return j.job.Save(folder) }

// Restore loads a checkpoint, or the newest of a folder. The next step then has the same result as if the run had not
// been interrupted.
func (j *Job) Restore(ctx context.Context, path string) error {
	if err := j.start(ctx); err != nil {
		return err
	}
	return j.job.Restore(ctx, path)
}

// Close frees the devices and threads.
func (j *Job) Close() error {
	defer j.close()
	return j.job.Close()
}

// Package sppo compiles training jobs for very long sequences, simulates them and runs them. It gives Go
// programs the functionality of the commands sppoc and sppovm.
//
//	spec, err := sppo.Load("job.sppo", "schedule.offload=full") // the language: package lang
//	plan, err := sppo.NewPlan(ctx, spec, sppo.Options{})        // every decision, with its reason
//	program, err := plan.Build(ctx)                             // verified bytecode of every rank: package ir
//	step, err := sppo.Simulate(ctx, program)                    // one step in virtual time
//
//	job, err := sppo.Open(program, sppo.CPU(0)) // or sppo.CUDA()
//	defer job.Close()
//	for step, err := range job.Train(ctx) { ... }
//
// Compile makes and builds a plan in one call. A Program can also be written by hand: ir.Verify checks any program,
// regardless of its origin.
//
// Besides errors of the file system, there are three kinds of errors: lang.Diagnostics if the spec is wrong, *FitError
// if the job needs more memory than its cluster has, and *BugError if the compiler has made a mistake.
//
// While the major version is 0, this package changes along with the language and the file formats;
// see CHANGELOG.md.
package sppo

import (
	"context"
	"io"

	"sppo.dev/internal/codegen"
	"sppo.dev/internal/compile"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/estimate"
	"sppo.dev/internal/passes/pass"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/shipped"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// Version is the release that contains this source, published or not. Its entry is the first in CHANGELOG.md.
const Version = "0.1.0"

// Load reads and checks a spec. Each override is KEY=VALUE, as in "schedule.sp=4". A spec in any folder can
// import the shipped clusters and baselines. An error in the spec is a lang.Diagnostics.
func Load(file string, overrides ...string) (*lang.Spec, error) {
	return lang.Load(file, languageOptions(overrides))
}

// Parse checks a spec in memory. The name is used as its file name in diagnostics and as the base of relative
// imports.
func Parse(name string, text []byte, overrides ...string) (*lang.Spec, error) {
	return lang.Parse(name, text, languageOptions(overrides))
}

func languageOptions(overrides []string) lang.Options {
	return lang.Options{Set: overrides, Shipped: shipped.Files}
}

// Options control the search for a plan. The zero value searches as sppoc plan does.
type Options struct {
	// FirstFit takes the first plan that fits, instead of looking for the fastest.
	FirstFit bool

	// Patience scales the amount of work after which the search accepts a plan that may not be the fastest;
	// 0 means 1.
	Patience float64

	// Progress, unless it is nil, is called after each candidate of the search, with the number of candidates so
	// far and the estimated time of a step in the fastest plan that fits, or 0 if none has been found yet.
	Progress func(candidates int, step ir.Seconds)
}

// A Plan holds every decision about a job. NewPlan makes plans; the fields describe the result.
type Plan struct {
	Step            ir.Seconds // estimated time of a step; Simulate gives a more accurate one
	TokensPerSecond float64    // of all ranks, estimated as well
	MFU             float64    // model FLOPs utilization: model FLOPs divided by the peak of the ranks
	Memory          Memory
	Decisions       []Decision // in the order in which they were made

	plan *plan.Plan
}

// Memory describes the memory of one rank. Peaks have one entry for each pipeline stage: the highest address that a
// buffer has on a rank of that stage.
type Memory struct {
	Fits                         bool
	DevicePeaks, HostPeaks       []ir.Bytes
	DeviceCapacity, HostCapacity ir.Bytes
}

// Decision is one choice, such as schedule.sp, the pass that made it, and its reason.
type Decision struct{ Pass, What, Value, Why string }

// NewPlan decides what the spec leaves open, predicts how a step will run, and places the buffers to find out whether
// the plan fits. If none fits, it returns the one that is closest to fitting. When ctx is done, the search ends and
// NewPlan returns the context's error.
func NewPlan(ctx context.Context, spec *lang.Spec, o Options) (*Plan, error) {
	p, err := search(ctx, spec, o)
	if err != nil {
		return nil, err
	}
	return measured(p)
}

func search(ctx context.Context, spec *lang.Spec, o Options) (*plan.Plan, error) {
	options := passes.Options{Fitting: o.FirstFit, Patience: o.Patience, Stop: ctx.Done()}
	if o.Progress != nil {
		options.Progress = func(p pass.Progress) { o.Progress(p.Candidates, p.StepS) }
	}
	p, err := compile.Plan(spec, options)
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	return p, err
}

// ReadPlan reads a plan that WriteJSON has written. The plan may have been edited, and is used as it is; an error
// reports decisions that contradict each other.
func ReadPlan(r io.Reader) (*Plan, error) {
	p, err := plan.ReadJSON(r)
	if err != nil {
		return nil, err
	}
	if err := passes.Verify(p); err != nil {
		return nil, err
	}
	estimate.Predict(p)
	p.Memory.Placed = false // the plan may have been edited
	return measured(p)
}

// measured describes a plan, after placing its buffers.
func measured(p *plan.Plan) (*Plan, error) {
	if !p.Memory.Placed {
		if err := codegen.Measure(p); err != nil {
			return nil, err
		}
	}
	out := &Plan{Step: p.Time.StepS, MFU: p.Throughput.MFU, Memory: memoryOf(p), plan: p,
		TokensPerSecond: p.Throughput.TGS * float64(p.Parallel.DP*p.Parallel.PP*p.Parallel.SP)}
	for _, d := range p.Decisions {
		out.Decisions = append(out.Decisions, Decision(d))
	}
	return out, nil
}

func memoryOf(p *plan.Plan) Memory {
	m := &p.Memory
	return Memory{m.Fits, m.DevicePeakBytes, m.HostPeakBytes, m.DeviceCapacityBytes, m.HostCapacityBytes}
}

// WriteJSON writes all decisions and figures, in the form that ReadPlan, sppoc and sppovm read.
func (p *Plan) WriteJSON(w io.Writer) error { return p.plan.WriteJSON(w) }

// Build generates the program and proves it free of races, bad accesses, unmatched messages and deadlocks, and, unless it is
// long, that it computes the loss, gradient and update of its model. It also builds a program that does not fit. If the program fails the proof, the error is a *BugError. Build takes up to
// seconds, and looks at ctx only at its beginning and end.
func (p *Plan) Build(ctx context.Context) (*ir.Program, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	program, err := build(ctx, p.plan)
	p.Memory = memoryOf(p.plan)
	return program, err
}

func build(ctx context.Context, p *plan.Plan) (*ir.Program, error) {
	program, err := compile.Build(p, nil)
	if err == nil {
		_, _, err = compile.Prove(program)
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return nil, err
	}
	return program, nil
}

// Compile makes a plan and builds it. If the job does not fit its cluster, the error is a *FitError.
func Compile(ctx context.Context, spec *lang.Spec, o Options) (*ir.Program, error) {
	p, err := search(ctx, spec, o)
	if err != nil {
		return nil, err
	}
	program, err := build(ctx, p)
	if err != nil {
		return nil, err
	}
	if !p.Memory.Fits {
		return nil, &FitError{memoryOf(p)}
	}
	return program, nil
}

// BugError reports a bug in the compiler, not in the job: a program that it generated fails verification or cannot be
// simulated. Its field Err says why; it is an *ir.VerifyError in the former case.
type BugError = compile.BugError

// FitError reports a job that needs more memory than its cluster has.
type FitError struct{ Memory Memory }

func (e *FitError) Error() string {
	m := &e.Memory
	return "the job does not fit: " + plan.Memory{DevicePeakBytes: m.DevicePeaks, HostPeakBytes: m.HostPeaks,
		DeviceCapacityBytes: m.DeviceCapacity, HostCapacityBytes: m.HostCapacity}.Excess()
}

// Simulation describes a step in virtual time.
type Simulation struct {
	Step            ir.Seconds
	TokensPerSecond float64    // of all ranks
	MFU             float64    // model FLOPs utilization: model FLOPs divided by the peak of the ranks
	BubbleRatio     float64    // idle divided by busy time of all ranks, up to the end of the pipeline
	Exposed         ir.Seconds // the longest time that a rank waits for copies between host and device
}

// Simulate runs one step in virtual time, without computing anything, on the machine that the program
// describes. It takes up to seconds, and looks at ctx only at its beginning and end.
func Simulate(ctx context.Context, p *ir.Program) (*Simulation, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	t, err := sim.Run(p, ir.SectionStep, sim.Options{})
	if err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	return &Simulation{Step: t.Makespan, TokensPerSecond: t.TGS() * float64(len(p.Ranks)), MFU: t.MFU(), BubbleRatio: t.BubbleRatio(), Exposed: t.Exposed()}, nil
}

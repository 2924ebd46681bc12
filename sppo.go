// Package sppo compiles training jobs for very long sequences, simulates them and runs them. It gives Go
// programs the functionality of the commands sppoc and sppovm.
//
//	spec, err := sppo.Load("job.sppo", "schedule.offload=full") // the language: package lang
//	plan, err := sppo.Plan(spec)                                // every decision, with its reason: package passes
//	program, err := sppo.Build(plan)                            // verified bytecode of every rank: package ir
//	timeline, err := sppo.Simulate(program)                     // one step in virtual time: package internal/vm/sim
//	err = sppo.Run(ctx, program, each)                          // training on the CPU: package train
//
// The results are plain values of those packages. A Program can also be written by hand: ir.Verify checks any
// program, regardless of its origin. To run on other devices, give train.Open a function that creates them;
// package cuda has the one for NVIDIA GPUs.
//
// While the major version is 0, this package changes along with the language and the file formats;
// see CHANGELOG.md.
package sppo

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"sppo.dev/internal/codegen"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/shipped"
	"sppo.dev/internal/train"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu"
	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// Version is the release that contains this source, published or not. Its entry is the first in CHANGELOG.md.
const Version = "0.1.0"

// Load reads and checks a spec. Each override is KEY=VALUE, as in "schedule.sp=4". A spec in any folder can
// import the shipped clusters and baselines. An error about the spec is a lang.Diagnostics.
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

// Plan decides what the spec leaves open and predicts how a step will run. Plan.Memory is an estimate until the
// plan is built.
func Plan(spec *lang.Spec) (*plan.Plan, error) { return PlanWith(spec, passes.Options{}) }

// PlanWith is Plan with a choice of passes. Unless o.Measure is set, the search places a candidate's buffers to
// find out whether the candidate fits.
func PlanWith(spec *lang.Spec, o passes.Options) (*plan.Plan, error) {
	if o.Measure == nil {
		o.Measure = codegen.MeasureFit
	}
	plan := plan.New(spec)
	if err := passes.Run(spec, plan, o); err != nil {
		return nil, err
	}
	return plan, nil
}

// Build compiles a plan and proves the program free of races, bad accesses, unmatched messages and deadlocks.
// It sets Plan.Memory to the peaks of the placed buffers. It also builds programs that exceed their cluster's
// memory. If the program fails the proof, the error is a *BugError.
func Build(plan *plan.Plan) (*ir.Program, error) { return BuildTimed(plan, nil) }

// BuildTimed is like Build, and also measures the passes and the proof.
func BuildTimed(plan *plan.Plan, times *passes.Times) (*ir.Program, error) {
	program, err := codegen.BuildTimed(plan, times)
	if err != nil {
		return nil, err
	}
	defer times.Time("verify")()
	return program, proved(program)
}

// proved verifies a program that the compiler generated; a failure is a bug in the compiler.
func proved(p *ir.Program) error {
	if err := verify(p); err != nil {
		return &BugError{err}
	}
	return nil
}

// verify proves everything except that the program fits its machine.
func verify(p *ir.Program) error { return ir.VerifyOptions{AllowOverCapacity: true}.Verify(p) }

// BugError reports a bug in the compiler: a program that it generated fails verification or cannot be simulated.
// The job is not at fault.
type BugError struct{ Err error } // an *ir.VerifyError, or the reason why the program cannot be simulated

func (e *BugError) Error() string {
	what := "the program that it compiled cannot run: " + e.Err.Error()
	var v *ir.VerifyError
	if errors.As(e.Err, &v) && len(v.Findings) > 0 {
		what = fmt.Sprintf("the program that it compiled breaks the verifier's rule %q\n%s", v.Findings[0].Kind, &v.Findings[0])
		if more := len(v.Findings) - 1 + v.More; more > 0 {
			what += fmt.Sprintf("\nand %d more", more)
		}
	}
	return "this is a bug in sppo, not a mistake in the job: " + what +
		"\nplease report it with this message, the version, the command line, and the spec with the files that it imports"
}

func (e *BugError) Unwrap() error { return e.Err }

// Compile makes a plan and builds it. If the job does not fit its cluster, the error is a *FitError.
func Compile(spec *lang.Spec) (*ir.Program, error) {
	plan, err := Plan(spec)
	if err != nil {
		return nil, err
	}
	program, err := Build(plan)
	if err != nil {
		return nil, err
	}
	if !plan.Memory.Fits {
		return nil, &FitError{plan.Memory}
	}
	return program, nil
}

// FitError reports a job that needs more memory than its cluster has.
type FitError struct{ Memory plan.Memory }

func (e *FitError) Error() string { return "the job does not fit: " + Shortfall(&e.Memory) }

// Shortfall names, for each kind of memory that is too small, the stage with the highest peak. It returns ""
// if the job fits.
func Shortfall(m *plan.Memory) string {
	var out []string
	for _, a := range []struct {
		name     string
		peaks    []ir.Bytes
		capacity ir.Bytes
	}{{"device", m.DevicePeakBytes, m.DeviceCapacityBytes}, {"host", m.HostPeakBytes, m.HostCapacityBytes}} {
		stage := 0
		for i, peak := range a.peaks {
			if peak > a.peaks[stage] {
				stage = i
			}
		}
		if peak := a.peaks[stage]; peak > a.capacity {
			has := a.capacity.String()
			if has == peak.String() {
				has = fmt.Sprintf("%s less", peak-a.capacity)
			}
			out = append(out, fmt.Sprintf("a rank of stage %d needs %s of %s memory but has %s", stage, peak, a.name, has))
		}
	}
	return strings.Join(out, "; ")
}

// Simulate runs one step in virtual time, without computing anything, on the machine that the program
// describes.
func Simulate(p *ir.Program) (*sim.Timeline, error) {
	return sim.Run(p, ir.SectionStep, sim.Options{})
}

// A Job is a program loaded for execution on the CPU. Init, Step and Eval run it; Tensor, Save and
// Restore access its weights. It must be used by one goroutine at a time.
type Job struct {
	*train.Job
	pool *simd.Pool
}

// Open verifies a program and loads it: every stream of every rank becomes a goroutine, and all kernels share
// the given number of threads, or GOMAXPROCS threads if it is 0. Job.Close releases the goroutines and
// threads.
func Open(p *ir.Program, threads int) (*Job, error) {
	if err := verify(p); err != nil {
		return nil, err
	}
	pool := simd.NewPool(threads)
	job, err := train.Open(p, func(int) (vm.Device, error) { return cpu.New(pool), nil }, train.Options{})
	if err != nil {
		pool.Close()
		return nil, err
	}
	return &Job{job, pool}, nil
}

// Close frees the devices and the threads.
func (j *Job) Close() error {
	defer j.pool.Close()
	return j.Job.Close()
}

// Run trains on the CPU from initial weights to the program's last step. It calls the function each, which may
// be nil, after every step. Relative paths of data files are resolved against the working directory.
func Run(ctx context.Context, p *ir.Program, each func(train.StepResult)) (err error) {
	job, err := Open(p, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, job.Close()) }()
	if err := job.Init(ctx); err != nil {
		return err
	}
	for job.Steps() < p.Run.Steps {
		result, err := job.Step(ctx)
		if err != nil {
			return err
		}
		if each != nil {
			each(result)
		}
	}
	return nil
}

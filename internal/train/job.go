// Package train is the training run around package vm: it gives a program data, learning rates and initial weights,
// runs its steps and validations, and saves checkpoints, in one process or several.
//
//	job.go          Job: open, init, step, eval, close
//	crew.go         the processes of one job: leader and followers; package world connects them
//	stall.go        sections that make no progress, and what each rank waits for
//	data.go         data sets: text, random; tokendata.go a corpus; split.go what is held out for validation
//	learningrate.go the learning rate of a step; guard.go decides which steps are skipped
//	losses.go       losses of individual tokens; positions.go groups them by position
//	tensor.go       whole tensors from the rectangles of ranks, and back
//	checkpoint.go   reads checkpoints; parts.go and saver.go write them; package store defines their files
//
// The package does not depend on specs, plans or kernels, nor on what an instruction does.
package train

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// Options of a job.
type Options struct {
	Dir       string       // folder in which relative data paths are resolved; empty: the working folder
	Transport vm.Transport // nil: all ranks are in this process
	Tokens    vm.Tokens    // nil: the data set named by the program
	Weights   Weights      // source of initial weights for Load; nil: the run starts from random weights

	Stall Stall                                 // when orders count as stalled
	Crew  Crew                                  // nil: all ranks are in this process
	Reply func(question string) ([]byte, error) // in a follower: answers questions asked through Others
	Kind  string                                // kind of this process's devices; devices of one kind round identically
}

// Job is a program loaded on its devices. Its methods must be called by one goroutine at a time. If a section
// that Init, Step or Eval has begun fails, the job has failed permanently: further calls return an error that
// wraps the first one.
//
// With a crew, the leader's job is used like one without a crew; followers call Follow, then Close.
type Job struct {
	program   *ir.Program
	ranks     []*rank
	transport vm.Transport
	tokens    vm.Tokens
	weights   Weights
	kinds     []string // Options.Kind of each process
	origin    string   // source of the weights that the run started from; empty: random
	crew      Crew
	reply     func(question string) ([]byte, error)
	restored  string // path of the checkpoint that the run continues from; empty: none
	changes   [][2]string
	step      int64     // steps done
	skipped   int64     // steps skipped so far
	norms     norms     // gradient norms of earlier steps
	order     lossOrder // element order of TokenLosses; nil before its first call
	writer    writer
	overseer  overseer
	dead      error
}

// StepResult is the result of a step.
type StepResult struct {
	Step            int
	Loss            float64
	GradNorm        float64 // before clipping
	Skipped         bool    // the weights are unchanged: the gradients were not finite or were too large
	LR              float64
	Seconds         float64
	TokensPerSecond float64
	ExpertLoad      [][]float64 // by layer: how often tokens of the batch chose each expert; empty for layers without experts
}

// rank is a goroutine that makes all calls to one device. A rank of another process has neither goroutine nor
// device.
type rank struct {
	index  int
	code   *ir.Code
	device vm.Device
	work   chan func()
}

// Open creates the device of every rank and loads the program on each.
func Open(p *ir.Program, newDevice func(rank int) (vm.Device, error), opts Options) (*Job, error) {
	if err := vm.CheckProgram(p); err != nil {
		return nil, err
	}
	env := vm.Env{Transport: opts.Transport, Tokens: opts.Tokens}
	if env.Transport == nil {
		env.Transport = vm.NewLocal()
	}
	if env.Tokens == nil && usesData(p) {
		tokens, err := OpenData(&p.Run, opts.Dir)
		if err != nil {
			return nil, err
		}
		env.Tokens = tokens
	}
	j := &Job{program: p, transport: env.Transport, tokens: env.Tokens, weights: opts.Weights, crew: opts.Crew, reply: opts.Reply, kinds: []string{opts.Kind}}
	j.overseer.stall, j.overseer.lengths = opts.Stall, map[string][]time.Duration{}
	for i := range p.Ranks {
		r := &rank{index: i, code: &p.Codes[p.Ranks[i].Code]}
		if j.crew == nil || j.crew.Here(i) {
			r.work = make(chan func())
			go r.serve()
		}
		j.ranks = append(j.ranks, r)
	}
	if j.crew != nil {
		j.crew.OnInspect(j.inspected)
	}
	err := j.ready(func(r *rank) (err error) {
		if r.device, err = newDevice(r.index); err != nil {
			return err
		}
		defer j.progress(1)
		return r.device.Load(p, r.index, &env)
	})
	if err != nil {
		return nil, errors.Join(j.firstCause(err), j.Close())
	}
	return j, nil
}

// usesData reports whether any code loads tokens. If none does, the program needs no data set.
func usesData(p *ir.Program) bool {
	for c := range p.Codes {
		for _, section := range p.Codes[c].Sections {
			for pc := range section {
				if section[pc].Op == ir.LoadTokens {
					return true
				}
			}
		}
	}
	return false
}

func (r *rank) serve() {
	for f := range r.work {
		f()
	}
}

// each runs f on the goroutine of every local rank and returns the root cause: the error of a rank that failed on
// its own, not as a consequence of another rank's failure.
func (j *Job) each(f func(r *rank) error) error {
	errs := make([]error, len(j.ranks))
	var done sync.WaitGroup
	for i, r := range j.ranks {
		if r.work == nil {
			continue
		}
		done.Add(1)
		r.work <- func() {
			defer done.Done()
			if err := f(r); err != nil {
				errs[i] = fmt.Errorf("rank %d: %w", i, err)
				j.transport.Abort(errs[i])
			}
		}
	}
	done.Wait()
	var first error
	for _, err := range errs {
		if err != nil && (first == nil || errors.Is(first, vm.ErrAborted) && !errors.Is(err, vm.ErrAborted)) {
			first = err
		}
	}
	return first
}

// one runs f on the goroutine of a rank.
func (r *rank) one(f func(d vm.Device) error) error {
	done := make(chan error)
	r.work <- func() { done <- f(r.device) }
	return <-done
}

// section runs a section on all ranks concurrently. A step that has begun is completed even if the context is
// cancelled, because half a step would leave the model in an inconsistent state.
func (j *Job) section(ctx context.Context, section ir.Section, round int64) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if j.dead != nil {
		return fmt.Errorf("the job has failed: %w", j.dead)
	}
	o := Order{What: OrderSection, Section: section, Round: round}
	if section == ir.SectionStep {
		o.Guard = guard{Skipped: j.skipped, Limit: j.norms.limit(j.program.Run.Spikes)}
	}
	_, j.dead = j.together(o, func() error { return j.runHere(o) })
	return j.dead
}

// runHere runs a section on the ranks of this process, after writing a step's parameters.
func (j *Job) runHere(o Order) error {
	parameters := stepParameters(&j.program.Run, o.Round, o.Round-o.Guard.Skipped)
	labels, err := j.labels(o.Section, o.Round)
	if err != nil {
		return err
	}
	weight := []float32{float32(1 / float64(max(1, labels)))}
	return j.each(func(r *rank) error { return j.runRank(r, o, parameters[:], weight) })
}

// runRank runs a section on a rank.
func (j *Job) runRank(r *rank, o Order, parameters, weight []float32) error {
	if o.Section == ir.SectionStep {
		key := vm.DropoutKey(j.program.Run.Seed, o.Round)
		err := errors.Join(r.fill(ir.ResultStep, vm.BytesOf(parameters)), r.fill(ir.ResultSpike, vm.BytesOf([]float32{o.Guard.limit()})),
			r.fill(ir.ResultDropout, binary.LittleEndian.AppendUint64(nil, key)))
		if err != nil {
			return err
		}
	}
	if err := r.fill(weightOf[o.Section], vm.BytesOf(weight)); err != nil {
		return err
	}
	return vm.RunSection(r.device, r.code, o.Section, o.Round)
}

// fill writes values to the named result, if the rank's code has it.
func (r *rank) fill(name string, values []byte) error {
	v, ok := r.result(name)
	if !ok {
		return nil
	}
	return r.device.Write(v, values)
}

// weightOf names the result that holds the weight of a label, by section.
var weightOf = [ir.NumSections]string{ir.SectionStep: ir.ResultWeight, ir.SectionEval: ir.ResultEvalWeight}

// labels returns the number of labels that count toward the loss of a section, over all replicas. If labels
// cannot be masked, it returns 1.
func (j *Job) labels(section ir.Section, round int64) (int64, error) {
	counts := slices.ContainsFunc(j.ranks, func(r *rank) bool {
		_, ok := r.result(weightOf[section])
		return ok
	})
	if !counts {
		return 1, nil
	}
	data, ok := j.tokens.(vm.Documents)
	if !ok {
		return 0, vm.ErrNoDocuments
	}
	n, err := data.Labels(section, round)
	if err == nil && n == 0 && section == ir.SectionStep {
		err = fmt.Errorf("step %d has no label to train on: all are masked", round)
	}
	return n, err
}

// Init sets the model's initial values and resets the step counter to 0.
func (j *Job) Init(ctx context.Context) error {
	j.step, j.skipped, j.norms, j.origin = 0, 0, nil, ""
	return j.section(ctx, ir.SectionInit, 0)
}

// Kinds returns Options.Kind of every process; in a follower, only its own.
func (j *Job) Kinds() []string { return j.kinds }

// Failed returns the error that ended the job, or nil.
func (j *Job) Failed() error { return j.dead }

// Steps returns the number of steps done.
func (j *Job) Steps() int { return int(j.step) }

// Step performs one step.
func (j *Job) Step(ctx context.Context) (StepResult, error) {
	t := j.step + 1
	began := time.Now()
	if err := j.section(ctx, ir.SectionStep, t); err != nil {
		return StepResult{}, err
	}
	j.step = t
	seconds := j.elapsed(time.Since(began)).Seconds()
	tokens := float64(j.program.Run.Sequence) * float64(j.program.Run.Batch)
	result := StepResult{Step: int(t), LR: learningRate(&j.program.Run, t), Seconds: seconds, TokensPerSecond: tokens / seconds}
	var err error
	if result.Loss, err = j.scalar(ir.ResultLoss); err != nil {
		return StepResult{}, err
	}
	if result.ExpertLoad, err = j.expertLoad(); err != nil {
		return StepResult{}, err
	}
	norm, err := j.vector(ir.ResultGradNorm)
	if len(norm) < 2 || err != nil {
		return result, err
	}
	result.GradNorm, result.Skipped = float64(norm[0]), norm[1] < 0
	if result.Skipped {
		j.skipped++
	} else {
		j.norms = j.norms.with(norm[0])
	}
	return result, nil
}

// expertLoad reads the load of experts, or returns nil if the model has none.
func (j *Job) expertLoad() (by [][]float64, err error) {
	all, err := j.vector(ir.ResultExpertLoad)
	if len(all) == 0 || err != nil {
		return nil, err
	}
	for layer := range slices.Chunk(all, max(1, j.program.Model.Experts)) {
		var load []float64
		for _, n := range layer {
			load = append(load, float64(n))
		}
		if slices.Max(load) == 0 {
			load = nil
		}
		by = append(by, load)
	}
	return by, nil
}

// elapsed returns the duration of a section: as measured by the devices' clocks or, if they have none, by this
// process.
func (j *Job) elapsed(here time.Duration) time.Duration {
	var longest time.Duration
	for _, r := range j.ranks {
		d, ok := vm.Elapsed(r.device)
		if !ok {
			return here // also for a rank of another process
		}
		longest = max(longest, d)
	}
	return longest
}

// Eval returns the mean loss over the labels of the validation's sequences. It runs as many eval sections as
// needed to cover EvalBatch.
func (j *Job) Eval(ctx context.Context) (float64, error) {
	return j.eval(ctx, func() error { return nil })
}

// EvalPositions is like Eval, and also adds the losses of all tokens to the given PositionLosses.
func (j *Job) EvalPositions(ctx context.Context, to *PositionLosses) (float64, error) {
	return j.eval(ctx, func() error {
		losses, err := j.TokenLosses()
		for sequence := range slices.Chunk(losses, int(j.program.Run.Sequence)) {
			to.Add(0, sequence)
		}
		return err
	})
}

// eval implements Eval, and calls the function each after every section.
func (j *Job) eval(ctx context.Context, each func() error) (float64, error) {
	r := &j.program.Run
	if r.EvalBatch <= 0 || r.EvalSequences <= 0 {
		return 0, errors.New("the program has no validation")
	}
	rounds := (r.EvalBatch + r.EvalSequences - 1) / r.EvalSequences
	sum, counted := 0.0, int64(0)
	for round := range rounds {
		loss, err := j.evalSection(ctx, int64(round))
		if err == nil {
			err = each()
		}
		if err != nil {
			return 0, err
		}
		labels, err := j.labels(ir.SectionEval, int64(round))
		if err != nil {
			return 0, err
		}
		sum, counted = sum+float64(loss*float64(labels)), counted+labels
	}
	if counted == 0 {
		return 0, errors.New("the validation has no labels: all are masked")
	}
	return sum / float64(counted), nil
}

// evalSection runs one eval section and returns the mean loss of its sequences.
func (j *Job) evalSection(ctx context.Context, round int64) (float64, error) {
	if err := j.section(ctx, ir.SectionEval, round); err != nil {
		return 0, err
	}
	return j.scalar(ir.ResultEvalLoss)
}

// result returns the view of a result in the rank's code.
func (r *rank) result(name string) (ir.View, bool) {
	for i := range r.code.Results {
		if r.code.Results[i].Name == name {
			return r.code.Results[i].View, true
		}
	}
	return ir.View{}, false
}

// scalar reads the first number of a result from the first rank that has it. If none has it, it returns 0.
func (j *Job) scalar(name string) (float64, error) {
	out, err := j.vector(name)
	if len(out) == 0 {
		return 0, err
	}
	return float64(out[0]), err
}

// vector reads a result from the first rank that has it. If none has it, it returns nil.
func (j *Job) vector(name string) ([]float32, error) {
	for _, r := range j.ranks {
		v, ok := r.result(name)
		if !ok {
			continue
		}
		out := make([]float32, v.Elements())
		if err := j.read(r, v, vm.BytesOf(out)); err != nil {
			if j.crew != nil && j.crew.Cause() != nil {
				return nil, err // the cause is a lost process
			}
			return nil, fmt.Errorf("reading the result %s of rank %d: %w", name, r.index, err)
		}
		return out, nil
	}
	return nil, nil
}

// Peaks returns the highest byte of each arena that a rank has touched so far.
func (j *Job) Peaks(rank int) [ir.NumArenas]ir.Bytes {
	peaks, _ := j.peaks(j.ranks[rank]) // 0 if the rank's process is lost
	return peaks
}

// Close frees the devices and ends the ranks' goroutines. A leader also closes the followers' jobs.
func (j *Job) Close() error {
	if j.Stuck() {
		return nil // memory that ranks still use cannot be freed
	}
	here := func() error {
		j.writer.free(j)
		return j.each(func(r *rank) error {
			if r.device == nil {
				return nil
			}
			return r.device.Close()
		})
	}
	var err error
	if j.crew == nil || j.crew.Cause() != nil {
		err = here() // after a failure every process closes independently
	} else {
		_, err = j.together(Order{What: OrderClose}, here)
	}
	if j.Stuck() {
		return err
	}
	for _, r := range j.ranks {
		if r.work != nil {
			close(r.work)
		}
	}
	j.ranks = nil
	return err
}

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/cmd/sppovm/internal/watch"
	"sppo.dev/internal/data/corpus"
	"sppo.dev/internal/train"
	"sppo.dev/internal/train/world"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// runFlags are the flags of run.
type runFlags struct {
	engine  string
	device  string
	steps   int
	json    bool
	quiet   bool
	seed    int64
	saves   saveFlags
	resume  string
	weights string
	adapter string
	cast    bool
	dir     string
	blas    string
	threads int
	nccl    bool
	tune    bool
	graphs  bool
	force   bool
	profile string
	seeded  bool // --seed was given
	free    freeMemory

	startOver bool // if every checkpoint is damaged
	sim       simFlags
	watch     watchFlags

	stall time.Duration // a step without progress for this long ends the run; 0: never

	launching launchFlags
	launch    *launch // nil: this is the only process
}

// leads reports whether this process prints and writes files.
func (f *runFlags) leads() bool { return f.launch == nil || f.launch.process == 0 }

// defineStart defines the flags that select the initial values of a run.
func (f *runFlags) defineStart(flags *pflag.FlagSet) {
	flags.StringVar(&f.resume, "resume", "", "continue from this `CHECKPOINT` or, for a folder of checkpoints, from the newest one; auto: from the newest one in the --save folder, if any")
	flags.StringVar(&f.weights, "weights", "", "start from the weights in this Hugging Face model `FOLDER`, at step 0 with zero-initialized optimizer moments")
	flags.StringVar(&f.adapter, "adapter", "", "with --weights, start from the adapters in this `FOLDER`, in PEFT format")
	flags.BoolVar(&f.cast, "cast", false, "allow --weights to round values that the program cannot represent exactly")
	for _, name := range []string{"resume", "weights", "adapter"} {
		cli.Files(flags, name)
	}
}

func run(flags *pflag.FlagSet) cli.Action {
	var f runFlags
	cli.Choice(flags, &f.engine, "engine", engineOwn, "sppo, or torch: the machine in the Python package sppo_torch, for Python as "+pythonVariable+" names it", engineOwn, engineTorch)
	cli.Choice(flags, &f.device, "device", "cpu", "cpu, cuda (NVIDIA GPUs), sim (virtual time on the program's cluster), or field (exact sums over finite fields, to compare programs)", "cpu", "cuda", "sim", "field")
	flags.IntVar(&f.steps, "steps", -1, "stop after this step (default: the program's last step; with sim, the first); the learning-rate schedule does not change")
	flags.BoolVar(&f.json, "json", false, "write one JSON object per line to standard output")
	flags.BoolVarP(&f.quiet, "quiet", "q", false, "show warnings and errors only, no progress")
	flags.Int64Var(&f.seed, "seed", 0, "use this seed instead of the program's")
	set := cli.JobFlags(flags)
	f.saves.define(flags)
	f.defineStart(flags)
	flags.BoolVar(&f.startOver, "start-over", false, "with --resume auto: if every checkpoint in the --save folder is damaged, train from the beginning instead of stopping")
	flags.StringVar(&f.dir, "dir", "", dirHelp)
	cli.Choice(flags, &f.blas, "blas", "go", "compute matrix products with go (built in) or openblas (if installed)", blasNames...)
	flags.IntVar(&f.threads, "threads", 0, "number of threads for kernels; 0: one per processor core")
	flags.BoolVar(&f.nccl, "nccl", false, "cuda: connect ranks through NCCL, with one GPU per rank, instead of copying "+
		"between their memories")
	flags.BoolVar(&f.tune, "tune", false, "cuda: measure cuBLASLt's algorithms for each matrix product and use the fastest; rounding may then differ between runs")
	flags.BoolVar(&f.graphs, "graphs", false, "cuda: capture each section once and replay it as a CUDA graph; only for single-rank programs")
	flags.StringVar(&f.profile, "profile", "", "write the start and end of each instruction in the last step to this file, for sppoc view")
	cli.Files(flags, "save")
	cli.Files(flags, "profile", "json")
	f.watch.define(flags)
	flags.DurationVar(&f.stall, "stall-timeout", 10*time.Minute, "end the run if no rank makes progress for this long, "+
		"or for 5 times as long as the longest of the last eight steps, if that is longer; applies to steps, to loading and "+
		"ending the run, and to saving checkpoints; 0: never")
	f.launching.define(flags)
	flags.BoolVar(&f.force, "force", false, "run the job even if it does not fit its cluster or the free memory")
	f.sim.define(flags)
	return func(env *cli.Env, args []string) error {
		f.seeded = flags.Changed("seed")
		if flags.Changed("prometheus") && f.watch.port < 0 {
			return cli.Usagef("--prometheus %d: ports are 0 to 65535; 0 is any free port", f.watch.port)
		}
		if flags.Changed("steps") && f.steps < 0 || f.threads < 0 {
			return cli.Usagef("--steps and --threads must not be negative")
		}
		var err error
		if f.launch, err = f.launching.find(); err != nil {
			return err
		}
		if err := f.check(); err != nil {
			return err
		}
		if f.profile != "" && f.leads() {
			if err := cli.CheckOutput(f.profile, args...); err != nil {
				return err
			}
		}
		job, err := f.compile(env, args[0], set())
		if err != nil {
			return err
		}
		if err := f.accept(env, args[0], job); err != nil {
			return err
		}
		switch {
		case f.engine == engineTorch:
			return f.runTorch(env, job.Program)
		case f.device == "sim":
			return f.simulate(env, job)
		case f.launch == nil:
			return f.run(env, job, nil)
		}
		w, err := f.join(env, job.Program)
		if err != nil {
			return err
		}
		return w.Close(f.run(env, job, w))
	}
}

// compile compiles or reads a job. A process that a launcher started shows no progress, because it shares the
// terminal with the others.
func (f *runFlags) compile(env *cli.Env, file string, set []string) (*cli.Job, error) {
	if f.launch != nil {
		return cli.OpenProgram(nil, file, set)
	}
	return openProgram(env, file, set)
}

// openProgram compiles or reads a job and shows the progress. If the user asks to stop meanwhile, it returns an
// error.
func openProgram(env *cli.Env, file string, set []string) (*cli.Job, error) {
	w := cli.NewWatch(env)
	defer w.End()
	var job *cli.Job
	if err := w.Do(func() (err error) {
		job, err = cli.OpenProgram(w, file, set)
		return err
	}); err != nil {
		return nil, err
	}
	return job, nil
}

// verify verifies a program that was read from a file, and shows the progress.
func (f *runFlags) verify(env *cli.Env, file string, p *ir.Program) error {
	var w *cli.Watch
	if f.launch == nil {
		w = cli.NewWatch(env)
		defer w.End()
	}
	w.Say("verifying %s", file)
	return w.Do(func() error { return cli.Verify(file, p, f.force) })
}

func (f *runFlags) check() error {
	switch {
	case f.seed < 0:
		return cli.Usagef("--seed %d: must not be negative, like train.seed", f.seed)
	case f.stall < 0:
		return cli.Usagef("--stall-timeout %s: must not be negative", f.stall)
	case f.weights != "" && f.resume != "" && f.resume != resumeAuto:
		return cli.Usagef("--weights starts a run and --resume continues one: give only one of them, or --resume auto")
	case f.cast && f.weights == "":
		return cli.Usagef("--cast needs --weights")
	case f.startOver && f.resume != resumeAuto:
		return cli.Usagef("--start-over needs --resume auto")
	}
	if err := errors.Join(f.saves.check(f.resume, f.watch.tensorboard, f.watch.log, f.profile), f.watch.check(f.device, f.json)); err != nil {
		return err
	}
	switch f.device {
	case "cpu", "cuda", "field":
		if f.sim.jitter != 0 || len(f.sim.slow) > 0 || f.sim.contention {
			return cli.Usagef("--jitter, --slow and --contention need --device sim")
		}
	case "sim":
		if f.saves.dir != "" || f.resume != "" || f.weights != "" {
			return cli.Usagef("--save, --resume and --weights need weights, which --device sim does not have")
		}
		if f.profile != "" {
			return cli.Usagef("--profile measures a device; for a simulation use sppoc trace")
		}
		if f.launch != nil {
			return cli.Usagef("a simulation runs in one process, not in %d", f.launch.processes)
		}
	}
	if f.device == "field" && (f.saves.dir != "" || f.resume != "" || f.weights != "" || f.launch != nil) {
		return cli.Usagef("--device field runs in one process and has no floating-point weights: --save, --resume and --weights need cpu or cuda")
	}
	if (f.nccl || f.tune || f.graphs) && f.device != "cuda" {
		return cli.Usagef("--nccl, --tune and --graphs need --device cuda")
	}
	if f.engine == engineTorch {
		_, err := f.torchArguments()
		return err
	}
	if f.blas == "openblas" {
		return cli.Wrong(simd.UseOpenBLAS(true))
	}
	return nil
}

// dirHelp describes --dir. Programs hold paths relative to the folder where their spec was compiled.
const dirHelp = "look for data files in this `FOLDER` instead of the current one; text(\"a.txt\") in the spec jobs/job.sppo is FOLDER/jobs/a.txt, also in a program compiled from it"

// blasNames lists the implementations of matrix products on the CPU.
var blasNames = []string{"go", "openblas"}

// accept refuses programs that cannot succeed, and applies the flags that change the program.
func (f *runFlags) accept(env *cli.Env, file string, job *cli.Job) error {
	switch {
	case job.Plan == nil:
		if err := f.verify(env, file, job.Program); err != nil {
			return err
		}
	case !job.Plan.Memory.Fits && !f.force:
		return cli.DoesNotFit(fmt.Errorf("%s does not fit: %s; sppoc plan suggests changes, --force runs it anyway", file, job.Plan.Memory.Excess()))
	}
	if err := f.saves.fits(file, job.Program, f.force); err != nil {
		return err
	}
	if n := len(job.Program.Ranks); f.graphs && n > 1 {
		return cli.Usagef("--graphs needs a program of one rank; %s has %d ranks", file, n)
	}
	if f.seeded {
		job.Program.Run.Seed = f.seed
	}
	switch {
	case f.steps >= 0:
	case f.device == "sim":
		f.steps = 1
	default:
		f.steps = job.Program.Run.Steps
	}
	return nil
}

// run trains, with the other processes of the world if there are any.
func (f *runFlags) run(env *cli.Env, job *cli.Job, w *world.World) error {
	tokens, err := openData(job, f.dir)
	if err != nil {
		return err
	}
	weights, err := f.openWeights(job.Program)
	if err != nil {
		return err
	}
	if weights != nil {
		defer weights.Close()
	}
	computer, err := f.open(job.Program, w)
	if err != nil {
		return err
	}
	meter := newBubbleMeter(job.Program)
	if computer.slowed {
		meter.wanted = sampled(f.profiled())
	}
	open := func(rank int) (vm.Device, error) { return meter.wrap(rank, computer.device(rank)), nil }
	var show *progress
	options := train.Options{Dir: f.dir, Tokens: tokens, Transport: computer.transport, Stall: f.watched(env, &show), Kind: computer.kind}
	if weights != nil {
		options.Weights = weights
	}
	if w != nil {
		options.Crew, options.Reply = w, meter.reply
	}
	j, err := train.Open(job.Program, open, options)
	if err != nil {
		if !errors.As(err, new(*train.StallError)) { // after a stall, ranks may still be using their devices
			computer.close()
		}
		return err
	}
	defer func() {
		if !j.Stuck() {
			computer.close()
		}
	}()
	if !f.leads() {
		return errors.Join(follow(env.Context, w, j), j.Close())
	}
	ctx := env.Context
	if w != nil {
		meter.others = j.Others
		var cancel context.CancelFunc
		ctx, cancel = untilStopped(ctx, w)
		defer cancel()
	}
	show = f.progress(env, job.Program, computer.name)
	r := newTraining(f)
	r.weights, r.program, r.job, r.meter, r.device, r.show = weights, job.Program, j, meter, computer.name, show
	if computer.notes != nil {
		for _, note := range computer.notes() {
			r.show.warn("note: %s", note)
		}
	}
	if err = r.watch(); err == nil {
		err = named(job, r.all(ctx))
	}
	return errors.Join(err, r.finish(err), j.Close())
}

// finish records how the run ended. If the run has stalled, the records may be on the file system that does not
// respond, so finish waits only briefly.
func (r *training) finish(err error) error {
	done := make(chan error, 1)
	go func() {
		if err != nil {
			r.show.watchers.Observe(&watch.Note{Note: "failed: " + err.Error(), Step: r.job.Steps(), Time: time.Now()})
		}
		done <- r.show.watchers.Close()
	}()
	if !r.job.Stuck() {
		return <-done
	}
	select {
	case err := <-done:
		return err
	case <-time.After(lastRecords):
		return nil
	}
}

// lastRecords is the time limit for writing the last records of a run that has stalled.
const lastRecords = 5 * time.Second

// watched defines when the run counts as stalled, and reports orders that take unusually long: on standard error
// while the run is being loaded, and as lines of progress afterwards.
func (f *runFlags) watched(env *cli.Env, show **progress) train.Stall {
	return train.Stall{After: f.stall, Tell: func(what string) {
		if *show == nil {
			fmt.Fprintln(env.Stderr, what)
			return
		}
		(*show).warn("%s", what)
	}}
}

// follow carries out the orders of process 0. Interrupting this process stops all processes.
func follow(ctx context.Context, w *world.World, j *train.Job) error {
	defer context.AfterFunc(ctx, w.Stop)()
	return j.Follow()
}

// profiled returns the number of the step to profile, or 0.
func (f *runFlags) profiled() int64 {
	if f.profile == "" {
		return 0
	}
	return int64(f.steps)
}

func (f *runFlags) progress(env *cli.Env, p *ir.Program, device string) *progress {
	show := &progress{text: env.Stderr, loud: env.Stderr, steps: f.steps}
	if f.quiet {
		show.text = io.Discard
	}
	show.rewrite = cli.IsTerminal(show.text)
	if f.json {
		show.watchers.Add("--json", &watch.Lines{W: env.Stdout, Results: true})
	}
	if f.device == "cpu" && lang.Cluster(p.Machine).Unit() == "GPU" {
		device += fmt.Sprintf("; the job is planned for the GPUs of %s: --device cuda runs it on GPUs, --device sim simulates it on %[1]s", p.Machine.Name)
	}
	show.header(p, device)
	return show
}

// openData opens the data before anything is allocated. Its errors are input errors and, if there is a spec,
// name the line of train.data.
func openData(job *cli.Job, dir string) (vm.Tokens, error) {
	if job.Program.Run.DataKind == "" {
		return nil, nil
	}
	tokens, err := train.OpenData(&job.Program.Run, dir)
	if err != nil && job.Spec != nil {
		return nil, job.Spec.Diagnose("train.data", lang.BadData, "%v", err)
	}
	return tokens, cli.Wrong(err)
}

// named returns err, or an input error that names the line of train.data if a token of the data is outside the vocabulary.
func named(job *cli.Job, err error) error {
	switch bad := (*corpus.TokenError)(nil); {
	case !errors.As(err, &bad):
		return err
	case job.Spec != nil:
		return job.Spec.Diagnose("train.data", lang.BadData, "%v", bad)
	default:
		return cli.Wrong(bad)
	}
}

// training is a run in progress.
type training struct {
	f       *runFlags
	program *ir.Program
	job     *train.Job
	weights *startWeights // nil: the run does not start from a folder
	meter   *bubbleMeter
	device  string
	show    *progress
	loss    float64 // loss of the last step
	norm    float64 // gradient norm of the last step
	proven  int     // the last step whose weights have given a finite loss, in a later step or in validation; -1: none
	sick    string  // why the state after the last step should not be saved; empty: it should
	saver   *saver  // nil: nothing is saved
	inRow   int     // consecutive skipped steps up to now
	skipped int     // steps skipped in this run
	compare watch.Compare
}

func newTraining(f *runFlags) *training { return &training{f: f, proven: -1} }

// all trains from the start or a checkpoint until the last step, or until the user stops it.
func (r *training) all(ctx context.Context) error {
	r.warn()
	resumed, err := r.start(ctx)
	if err != nil {
		return r.stopped(err) // there is no state to save yet
	}
	if err := r.behind(); err != nil {
		return err
	}
	if err := r.announce(); err != nil {
		return err
	}
	if r.saver, err = r.newSaver(resumed); err != nil {
		return err
	}
	if r.saver == nil && r.f.device != "field" && r.job.Steps() < r.f.steps {
		r.show.say("the trained weights will be discarded: --save FOLDER keeps them")
	}
	return errors.Join(r.train(ctx), r.saver.close())
}

func (r *training) train(ctx context.Context) error {
	if r.job.Steps() == 0 && r.program.Run.EvalEvery > 0 {
		if err := r.validate(ctx); err != nil {
			return r.stopped(err)
		}
	}
	r.show.begin(r.job.Steps())
	for r.job.Steps() < r.f.steps {
		if err := r.step(ctx); err != nil {
			return r.stopped(err)
		}
		if err := r.saver.after(ctx); err != nil {
			return r.stopped(err)
		}
	}
	if err := r.idle(); err != nil {
		return errors.Join(err, r.saver.finish())
	}
	return r.end(ctx)
}

// idle returns an error if the run has skipped all of its steps. Its weights are those it began with, so there is nothing to
// save, and a restart fails in the same way. A spike in a single step, such as the last one after a restart, is no error.
func (r *training) idle() error {
	done := r.job.Steps() - r.show.first
	if done == 0 || r.skipped < done || done == 1 && finite(r.norm) {
		return nil
	}
	return fmt.Errorf("every step was skipped (%d), so nothing was trained; the last had loss %.4g and gradient norm %.4g", done, r.loss, r.norm)
}

// warn reports processes that use different kinds of devices, because their results may be rounded differently from
// those of a single process.
func (r *training) warn() {
	kinds := r.job.Kinds()
	for i, kind := range kinds {
		if kind != kinds[0] {
			r.show.warn("process %d computes on %s, but process 0 on %s: losses may differ by rounding errors", i, kind, kinds[0])
		}
	}
}

// start sets the initial state of the run, and reports whether it comes from a checkpoint.
func (r *training) start(ctx context.Context) (resumed bool, err error) {
	if err := r.job.Init(ctx); err != nil {
		return false, err
	}
	switch r.f.resume {
	case "":
	case resumeAuto:
		if resumed, err := r.resumeNewest(ctx); resumed || err != nil {
			return resumed, err
		}
	default:
		if err := r.restored(r.job.Restore(ctx, r.f.resume)); err != nil {
			return false, noCheckpoint("--resume", r.f.resume, err)
		}
		r.resumed(r.show.say)
		return true, nil
	}
	if r.weights != nil {
		return false, r.load(ctx, r.weights)
	}
	return false, nil
}

// resumed reports the checkpoint that the run continues from, and each setting that differs from the one it was made with.
func (r *training) resumed(tell func(format string, args ...any)) {
	path, _ := r.job.Restored()
	r.show.newest = r.job.Steps()
	tell("resumed from %s", path)
	r.show.changed(r.job)
}

// restored marks the error of a checkpoint as the user's mistake, unless the job has failed while loading it. With --resume auto
// it is a mistake only if the checkpoint is good and of another job: a file that cannot be read now may be readable later.
func (r *training) restored(err error) error {
	if r.job.Failed() != nil || r.f.resume == resumeAuto && !errors.As(err, new(*train.MismatchError)) {
		return err
	}
	return cli.Wrong(err)
}

// behind refuses a run that is set to end before the step of its checkpoint. A run set to end at exactly that
// step has nothing to do, which is not an error, because launchers repeat commands.
func (r *training) behind() error {
	if done := r.job.Steps(); done > r.f.steps {
		from := r.f.resume
		if from == resumeAuto {
			from = r.f.saves.dir
		}
		return cli.Usagef("%s is a checkpoint of step %d, but the run ends after step %d; continue further with --steps",
			from, done, r.f.steps)
	}
	return nil
}

func (r *training) step(ctx context.Context) error {
	result, err := r.job.Step(ctx)
	if err != nil {
		return err
	}
	r.loss, r.norm = result.Loss, result.GradNorm
	if err := r.record(&result); err != nil {
		return err
	}
	r.prove(result)
	if err := r.guard(result); err != nil {
		return err
	}
	if r.sick != "" && !result.Skipped {
		return fmt.Errorf("step %d: the loss is %g; try a smaller learning rate or gradient clipping", result.Step, result.Loss)
	}
	every := r.program.Run.EvalEvery
	if last := result.Step >= r.f.steps; last || every > 0 && result.Step%every == 0 {
		return r.validate(ctx)
	}
	return nil
}

// prove notes which weights have given a finite loss, and whether the state after the step should be saved. The loss of a step is
// that of the weights before it, which a skipped step leaves as they were.
func (r *training) prove(result train.StepResult) {
	if r.sick = ""; finite(result.Loss) {
		r.proven = max(r.proven, result.Step-1)
	}
	switch {
	case result.Skipped && r.proven >= result.Step-1:
		r.proven = result.Step
	case !finite(result.Loss):
		r.sick = fmt.Sprintf("the loss of step %d is %g", result.Step, result.Loss)
	}
}

// guard reports a step that was skipped, and ends a run that skips too many steps in a row.
func (r *training) guard(result train.StepResult) error {
	if !result.Skipped {
		r.inRow = 0
		return nil
	}
	r.inRow++
	r.skipped++
	r.show.warn("step %d skipped: loss %.4g, gradient norm %.4g; the weights are unchanged", result.Step, result.Loss, result.GradNorm)
	if most := r.program.Run.MaxSkipped; most > 0 && r.inRow >= most {
		return fmt.Errorf("step %d: %s skipped in a row, the last with loss %.4g and gradient norm %.4g; try a smaller learning rate or gradient clipping",
			result.Step, count(r.inRow, "step"), result.Loss, result.GradNorm)
	}
	return nil
}

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }

func (r *training) validate(ctx context.Context) error {
	if r.program.Run.EvalBatch <= 0 || r.program.Run.EvalSequences <= 0 {
		return nil
	}
	v, err := r.evaluate(ctx)
	if err == nil {
		loss := float64(v.Loss)
		r.meter.forget()
		r.show.validation(v)
		if finite(loss) {
			r.proven = r.job.Steps()
		} else {
			r.sick = fmt.Sprintf("the validation loss after step %d is %g", r.job.Steps(), loss)
		}
	}
	return err
}

// stopped ends a run early, because of an error or because the user asked for it. A stop by the user counts as a
// success.
func (r *training) stopped(err error) error {
	if !errors.Is(err, context.Canceled) {
		return errors.Join(err, r.saver.finish())
	}
	r.show.say("stopped after step %d", r.job.Steps())
	return r.end(context.Background())
}

// examine looks for weights that are not finite if no loss shows that those after the last step are good.
func (r *training) examine() error {
	step := r.job.Steps()
	if r.sick != "" || r.proven >= step || step == r.show.first || r.f.device == "field" {
		return nil
	}
	name, err := r.job.Ruined()
	if name != "" {
		r.sick = fmt.Sprintf("after step %d, the %s is not finite", step, name)
	}
	return err
}

func (r *training) end(ctx context.Context) error {
	if err := r.examine(); err != nil {
		return err
	}
	if err := r.saver.last(ctx); err != nil {
		return err
	}
	if r.sick != "" {
		return fmt.Errorf("the run ends with weights that may not be finite: %s; try a smaller learning rate or gradient clipping", r.sick)
	}
	if r.f.profile != "" {
		if err := r.writeProfile(); err != nil {
			return err
		}
	}
	var device, host ir.Bytes
	for rank := range r.program.Ranks {
		peaks := r.job.Peaks(rank)
		device, host = max(device, peaks[ir.Device]), max(host, peaks[ir.Host])
	}
	r.show.done(r.job.Steps(), r.loss, device, host, r.meter.ratio())
	return nil
}

package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/cmd/sppovm/internal/watch"
	"sppo.dev/internal/passes/words"
	"sppo.dev/internal/train"
	"sppo.dev/internal/train/world"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// evalFlags are the flags of eval, many of which are also flags of run.
type evalFlags struct {
	runFlags
	split  string
	losses string // file for the losses of tokens
}

func evaluate(flags *pflag.FlagSet) cli.Action {
	var f evalFlags
	cli.Choice(flags, &f.device, "device", "cpu", "cpu, or cuda (NVIDIA GPUs)", "cpu", "cuda")
	flags.StringVar(&f.weights, "weights", "", "evaluate the weights in this Hugging Face model `FOLDER`")
	flags.StringVar(&f.adapter, "adapter", "", "with --weights, evaluate the model with the adapters in this `FOLDER`, in PEFT format; the spec needs train.adapter")
	flags.StringVar(&f.resume, "resume", "", "evaluate the weights of this `CHECKPOINT` or, for a folder of checkpoints, of the newest one")
	flags.BoolVar(&f.cast, "cast", false, "allow --weights to round values that the program cannot represent exactly")
	cli.Choice(flags, &f.split, "split", train.SplitAll, "part of the data to evaluate on: all, train, or validation (the held-out part)", train.SplitNames...)
	flags.StringVar(&f.losses, "token-losses", "", "write token losses to this file as little-endian float32; NaN where the label is masked")
	flags.BoolVar(&f.json, "json", false, "write one JSON object to standard output")
	flags.BoolVarP(&f.quiet, "quiet", "q", false, "show warnings and errors only, no progress")
	flags.StringVar(&f.dir, "dir", "", dirHelp)
	flags.IntVar(&f.threads, "threads", 0, "number of threads for kernels; 0: one per processor core")
	flags.BoolVar(&f.force, "force", false, "evaluate even if the job does not fit its cluster or the free memory")
	set := cli.JobFlags(flags)
	f.launching.define(flags)
	for _, name := range []string{"resume", "weights", "adapter", "token-losses"} {
		cli.Files(flags, name)
	}
	return func(env *cli.Env, args []string) error {
		switch {
		case (f.weights == "") == (f.resume == ""):
			return cli.Usagef("eval: give the weights to evaluate with --weights or --resume")
		case f.cast && f.weights == "":
			return cli.Usagef("--cast needs --weights")
		case f.adapter != "" && f.weights == "":
			return cli.Usagef("--adapter needs --weights: the folder of the model that the adapter belongs to")
		case f.resume == resumeAuto:
			return cli.Usagef("eval: --resume auto is for runs; name a checkpoint, or a folder to use its newest checkpoint")
		case f.threads < 0:
			return cli.Usagef("--threads must be 0 or more")
		}
		var err error
		if f.launch, err = f.launching.find(); err != nil {
			return err
		}
		if f.losses != "" && f.leads() {
			if err := cli.CheckOutput(f.losses, args[0], f.resume); err != nil {
				return err
			}
		}
		job, holdout, err := openEval(env, args[0], set())
		if err != nil {
			return err
		}
		if err := f.accept(env, args[0], job); err != nil {
			return err
		}
		f.blas = "go"
		if f.launch == nil {
			return f.evaluate(env, job, holdout, nil)
		}
		w, err := f.join(env, job.Program)
		if err != nil {
			return err
		}
		return w.Close(f.evaluate(env, job, holdout, w))
	}
}

// openEval compiles a spec to a program that can validate. A program or plan is used unchanged, so it must
// contain validation. openEval also returns the share of the data that training holds out.
func openEval(env *cli.Env, file string, set []string) (*cli.Job, float64, error) {
	if cli.IsProgram(file) || filepath.Ext(file) == ".json" {
		job, err := openProgram(env, file, set)
		if err != nil {
			return nil, 0, err
		}
		if job.Program.Run.EvalSequences <= 0 {
			return nil, 0, cli.Usagef("%s has no validation, which eval needs to compute losses: compile it with "+
				"train.holdout and train.eval_batch above 0", file)
		}
		return job, job.Program.Run.Holdout, nil
	}
	spec, err := cli.LoadSpec(file, set)
	if err != nil {
		return nil, 0, err
	}
	if !spec.Train.Validates() {
		set = append(set[:len(set):len(set)], "train.holdout=0.5", "train.eval_batch=1")
	}
	job, err := openProgram(env, file, set)
	if err == nil {
		job.Program.Run.Holdout = spec.Train.Holdout // as in the run that saved a checkpoint
	}
	return job, spec.Train.Holdout, err
}

// evaluate computes the losses, together with the other processes of the world if there are any.
func (f *evalFlags) evaluate(env *cli.Env, job *cli.Job, holdout float64, w *world.World) error {
	split, err := train.OpenSplit(&job.Program.Run, f.dir, f.split, holdout)
	if err != nil {
		return cli.Wrong(err)
	}
	weights, err := f.openWeights(job.Program)
	if err != nil {
		return err
	}
	options := train.Options{Dir: f.dir, Tokens: split}
	if weights != nil {
		defer weights.Close()
		options.Weights = weights
	}
	computer, err := f.open(job.Program, w)
	if err != nil {
		return err
	}
	defer computer.close()
	options.Transport = computer.transport
	if w != nil {
		options.Crew = w
	}
	j, err := train.Open(job.Program, func(rank int) (vm.Device, error) { return computer.device(rank), nil }, options)
	if err != nil {
		return err
	}
	if !f.leads() {
		return errors.Join(follow(env.Context, w, j), j.Close())
	}
	ctx := env.Context
	if w != nil {
		var cancel context.CancelFunc
		ctx, cancel = untilStopped(ctx, w)
		defer cancel()
	}
	r := &training{f: &f.runFlags, weights: weights, program: job.Program, job: j, device: computer.name, show: f.progress(env, job.Program, computer.name)}
	e := &evaluating{evalFlags: f, training: r, split: split}
	err = named(job, e.all(ctx))
	if err == nil {
		err = e.report(env)
	}
	return errors.Join(err, j.Close())
}

// evaluation is the output of eval --json.
type evaluation struct {
	Split      string         `json:"split"`
	Loss       number         `json:"loss"`
	Perplexity number         `json:"perplexity"`
	Windows    int64          `json:"windows"`
	Tokens     int64          `json:"tokens"`
	Left       int64          `json:"tokens_left"`
	Sequence   int64          `json:"sequence"`
	Step       int            `json:"step"`
	Positions  []watch.Bucket `json:"loss_by_position"`
}

// evaluating is an evaluation in progress.
type evaluating struct {
	*evalFlags
	*training
	split  *train.Split
	losses train.PositionLosses
}

// all evaluates the split. If a file of losses is requested, it appears completely or not at all.
func (e *evaluating) all(ctx context.Context) error {
	if _, err := e.start(ctx); err != nil {
		return err
	}
	if e.evalFlags.losses == "" {
		return e.windows(ctx, io.Discard)
	}
	return ir.ReplaceFile(e.evalFlags.losses, func(file *os.File) error {
		out := bufio.NewWriterSize(file, 1<<20)
		if err := e.windows(ctx, out); err != nil {
			return err
		}
		return out.Flush()
	})
}

// windows evaluates the windows of the split, and writes the loss of every token in stream order.
func (e *evaluating) windows(ctx context.Context, out io.Writer) error {
	windows, _ := e.split.Windows()
	done, labels, raw := int64(0), int64(0), []byte(nil)
	err := e.split.Evaluate(ctx, e.job, func(losses []float32) error {
		counted, err := e.split.Counted(done)
		if err != nil {
			return err
		}
		labels += counted
		e.losses.Add(0, losses)
		if done++; done < windows && done%int64(max(1, e.program.Run.EvalSequences)) == 0 && e.show.due() {
			mean, _ := e.losses.Mean()
			e.show.say("%d of %d windows  loss %.4f", done, windows, mean)
		}
		raw = raw[:0]
		for _, loss := range losses {
			raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(loss))
		}
		_, err = out.Write(raw)
		return err
	})
	if errors.Is(err, context.Canceled) {
		return cli.Stopped("stopped after %d of %d windows", done, windows)
	}
	switch _, tokens := e.losses.Mean(); {
	case err != nil:
		return err
	case tokens < labels:
		return fmt.Errorf("the losses of %d of %d tokens are not numbers", labels-tokens, labels)
	case labels == 0:
		return cli.Usagef("the split %s has no label: all are masked", e.evalFlags.split)
	}
	return nil
}

func (e *evaluating) report(env *cli.Env) error {
	windows, left := e.split.Windows()
	loss, tokens := e.losses.Mean()
	sequence := e.program.Run.Sequence
	result := evaluation{
		Split: e.evalFlags.split, Loss: number(loss), Perplexity: number(math.Exp(loss)), Windows: windows, Tokens: tokens, Left: left,
		Sequence: sequence, Step: e.job.Steps(), Positions: watch.BucketsOf(&e.losses, sequence),
	}
	if e.evalFlags.json {
		return json.NewEncoder(env.Stdout).Encode(result)
	}
	fmt.Fprintf(env.Stdout, "loss %.6f, perplexity %.4f over %s in %s of %d (%s)\n", loss, math.Exp(loss), words.Plural(tokens, "token"), words.Plural(windows, "window"), sequence, result.Split)
	fmt.Fprintln(env.Stdout, "     positions  loss")
	for _, b := range result.Positions {
		at := strconv.FormatInt(b.First, 10)
		if b.Last > b.First {
			at += "-" + strconv.FormatInt(b.Last, 10)
		}
		fmt.Fprintf(env.Stdout, "%14s  %.6f\n", at, float64(b.Loss))
	}
	if left > 0 {
		fmt.Fprintf(env.Stdout, "left at the end, too short for a window: %s\n", words.Plural(left, "token"))
	}
	return nil
}

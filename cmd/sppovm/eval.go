package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"path/filepath"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/vm"
)

// evalFlags are the flags of eval, of which many are those of run.
type evalFlags struct {
	runFlags
	split string
}

func evaluate(flags *pflag.FlagSet) cli.Action {
	var f evalFlags
	cli.Choice(flags, &f.device, "device", "cpu", "cpu, or cuda: NVIDIA GPUs", "cpu", "cuda")
	flags.StringVar(&f.weights, "weights", "", "evaluate the weights of this `FOLDER` from the Hugging Face hub")
	flags.StringVar(&f.resume, "resume", "", "evaluate the weights of this `CHECKPOINT`, or of the newest in this folder")
	flags.BoolVar(&f.cast, "cast", false, "let --weights round values that the program cannot hold exactly")
	cli.Choice(flags, &f.split, "split", vm.SplitAll, "which part of the data: all, train, or validation (the part held out)", vm.SplitNames...)
	flags.BoolVar(&f.json, "json", false, "write one JSON object to standard output")
	flags.BoolVarP(&f.quiet, "quiet", "q", false, "show no progress")
	flags.StringVar(&f.dir, "dir", "", "resolve relative data files in this folder instead of the current one")
	flags.IntVar(&f.threads, "threads", 0, "threads that share the work of kernels; 0 is one per processor core")
	flags.BoolVar(&f.force, "force", false, "evaluate even if the job does not fit its cluster")
	set := cli.SetFlag(flags, "set")
	for _, name := range []string{"resume", "weights"} {
		cli.Files(flags, name)
	}
	return func(env *cli.Env, args []string) error {
		switch {
		case (f.weights == "") == (f.resume == ""):
			return cli.Usagef("eval: give the weights to evaluate by --weights or by --resume")
		case f.cast && f.weights == "":
			return cli.Usagef("--cast needs --weights")
		case f.threads < 0:
			return cli.Usagef("--threads must be 0 or more")
		}
		job, holdout, err := openEval(args[0], *set)
		if err != nil {
			return err
		}
		if err := f.accept(args[0], job); err != nil {
			return err
		}
		f.blas = "go"
		return f.evaluate(env, job, holdout)
	}
}

// openEval compiles a spec so that its program has a validation, or reads a program, which must have one. It returns the share of
// the data that is held out.
func openEval(file string, set []string) (*cli.Job, float64, error) {
	if cli.IsProgram(file) || filepath.Ext(file) == ".json" {
		job, err := cli.OpenProgram(file, set)
		if err != nil {
			return nil, 0, err
		}
		if job.Program.Run.EvalSequences <= 0 {
			return nil, 0, cli.Usagef("%s has no validation, which computes the losses: compile it with train.holdout and train.eval_batch above 0", file)
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
	job, err := cli.OpenProgram(file, set)
	return job, spec.Train.Holdout, err
}

func (f *evalFlags) evaluate(env *cli.Env, job *cli.Job, holdout float64) error {
	split, err := vm.OpenSplit(&job.Program.Run, f.dir, f.split, holdout)
	if err != nil {
		return cli.Wrong(err)
	}
	weights, err := f.openWeights(job.Program)
	if err != nil {
		return err
	}
	options := vm.Options{Dir: f.dir, Tokens: split}
	if weights != nil {
		defer weights.Close()
		options.Weights = weights
	}
	computer, err := f.open(job.Program, nil)
	if err != nil {
		return err
	}
	defer computer.close()
	options.Transport = computer.transport
	j, err := vm.Open(job.Program, func(rank int) (vm.Device, error) { return computer.device(rank), nil }, options)
	if err != nil {
		return err
	}
	r := &training{f: &f.runFlags, weights: weights, program: job.Program, job: j, device: computer.name, show: f.progress(env, job.Program, computer.name)}
	return errors.Join(f.report(env, r, split), j.Close())
}

// evaluation is what eval prints with --json.
type evaluation struct {
	Split      string `json:"split"`
	Loss       number `json:"loss"`
	Perplexity number `json:"perplexity"`
	Windows    int64  `json:"windows"`
	Tokens     int64  `json:"tokens"`
	Left       int64  `json:"tokens_left"`
	Sequence   int64  `json:"sequence"`
	Step       int    `json:"step"`
}

func (f *evalFlags) report(env *cli.Env, r *training, split *vm.Split) error {
	if _, err := r.start(env.Context); err != nil {
		return err
	}
	windows, left := split.Windows()
	loss, err := split.Evaluate(env.Context, r.job, func(done int64, mean float64) error {
		if done < windows {
			r.show.say("%d of %d windows  loss %.4f", done, windows, mean)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if math.IsNaN(loss) {
		return errors.New("the loss is not a number")
	}
	tokens := windows * r.program.Run.Sequence
	if f.json {
		return json.NewEncoder(env.Stdout).Encode(evaluation{
			f.split, number(loss), number(math.Exp(loss)), windows, tokens, left, r.program.Run.Sequence, r.job.Steps(),
		})
	}
	fmt.Fprintf(env.Stdout, "loss %.6f, perplexity %.4f over %d tokens in %d windows of %d (%s)\n", loss, math.Exp(loss), tokens, windows, r.program.Run.Sequence, f.split)
	if left > 0 {
		fmt.Fprintf(env.Stdout, "%d tokens at the end fill no window\n", left)
	}
	return nil
}

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/cmd/sppovm/internal/watch"
	"sppo.dev/internal/train"
	"sppo.dev/ir"
)

// watchFlags are the flags of run that add observers.
type watchFlags struct {
	tensorboard string
	log         string
	port        int // port on which metrics are served; -1: none
	gradNorms   int // steps between readings of gradient norms; 0: none are read
	positions   bool
}

func (f *watchFlags) define(flags *pflag.FlagSet) {
	flags.StringVar(&f.tensorboard, "tensorboard", "", "write a TensorBoard event file to this `FOLDER`")
	flags.StringVar(&f.log, "record", "", "append the run's records to this `FILE` as JSON lines, for sppovm report")
	flags.IntVar(&f.port, "prometheus", -1, "serve metrics at 127.0.0.1:`PORT` during training; 0: any free port")
	flags.IntVar(&f.gradNorms, "grad-norms", 0, "record the gradient norm of each layer every `N` steps; this reads all gradients from the devices")
	flags.BoolVar(&f.positions, "position-losses", false, "record each validation loss by position in the sequence")
	cli.Files(flags, "record", "jsonl")
}

// watched reports whether the run has observers besides its standard output.
func (f *watchFlags) watched() bool { return f.tensorboard != "" || f.log != "" || f.port >= 0 }

func (f *watchFlags) check(device string, json bool) error {
	switch {
	case f.port > 65535 || f.port < -1:
		return cli.Usagef("--prometheus %d: ports end at 65535", f.port)
	case f.gradNorms < 0:
		return cli.Usagef("--grad-norms must not be negative")
	case device == "sim" && (f.watched() || f.gradNorms > 0 || f.positions):
		return cli.Usagef("--tensorboard, --record, --prometheus, --grad-norms and --position-losses watch training, which --device sim does not do")
	case (f.gradNorms > 0 || f.positions) && !f.watched() && !json:
		return cli.Usagef("--grad-norms and --position-losses need --json, --record, --tensorboard or --prometheus to record them")
	}
	return nil
}

// watch opens the observers that the flags request. The caller closes them.
func (r *training) watch() error {
	f := &r.f.watch
	r.show.watchers.Fail = func(name string, err error) {
		r.show.warn("warning: %s failed and is now disabled: %v", name, err)
	}
	if f.tensorboard != "" {
		t, err := watch.NewTensorBoard(f.tensorboard)
		if err != nil {
			return cli.Wrong(fmt.Errorf("--tensorboard: %w", err))
		}
		r.show.watchers.Add("--tensorboard", t)
	}
	if f.log != "" {
		if err := cli.CheckOutput(f.log); err != nil {
			return err
		}
		file, err := openLog(f.log)
		if err != nil {
			return cli.Wrong(fmt.Errorf("--record: %w", err))
		}
		r.show.watchers.Add("--record", &watch.Lines{W: file})
	}
	if f.port >= 0 {
		p, err := watch.NewPrometheus(uint16(f.port))
		if err != nil {
			return fmt.Errorf("--prometheus: %w", err)
		}
		r.show.watchers.Add("--prometheus", p)
		r.show.warn("metrics for Prometheus: %s", p.URL())
	}
	return nil
}

// openLog opens a file to append lines to. If a killed run left an incomplete line, openLog ends that line first.
func openLog(path string) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	if err == nil && info.Mode().IsRegular() && info.Size() > 0 {
		last := make([]byte, 1)
		if _, err = file.ReadAt(last, info.Size()-1); err == nil && last[0] != '\n' {
			_, err = file.Write([]byte("\n"))
		}
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// announce passes a record of the run's start to the observers. It predicts the time of a step only if the run is
// watched, because the simulation takes time.
func (r *training) announce() error {
	p := r.program
	dp, pp, sp := degrees(p)
	run := &watch.Run{
		Name: p.Name, Version: cli.Version("sppovm"), Time: time.Now(), Device: r.device, Machine: p.Machine.Name, Ranks: len(p.Ranks),
		DP: dp, PP: pp, SP: sp, Parameters: parameters(p), Sequence: p.Run.Sequence, Batch: p.Run.Batch, Steps: r.f.steps, First: r.job.Steps(),
		DeviceMemory: watch.Memory{Capacity: ir.Bytes(p.Machine.DeviceMemory)}, HostMemory: watch.Memory{Capacity: p.Machine.HostMemoryPerRank()},
	}
	for _, rank := range p.Ranks {
		arenas := &p.Codes[rank.Code].Arenas
		run.DeviceMemory.Peak = max(run.DeviceMemory.Peak, arenas[ir.Device])
		run.HostMemory.Peak = max(run.HostMemory.Peak, arenas[ir.Host])
	}
	if r.f.watch.watched() {
		predicted, err := watch.Predict(p, r.f.device == "cpu")
		if err != nil {
			return err
		}
		run.Predicted, r.compare.Predicted = predicted, predicted
	}
	r.show.watchers.Observe(run)
	return nil
}

// record passes the step that has just ended to the observers.
func (r *training) record(result *train.StepResult) error {
	split, err := r.meter.add()
	if err != nil {
		return err
	}
	norms, err := r.norms()
	if err != nil {
		return err
	}
	s := &watch.Step{
		Step: result.Step, Loss: number(result.Loss), TokensPerSecond: number(result.TokensPerSecond), Seconds: number(result.Seconds),
		GradNorm: number(result.GradNorm), LR: number(result.LR), Skipped: result.Skipped, GradNorms: norms, ExpertLoad: watch.LoadsOf(result.ExpertLoad),
	}
	if split != nil {
		s.Split = watch.SplitOf(*split)
	}
	r.show.step(s)
	if result.Step > r.show.first+1 {
		if warning := r.compare.Add(s); warning != "" {
			r.show.warn("%s", warning)
		}
	}
	return nil
}

// evaluate runs a validation.
func (r *training) evaluate(ctx context.Context) (*watch.Validation, error) {
	v := &watch.Validation{Step: r.job.Steps()}
	if !r.f.watch.positions {
		loss, err := r.job.Eval(ctx)
		v.Loss = number(loss)
		return v, err
	}
	var losses train.PositionLosses
	loss, err := r.job.EvalPositions(ctx, &losses)
	v.Loss, v.ByPosition = number(loss), watch.BucketsOf(&losses, r.program.Run.Sequence)
	return v, err
}

// norms returns the gradient norms of the layers if --grad-norms selects the step that has just ended, and
// otherwise nil.
func (r *training) norms() (map[string]watch.Number, error) {
	every := r.f.watch.gradNorms
	if every == 0 || r.job.Steps()%every != 0 {
		return nil, nil
	}
	norms, err := r.job.GradNorms(watch.LayerOf)
	if err != nil {
		return nil, err
	}
	out := map[string]watch.Number{}
	for layer, norm := range norms {
		out[layer] = watch.Number(norm)
	}
	return out, nil
}

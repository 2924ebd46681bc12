package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/ir"
	"sppo.dev/vm"
	"sppo.dev/vm/sim"
)

// simFlags are the flags of simulated runs.
type simFlags struct {
	jitter     float64
	slow       []string
	contention bool
}

func (f *simFlags) define(flags *pflag.FlagSet) {
	flags.BoolVar(&f.contention, "contention", false, "sim: let copies share a node's bandwidth dynamically instead of in fixed shares")
	flags.Float64Var(&f.jitter, "jitter", 0, "sim: vary every duration randomly; the value is the standard deviation of the duration's logarithm")
	flags.StringArrayVar(&f.slow, "slow", nil, "sim: slow down the kernels and copies of a rank by a factor, given as `RANK=FACTOR`; may be repeated")
}

// options converts the flags to options of the simulator.
func (f *simFlags) options(seed int64) (sim.Options, error) {
	o := sim.Options{Jitter: f.jitter, Contention: f.contention, Seed: uint64(seed), Slow: map[int]float64{}}
	for _, text := range f.slow {
		left, right, ok := strings.Cut(text, "=")
		rank, rankErr := strconv.Atoi(left)
		factor, factorErr := strconv.ParseFloat(right, 64)
		if !ok || rankErr != nil || factorErr != nil {
			return o, cli.Usagef("--slow %s: write RANK=FACTOR, for example 3=1.2", text)
		}
		o.Slow[rank] = factor
	}
	return o, nil
}

// simulation is a run in virtual time.
type simulation struct {
	job   *vm.Job
	sim   *sim.Job
	show  *progress
	steps int
	took  []float64 // seconds of each step
}

// simulate runs a job in virtual time, without computing anything. Only one step runs by default, because without
// jitter all steps are equal.
func (f *runFlags) simulate(env *cli.Env, job *cli.Job) error {
	o, err := f.sim.options(job.Program.Run.Seed)
	if err != nil {
		return err
	}
	world, err := sim.New(job.Program, o)
	if err != nil {
		return cli.Wrong(err)
	}
	j, err := vm.Open(job.Program, func(rank int) (vm.Device, error) { return world.Device(rank), nil }, vm.Options{Tokens: sim.NoTokens{}})
	if err != nil {
		return err
	}
	s := &simulation{job: j, sim: world, steps: f.steps, show: f.simulated(env, job.Program)}
	for err == nil && j.Steps() < s.steps && env.Context.Err() == nil {
		err = s.step(env)
	}
	if err == nil {
		s.end(job.Program)
	}
	return errors.Join(err, j.Close())
}

func (f *runFlags) simulated(env *cli.Env, p *ir.Program) *progress {
	show := &progress{text: env.Stderr, loud: env.Stderr, steps: f.steps}
	if f.quiet {
		show.text = io.Discard
	}
	if f.json {
		show.json = env.Stdout
	}
	show.header(p, fmt.Sprintf("sim: virtual time on %s; nothing is computed, so there are no losses", p.Machine.Name))
	return show
}

func (s *simulation) step(env *cli.Env) error {
	r, err := s.job.Step(env.Context)
	if err != nil {
		return err
	}
	s.took = append(s.took, r.Seconds)
	s.show.say("simulated step %d/%d  %s  %s tokens/s", r.Step, s.steps, ir.Seconds(r.Seconds), cli.Short(r.TokensPerSecond))
	s.show.line(simulatedStep{true, r.Step, number(r.TokensPerSecond), number(r.Seconds)})
	return nil
}

// end prints a summary: the distribution of step times, the throughput of the median step, the memory peaks,
// and the other figures of the last step.
func (s *simulation) end(p *ir.Program) {
	if len(s.took) == 0 {
		return
	}
	slices.Sort(s.took)
	least, median, most := s.took[0], s.took[len(s.took)/2], s.took[len(s.took)-1]
	t := s.sim.Timeline()
	var device, host ir.Bytes
	for rank := range p.Ranks {
		peaks := s.job.Peaks(rank)
		device, host = max(device, peaks[ir.Device]), max(host, peaks[ir.Host])
	}
	tgs := float64(p.Run.Sequence) * float64(p.Run.Batch) / (median * float64(len(p.Ranks)))
	took := fmt.Sprintf("%s a step", ir.Seconds(median))
	if least < most {
		took = fmt.Sprintf("median %s a step, from %s to %s", ir.Seconds(median), ir.Seconds(least), ir.Seconds(most))
	}
	s.show.say("simulated: %s, %s tokens per second and rank, MFU %.1f%%, bubble %.1f%%, exposed transfers %s; peak %s device and %s host memory per rank",
		took, cli.Short(tgs), 100*t.MFU(), 100*t.BubbleRatio(), t.Exposed(), device, host)
	s.show.line(simulatedEnd{
		true, true, len(s.took), number(median), number(least), number(most), number(tgs), number(t.MFU()),
		number(t.BubbleRatio()), number(t.Exposed()), device, host,
	})
}

// The --json objects of a simulation; each is marked as simulated.
type (
	simulatedStep struct {
		Simulated       bool   `json:"simulated"`
		Step            int    `json:"step"`
		TokensPerSecond number `json:"tokens_per_s"`
		Seconds         number `json:"step_s"`
	}
	simulatedEnd struct {
		Simulated     bool     `json:"simulated"`
		Done          bool     `json:"done"`
		Steps         int      `json:"steps"`
		MedianSeconds number   `json:"step_s_median"`
		LeastSeconds  number   `json:"step_s_min"`
		MostSeconds   number   `json:"step_s_max"`
		TGS           number   `json:"tgs"`
		MFU           number   `json:"mfu"`
		BubbleRatio   number   `json:"bubble_ratio"`
		Exposed       number   `json:"exposed_transfer_s"`
		DevicePeak    ir.Bytes `json:"device_peak_bytes"`
		HostPeak      ir.Bytes `json:"host_peak_bytes"`
	}
)

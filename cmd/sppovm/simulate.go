package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
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

// simulate runs a job in virtual time, without computing anything. Only one step runs by default, because without
// jitter all steps are equal.
func (f *runFlags) simulate(env *cli.Env, job *cli.Job) error {
	o, err := f.sim.options(job.Program.Run.Seed)
	if err != nil {
		return err
	}
	if err := o.Check(job.Program); err != nil {
		return cli.Wrong(err)
	}
	s := &simulation{program: job.Program, steps: f.steps, show: f.simulated(env, job.Program)}
	for len(s.took) < s.steps && env.Context.Err() == nil {
		if s.last == nil || o.Jitter > 0 {
			o.Round = int64(len(s.took)) + 1
			if err := s.run(env, o); err != nil {
				return err
			}
		}
		s.step()
	}
	s.end()
	return nil
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

// simulation is a run in virtual time.
type simulation struct {
	program *ir.Program
	last    *sim.Timeline // of the last step
	show    *progress
	steps   int
	took    []float64 // seconds of each step
}

// run simulates a step, and shows the progress.
func (s *simulation) run(env *cli.Env, o sim.Options) error {
	w := cli.NewWatch(env)
	defer w.End()
	w.Say("simulating the program")
	return w.Do(func() (err error) {
		s.last, err = sim.Run(s.program, ir.SectionStep, o)
		return err
	})
}

// step prints the last step.
func (s *simulation) step() {
	seconds := math.Round(float64(s.last.Makespan)*1e9) / 1e9 // other devices also measure whole nanoseconds
	s.took = append(s.took, seconds)
	tokens := float64(s.program.Run.Sequence) * float64(s.program.Run.Batch) / seconds
	s.show.say("simulated step %d/%d  %s  %s tokens/s", len(s.took), s.steps, ir.Seconds(seconds), cli.Short(tokens))
	s.show.line(simulatedStep{true, len(s.took), number(tokens), number(seconds)})
}

// end prints a summary: the distribution of step times, the throughput of the median step, the memory peaks,
// and the other figures of the last step.
func (s *simulation) end() {
	if len(s.took) == 0 {
		return
	}
	slices.Sort(s.took)
	least, median, most := s.took[0], s.took[len(s.took)/2], s.took[len(s.took)-1]
	var device, host ir.Bytes
	for i := range s.last.Ranks {
		peaks := &s.last.Ranks[i].Peaks
		device, host = max(device, peaks[ir.Device]), max(host, peaks[ir.Host])
	}
	tgs := float64(s.program.Run.Sequence) * float64(s.program.Run.Batch) / (median * float64(len(s.program.Ranks)))
	took := fmt.Sprintf("%s a step", ir.Seconds(median))
	if least < most {
		took = fmt.Sprintf("median %s a step, from %s to %s", ir.Seconds(median), ir.Seconds(least), ir.Seconds(most))
	}
	s.show.say("simulated: %s, %s tokens per second and rank, MFU %.1f%%, bubble %.1f%%, exposed transfers %s; peak %s device and %s host memory per rank",
		took, cli.Short(tgs), 100*s.last.MFU(), 100*s.last.BubbleRatio(), s.last.Exposed(), device, host)
	s.show.line(simulatedEnd{
		true, true, len(s.took), number(median), number(least), number(most), number(tgs), number(s.last.MFU()),
		number(s.last.BubbleRatio()), number(s.last.Exposed()), device, host,
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

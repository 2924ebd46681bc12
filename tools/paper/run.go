package main

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"

	"sppo.dev/internal/compile"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/memory"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/search"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// outcome is the result of a simulated step.
type outcome struct {
	Schedule  string   `json:"schedule"` // dp x pp x sp, subsequences
	Sequences int      `json:"m"`        // sequences in a replica's batch
	StepS     float64  `json:"step_s"`
	TGS       float64  `json:"tgs"`
	MFU       float64  `json:"mfu"`
	Bubble    float64  `json:"bubble_ratio"`
	ExposedS  float64  `json:"exposed_transfer_s"`
	Imbalance float64  `json:"imbalance"` // imbalance of FLOPs among subsequences
	Device    ir.Bytes `json:"device_peak_bytes"`
	Host      ir.Bytes `json:"host_peak_bytes"`
	Fits      bool     `json:"fits"`

	Found map[string]string `json:"found,omitempty"` // the schedule, if the solver chose it
	Error string            `json:"error,omitempty"` // why the compiler refused the job
}

// results holds all outcomes by job, and the longest sequences, in tokens, by search.
type results struct {
	Jobs    map[string]outcome `json:"jobs"`
	Longest map[string]int64   `json:"longest"`
}

// fill simulates the jobs and runs the searches whose keys match.
func (r *results) fill(wanted *regexp.Regexp) error {
	if r.Jobs == nil {
		r.Jobs, r.Longest = map[string]outcome{}, map[string]int64{}
	}
	list, err := jobs()
	if err != nil {
		return err
	}
	for _, j := range list {
		if !wanted.MatchString(j.key()) {
			continue
		}
		o, err := j.simulate()
		if err != nil {
			return fmt.Errorf("%s: %w", j.key(), err)
		}
		r.Jobs[j.key()] = o
		fmt.Fprintf(os.Stderr, "%-40s %8.4g tokens/s per GPU  %s\n", j.key(), o.TGS, o.Error)
	}
	for _, s := range searches {
		if !wanted.MatchString(s.key()) {
			continue
		}
		if r.Longest[s.key()], err = s.run(); err != nil {
			return fmt.Errorf("%s: %w", s.key(), err)
		}
		fmt.Fprintf(os.Stderr, "%-40s %8dK tokens\n", s.key(), r.Longest[s.key()]>>10)
	}
	return nil
}

// simulate plans, compiles, verifies and runs a step. If the language or a pass refuses the job, that is
// also an outcome.
func (j job) simulate() (outcome, error) {
	spec, err := j.spec()
	if err != nil {
		return refusal(err)
	}
	plan := plan.New(spec)
	if err := passes.Run(spec, plan, passes.Options{}); err != nil {
		return refusal(err)
	}
	program, err := compile.Build(plan, nil)
	if err != nil {
		return outcome{}, err
	}
	t, err := sim.Run(program, ir.SectionStep, sim.Options{})
	if err != nil {
		return outcome{}, err
	}
	p := plan.Parallel
	o := outcome{
		Schedule: fmt.Sprintf("%d x %d x %d, N = %d", p.DP, p.PP, p.SP, plan.Subsequences.N), Sequences: p.Microbatches * p.Microbatch,
		StepS: float64(t.Makespan), TGS: t.TGS(), MFU: t.MFU(), Bubble: t.BubbleRatio(), ExposedS: float64(t.Exposed()),
		Imbalance: plan.Subsequences.Imbalance, Fits: plan.Memory.Fits,
	}
	if j.system.name == free {
		o.Found = found(plan)
	}
	for s := range plan.Memory.DevicePeakBytes {
		o.Device, o.Host = max(o.Device, plan.Memory.DevicePeakBytes[s]), max(o.Host, plan.Memory.HostPeakBytes[s])
	}
	return o, nil
}

// found returns the schedule of a plan, by key.
func found(plan *plan.Plan) map[string]string {
	out := map[string]string{}
	keys, values := search.Pins(plan.Schedule)
	for i, key := range keys {
		out[strings.TrimPrefix(key, "schedule.")] = values[i]
	}
	return out
}

// refusal turns the compiler's refusal of a job into an outcome.
func refusal(err error) (outcome, error) {
	var d lang.Diagnostics
	if !errors.As(err, &d) || len(d) == 0 {
		return outcome{}, err
	}
	return outcome{Error: d[0].Message}, nil
}

// frontier is a search for the longest sequence with which GPT-7B fits on the given number of nodes.
type frontier struct {
	system string
	nodes  int
	// schedule returns the schedule for a sequence length, in the format that parse reads. It is nil for SPPO,
	// whose subsequences have the length that the paper calls profitable.
	schedule func(sequence int64) string
}

func (s frontier) key() string { return fmt.Sprintf("longest, %s, %d GPUs", s.system, 8*s.nodes) }

// Step and upper limit of a search, in tokens.
const (
	searchStep = 64 << 10
	searchMost = 16 << 20
	perTask    = 16 << 10 // tokens in a subsequence of SPPO
)

var searches = func() (list []frontier) {
	for _, nodes := range []int{4, 8, 16} {
		list = append(list,
			frontier{"deepspeed-ulysses", nodes, func(int64) string { return fmt.Sprintf("deepspeed-ulysses(sp = %d)", 8*nodes) }},
			frontier{"megatron tuned", nodes, func(int64) string { return fmt.Sprintf("megatron(sp = 32, pp = %d)", nodes/4) }},
			frontier{"fpdt", nodes, func(n int64) string {
				return fmt.Sprintf("fpdt(sp = 32, dp = %d, chunks = %d)", nodes/4, max(2, n/chunk))
			}},
			frontier{"sppo", nodes, nil},
		)
	}
	return list
}()

// run finds the greatest length that fits, by bisection.
func (s frontier) run() (int64, error) {
	fits, over := int64(0), int64(searchMost/searchStep)
	for over-fits > 1 {
		middle := (fits + over) / 2
		ok, err := s.fits(middle * searchStep)
		if err != nil {
			return 0, err
		}
		if ok {
			fits = middle
		} else {
			over = middle
		}
	}
	return fits * searchStep, nil
}

// fits reports whether a sequence length fits according to the plan's memory bound; nothing is compiled.
func (s frontier) fits(sequence int64) (bool, error) {
	set := []string{fmt.Sprintf("cluster.nodes=%d", s.nodes)}
	var spec *lang.Spec
	var err error
	if s.schedule != nil {
		schedule := s.schedule(sequence)
		batch := 1
		if strings.Contains(schedule, "dp = ") {
			batch = s.nodes / 4
		}
		spec, err = parse("gpt-7b", schedule, sequence, batch, set)
	} else {
		spec, err = load("gpt-7b-1m", append(set, fmt.Sprintf("schedule.pp=%d", s.nodes), "schedule.offload=full",
			fmt.Sprintf("train.sequence=%d", sequence), fmt.Sprintf("schedule.subsequences=%d", max(int64(2*s.nodes), sequence/perTask))))
	}
	var p *plan.Plan
	if err == nil {
		p = plan.New(spec)
		err = passes.Run(spec, p, passes.Options{})
	}
	if err != nil {
		_, err = refusal(err)
		return false, err
	}
	return memory.FootprintOf(p).Fits(p.Memory.DeviceCapacityBytes, p.Memory.HostCapacityBytes), nil
}

package main

import (
	"fmt"
	"slices"
	"strings"

	"sppo.dev"
	"sppo.dev/internal/codegen"
	"sppo.dev/internal/compile"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// This file compares steps with many replicas with a step of one replica that does the same work. No one has measured these steps.

// replicated is a job of which every replica does the same work.
type replicated struct {
	model, cluster    string
	sp                int
	zero              string
	sequence, batches int // K tokens of a sequence; sequences of a replica, of which it processes one at a time
	recompute         string
}

var replicatedJobs = []replicated{
	{"llama-3.1-8b", "h100", 8, "auto", 32, 1, "none"},
	{"llama-3.1-8b", "h100", 8, "auto", 8, 4, "none"},
	{"llama-3.1-8b", "h100", 1, "3", 8, 1, "selective"},
	{"llama-3.1-8b", "h200", 1, "auto", 8, 4, "selective"},
	{"llama-3.1-70b", "b200", 8, "auto", 32, 1, "selective"},
	{"llama-3.1-8b", "a800", 8, "auto", 32, 1, "none"},
}

// replicas lists the numbers of replicas. The first is what the others are compared with.
var replicas = []int{1, 8, 16, 32, 64}

// limit is the largest share by which a step is longer than with one replica, if a layer's gradients take less than hidden of the
// backward work that is left after the layer.
const limit, hidden = 0.05, 0.8

const replicatedSpec = `import "../../examples/today/%s.sppo"
import "clusters/%s.sppo"
cluster nodes = %s(nodes = %d)
train {
  sequence    = %dK
  batch       = %d
  grad_reduce = %s
  data        = random()
}
schedule pinned {
  sp                = %d
  pp                = 1
  dp                = %d
  sp_mode           = ulysses
  zero              = %s
  microbatch        = 1
  optimizer_offload = none
  strategy          = sppo
  virtual_stages    = 1
  subsequences      = 1
  order             = sequence
  recompute         = %s
  offload           = none
  keep              = [k, v]
  mux               = off
}
`

// programOf returns the program of a job with a number of replicas.
func (j *replicated) programOf(dp int, reduce string) (*ir.Program, error) {
	nodes := max(1, dp*j.sp/8)
	text := fmt.Sprintf(replicatedSpec, j.model, j.cluster, j.cluster, nodes, j.sequence, dp*j.batches, reduce, j.sp, dp, j.zero, j.recompute)
	spec, err := sppo.Parse(folder+"/replicas.sppo", []byte(text))
	if err != nil {
		return nil, err
	}
	p, err := compile.Plan(spec, passes.Options{})
	if err != nil {
		return nil, err
	}
	return codegen.Build(p)
}

// stepOf returns the simulated time of a step, and the largest share that the collectives on the gradients of a layer take of the
// backward work that is left after the layer. After the last layer, none is left.
func stepOf(p *ir.Program) (step, share float64, err error) {
	t, err := sim.Run(p, ir.SectionStep, sim.Options{Spans: true})
	if err != nil {
		return 0, 0, err
	}
	sums, left := map[int32]ir.Seconds{}, map[int32]ir.Seconds{} // by layer
	work := ir.Seconds(0)
	for pc, in := range slices.Backward(p.Codes[p.Ranks[0].Code].Sections[ir.SectionStep]) {
		d := t.Ranks[0].Spans[pc].End - t.Ranks[0].Spans[pc].Begin
		at, again := left[in.Prov.Layer]
		reduces := in.Stream == ir.Params && (in.Op == ir.ReduceScatter || in.Op == ir.AllReduce)
		switch {
		case in.Prov.Phase != ir.PhaseBackward || in.Prov.Layer < 0:
		case reduces && !again:
			left[in.Prov.Layer], sums[in.Prov.Layer] = work, d
		case reduces && at == work: // not an earlier microbatch's
			sums[in.Prov.Layer] += d
		case in.Stream == ir.Compute && in.Op != ir.Wait:
			work += d
		}
	}
	for layer, work := range left {
		if work > 0 {
			share = max(share, float64(sums[layer]/work))
		}
	}
	return float64(t.Makespan), share, nil
}

// replicasTable returns the table of all jobs.
func replicasTable() (string, error) {
	var b strings.Builder
	b.WriteString("| job | dp | GPUs | share | step | over dp = 1 | without contention | bf16: share | over dp = 1 | |\n")
	b.WriteString("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n")
	for _, j := range replicatedJobs {
		var one replicatedStep
		for _, dp := range replicas {
			line, err := j.line(dp, &one)
			if err != nil {
				return "", fmt.Errorf("%s, dp = %d: %w", j.model, dp, err)
			}
			fmt.Print(line)
			b.WriteString(line)
		}
	}
	return b.String(), nil
}

// replicatedStep holds the times of a step in seconds.
type replicatedStep struct {
	step, alone float64 // with contention and without
	share       float64 // see stepOf, without contention
}

// step simulates a step of a job.
func (j *replicated) step(dp int, reduce string) (s replicatedStep, err error) {
	p, err := j.programOf(dp, reduce)
	if err != nil {
		return s, err
	}
	if s.step, _, err = stepOf(p); err != nil {
		return s, err
	}
	p.Machine.Contention = 0
	s.alone, s.share, err = stepOf(p)
	return s, err
}

// line returns the line of a job with a number of replicas. It compares with one replica, whose step it sets or reads.
func (j *replicated) line(dp int, one *replicatedStep) (string, error) {
	exact, err := j.step(dp, "f32")
	if err != nil {
		return "", err
	}
	name := fmt.Sprintf("%s on %s, %d x %dK tokens", j.model, j.cluster, j.batches, j.sequence)
	if dp == 1 {
		*one = exact
		return fmt.Sprintf("| %s | 1 | %d | | %s | | | | | |\n", name, j.sp, stepText(exact.step)), nil
	}
	rounded, err := j.step(dp, "bf16")
	over, remark := exact.step/one.step-1, ""
	switch {
	case over > limit && exact.share >= hidden:
		remark = "share of at least 80%"
	case over > limit:
		remark = "outside the limit"
	}
	return fmt.Sprintf("| %s | %d | %d | %.0f%% | %s | %+.1f%% | %+.1f%% | %.0f%% | %+.1f%% | %s |\n", name, dp, dp*j.sp, 100*exact.share, stepText(exact.step),
		100*over, 100*(exact.alone/one.alone-1), 100*rounded.share, 100*(rounded.step/one.step-1), remark), err
}

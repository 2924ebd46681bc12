package main

import (
	"fmt"
	"strings"

	"sppo/cmd/internal/cli"
	"sppo/passes"
)

// maxAdvice is how many ways out are shown.
const maxAdvice = 3

// adviseFit says which single change of a spec would make its job fit: changes are tried, from the cheapest to the
// dearest, and measured like the plan itself.
func adviseFit(job *cli.Job, set []string) error {
	if job.Spec == nil {
		return fmt.Errorf("the plan does not fit: %s", cli.Lack(&job.Plan.Memory))
	}
	file := job.Spec.File
	lines := []string{file + " does not fit; it would with one of"}
	for _, group := range changes(job.Plan) {
		if len(lines) > maxAdvice {
			break
		}
		for _, change := range group {
			if line := try(file, append(set[:len(set):len(set)], change)); line != "" {
				lines = append(lines, fmt.Sprintf("  --set %s: %s", change, line))
				break
			}
		}
	}
	if len(lines) == 1 {
		lines[0] = file + " does not fit, nor with any single change of its schedule or an eighth of the sequence: it takes more devices"
	}
	return fmt.Errorf("%s", strings.Join(lines, "\n"))
}

// try says what a changed spec needs if it fits, and nothing if it does not or is no spec.
func try(file string, set []string) string {
	job, err := cli.OpenPlan(file, set, passes.Options{})
	if err != nil || job.Measure() != nil || !job.Plan.Memory.Fits {
		return ""
	}
	device, host := cli.Peaks(&job.Plan.Memory)
	return fmt.Sprintf("%s of device memory, %s of host memory", device, host)
}

// changes are the overrides worth a try, in groups of the same kind: of each the first that fits is enough.
func changes(p *passes.Plan) [][]string {
	var out [][]string
	add := func(format string, values ...any) {
		var group []string
		for _, v := range values {
			group = append(group, fmt.Sprintf(format, v))
		}
		out = append(out, group)
	}
	if p.Offload.Policy != "full" {
		add("schedule.offload=%s", "full")
	}
	if p.Parallel.Microbatch > 1 {
		add("schedule.microbatch=%d", 1)
	}
	if len(p.Schedule.Subsequences.Lengths) == 0 {
		add("schedule.subsequences=%d", 2*p.Subsequences.N, 4*p.Subsequences.N)
	}
	add("schedule.pp=%d", 2*p.Parallel.PP)
	add("schedule.sp=%d", 2*p.Parallel.SP)
	if p.Model.DType == "f32" {
		add("model.dtype=%s", "bf16")
	}
	if p.Offload.Policy != "none" {
		add("schedule.offload=%s", "0.5", "none") // where the host lacks
	}
	s := p.Train.Sequence
	add("train.sequence=%s", tokens(s/2), tokens(s/4), tokens(s/8))
	return out
}

// tokens writes a length as specs do.
func tokens(n int64) string {
	if n > 0 && n%1024 == 0 {
		return fmt.Sprintf("%dK", n/1024)
	}
	return fmt.Sprint(n)
}

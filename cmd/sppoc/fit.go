package main

import (
	"fmt"
	"strings"

	"sppo/cmd/internal/cli"
	"sppo/codegen"
	"sppo/passes"
)

// maxAdvice is how many ways out are shown.
const maxAdvice = 3

// adviseFit says by how much a job does not fit, and which single change of its spec would make it: changes are
// tried, from the cheapest to the dearest, and measured like the plan itself.
func adviseFit(job *cli.Job, set []string) error {
	lines := []string{"does not fit: " + cli.Lack(&job.Plan.Memory)}
	if job.Spec == nil {
		return fmt.Errorf("%s", lines[0])
	}
	for _, change := range changes(job.Plan) {
		other, err := cli.OpenPlan(job.Spec.File, append(set[:len(set):len(set)], change), passes.Options{})
		if err != nil || codegen.Measure(other.Plan) != nil || !other.Plan.Memory.Fits {
			continue
		}
		device, host := cli.Peaks(&other.Plan.Memory)
		lines = append(lines, fmt.Sprintf("  --set %s fits: %s of device memory, %s of host memory", change, device, host))
		if len(lines) > maxAdvice {
			break
		}
	}
	if len(lines) == 1 {
		lines = append(lines, "  no single change of the schedule, nor an eighth of the sequence, makes it fit: it takes more devices")
	}
	return fmt.Errorf("%s", strings.Join(lines, "\n"))
}

// changes are the overrides worth a try.
func changes(p *passes.Plan) []string {
	var out []string
	add := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	if p.Offload.Policy != "full" {
		add("schedule.offload=full")
	}
	if p.Parallel.Microbatch > 1 {
		add("schedule.microbatch=1")
	}
	if len(p.Schedule.Subsequences.Lengths) == 0 {
		add("schedule.subsequences=%d", 2*p.Subsequences.N)
		add("schedule.subsequences=%d", 4*p.Subsequences.N)
	}
	add("schedule.offload=0.5")
	add("schedule.pp=%d", 2*p.Parallel.PP)
	add("schedule.sp=%d", 2*p.Parallel.SP)
	if p.Model.DType == "f32" {
		add("model.dtype=bf16")
	}
	add("schedule.offload=none")
	for share := int64(2); share <= 8; share *= 2 {
		add("train.sequence=%d", p.Train.Sequence/share)
	}
	return out
}

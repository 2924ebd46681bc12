package main

import (
	"fmt"
	"slices"
	"strings"

	"sppo/cmd/internal/cli"
	"sppo/lang"
	"sppo/passes"
)

// maxAdvice is how many ways out are shown.
const maxAdvice = 3

// adviseFit says which single change of a spec would make its job fit: each value that the spec pins is searched anew, then
// there are more machines, smaller numbers, and shorter sequences, and if none of them does, all that the schedule pins at once. All
// are measured like the plan itself.
func adviseFit(job *cli.Job, set []string) error {
	if job.Spec == nil {
		return fmt.Errorf("the plan does not fit: %s", cli.Lack(&job.Plan.Memory))
	}
	file := job.Spec.File
	lines := []string{file + " does not fit; it would with one of"}
	for _, group := range changes(job) {
		if len(lines) > maxAdvice {
			break
		}
		for _, change := range group {
			if line := try(job, set, change); line != "" {
				if line = "  --set " + line; !slices.Contains(lines, line) { // auto may have found what another change says
					lines = append(lines, line)
				}
				break
			}
		}
	}
	if len(lines) == 1 {
		lines[0] = file + " does not fit, nor with any single change; it would with all of"
		if line := tryAll(job, set); line != "" {
			return fmt.Errorf("%s\n  %s", lines[0], line)
		}
		lines[0] = file + " does not fit, nor with any single change of its schedule, eight times the nodes or an eighth of the sequence"
	}
	return fmt.Errorf("%s", strings.Join(lines, "\n"))
}

// try says what a changed spec needs if it fits, and nothing if it does not or is no spec. What the change leaves to the search
// is said as it was found, and with it the grid, which is searched as soon as anything is.
func try(asked *cli.Job, set []string, change string) string {
	job, err := cli.OpenPlan(asked.Spec.File, append(set[:len(set):len(set)], change), passes.Options{})
	if err != nil || lack(job) != "" {
		return ""
	}
	const grid = "schedule.align"
	changed, _, _ := strings.Cut(change, "=")
	keys, values := passes.Pins(job.Plan.Schedule)
	_, before := passes.Pins(asked.Spec.Schedule)
	said := []string{quoted(change)}
	for i, key := range keys {
		switch now := quoted(key + "=" + values[i]); {
		case values[i] == "":
		case key == changed && values[i] == before[i]:
			said = nil
		case key == changed:
			said = []string{now}
		case key == grid && before[i] == "":
			said = append(said, "--set "+now)
		}
	}
	device, host := cli.Peaks(&job.Plan.Memory)
	words := strings.TrimPrefix(strings.Join(said, " "), "--set ")
	return fmt.Sprintf("%s: %s a step, %s of device memory, %s of host memory", words, job.Plan.Time.StepS, device, host)
}

// tryAll leaves the whole schedule to the search, and says in what the plan that it finds differs from what was asked for.
func tryAll(job *cli.Job, set []string) string {
	keys, asked := passes.Pins(job.Spec.Schedule)
	all := set[:len(set):len(set)]
	for i, key := range keys {
		if opens(key, asked[i]) {
			all = append(all, key+"=auto")
		}
	}
	free, err := cli.OpenPlan(job.Spec.File, all, passes.Options{})
	if err != nil || lack(free) != "" {
		return ""
	}
	var changes []string
	_, found := passes.Pins(free.Plan.Schedule)
	for i, key := range keys {
		if opens(key, asked[i]) && found[i] != "" && found[i] != asked[i] {
			changes = append(changes, "--set "+quoted(key+"="+found[i]))
		}
	}
	device, host := cli.Peaks(&free.Plan.Memory)
	return fmt.Sprintf("%s: %s a step, %s of device memory, %s of host memory", strings.Join(changes, " "), free.Plan.Time.StepS, device, host)
}

// lack is what a job lacks, or "". A plan is placed unless the bound on its memory says that it is in vain.
func lack(job *cli.Job) string {
	const slack = 1.05 // of the bound
	p := job.Plan
	if !p.Memory.Placed {
		need, bound := passes.FootprintOf(p), p.Memory
		for s := range need.Device {
			bound.DevicePeakBytes = append(bound.DevicePeakBytes, need.Device[s].Bytes)
			bound.HostPeakBytes = append(bound.HostPeakBytes, need.Host[s])
		}
		device, host := cli.Peaks(&bound)
		if float64(device) > slack*float64(p.Memory.DeviceCapacityBytes) || float64(host) > slack*float64(p.Memory.HostCapacityBytes) {
			return cli.Lack(&bound)
		}
	}
	if err := job.Measure(); err != nil {
		return plainly(err)
	}
	return cli.Lack(&p.Memory)
}

// opens says whether a key that is pinned to a value is left to the search for a way out: a default is nothing that was asked for.
func opens(key, value string) bool { return value != "" && value != lang.FindKey(key).Default }

// changes are the overrides worth a try, in groups of the same kind: of each the first that fits is enough.
func changes(job *cli.Job) [][]string {
	var out [][]string
	add := func(format string, values ...any) {
		var group []string
		for _, v := range values {
			group = append(group, fmt.Sprintf(format, v))
		}
		out = append(out, group)
	}
	keys, values := passes.Pins(job.Spec.Schedule)
	for i, key := range keys {
		if opens(key, values[i]) || values[i] != "" && key == "schedule.keep" {
			add(key+"=%s", "auto")
		}
	}
	nodes := job.Spec.Cluster.Nodes
	add("cluster.nodes=%d", 2*nodes, 4*nodes, 8*nodes)
	if job.Plan.Model.DType == "f32" {
		add("model.dtype=%s", "bf16")
	}
	if job.Plan.Streams() {
		add("schedule.keep=%s", "[k, v]") // where the host lacks
	}
	s := job.Plan.Train.Sequence
	add("train.sequence=%s", tokens(s/2), tokens(s/4), tokens(s/8))
	return out
}

// quoted is an argument as a shell wants it.
func quoted(change string) string {
	if strings.ContainsAny(change, " []()\"*") {
		return "'" + change + "'"
	}
	return change
}

// tokens writes a length as specs do.
func tokens(n int64) string {
	if n > 0 && n%1024 == 0 {
		return fmt.Sprintf("%dK", n/1024)
	}
	return fmt.Sprint(n)
}

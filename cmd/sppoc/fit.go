package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"sppo.dev"
	"sppo.dev/cmd/internal/cli"
	"sppo.dev/ir"
	"sppo.dev/lang"
	"sppo.dev/passes"
)

const (
	maxAdvice      = 3   // ways out that are shown
	advicePatience = 0.2 // of the searches for them, of which there are many
)

// adviseFit says which single change of a spec would make its job fit. First come the fastest of those that leave the job as it is: each
// value that the schedule pins is searched anew. Then there are more machines, smaller numbers, and shorter sequences; and if nothing
// does, all that the schedule pins at once. All are measured like the plan itself.
func adviseFit(job *cli.Job, set []string) error {
	if job.Spec == nil {
		return fmt.Errorf("the plan does not fit: %s", sppo.Shortfall(&job.Plan.Memory))
	}
	file := job.Spec.File
	var ways []way
	for _, change := range scheduleChanges(job) {
		ways = appendWay(ways, job, set, change)
	}
	step := func(w way) ir.Seconds { return w.job.Plan.Time.EstimateS }
	slices.SortStableFunc(ways, func(a, b way) int { return cmp.Compare(step(a), step(b)) })
	ways = ways[:min(len(ways), maxAdvice)]
	for _, group := range otherChanges(job) {
		if len(ways) == maxAdvice {
			break
		}
		ways = appendWay(ways, job, set, group...)
	}
	if len(ways) > 0 {
		lines := []string{file + " does not fit; it would with one of"}
		for _, w := range ways {
			needs, err := needs(w.job)
			if err != nil {
				return err
			}
			lines = append(lines, "  --set "+w.words+": "+needs)
		}
		return fmt.Errorf("%s", strings.Join(lines, "\n"))
	}
	if line, err := tryAll(job, set); err != nil {
		return err
	} else if line != "" {
		return fmt.Errorf("%s does not fit, nor with any single change; it would with all of\n  %s", file, line)
	}
	return fmt.Errorf("%s does not fit, nor with any single change of its schedule, eight times the nodes or an eighth of the sequence", file)
}

// way is a change with which a job fits.
type way struct {
	words string
	job   *cli.Job // as changed
}

// needs says what a step of a placed job takes.
func needs(job *cli.Job) (string, error) {
	if err := job.Simulate(); err != nil {
		return "", err
	}
	device, host := cli.Peaks(&job.Plan.Memory)
	return fmt.Sprintf("%s a step, %s of device memory, %s of host memory", job.Plan.Time.StepS, device, host), nil
}

// appendWay adds the first of some changes with which the job fits.
func appendWay(ways []way, job *cli.Job, set []string, changes ...string) []way {
	for _, change := range changes {
		if w, ok := try(job, set, change); ok {
			same := func(x way) bool { return x.words == w.words }
			if !slices.ContainsFunc(ways, same) { // auto may have found what another change says
				ways = append(ways, w)
			}
			break
		}
	}
	return ways
}

// try says what a changed spec needs, if it fits. What the change leaves to the search is said as it was found, and with it the grid,
// which is searched as soon as anything is.
func try(asked *cli.Job, set []string, change string) (w way, ok bool) {
	set = append(set[:len(set):len(set)], change)
	if any, err := cli.OpenPlan(asked.Spec.File, set, passes.Options{Fitting: true, Patience: advicePatience}); err != nil || lack(any) != "" {
		return way{}, false
	}
	job, err := cli.OpenPlan(asked.Spec.File, set, passes.Options{Patience: advicePatience})
	if err != nil || lack(job) != "" {
		return way{}, false
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
	if len(said) == 0 { // that it is searched changes what no key says
		said = []string{quoted(change)}
	}
	return way{strings.TrimPrefix(strings.Join(said, " "), "--set "), job}, true
}

// tryAll leaves the whole schedule to the search, and says in what the plan that it finds differs from what was asked for.
func tryAll(job *cli.Job, set []string) (string, error) {
	keys, asked := passes.Pins(job.Spec.Schedule)
	all := set[:len(set):len(set)]
	for i, key := range keys {
		if opens(key, asked[i]) {
			all = append(all, key+"=auto")
		}
	}
	free, err := cli.OpenPlan(job.Spec.File, all, passes.Options{})
	if err != nil || lack(free) != "" {
		return "", nil
	}
	var changes []string
	_, found := passes.Pins(free.Plan.Schedule)
	for i, key := range keys {
		if opens(key, asked[i]) && found[i] != "" && found[i] != asked[i] {
			changes = append(changes, "--set "+quoted(key+"="+found[i]))
		}
	}
	needs, err := needs(free)
	return strings.Join(changes, " ") + ": " + needs, err
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
			return sppo.Shortfall(&bound)
		}
	}
	if err := job.Measure(); err != nil {
		return plainly(err)
	}
	return sppo.Shortfall(&p.Memory)
}

// opens reports whether a key that is pinned to a value is left to the search for a way out: a default is nothing that was asked for.
func opens(key, value string) bool { return value != "" && value != lang.FindKey(key).Default }

// scheduleChanges are overrides of what the schedule pins.
func scheduleChanges(job *cli.Job) (changes []string) {
	keys, values := passes.Pins(job.Spec.Schedule)
	for i, key := range keys {
		if opens(key, values[i]) || values[i] != "" && key == "schedule.keep" {
			changes = append(changes, key+"=auto")
		}
	}
	if job.Plan.Streams() {
		changes = append(changes, "schedule.keep=[k, v]") // where the host lacks
	}
	return changes
}

// otherChanges are overrides that make another job of it, in groups of the same kind: of each the first that fits is enough.
func otherChanges(job *cli.Job) (groups [][]string) {
	nodes, s := job.Spec.Cluster.Nodes, job.Plan.Train.Sequence
	var more, shorter []string
	for times := 2; times <= 8; times *= 2 {
		more = append(more, fmt.Sprintf("cluster.nodes=%d", times*nodes))
		shorter = append(shorter, "train.sequence="+tokens(s/int64(times)))
	}
	groups = append(groups, more)
	if job.Plan.Model.DType == "f32" {
		groups = append(groups, []string{"model.dtype=bf16"})
	}
	return append(groups, shorter)
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

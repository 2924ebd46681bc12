package main

import (
	"cmp"
	"fmt"
	"math/bits"
	"slices"
	"strings"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/codegen"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/memory"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/search"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

const (
	maxAdvice      = 3   // suggestions shown
	advicePatience = 0.2 // factor on the work limit of each search, because there are many
)

// adviseFit suggests single changes to a spec that would make its job fit, the cheapest first. First come changes that
// keep the job and its machines as they are, such as leaving one pinned value of the schedule to the search; of these,
// it suggests those with the fastest plans. Then come more host memory, more machines, a smaller data type and shorter
// sequences, each by as little as suffices. If no single change suffices, all pinned values are left to the search
// together. Every suggestion is known to fit, either from its memory bound or because it was placed.
func adviseFit(w *cli.Watch, job *cli.Job, set []string) error {
	if job.Spec == nil {
		return fmt.Errorf("the plan does not fit: %s", job.Plan.Memory.Excess())
	}
	file := job.Spec.File
	var ways []way
	for _, change := range scheduleChanges(job) {
		ways = appendWay(w, ways, job, set, change)
	}
	step := func(w way) ir.Seconds { return w.job.Plan.Time.StepS }
	slices.SortStableFunc(ways, func(a, b way) int { return cmp.Compare(step(a), step(b)) })
	ways = ways[:min(len(ways), maxAdvice)]
	for _, group := range otherChanges(job) {
		if len(ways) == maxAdvice {
			break
		}
		ways = appendWay(w, ways, job, set, group...)
	}
	if w.Stopped() && len(ways) == 0 {
		return fmt.Errorf("%s does not fit; the search for changes that make it fit was stopped", file)
	}
	if len(ways) > 0 {
		lines := []string{file + " does not fit; each of these changes would make it fit"}
		for _, w := range ways {
			lines = append(lines, "  --set "+w.words+": "+foreseen(w.job.Plan)+ofNode(w.words))
		}
		return fmt.Errorf("%s", strings.Join(lines, "\n"))
	}
	if line := tryAll(w, job, set); line != "" {
		return fmt.Errorf("%s does not fit, nor does any single change make it fit; together these would\n  %s", file, line)
	}
	return fmt.Errorf("%s does not fit, nor would it with any single change of its schedule, more host memory, eight times the nodes or an eighth of the sequence", file)
}

// ofNode returns a remark on an override of host memory, because peaks are those of a rank.
func ofNode(override string) string {
	if strings.HasPrefix(override, "cluster.host_memory=") {
		return "; cluster.host_memory is that of a node"
	}
	return ""
}

// way is a change that makes a job fit.
type way struct {
	words string
	job   *cli.Job // after the change
}

// needs describes the simulated time and the memory of a step of a placed job.
func needs(job *cli.Job) (string, error) {
	if err := job.Simulate(); err != nil {
		return "", err
	}
	device, host := cli.Peaks(&job.Plan.Memory)
	return fmt.Sprintf("%s a step%s, %s of device memory, %s of host memory per rank", job.Plan.Time.StepS, inHours(job.Plan.Time.StepS), device, host), nil
}

// inHours repeats a time of more than an hour in hours, in parentheses.
func inHours(t ir.Seconds) string {
	if t < 3600 {
		return ""
	}
	return fmt.Sprintf(" (%.1f hours)", float64(t)/3600)
}

// foreseen describes the estimated time and the memory bound of a step. Both are upper limits: the search for a suggestion is
// short, and a longer one may find a faster plan. Suggestions are not built, because building a plan may take longer than
// finding it.
func foreseen(p *plan.Plan) string {
	device, host := cli.Peaks(bounded(p))
	return fmt.Sprintf("estimated at most %s a step, %s of device memory, %s of host memory per rank", p.Time.StepS, device, host)
}

// bounded returns the placed memory of a plan, or its memory bound if the plan is not placed.
func bounded(p *plan.Plan) *plan.Memory {
	m := p.Memory
	if m.Placed {
		return &m
	}
	need := memory.FootprintOf(p)
	for s := range need.Device {
		m.DevicePeakBytes = append(m.DevicePeakBytes, need.Device[s].Bytes)
		m.HostPeakBytes = append(m.HostPeakBytes, need.Host[s])
	}
	return &m
}

// appendWay adds the first of several changes that makes the job fit.
func appendWay(w *cli.Watch, ways []way, job *cli.Job, set []string, changes ...string) []way {
	for _, change := range changes {
		if w.Stopped() {
			break
		}
		if found, ok := try(w, job, set, change); ok {
			same := func(x way) bool { return x.words == found.words }
			if !slices.ContainsFunc(ways, same) { // leaving a value to the search may give the same way again
				ways = append(ways, found)
			}
			break
		}
	}
	return ways
}

// try plans the spec with a change and returns the way if the job then fits. For a value that the change leaves
// to the search, the way names the value that the search chose. It also names the grid if the spec does not set
// it, because the grid is then searched too.
func try(w *cli.Watch, asked *cli.Job, set []string, change string) (found way, ok bool) {
	w.Say("searching for settings that fit, with %s", change)
	set = append(set[:len(set):len(set)], change)
	if any, err := cli.OpenPlan(asked.Spec.File, set, w.Options(passes.Options{Fitting: true, Patience: probePatience})); err != nil || shortfall(any) != "" {
		return way{}, false
	}
	job, err := cli.OpenPlan(asked.Spec.File, set, w.Options(passes.Options{Patience: advicePatience}))
	if err != nil || shortfall(job) != "" {
		return way{}, false
	}
	const grid = "schedule.align"
	changed, _, _ := strings.Cut(change, "=")
	keys, values := search.Pins(job.Plan.Schedule)
	_, before := search.Pins(asked.Spec.Schedule)
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
	if len(said) == 0 { // the search chose the value that was pinned before
		said = []string{quoted(change)}
	}
	return way{strings.TrimPrefix(strings.Join(said, " "), "--set "), job}, true
}

// tryAll leaves the entire schedule to the search and returns how the plan that it finds differs from the request.
func tryAll(w *cli.Watch, job *cli.Job, set []string) string {
	w.Say("searching for settings that fit, with the whole schedule open")
	keys, asked := search.Pins(job.Spec.Schedule)
	all := set[:len(set):len(set)]
	for i, key := range keys {
		if opens(key, asked[i]) {
			all = append(all, key+"=auto")
		}
	}
	free, err := cli.OpenPlan(job.Spec.File, all, w.Options(passes.Options{Patience: advicePatience}))
	if err != nil || shortfall(free) != "" {
		return ""
	}
	var changes []string
	_, found := search.Pins(free.Plan.Schedule)
	for i, key := range keys {
		if opens(key, asked[i]) && found[i] != "" && found[i] != asked[i] {
			changes = append(changes, "--set "+quoted(key+"="+found[i]))
		}
	}
	return strings.Join(changes, " ") + ": " + foreseen(free.Plan)
}

// shortfall describes the memory that a job lacks, or returns "" if the job fits. The plan is placed unless the
// answer already follows from its memory bound or from the bytes that are live at the same time.
func shortfall(job *cli.Job) string {
	const slack = 1.05 // with a bound this far over the capacity, placement is unnecessary
	p := job.Plan
	bound := bounded(p)
	if !p.Memory.Placed {
		device, host := cli.Peaks(bound)
		if device <= p.Memory.DeviceCapacityBytes && host <= p.Memory.HostCapacityBytes {
			return ""
		}
		if float64(device) > slack*float64(p.Memory.DeviceCapacityBytes) || float64(host) > slack*float64(p.Memory.HostCapacityBytes) {
			return bound.Excess()
		}
		if shortfall, err := codegen.MeasureFit(p); err != nil {
			return plainly(err)
		} else if shortfall != nil && !p.Memory.Placed {
			return bound.Excess()
		}
	}
	return p.Memory.Excess()
}

// opens reports whether a pinned key should be left to the search. A value equal to the default does not count
// as pinned.
func opens(key, value string) bool { return value != "" && value != lang.FindKey(key).Default }

// scheduleChanges returns overrides that each change one key of the schedule: they leave a pinned value to the
// search, or set a value that saves memory.
func scheduleChanges(job *cli.Job) (changes []string) {
	keys, values := search.Pins(job.Spec.Schedule)
	for i, key := range keys {
		if opens(key, values[i]) || values[i] != "" && key == "schedule.keep" {
			changes = append(changes, key+"=auto")
		}
	}
	if job.Plan.Streams() {
		changes = append(changes, "schedule.keep=[k, v]") // helps if host memory is short
	}
	if slices.Contains(job.Spec.Model.Mixers, lang.MixerLatent) && job.Plan.Schedule.LatentCache == "off" {
		changes = append(changes, "schedule.latent_cache=on") // which the search leaves as it is
	}
	if job.Plan.Parallel.OptimizerOffload != plan.OffloadHost && values[slices.Index(keys, "schedule.optimizer_offload")] == "" {
		changes = append(changes, "schedule.optimizer_offload=host") // the search omits this if state is small
	}
	if job.Plan.Schedule.CheckpointCopy == "on" {
		changes = append(changes, "schedule.checkpoint_copy=off")
	}
	return changes
}

// otherChanges returns overrides that change the job, grouped by kind, cheapest first. From each group, the first and
// smallest change that makes the job fit is enough.
func otherChanges(job *cli.Job) (groups [][]string) {
	c, s := job.Spec.Cluster, job.Plan.Train.Sequence
	device, host := lacks(&job.Plan.Memory)
	if c.Parallelism > 0 { // users choose how much of this computer's memory a CPU rank gets
		groups = append(groups, larger("cluster.device_memory", c.DeviceMemory, int64(device)))
	}
	if _, used := cli.Peaks(&job.Plan.Memory); float64(used) > fullHost*float64(job.Plan.Memory.HostCapacityBytes) {
		groups = append(groups, larger("cluster.host_memory", c.HostMemory, int64(c.GPUsPerNode)*int64(device+host)))
	}
	if c.Nodes == 1 && c.Parallelism == 0 {
		groups = append(groups, counts("cluster.gpus_per_node", c.GPUsPerNode, mostPerNode))
	}
	groups = append(groups, counts("cluster.nodes", c.Nodes, 8*c.Nodes))
	if job.Plan.Model.DType == "f32" {
		groups = append(groups, []string{"model.dtype=bf16"})
	}
	var shorter []string
	for _, eighths := range []int64{7, 6, 5, 4, 3, 2, 1} {
		if s*eighths%8 == 0 {
			shorter = append(shorter, "train.sequence="+tokens(s*eighths/8))
		}
	}
	return append(groups, shorter)
}

const (
	fullHost    = 0.8 // share of host memory in use from which more of it may help
	mostPerNode = 8   // GPUs in the nodes that vendors sell
)

// lacks returns the bytes that the fullest ranks of a plan lack on the device and on the host.
func lacks(m *plan.Memory) (device, host ir.Bytes) {
	device, host = cli.Peaks(m)
	return max(0, device-m.DeviceCapacityBytes), max(0, host-m.HostCapacityBytes)
}

// larger returns overrides that add to a memory the bytes that it lacks, and then more, in sizes that people ask for.
func larger(key string, has, lacking int64) (changes []string) {
	for _, quarters := range []int64{4, 5, 6, 8, 12, 16} {
		changes = append(changes, key+"="+size(roundUp(has+lacking*quarters/4)))
	}
	return slices.Compact(changes)
}

// roundUp rounds a number of bytes up to six binary digits.
func roundUp(n int64) int64 {
	unit := int64(1) << max(0, bits.Len64(uint64(n))-6)
	return (n + unit - 1) / unit * unit
}

// counts returns overrides with larger numbers of machines, each by one or by about a third larger than the one before it.
func counts(key string, has, most int) (changes []string) {
	for n := has + 1; n <= most; n = max(n+1, n*4/3) {
		changes = append(changes, fmt.Sprintf("%s=%d", key, n))
	}
	return changes
}

// quoted quotes an argument for a shell if necessary.
func quoted(change string) string {
	if strings.ContainsAny(change, " []()\"*") {
		return "'" + change + "'"
	}
	return change
}

// size writes a number of bytes as in a spec, in the largest unit that divides it.
func size(bytes int64) string {
	for i, unit := range []string{"GiB", "MiB", "KiB"} {
		if n := int64(1) << (30 - 10*i); bytes >= n && bytes%n == 0 {
			return fmt.Sprintf("%d%s", bytes/n, unit)
		}
	}
	return fmt.Sprintf("%dB", bytes)
}

// tokens writes a number of tokens as in a spec, with K if that is exact.
func tokens(n int64) string {
	if n > 0 && n%1024 == 0 {
		return fmt.Sprintf("%dK", n/1024)
	}
	return fmt.Sprint(n)
}

package main

import (
	"fmt"
	"strings"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/passes/memory"
	"sppo.dev/internal/passes/pass"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/report"
	"sppo.dev/internal/passes/search"
)

// If the number of subsequences is also searched for, every length is a multiple of searchedGrid, and therefore
// of all divisors of searchedGrid.
const searchedGrid = 1 << 10

// The longest sequence, up to mostTokens, is found with a relative error of at most 1/fineness.
const (
	fineness   = 64
	mostTokens = 1 << 40
)

// probePatience scales the work limit of the search at one length. That search ends at the first plan that fits.
// About a dozen lengths are searched. If a search gives up before it finds a plan that fits, its length counts as
// too long.
const probePatience = 0.05

// longestSequence finds the longest sequence for which the job fits, with all other settings as in the spec, and
// the shortfall at the next longer one. Lengths are multiples of a grid, so that every subsequence can be a whole
// number of alignment steps long. The overrides in answer pin that length and its plan.
func longestSequence(w *cli.Watch, file string, set []string) (text string, answer []string, err error) {
	job, err := cli.OpenPlan(file, set, pass.Options{Fitting: true, Patience: probePatience})
	if err != nil {
		return "", nil, err
	}
	if job.Spec == nil {
		return "", nil, cli.Usagef("--max-sequence needs a spec: %s is a plan for one sequence length", file)
	}
	if len(job.Plan.Schedule.Subsequences.Lengths) > 0 {
		return "", nil, cli.Usagef("--max-sequence needs a number of subsequences; the lengths that the spec lists allow only one sequence length")
	}
	grid := int64(job.Plan.Subsequences.N) * job.Plan.Subsequences.Align
	if job.Spec.Schedule.Subsequences.Auto { // each length has its own number of subsequences
		grid = searchedGrid
	}
	s := sequenceSearch{watch: w, file: file, set: set, grid: grid}
	return s.run(max(1, job.Plan.Train.Sequence/grid))
}

// sequenceSearch searches for the largest number of grid steps that fits.
type sequenceSearch struct {
	watch   *cli.Watch
	file    string
	set     []string
	grid    int64
	lacking string     // shortfall of the shortest length that did not fit
	best    *plan.Plan // plan of the longest sequence that fits
	over    *plan.Plan // plan of the shortest sequence that does not fit; nil: there is none
}

func (s *sequenceSearch) run(start int64) (text string, answer []string, err error) {
	fits, over := int64(0), start
	for s.fits(over) && !s.watch.Stopped() {
		fits, over = over, 2*over
		if over*s.grid > mostTokens {
			return fmt.Sprintf("%s tokens fit; no limit was found below that\n", tokens(fits*s.grid)), s.pinned(fits), nil
		}
	}
	for over-fits > max(1, fits/fineness) && !s.watch.Stopped() {
		if middle := (fits + over) / 2; s.fits(middle) {
			fits = middle
		} else {
			over = middle
		}
	}
	if s.watch.Stopped() && fits > 0 {
		return fmt.Sprintf("%s tokens fit (%d), with\n  %s\nthe search was stopped; more may fit\n", tokens(fits*s.grid), fits*s.grid, settings(s.best)), s.pinned(fits), nil
	}
	if s.watch.Stopped() {
		return "", nil, cli.Stopped("%s: the search was stopped before it found a sequence that fits", s.file)
	}
	if fits == 0 {
		return "", nil, cli.DoesNotFit(fmt.Errorf("%s does not fit even with %s tokens: %s", s.file, tokens(s.grid), s.lacking))
	}
	needed, err := s.fastest(fits)
	if err != nil {
		return "", nil, err
	}
	text = fmt.Sprintf("%s tokens fit (%d), with\n  %s\n", tokens(fits*s.grid), fits*s.grid, settings(s.best))
	if s.best.LayerOrder() {
		text += "order: " + report.OrderInWords(s.best) + "\n"
	}
	text += needed + "\n" + fmt.Sprintf("no plan for %s tokens was found to fit: %s\n", tokens(over*s.grid), s.lacking)
	return text + s.limits(over), s.pinned(fits), nil
}

// pinned returns the overrides that give sequences a length, and pin the best plan.
func (s *sequenceSearch) pinned(steps int64) []string {
	return append([]string{fmt.Sprintf("train.sequence=%d", steps*s.grid)}, pins(s.best)...)
}

// fastest keeps the fastest plan found for the longest length that fits, and describes the time and the memory of its step.
// The search for lengths takes the first plan that fits, which may be slow.
func (s *sequenceSearch) fastest(steps int64) (string, error) {
	s.watch.Say("the fastest plan for %s tokens", tokens(steps*s.grid))
	set := append(s.set[:len(s.set):len(s.set)], fmt.Sprintf("train.sequence=%d", steps*s.grid))
	job, err := cli.OpenPlan(s.file, set, s.watch.Options(pass.Options{}))
	if err != nil || shortfall(job) != "" { // a search by time may miss the plan that fits
		if job, err = cli.OpenPlan(s.file, append(set, pins(s.best)...), s.watch.Options(pass.Options{})); err != nil {
			return "", err
		}
	}
	if err := job.Measure(); err != nil {
		return "", cli.Wrong(err)
	}
	s.best = job.Plan
	return needs(job)
}

// settings returns the overrides that pin the result of the search.
func settings(p *plan.Plan) string {
	out := pins(p)
	for i := range out {
		out[i] = "--set " + quoted(out[i])
	}
	return strings.Join(out, " ")
}

// pins returns the values of a plan's schedule as overrides.
func pins(p *plan.Plan) (out []string) {
	keys, values := search.Pins(p.Schedule)
	for i, key := range keys {
		if values[i] != "" {
			out = append(out, key+"="+values[i])
		}
	}
	return out
}

// limits describes, for a length that does not fit, the contents of device memory, whether host memory is full,
// and the single changes that would each make that length fit.
func (s *sequenceSearch) limits(steps int64) string {
	const full = 0.95
	if s.over == nil {
		return ""
	}
	need := memory.FootprintOf(s.over)
	stage := 0
	for i := range need.Device {
		if need.Device[i].Bytes > need.Device[stage].Bytes {
			stage = i
		}
	}
	capacity, host := s.over.Memory.HostCapacityBytes, need.Host[stage]
	text := fmt.Sprintf("device memory holds %s\n", need.Device[stage].InWords())
	if float64(host) > full*float64(capacity) {
		text += fmt.Sprintf("host memory is full (%s of %s per rank), so the other activations stay on the device\n", host, capacity)
	}
	c := s.over.Cluster
	changes := []string{
		fmt.Sprintf("cluster.host_memory=%dGiB", 2*int64(c.HostMemory)>>30), fmt.Sprintf("cluster.device_memory=%dGiB", 2*int64(c.DeviceMemory)>>30),
		fmt.Sprintf("cluster.nodes=%d", 2*c.Nodes),
	}
	var enough []string
	for _, change := range changes {
		s.watch.Say("%s tokens with %s", tokens(steps*s.grid), change)
		set := append(s.set[:len(s.set):len(s.set)], fmt.Sprintf("train.sequence=%d", steps*s.grid), change)
		if _, lacking := probe(s.watch, s.file, set, probePatience); lacking == "" {
			enough = append(enough, "--set "+change)
		}
	}
	if len(enough) > 0 {
		text += fmt.Sprintf("they would fit with one of: %s%s\n", strings.Join(enough, ", "), ofNode(strings.TrimPrefix(enough[0], "--set ")))
	}
	return text
}

// probe plans a job with a factor on the work limit of the search, taking the first plan that fits. It returns the plan, and its shortfall, which is "" if
// the plan fits. If there is no plan, it returns nil and the reason.
func probe(w *cli.Watch, file string, set []string, patience float64) (*plan.Plan, string) {
	job, err := cli.OpenPlan(file, set, w.Options(pass.Options{Fitting: true, Patience: patience}))
	if err != nil {
		return nil, plainly(err)
	}
	return job.Plan, shortfall(job)
}

// fits reports whether a plan fits at one length, and keeps the plan. A length without any plan does not fit.
func (s *sequenceSearch) fits(steps int64) bool {
	set := append(s.set[:len(s.set):len(s.set)], fmt.Sprintf("train.sequence=%d", steps*s.grid))
	s.watch.Say("%s tokens", tokens(steps*s.grid))
	p, lacking := probe(s.watch, s.file, set, probePatience)
	if lacking != "" {
		s.lacking, s.over = lacking, p
	} else {
		s.best = p
	}
	return lacking == ""
}

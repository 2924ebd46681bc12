package main

import (
	"fmt"
	"slices"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/report"
)

// mostGPUs is the largest number of GPUs that the search tries.
const mostGPUs = 1 << 14

// surePatience scales the work limit of the search that confirms that a number of GPUs is not enough.
const surePatience = 1

// fewestGPUs describes the smallest number of GPUs of the spec's kind on which the job fits, and the shortfall
// on the next smaller number. Open choices are searched separately for each number. The overrides in answer select that number.
func fewestGPUs(w *cli.Watch, file string, set []string) (text string, answer []string, err error) {
	spec, err := cli.LoadSpec(file, set)
	if err != nil {
		return "", nil, err
	}
	fleets := fleetsOf(spec.Cluster.GPUsPerNode, spec.Cluster.Unit())
	s := fleetSearch{w, file, set, map[int]string{}}
	enough, few := 0, -1
	for s.lacking(fleets, enough) != "" {
		if s.watch.Stopped() {
			text := fmt.Sprintf("%s: the search was stopped before it found a number of GPUs that suffices", file)
			if few >= 0 {
				text += fmt.Sprintf("; %s %s not enough", fleets[few], fleets[few].are())
			}
			return "", nil, cli.Stopped("%s", text)
		}
		if enough == len(fleets)-1 {
			return "", nil, cli.DoesNotFit(fmt.Errorf("%s does not fit even on %s: %s", file, fleets[enough], s.lacking(fleets, enough)))
		}
		few, enough = enough, min(2*enough+1, len(fleets)-1)
	}
	enough, few = s.smallest(fleets, enough, few)
	if s.watch.Stopped() {
		return fmt.Sprintf("%s %s enough; the search was stopped, and fewer may suffice\n", fleets[enough], fleets[enough].are()), fleets[enough].set(), nil
	}
	s.watch.Say("the fastest plan on %s", fleets[enough])
	words, err := s.plan(fleets[enough])
	if err != nil {
		return "", nil, err
	}
	text = fmt.Sprintf("%s %s enough: %s\n", fleets[enough], fleets[enough].are(), words)
	if few >= 0 {
		text += fmt.Sprintf("%s %s not enough: %s\n", fleets[few], fleets[few].are(), s.lacking(fleets, few))
	}
	return text, fleets[enough].set(), nil
}

// fleet is a whole number of nodes, or a part of one node.
type fleet struct {
	nodes, gpus int
	unit        string // "GPU" or "CPU rank"
}

func (f fleet) String() string {
	if f.nodes == 1 {
		return fmt.Sprintf("%d of the %ss of a node", f.gpus, f.unit)
	}
	return fmt.Sprintf("%d %ss (%d nodes of %d)", f.nodes*f.gpus, f.unit, f.nodes, f.gpus)
}

// set returns the overrides that make the fleet the job's cluster.
func (f fleet) set() []string {
	return []string{fmt.Sprintf("cluster.nodes=%d", f.nodes), fmt.Sprintf("cluster.gpus_per_node=%d", f.gpus)}
}

// are returns the verb for the fleet.
func (f fleet) are() string {
	if f.nodes*f.gpus == 1 {
		return "is"
	}
	return "are"
}

// fleetsOf lists the fleets to try, smallest first: first each number of GPUs that divides the number in a node,
// then each number of whole nodes.
func fleetsOf(node int, unit string) []fleet {
	var out []fleet
	for n := 1; n <= node; n++ {
		if node%n == 0 {
			out = append(out, fleet{1, n, unit})
		}
	}
	for nodes := 2; nodes*node <= mostGPUs; nodes++ {
		out = append(out, fleet{nodes, node, unit})
	}
	return out
}

type fleetSearch struct {
	watch *cli.Watch
	file  string
	set   []string
	known map[int]string // shortfall by index of the fleet; "" if the job fits
}

// on returns the overrides of the job on a fleet.
func (s *fleetSearch) on(f fleet) []string { return slices.Concat(s.set, f.set()) }

func (s *fleetSearch) lacking(fleets []fleet, i int) string {
	lacking, known := s.known[i]
	if !known {
		s.watch.Say("%s", fleets[i])
		_, lacking = probe(s.watch, s.file, s.on(fleets[i]), probePatience)
		s.known[i] = lacking
	}
	return lacking
}

// smallest narrows a range of fleets, of which the last is enough and the first is not, to two neighbours. The index of
// the first is -1 if the smallest fleet is enough.
func (s *fleetSearch) smallest(fleets []fleet, enough, few int) (int, int) {
	for enough-few > 1 && !s.watch.Stopped() {
		if middle := (few + enough) / 2; s.lacking(fleets, middle) == "" {
			enough = middle
		} else {
			few = middle
		}
	}
	for few >= 0 && !s.watch.Stopped() && s.surely(fleets, few) == "" {
		enough, few = few, few-1
	}
	return enough, few
}

// surely is like lacking, but it also searches for longer. A short search may miss a plan that streams K and V in
// many subsequences, because bounding the memory of such a plan takes long.
func (s *fleetSearch) surely(fleets []fleet, i int) string {
	if s.lacking(fleets, i) != "" {
		s.watch.Say("%s, in a longer search", fleets[i])
		_, s.known[i] = probe(s.watch, s.file, s.on(fleets[i]), surePatience)
	}
	return s.known[i]
}

// plan describes the fastest plan on a fleet, and the fleet, which may have only a part of a node's host memory.
func (s *fleetSearch) plan(f fleet) (string, error) {
	job, err := cli.OpenPlan(s.file, s.on(f), s.watch.Options(passes.Options{}))
	if err != nil {
		return "", err
	}
	if err := job.Measure(); err != nil {
		return "", cli.Wrong(err)
	}
	p := job.Plan
	words, err := needs(job)
	return fmt.Sprintf("dp %d x pp %d x sp %s, %s\nwith %s", p.Parallel.DP, p.Parallel.PP, p.Parallel.SPText(), words, report.ClusterInWords(p)), err
}

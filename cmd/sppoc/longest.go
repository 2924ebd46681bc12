package main

import (
	"fmt"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/passes"
	"sppo.dev/passes/memory"
)

// searchedGrid divides every length where the number of subsequences is searched too; all its divisors divide
// them as well.
const searchedGrid = 1 << 10

// The longest sequence is found to within 1/fineness of itself, up to mostTokens.
const (
	fineness   = 128
	mostTokens = 1 << 40
)

// longestSequence finds the longest sequence with which the job fits, everything else as in the spec, and the
// shortfall of the next longer one. Lengths are multiples of a grid on which every subsequence has a whole
// number of steps.
func longestSequence(file string, set []string) (string, error) {
	job, err := cli.OpenPlan(file, set, passes.Options{Fitting: true})
	if err != nil {
		return "", err
	}
	if job.Spec == nil {
		return "", cli.Usagef("--max-sequence needs a spec: %s is a plan for one sequence length", file)
	}
	if len(job.Plan.Schedule.Subsequences.Lengths) > 0 {
		return "", cli.Usagef("--max-sequence needs a number of subsequences; the lengths that the spec lists allow one sequence only")
	}
	grid := int64(job.Plan.Subsequences.N) * job.Plan.Subsequences.Align
	if job.Spec.Schedule.Subsequences.Auto { // each length has its own number of subsequences
		grid = searchedGrid
	}
	s := sequenceSearch{file: file, set: set, grid: grid}
	return s.run(max(1, job.Plan.Train.Sequence/grid))
}

// sequenceSearch searches for the largest number of grid steps that fits.
type sequenceSearch struct {
	file    string
	set     []string
	grid    int64
	lacking string // shortfall of the shortest length that did not fit
}

func (s *sequenceSearch) run(start int64) (string, error) {
	fits, over := int64(0), start
	for s.fits(over) {
		fits, over = over, 2*over
		if over*s.grid > mostTokens {
			return fmt.Sprintf("%s tokens fit; no limit was found below that\n", tokens(fits*s.grid)), nil
		}
	}
	for over-fits > max(1, fits/fineness) {
		if middle := (fits + over) / 2; s.fits(middle) {
			fits = middle
		} else {
			over = middle
		}
	}
	if fits == 0 {
		return "", cli.DoesNotFit(fmt.Errorf("%s does not fit even with %s tokens: %s", s.file, tokens(s.grid), s.lacking))
	}
	return fmt.Sprintf("%s tokens fit (%d), in steps of %d\n%s tokens do not: %s\n", tokens(fits*s.grid), fits*s.grid, s.grid, tokens(over*s.grid), s.lacking), nil
}

// probe returns the shortfall of a job, or "". It stops at the first plan that fits, and places it only if
// the memory bound does not already prove that it fits.
func probe(file string, set []string) string {
	job, err := cli.OpenPlan(file, set, passes.Options{Fitting: true})
	if err != nil {
		return plainly(err)
	}
	m := &job.Plan.Memory
	if !m.Placed && memory.FootprintOf(job.Plan).Fits(m.DeviceCapacityBytes, m.HostCapacityBytes) {
		return ""
	}
	return lack(job)
}

// fits plans one length. A length without any plan does not fit.
func (s *sequenceSearch) fits(steps int64) bool {
	set := append(s.set[:len(s.set):len(s.set)], fmt.Sprintf("train.sequence=%d", steps*s.grid))
	lacking := probe(s.file, set)
	if lacking != "" {
		s.lacking = lacking
	}
	return lacking == ""
}

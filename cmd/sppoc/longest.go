package main

import (
	"fmt"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/passes"
)

// searchedGrid is what lengths are multiples of where the number of subsequences is searched, too: whatever divides it does.
const searchedGrid = 1 << 10

// The longest sequence is searched to a part of 1/fineness of itself, and no further than mostTokens.
const (
	fineness   = 128
	mostTokens = 1 << 40
)

// longestSequence says how long the sequence may get until the job, all else as the spec has it, no longer fits, and what
// then lacks. Lengths are tried on a grid on which every subsequence has a whole number of steps.
func longestSequence(file string, set []string) (string, error) {
	job, err := cli.OpenPlan(file, set, passes.Options{Fitting: true})
	if err != nil {
		return "", err
	}
	if job.Spec == nil {
		return "", cli.Usagef("--max-sequence wants a spec, for %s is a plan of one sequence already", file)
	}
	if len(job.Plan.Schedule.Subsequences.Lengths) > 0 {
		return "", cli.Usagef("--max-sequence wants a number of subsequences: the lengths that the spec lists make one sequence")
	}
	grid := int64(job.Plan.Subsequences.N) * job.Plan.Subsequences.Align
	if job.Spec.Schedule.Subsequences.Auto { // every length has its own number of them
		grid = searchedGrid
	}
	s := sequenceSearch{file: file, set: set, grid: grid}
	return s.run(max(1, job.Plan.Train.Sequence/grid))
}

// sequenceSearch looks for a number of steps of a grid.
type sequenceSearch struct {
	file    string
	set     []string
	grid    int64
	lacking string // of the shortest that did not fit
}

func (s *sequenceSearch) run(start int64) (string, error) {
	fits, over := int64(0), start
	for s.fits(over) {
		fits, over = over, 2*over
		if over*s.grid > mostTokens {
			return fmt.Sprintf("%s tokens fit, and nothing bounds the sequence before that\n", tokens(fits*s.grid)), nil
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
		return "", cli.DoesNotFit(fmt.Errorf("%s does not fit with %s tokens either: %s", s.file, tokens(s.grid), s.lacking))
	}
	return fmt.Sprintf("%s tokens fit (%d), in steps of %d\n%s tokens do not: %s\n", tokens(fits*s.grid), fits*s.grid, s.grid, tokens(over*s.grid), s.lacking), nil
}

// probe says what a job lacks, or "", and looks no further than for some plan that fits. What the bound on its memory says to fit
// is not placed.
func probe(file string, set []string) string {
	job, err := cli.OpenPlan(file, set, passes.Options{Fitting: true})
	if err != nil {
		return plainly(err)
	}
	m := &job.Plan.Memory
	if !m.Placed && passes.FootprintOf(job.Plan).Fits(m.DeviceCapacityBytes, m.HostCapacityBytes) {
		return ""
	}
	return lack(job)
}

// fits plans a length; one that is no plan at all does not fit for that reason.
func (s *sequenceSearch) fits(steps int64) bool {
	set := append(s.set[:len(s.set):len(s.set)], fmt.Sprintf("train.sequence=%d", steps*s.grid))
	lacking := probe(s.file, set)
	if lacking != "" {
		s.lacking = lacking
	}
	return lacking == ""
}

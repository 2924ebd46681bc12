package main

import (
	"testing"
)

// TestFewestGPUsSearchesLonger checks that a number of GPUs counts as too small only after a long search: on one
// H100, 2M tokens fit if K and V are streamed in many subsequences, and a short search does not find that.
func TestFewestGPUsSearchesLonger(t *testing.T) {
	file, set := fleetFile(t, []string{"llama-8b", "h100", "1", "8", "2M"})
	set = append(set, "cluster.host_memory=2TB") // K and V need more than one of eight shares of a node
	fleets := fleetsOf(8, "GPU")
	s := fleetSearch{nil, file, set, map[int]string{}}
	if enough, few := s.smallest(fleets, 1, 0); enough != 0 || few != -1 {
		t.Errorf("%s are the fewest, not %s", fleets[enough], fleets[0])
	}
}

package main

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"

	"sppo.dev/internal/irtest"
	"sppo.dev/lang"
)

// A better machine should never make a plan slower: every plan of the original machine also runs on the better one, in at
// most the same time.

// betterMachines lists what may be better, and the keys that say so, given the cluster of a job and a factor above 1.
var betterMachines = []struct {
	what string
	set  func(c *lang.Cluster, factor float64) []string
}{
	{"device memory", func(c *lang.Cluster, factor float64) []string {
		return []string{fmt.Sprintf("cluster.device_memory=%.0fB", factor*float64(c.DeviceMemory))}
	}},
	{"host memory", func(c *lang.Cluster, factor float64) []string {
		return []string{fmt.Sprintf("cluster.host_memory=%.0fB", factor*float64(c.HostMemory))}
	}},
	{"PCIe", func(c *lang.Cluster, factor float64) []string {
		return []string{perSecond("d2h_bandwidth", c.D2HBandwidth, factor), perSecond("h2d_bandwidth", c.H2DBandwidth, factor),
			perSecond("node_copy_bandwidth", c.NodeCopyBandwidth, factor)}
	}},
	{"NVLink", func(c *lang.Cluster, factor float64) []string {
		return []string{perSecond("nvlink_bandwidth", c.NVLinkBandwidth, factor)}
	}},
	{"network", func(c *lang.Cluster, factor float64) []string {
		return []string{perSecond("node_network_bandwidth", c.NodeNetworkBandwidth, factor)}
	}},
	{"GPUs", func(c *lang.Cluster, factor float64) []string {
		return []string{fmt.Sprintf("cluster.nodes=%d", int(float64(c.Nodes)*factor)+1)}
	}},
}

func perSecond(key string, bytes, factor float64) string {
	return fmt.Sprintf("cluster.%s=%.3fGB/s", key, factor*bytes/1e9)
}

const (
	betterPairs     = 40   // of jobs that fit the original machine
	betterTolerance = 1.01 // time of a step on the better machine over that on the original one
)

// TestFleetBetter plans drawn jobs of the fleet on their machine and on one that is better in one respect.
func TestFleetBetter(t *testing.T) {
	if os.Getenv("SPPO_LONG") == "" {
		t.Skip("takes half an hour: make fleet-better")
	}
	r := rand.New(rand.NewPCG(irtest.Seed(t), 1))
	var table strings.Builder
	w := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "job\tbetter\tstep\ton the better machine\tratio")
	for compared := 0; compared < betterPairs; {
		name, better, factor := fleetJobs[r.IntN(len(fleetJobs))], betterMachines[r.IntN(len(betterMachines))], 1.1+0.9*r.Float64()
		file, set := fleetFile(t, strings.Fields(name))
		job, err := placed(file, set)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if !job.Plan.Memory.Fits {
			continue
		}
		compared++
		what := fmt.Sprintf("%.2f times the %s", factor, better.what)
		t.Run(name+", "+what, func(t *testing.T) {
			with, err := placed(file, slices.Concat(set, better.set(&job.Plan.Cluster, factor)))
			if err != nil {
				t.Fatal(err)
			}
			ratio := float64(with.Plan.Time.StepS / job.Plan.Time.StepS)
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%.4f\n", name, what, job.Plan.Time.StepS, with.Plan.Time.StepS, ratio)
			if !with.Plan.Memory.Fits || ratio > betterTolerance {
				t.Errorf("a step takes %s instead of %s, and fits: %t", with.Plan.Time.StepS, job.Plan.Time.StepS, with.Plan.Memory.Fits)
			}
		})
	}
	w.Flush()
	t.Log("estimated steps\n" + table.String())
}

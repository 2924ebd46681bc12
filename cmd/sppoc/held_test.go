package main

import (
	"strings"
	"testing"

	"sppo.dev/ir"
)

// heldJobs lists jobs whose ranks do not divide the rows of most matrices.
var heldJobs = []string{
	"llama-8b h100 1 5 32K train.batch=5 schedule.dp=5 schedule.pp=1 schedule.sp=1 schedule.zero=3",
	"qwen2.5-7b h100 1 5 32K train.batch=5 schedule.dp=5 schedule.pp=1 schedule.sp=1 schedule.zero=2",
	"mistral-7b h100 1 7 32K train.batch=7 schedule.dp=7 schedule.pp=1 schedule.sp=1 schedule.zero=3",
	"llama-3.2-3b h100 2 3 32K train.batch=6 schedule.dp=6 schedule.pp=1 schedule.sp=1 schedule.zero=1",
	"llama-8b h100 1 6 48K train.batch=3 schedule.dp=3 schedule.pp=1 schedule.sp=2 schedule.sp_mode=megatron schedule.zero=1",
	"llama-3.2-3b h100 1 6 48K schedule.dp=1 schedule.pp=1 schedule.sp=6 schedule.sp_mode=ring schedule.zero=3",
}

// TestRanksHoldTheirShare checks that ranks divide the optimizer state and the f32 masters of the whole model evenly,
// except for padding and vectors, in plans whose peak has been placed.
func TestRanksHoldTheirShare(t *testing.T) {
	const slack, perParameter = 1.01, 12 // bytes: m, v and the master
	for _, name := range heldJobs {
		t.Run(name, func(t *testing.T) {
			file, set := fleetFile(t, strings.Fields(name))
			set = append(set, "schedule.optimizer_offload=none", "schedule.offload=full", "schedule.recompute=full", "schedule.subsequences=4")
			job, _, _, err := weighed(file, set)
			if err != nil {
				t.Fatal(err)
			}
			trained, _ := job.Plan.Graph().Parameters()
			share := perParameter * float64(trained) / float64(job.Plan.Parallel.Ranks())
			for stage := range job.Plan.Memory.Device {
				device := &job.Plan.Memory.Device[stage]
				t.Logf("optimizer %s of %s, weights %s, gradients %s, peak %s", device.Parts[ir.PartOptimizer], ir.Bytes(share),
					device.Parts[ir.PartWeights], device.Parts[ir.PartGradients], job.Plan.Memory.DevicePeakBytes[stage])
				if held := float64(device.Parts[ir.PartOptimizer]); held < share || held > slack*share {
					t.Errorf("a rank holds %s of optimizer state, but its share is %s", device.Parts[ir.PartOptimizer], ir.Bytes(share))
				}
			}
		})
	}
}

package main

import (
	"strings"
	"testing"

	"sppo.dev/internal/passes/report"
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

// TestWholePositionTable checks that the report says when replicas hold a position table as a whole, and that the program then divides the
// rest of the optimizer state.
func TestWholePositionTable(t *testing.T) {
	for name, whole := range map[string]bool{
		"gpt-1.3b h100 3 2 48K train.batch=3 schedule.dp=3 schedule.sp=2 schedule.zero=1":                      false, // 6144 rows per rank and subsequence
		"gpt-1.3b h100 3 2 32K train.batch=3 schedule.dp=3 schedule.sp=2 schedule.zero=1":                      true,
		"gpt-1.3b h100 2 2 32K train.batch=2 schedule.dp=2 schedule.sp=2 schedule.zero=1":                      false,
		"gpt-1.3b h100 3 2 32K train.batch=3 schedule.dp=3 schedule.sp=2 model.positions=rope schedule.zero=1": false,
	} {
		file, set := fleetFile(t, strings.Fields(name))
		set = append(set, "schedule.optimizer_offload=none", "schedule.subsequences=4", "schedule.partition=length")
		job, _, _, err := weighed(file, set)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		var text strings.Builder
		if err := report.Write(&text, job.Plan); err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(text.String(), "the position table is not divided"); got != whole {
			t.Errorf("%s: the report says %t that the position table is whole", name, got)
		}
		g := job.Plan.Graph()
		trained, _ := g.Parameters()
		table := 0.0
		if whole {
			table = 32 << 10 * 2048
		}
		share := 12 * ((float64(trained)-table)/float64(job.Plan.Parallel.Ranks()) + table/2)
		if held := float64(job.Plan.Memory.Device[0].Parts[ir.PartOptimizer]); held < share || held > 1.01*share {
			t.Errorf("%s: a rank holds %s of optimizer state, not %s", name, ir.Bytes(held), ir.Bytes(share))
		}
	}
}

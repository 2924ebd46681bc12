package main

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
)

// TestHintsFit draws jobs that do not fit, and checks that following any one of the hints makes them fit.
func TestHintsFit(t *testing.T) {
	draws := 5
	if os.Getenv("SPPO_LONG") != "" {
		draws = 60
	}
	r, hints := rand.New(rand.NewPCG(29, 3)), 0
	for range draws {
		set := []string{"cluster.parallelism=0", fmt.Sprintf("cluster.gpus_per_node=%d", 1<<r.IntN(3)),
			fmt.Sprintf("cluster.device_memory=%dKiB", 100+r.IntN(120)), fmt.Sprintf("cluster.host_memory=%dKiB", r.IntN(600)),
			"schedule.sp=auto", "schedule.pp=auto", "schedule.subsequences=auto"}
		if r.IntN(2) == 0 {
			set = append(set, "schedule.offload="+[]string{"none", "full", "carry"}[r.IntN(3)])
		}
		job, err := cli.OpenPlan("../../examples/tiny.sppo", set, passes.Options{})
		if err == nil {
			err = job.Measure()
		}
		if err != nil {
			t.Fatal(err)
		}
		if !job.Plan.Memory.Fits {
			hints += followed(t, job, set)
		}
	}
	if hints < draws {
		t.Errorf("%d hints for %d jobs", hints, draws)
	}
}

// TestHostMemoryFirst checks that a job with too little host memory is told to get the memory that it lacks, before it is
// told to get more GPUs.
func TestHostMemoryFirst(t *testing.T) {
	if os.Getenv("SPPO_LONG") == "" {
		t.Skip("takes a minute; SPPO_LONG=1 runs it")
	}
	set := []string{"cluster=h200(gpus_per_node = 1, host_memory = 200GB)"}
	job, err := cli.OpenPlan("../../examples/long/llama-8b-1m.sppo", set, passes.Options{})
	if err == nil {
		err = job.Measure()
	}
	if err != nil {
		t.Fatal(err)
	}
	if s := job.Plan.Memory.Shortfall(); s == nil || s.Bytes > 80<<30 {
		t.Errorf("the shortfall is %v, want at most 80 GiB: it fits with 272 GiB of host memory", s)
	}
	lines := strings.Split(adviseFit(nil, job, set).Error(), "\n")
	if len(lines) < 2 || !strings.HasPrefix(lines[1], "  --set cluster.host_memory=2") {
		t.Errorf("the first hint is not more host memory, below 300 GB:\n%s", strings.Join(lines, "\n"))
	}
}

// TestSeekFaster checks that the report suggests a value only if the plan with it was found to be faster.
func TestSeekFaster(t *testing.T) {
	for _, c := range []struct {
		step   ir.Seconds // said of the plan
		value  string
		faster bool
	}{{1, "2", true}, {1e-9, "2", false}, {1, "3", false}} {
		job, err := cli.OpenPlan("../../examples/tiny.sppo", []string{"schedule.sp=auto"}, passes.Options{})
		if err == nil {
			err = job.Measure()
		}
		if err != nil {
			t.Fatal(err)
		}
		p := job.Plan
		p.Search.Within, p.Search.StepS = 0.5, c.step
		p.Rejected = []plan.Rejection{{Key: "schedule.sp", Value: c.value, BoundS: c.step / 2}}
		seekFaster(nil, job, []string{"schedule.sp=auto"})
		if f := p.Search.Faster; (f != nil) != c.faster || f != nil && (f.Key != "schedule.sp" || f.StepS >= c.step) {
			t.Errorf("%+v: suggested is %+v", c, f)
		}
	}
}

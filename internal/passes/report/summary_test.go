package report

import (
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// TestWarnings checks that the summary warns of idle GPUs, with the reason, and of plans that are not proved the best, with
// the value of a faster plan if one is known.
func TestWarnings(t *testing.T) {
	p := &plan.Plan{Cluster: lang.Cluster{Nodes: 1, GPUsPerNode: 3}, Parallel: plan.Parallel{DP: 1, PP: 2, SP: 1}}
	check := func(want ...string) {
		t.Helper()
		got := Warnings(p)
		if !slices.EqualFunc(got, want, strings.Contains) {
			t.Errorf("warnings %q, want %q", got, want)
		}
	}
	check("1 of the 3 GPUs is idle: the spec sets sp, dp and pp")
	p.Search = &plan.Search{StepS: 40, Within: 0.45, AllGPUs: &plan.Rejection{Value: "dp 3 x pp 1 x sp 1", StepS: 41}}
	p.Rejected = []plan.Rejection{{Key: "schedule.dp", Value: "3", Planned: 2, BoundS: 30}, {Key: "schedule.pp", Value: "1", Planned: 1, StepS: 41, BoundS: 20},
		{Key: "schedule.keep", Value: "[k, v]", BoundS: 29}, {Key: "schedule.zero", Value: "1", BoundS: 50}}
	check("on all of them (dp 3 x pp 1 x sp 1), a step takes 41.0 s, by estimate", "not proved the best: a step takes at most 45% longer than that of the best plan")
	p.Search.Faster = &plan.Rejection{Key: "schedule.keep", Value: "[k, v]", StepS: 36}
	p.Search.AllGPUs = &plan.Rejection{BoundS: 35}
	p.Rejected = p.Rejected[2:]
	check("may exist that takes at least 35.0 s", "a plan with --set schedule.keep='[k, v]' is 10% faster, by estimate (36.0 s)")
	p.Search.AllGPUs = &plan.Rejection{Value: "sp = 2"}
	check("1 of the 3 GPUs is idle: the spec sets sp = 2, which does not divide 3", "is 10% faster")
	p.Search.AllGPUs = &plan.Rejection{}
	p.Model.Heads = 8
	check("no plan on all of them was found; sp divides tokens and, unless sp_mode is ring, heads = 8; dp", "is 10% faster")
	p.Model.LinearKeyHeads = 2
	check("no plan on all of them was found; sp divides tokens, heads = 8 and linear_num_key_heads = 2; dp", "is 10% faster")
	p.Search.Within, p.Parallel.DP, p.Parallel.PP = 0.04, 3, 1
	check()
	p.Model.DType, p.Model.HeadDim = "bf16", 112
	check("no kernels on tensor cores for heads of 112 elements, only for 64, 80, 96, 128, 192, 256")
	p.Cluster.Parallelism = 8
	check()
	p.Cluster.Parallelism, p.Model.HeadDim = 0, 80
	check()
}

// TestShortfalls checks that the summary names what is short in both arenas.
func TestShortfalls(t *testing.T) {
	m := plan.Memory{Placed: true, DeviceCapacityBytes: 100, HostCapacityBytes: 50, DevicePeakBytes: []ir.Bytes{90, 130}, HostPeakBytes: []ir.Bytes{70, 60}}
	if got, want := fitsInWords(m), "no: stage 1 needs 30 B more device memory per rank; stage 0 needs 20 B more host memory per rank"; got != want {
		t.Errorf("the summary says %q, want %q", got, want)
	}
}

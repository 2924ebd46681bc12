package search

import (
	"regexp"
	"strconv"
	"testing"

	"sppo.dev/internal/passes/memory"
	"sppo.dev/internal/passes/pass"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/plantest"
)

// A search with little patience finds a plan that fits, and reports how far this plan may be from the best. The
// plan is no further from the best than reported. The jobs make bounds on time loose: memory is scarce, and
// many candidates are about equally good.
func TestGapHolds(t *testing.T) {
	within := regexp.MustCompile(`^within ([0-9.]+)% of the best$`)
	said := 0
	for _, set := range [][]string{
		{"schedule.offload=auto", "schedule.recompute=auto", "cluster.device_memory=24GiB"},
		{"schedule.offload=auto", "schedule.recompute=auto", "cluster.device_memory=24GiB", "schedule.partition=auto", "schedule.keep=auto"},
		{"schedule.offload=auto", "cluster.device_memory=40GiB", "cluster.host_memory=400GiB", "schedule.pp=8"},
	} {
		set = append(set, "schedule.sp=auto", "schedule.subsequences=auto", "schedule.virtual_stages=auto", "schedule.mux=auto", "schedule.strategy=auto")
		search := func(patience float64) *plan.Plan {
			sp := plantest.Load(t, "paper/gpt-7b-512k.sppo", set...)
			p := plan.New(sp)
			if err := RunWith(sp, p, pass.Options{Patience: patience}); err != nil {
				t.Fatal(err)
			}
			return p
		}
		quick, best := search(0.01), search(1)
		gap := searchGap + searchHandicap
		for _, d := range quick.Decisions {
			if m := within.FindStringSubmatch(d.Value); m != nil {
				percent, _ := strconv.ParseFloat(m[1], 64)
				gap = max(gap, percent/100)
				said++
			}
		}
		if !memory.FootprintOf(quick).Fits(quick.Memory.DeviceCapacityBytes, quick.Memory.HostCapacityBytes) {
			t.Errorf("%v: the plan of a short search does not fit", set)
		}
		if limit := float64(best.Time.StepS) * (1 + gap + 0.0005); float64(quick.Time.StepS) > limit {
			t.Errorf("%v: %s a step, said to be within %.1f%% of the best, which takes %s", set, quick.Time.StepS, 100*gap, best.Time.StepS)
		}
	}
	if said == 0 {
		t.Error("no search ended early")
	}
}

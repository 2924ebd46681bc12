package offload

import (
	"testing"

	"sppo.dev/internal/passes/estimate"
	"sppo.dev/internal/passes/pass"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/plantest"
	"sppo.dev/ir"
)

// TestLongJobsFit checks that the largest shipped jobs fit with the values that the solver has found for them,
// according to an upper bound that needs neither timed copies nor placement. The long form of
// TestExamplesReport searches for these values again.
func TestLongJobsFit(t *testing.T) {
	for _, job := range []struct {
		file string
		set  []string
	}{
		{"long/gpt-7b-4m.sppo", []string{"schedule.pp=16", "schedule.subsequences=1472", "schedule.virtual_stages=2", "schedule.sp_mode=ulysses", "schedule.zero=1"}},
		{"long/gpt-13b-2m.sppo", []string{"schedule.pp=8", "schedule.subsequences=16", "schedule.virtual_stages=5", "schedule.sp_mode=ulysses", "schedule.zero=3"}},
		{"long/gpt-65b-1m.sppo", []string{"schedule.pp=16", "schedule.subsequences=512", "schedule.virtual_stages=5", "schedule.sp_mode=megatron", "schedule.zero=0"}},
	} {
		sp := plantest.Load(t, job.file, append(job.set, "schedule.sp=8", "schedule.dp=1", "schedule.microbatch=1", "schedule.strategy=sppo", "schedule.mux=off",
			"schedule.recompute=none", "schedule.offload=full")...)
		p := plan.New(sp)
		if err := RunWith(sp, p, pass.Options{StopAfter: "lifespan"}); err != nil {
			t.Fatal(err)
		}
		c := &pass.Context{Cache: estimate.NewCache()}
		keepAll(p, c, "full")
		takeShares(p, c)
		p.Offload.Ahead = 2
		m := c.Estimator(p).Memory()
		machine, inputs := ir.Machine(p.Cluster), m.WaitingInputs()
		for _, s := range []int{0, 1, p.Parallel.PP - 1} { // the stages in between need as much as the second
			device, host := m.Rank(s, inputs[s])
			if has, hasHost := ir.Bytes(machine.DeviceMemory), machine.HostMemoryPerRank(); device.Bytes > has || host > hasHost {
				t.Errorf("%s: stage %d holds up to %s of %s, and %s of %s on the host", job.file, s, device.Bytes, has, host, hasHost)
			}
		}
	}
}

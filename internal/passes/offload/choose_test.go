package offload

import (
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/passes/estimate"
	"sppo.dev/internal/passes/memory"
	"sppo.dev/internal/passes/pass"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/plantest"
	"sppo.dev/ir"
)

// mostOf returns the largest device memory bound of any rank.
func mostOf(p *plan.Plan) (most ir.Bytes) {
	for _, k := range memory.FootprintOf(p).Device {
		most = max(most, k.Bytes)
	}
	return most
}

var slowCopies = []string{"cluster.d2h_bandwidth=3GB/s", "cluster.h2d_bandwidth=3GB/s"}

// TestLeastMemory checks that offload = memory has no exposed copies, and that no other policy without exposed
// copies has a lower peak.
func TestLeastMemory(t *testing.T) {
	for _, c := range []struct {
		file   string
		set    []string
		others []string
	}{
		{"paper/gpt-7b-512k.sppo", nil, []string{"none", "adaptive", "carry", "full", "0.7"}},
		{"paper/gpt-7b-512k.sppo", slowCopies, []string{"none", "adaptive", "0.3", "0.6"}},
		{"paper/gpt-13b-512k.sppo", append(slowCopies, "schedule.virtual_stages=5"), []string{"none", "adaptive", "0.2"}},
		{"paper/gpt-7b-512k.sppo", []string{"train.batch=4", "schedule.strategy=seq1f1b", "cluster.d2h_bandwidth=8GB/s"}, []string{"none", "adaptive"}},
	} {
		p := plantest.Plan(t, c.file, append(c.set, "schedule.offload=memory")...)
		if p.Time.ExposedTransferS > 0 {
			t.Errorf("%s %v: waits %s for copies", c.file, c.set, p.Time.ExposedTransferS)
		}
		least := mostOf(p)
		for _, policy := range c.others {
			q := plantest.Plan(t, c.file, append(c.set, "schedule.offload="+policy)...)
			if got := mostOf(q); q.Time.ExposedTransferS == 0 && float64(got) < 0.999*float64(least) {
				t.Errorf("%s %v: %s at the peak, and %s with offload = %s", c.file, c.set, least, got, policy)
			}
		}
	}
}

// TestAutoOffload checks that nothing is offloaded if everything fits. Otherwise all ranks must fit, nothing
// may wait for copies, and no rank that offloads may have room for two more layers of a subsequence.
func TestAutoOffload(t *testing.T) {
	if p := plantest.Plan(t, "paper/gpt-7b-512k.sppo", "schedule.offload=auto", "cluster.device_memory=100GiB"); copies(p) {
		t.Error("copies although all fits")
	}
	for _, set := range [][]string{nil, slowCopies, {"train.batch=4", "schedule.strategy=seq1f1b"}, {"schedule.virtual_stages=4"}, {"cluster.device_memory=50GiB"}} {
		p := plantest.Plan(t, "paper/gpt-7b-512k.sppo", append(set, "schedule.offload=auto", "schedule.recompute=none")...)
		capacity := p.Memory.DeviceCapacityBytes
		bound := memory.FootprintOf(p)
		if !bound.Fits(capacity, p.Memory.HostCapacityBytes) || p.Time.ExposedTransferS > 0 {
			t.Errorf("%v: fits: %t, %s exposed", set, bound.Fits(capacity, p.Memory.HostCapacityBytes), p.Time.ExposedTransferS)
		}
		layer := ir.Bytes(0)
		for _, n := range plan.UnitSizes(p.Graph(), p.Size(0))[0] {
			layer += n
		}
		for s, k := range bound.Device {
			if slices.ContainsFunc(p.Offload.Placement[s], func(f string) bool { return strings.ContainsRune(f, plan.PlacementOffload) }) && capacity-k.Bytes > 2*layer {
				t.Errorf("%v: stage %d sends units away although it has %s left", set, s, capacity-k.Bytes)
			}
		}
	}
}

// If the host has no memory, nothing is offloaded: units are recomputed instead.
func TestNoHostMemory(t *testing.T) {
	p := plantest.Plan(t, "tiny.sppo", "cluster.host_memory=0GB", "cluster.device_memory=250KiB", "schedule.offload=auto", "schedule.recompute=auto")
	if placements := fmt.Sprint(p.Offload.Placement); copies(p) || !strings.ContainsRune(placements, plan.PlacementRecompute) || !memory.FootprintOf(p).Fits(p.Memory.DeviceCapacityBytes, 0) {
		t.Errorf("copies: %t, and placements are %s", copies(p), placements)
	}
}

// TestAutoIsFastest leaves offload and recompute to the passes. No pinned pair of policies that fits may be
// more than 1% faster.
func TestAutoIsFastest(t *testing.T) {
	for _, set := range [][]string{
		append(slowCopies, "cluster.device_memory=34GiB"),
		{"cluster.host_memory=250GB", "cluster.device_memory=40GiB"},
	} {
		checkFastest(t, set)
	}
}

// TestAutoIsFastestAtRandom does the same as TestAutoIsFastest for random machines and strategies, and for more
// of them if SPPO_LONG is set.
func TestAutoIsFastestAtRandom(t *testing.T) {
	r, draws := plantest.Random(t), 2
	if os.Getenv("SPPO_LONG") != "" {
		draws = 100
	}
	for range draws {
		set := []string{
			fmt.Sprintf("cluster.device_memory=%dGiB", 28+r.IntN(70)), fmt.Sprintf("cluster.host_memory=%dGB", 100+r.IntN(800)),
			fmt.Sprintf("cluster.d2h_bandwidth=%gGB/s", 0.5+20*r.Float64()*r.Float64()), fmt.Sprintf("cluster.h2d_bandwidth=%gGB/s", 0.5+20*r.Float64()*r.Float64()),
			fmt.Sprintf("schedule.subsequences=%d", 8+r.IntN(32)), fmt.Sprintf("model.layers=%d", 4+r.IntN(30)),
		}
		switch r.IntN(4) {
		case 0:
			set = append(set, "schedule.strategy=seq1f1b", "train.batch=3")
		case 1:
			set = append(set, "schedule.strategy=overlapped-sppo", "train.batch=2")
		case 2:
			set = append(set, "schedule.pp=2", "schedule.virtual_stages=2")
		}
		checkFastest(t, set)
	}
}

// checkFastest compares the passes' choice with every pair of an offload and a recomputation policy.
func checkFastest(t *testing.T, set []string) {
	t.Helper()
	const file = "paper/gpt-7b-512k.sppo"
	fits := func(p *plan.Plan) bool {
		return memory.FootprintOf(p).Fits(p.Memory.DeviceCapacityBytes, p.Memory.HostCapacityBytes)
	}
	auto := plantest.Plan(t, file, append(set, "schedule.offload=auto", "schedule.recompute=auto")...)
	for _, offload := range []string{"none", "0.5", "full", "adaptive", "carry", "memory"} {
		for _, recompute := range []string{"none", "selective", "keep_attention", "full"} {
			p := plantest.Plan(t, file, append(set, "schedule.offload="+offload, "schedule.recompute="+recompute)...)
			switch {
			case fits(p) && !fits(auto):
				t.Errorf("%v: offload = %s, recompute = %s fits, and auto takes %s", set, offload, recompute, mostOf(auto))
			case fits(p) && p.Time.StepS*1.01 < auto.Time.StepS:
				t.Errorf("%v: %s by itself, %s with offload = %s, recompute = %s", set, auto.Time.StepS, p.Time.StepS, offload, recompute)
			}
		}
	}
}

// TestRecomputeByPrice checks that, without copies, units are recomputed in the order of their costs,
// that no more are recomputed than needed, and that the plan reports the costs.
func TestRecomputeByPrice(t *testing.T) {
	p := plantest.Plan(t, "paper/gpt-7b-1m.sppo", "schedule.offload=none", "schedule.recompute=auto")
	if !memory.FootprintOf(p).Fits(p.Memory.DeviceCapacityBytes, p.Memory.HostCapacityBytes) {
		t.Error("it does not fit")
	}
	c := &pass.Context{Cache: estimate.NewCache()}
	order := newChooser(c, p).recompute
	for s := range p.Tasks {
		part := 1.0
		for _, r := range order {
			count, all := 0, 0
			for _, placement := range p.Offload.Placement[s] {
				for at := r.unit; at < len(placement); at += len(c.Model(p).Plain(0).Units) {
					if all++; placement[at] == plan.PlacementRecompute {
						count++
					}
				}
			}
			if count > 0 && part < 1 {
				t.Errorf("stage %d makes unit %d again while cheaper ones stay", s, r.unit)
			}
			part = float64(count) / float64(all)
		}
	}
	explained := 0
	for _, d := range p.Decisions {
		if strings.Contains(d.Why, "per GiB freed") {
			explained++
		}
	}
	if explained != len(order) {
		t.Errorf("%d of %d units are explained", explained, len(order))
	}
	if err := plantest.Verify(p); err != nil {
		t.Error(err)
	}
}

// TestNothingFits checks that a job that cannot fit uses as little device memory as possible, and that the
// reason names the device's capacity.
func TestNothingFits(t *testing.T) {
	p := plantest.Plan(t, "paper/gpt-7b-1m.sppo", "schedule.offload=auto", "schedule.recompute=auto", "cluster.device_memory=30GiB")
	full := plantest.Plan(t, "paper/gpt-7b-1m.sppo", "schedule.offload=full", "schedule.recompute=none")
	if got, want := mostOf(p), mostOf(full); float64(got) > 1.02*float64(want) {
		t.Errorf("%s where all to the host takes %s", got, want)
	}
	if why := fmt.Sprint(p.Decisions); !strings.Contains(why, "30.0 GiB is available") {
		t.Error("the capacity is not named")
	}
}

// TestCopiesInTurns checks a job in layer order in which only copies take time. If both directions take turns,
// a step takes the sum of their times; if not, it takes less.
func TestCopiesInTurns(t *testing.T) {
	step := func(set ...string) float64 {
		set = append(set, "schedule.pp=1", "schedule.order=layer", "schedule.subsequences=16", "model.layers=8", "schedule.offload=full",
			"cluster.node_copy_bandwidth=0", "cluster.peak_bf16=1e9TFLOPS", "cluster.memory_bandwidth=1e9GB/s", "cluster.nvlink_bandwidth=1e9GB/s", "cluster.kernel_latency=0us", "cluster.nvlink_latency=0us")
		return float64(plantest.Plan(t, "paper/gpt-7b-512k.sppo", set...).Time.StepS)
	}
	out, back := step("cluster.h2d_bandwidth=1e9GB/s"), step("cluster.d2h_bandwidth=1e9GB/s")
	if half := step("cluster.copy_duplex=half"); math.Abs(half/(out+back)-1) > 1e-4 {
		t.Errorf("%g s in turns, %g s out and %g s back", half, out, back)
	}
	if half, full := step("cluster.copy_duplex=half", "schedule.order=sequence", "schedule.keep=[]"), step("schedule.order=sequence", "schedule.keep=[]"); half < 1.01*full {
		t.Errorf("K and V that stream: %g s in turns, %g s with both ways at once", half, full)
	}
	once := step("cluster.copy_duplex=half", "schedule.order=sequence") // in this order, a sequence's first copy back begins after its last copy out
	if full := step("schedule.order=sequence"); math.Abs(once/full-1) > 1e-9 {
		t.Errorf("one sequence after another: %g s in turns, %g s with both ways at once", once, full)
	}
}

// TestNodesShareCopies checks that a node's copy bandwidth is divided among its GPUs: the plan is the same as
// if each GPU had its share of the bandwidth.
func TestNodesShareCopies(t *testing.T) {
	for _, policy := range []string{"adaptive", "memory", "auto"} {
		shared := plantest.Plan(t, "paper/gpt-7b-512k.sppo", "schedule.offload="+policy, "cluster.node_copy_bandwidth=24GB/s")
		own := plantest.Plan(t, "paper/gpt-7b-512k.sppo", append(slowCopies, "schedule.offload="+policy)...)
		if shared.Time.StepS != own.Time.StepS || !slices.EqualFunc(shared.Offload.Placement, own.Offload.Placement, slices.Equal) {
			t.Errorf("offload = %s: %s and %.3f with 24 GB/s for eight GPUs, %s and %.3f with 3 GB/s for each", policy,
				shared.Time.StepS, shared.Offload.Alpha[0][0], own.Time.StepS, own.Offload.Alpha[0][0])
		}
		wide := plantest.Plan(t, "paper/gpt-7b-512k.sppo", "schedule.offload="+policy, "cluster.node_copy_bandwidth=1TB/s")
		if none := plantest.Plan(t, "paper/gpt-7b-512k.sppo", "schedule.offload="+policy); wide.Time.StepS != none.Time.StepS {
			t.Errorf("offload = %s: a wide node takes %s, one without a limit %s", policy, wide.Time.StepS, none.Time.StepS)
		}
	}
}

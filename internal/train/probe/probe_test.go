package probe_test

import (
	"fmt"
	"math"
	"testing"
	"time"

	"sppo.dev/internal/cost"
	"sppo.dev/internal/train/probe"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// machine has a different value for every figure that Probe measures on one node.
var machine = ir.Machine{
	Name: "made up", Nodes: 1, GPUsPerNode: 4, DeviceMemory: 80 << 30, HostMemory: 1 << 40, PeakBF16: 900e12, PeakF32: 60e12,
	MemoryBandwidth: 3e12, D2HBandwidth: 50e9, H2DBandwidth: 40e9, NodeCopyBandwidth: 120e9, NVLinkBandwidth: 400e9,
	NodeNetworkBandwidth: 400e9, NVLinkLatency: 4e-6, NetworkLatency: 4e-6, KernelLatency: 6e-6,
	MatmulEfficiency:    []ir.CurvePoint{{128, 0.1}, {512, 0.3}, {1024, 0.45}, {2048, 0.55}, {4096, 0.65}},
	AttentionEfficiency: []ir.CurvePoint{{128, 0.2}, {1024, 0.4}, {8192, 0.55}},
	AttentionGradEff:    []ir.CurvePoint{{128, 0.1}, {1024, 0.3}, {8192, 0.5}},
	CopyEfficiency:      1, CollectiveEfficiency: 0.8,
}

// simulated returns a bench whose programs are verified, then run in virtual time on the given machine.
func simulated(t *testing.T, m ir.Machine) *probe.Bench {
	return &probe.Bench{Span: time.Millisecond, Open: func(p *ir.Program) (func(int) vm.Device, vm.Transport, error) {
		p.Machine = m
		if err := (ir.VerifyOptions{AllowUnread: true, AllowReuse: true}).Verify(p); err != nil {
			t.Errorf("%s: %v", p.Name, err)
		}
		job, err := sim.New(p, sim.Options{})
		if err != nil {
			return nil, nil, err
		}
		return job.Device, nil, nil
	}}
}

// The probe recovers the figures that the simulator uses, because both use the same formulas.
func TestProbeFindsTheFigures(t *testing.T) {
	facts := probe.Facts{Name: machine.Name, Ranks: 4, DeviceMemory: machine.DeviceMemory, HostMemory: machine.HostMemory,
		PeakBF16: machine.PeakBF16, PeakF32: machine.PeakF32, PeakSource: "data sheet"}
	got, err := simulated(t, machine).Probe(t.Context(), facts, probe.GPU)
	if err != nil {
		t.Fatal(err)
	}
	g := &got.Machine
	for _, c := range []struct {
		name      string
		got, want float64
	}{
		{"kernel latency", g.KernelLatency, machine.KernelLatency}, {"memory", g.MemoryBandwidth, machine.MemoryBandwidth},
		{"copy efficiency", g.CopyEfficiency, 1}, {"d2h", g.D2HBandwidth, machine.D2HBandwidth}, {"h2d", g.H2DBandwidth, machine.H2DBandwidth},
		{"copies of a node", g.NodeCopyBandwidth, machine.NodeCopyBandwidth}, {"links", g.NVLinkBandwidth, machine.NVLinkBandwidth},
		{"latency of links", g.NVLinkLatency, machine.NVLinkLatency}, {"collectives", g.CollectiveEfficiency, machine.CollectiveEfficiency},
		{"bf16", g.PeakBF16, machine.PeakBF16}, {"f32", g.PeakF32, machine.PeakF32},
	} {
		if !(math.Abs(c.got-c.want) <= 0.01*c.want) {
			t.Errorf("%s: %g, the machine has %g", c.name, c.got, c.want)
		}
	}
	for _, c := range []struct {
		name      string
		got, want []ir.CurvePoint
	}{{"products", g.MatmulEfficiency, machine.MatmulEfficiency}, {"attention", g.AttentionEfficiency, machine.AttentionEfficiency},
		{"its gradient", g.AttentionGradEff, machine.AttentionGradEff}} {
		for _, want := range c.want {
			if got := at(c.got, want[0]); !(math.Abs(got-want[1]) <= 0.01) {
				t.Errorf("%s at %g: %g, the machine has %g; %v", c.name, want[0], got, want[1], c.got)
			}
		}
	}
}

// If ranks share processors, rates are those of one processor, and the cost of spreading a kernel over several
// processors is derived from kernels of all sizes.
func TestProbeFindsSharing(t *testing.T) {
	few := machine
	few.Parallelism, few.SpreadEfficiency, few.NodeCopyBandwidth = 2, 0.9, 0
	bench := simulated(t, few)
	bench.Span = 50 * time.Millisecond
	got, err := bench.Probe(t.Context(), probe.Facts{Name: few.Name, Ranks: 4, Processors: 2}, probe.GPU)
	if err != nil {
		t.Fatal(err)
	}
	g := &got.Machine
	for _, c := range []struct {
		name      string
		got, want float64
	}{
		{"parallelism", g.Parallelism, 2}, {"spreading", g.SpreadEfficiency, 0.9}, {"memory", g.MemoryBandwidth, few.MemoryBandwidth},
		{"products", g.PeakBF16, 0.65 * few.PeakBF16}, {"d2h", g.D2HBandwidth, few.D2HBandwidth}, {"links", g.NVLinkBandwidth, few.NVLinkBandwidth},
	} {
		if !(math.Abs(c.got-c.want) <= 0.04*c.want) {
			t.Errorf("%s: %g, the machine has %g", c.name, c.got, c.want)
		}
	}
	for i, p := range g.AttentionGradEff { // here a layer takes no longer than the sum of its kernels
		if want := few.PeakBF16 / g.PeakBF16 * cost.Efficiency(few.AttentionGradEff, int64(p[0])); math.Abs(p[1]-want) > 0.04*want {
			t.Errorf("point %d of attention_grad's efficiency: %g, the machine has %g", i, p[1], want)
		}
	}
	// The range is wide, because the first kernel of a section finds processors idle.
	if l := g.KernelLatency; l < 0.7*few.KernelLatency || l > 1.3*few.KernelLatency {
		t.Errorf("kernel latency: %g, the machine has %g", l, few.KernelLatency)
	}
}

func at(curve []ir.CurvePoint, size float64) float64 {
	for _, p := range curve {
		if p[0] == size {
			return p[1]
		}
	}
	return math.NaN()
}

// Without a data sheet, the rate of the fastest matmul counts as the peak. With a single rank, the figures of
// links are noted as not measured.
func TestProbeAlone(t *testing.T) {
	got, err := simulated(t, machine).Probe(t.Context(), probe.Facts{Ranks: 1}, probe.GPU)
	if err != nil {
		t.Fatal(err)
	}
	if best := 0.65 * machine.PeakBF16; math.Abs(got.Machine.PeakBF16-best) > 0.01*best {
		t.Errorf("the peak is %g, the fastest product %g", got.Machine.PeakBF16, best)
	}
	if got.Notes["nvlink_bandwidth"] != "not measured: there is one rank" || got.Machine.NodeCopyBandwidth != 0 {
		t.Errorf("%q, %g", got.Notes["nvlink_bandwidth"], got.Machine.NodeCopyBandwidth)
	}
}

// Of fifteen rounds, an item that takes longer than the span takes part in every third, and others take part in all.
func TestLongItemsAreMeasuredLess(t *testing.T) {
	for span, want := range map[time.Duration]int{0: 5, time.Hour: 15} {
		bench, rounds := simulated(t, machine), map[string]int{}
		bench.Span, bench.Rounds = span, 15
		bench.Begin = func(item probe.Item, ranks, _, _ int) { rounds[fmt.Sprint(item.Name, ranks)]++ }
		scale := probe.Scale{DType: ir.BF16, Inner: 64, Rows: []int64{8}, Tokens: []int64{8}, Heads: probe.Heads{Heads: 2, KVHeads: 2, Dim: 8}, Bytes: 4096, Cols: 64}
		if _, err := bench.Probe(t.Context(), probe.Facts{Ranks: 1}, scale); err != nil {
			t.Fatal(err)
		}
		for item, got := range rounds {
			if got != want {
				t.Errorf("with a span of %s, %s was measured in %d rounds, not %d", span, item, got, want)
			}
		}
		if len(rounds) < 10 {
			t.Errorf("%d items were measured", len(rounds))
		}
	}
}

// The same items run on a device that computes, on one rank and on several.
func TestItemsRunOnTheCPU(t *testing.T) {
	bench := &probe.Bench{Span: 100 * time.Microsecond, Open: func(*ir.Program) (func(int) vm.Device, vm.Transport, error) {
		return func(int) vm.Device { return cpu.New(nil) }, nil, nil
	}}
	scale := probe.Scale{DType: ir.BF16, Inner: 24, Rows: []int64{8, 32}, Tokens: []int64{4, 9}, Prefix: 7, Heads: probe.Heads{Heads: 4, KVHeads: 2, Dim: 8}, Bytes: 4096, Cols: 40}
	for ranks, processors := range []int{1: 0, 2: 2, 3: 0} {
		if ranks == 0 {
			continue
		}
		got, err := bench.Probe(t.Context(), probe.Facts{Ranks: ranks, Processors: processors}, scale)
		if err != nil {
			t.Fatal(err)
		}
		for _, timing := range got.Timings {
			if !(timing.Seconds > 0) {
				t.Errorf("%d ranks, %s: %v", ranks, timing.Item.Name, timing)
			}
		}
	}
}

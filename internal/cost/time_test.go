package cost

import (
	"math"
	"testing"

	"sppo.dev/ir"
)

// machine has round figures, so that the expected times are easy to compute.
var machine = ir.Machine{
	Nodes: 2, GPUsPerNode: 4,
	PeakBF16: 100e12, PeakF32: 10e12, MemoryBandwidth: 1e12, CopyEfficiency: 0.5,
	D2HBandwidth: 10e9, H2DBandwidth: 20e9,
	NVLinkBandwidth: 100e9, NodeNetworkBandwidth: 40e9, CollectiveEfficiency: 0.5,
	NVLinkLatency: 1e-6, NetworkLatency: 10e-6, KernelLatency: 2e-6,
	MatmulEfficiency:    []ir.CurvePoint{{100, 0.2}, {10000, 0.8}},
	AttentionEfficiency: []ir.CurvePoint{{1, 0.5}}, AttentionGradEff: []ir.CurvePoint{{1, 0.25}},
}

func TestTime(t *testing.T) {
	const ms = 1e-3
	inNode, across, pair := Link{Ranks: 4, Nodes: 1}, Link{Ranks: 8, Nodes: 2}, Link{Ranks: 2, Nodes: 2}
	for _, c := range []struct {
		name string
		w    ir.Work
		l    Link
		want float64 // without the kernel latency
	}{
		{"matmul", ir.Work{Kind: ir.WorkMatmul, Flops: 80e9, Rows: 10000, DType: ir.BF16}, Link{}, 1 * ms},
		{"few rows", ir.Work{Kind: ir.WorkMatmul, Flops: 80e9, Rows: 100, DType: ir.BF16}, Link{}, 4 * ms},
		{"f32", ir.Work{Kind: ir.WorkMatmul, Flops: 80e9, Rows: 10000, DType: ir.F32}, Link{}, 10 * ms},
		{"bound by memory", ir.Work{Kind: ir.WorkMatmul, Flops: 80e9, Bytes: 1e9, Rows: 10000, DType: ir.BF16}, Link{}, 2 * ms},
		{"attention", ir.Work{Kind: ir.WorkAttention, Flops: 50e9, Rows: 7, DType: ir.BF16, HeadDim: 128, ValueDim: 128}, Link{}, 1 * ms},
		{"attention_grad", ir.Work{Kind: ir.WorkAttentionGrad, Flops: 50e9, Rows: 7, DType: ir.BF16, HeadDim: 128, ValueDim: 128}, Link{}, 2 * ms},
		{"memory", ir.Work{Kind: ir.WorkMemory, Bytes: 1e9}, Link{}, 2 * ms},
		{"d2h", ir.Work{Kind: ir.WorkD2H, Bytes: 1e7}, Link{}, 1 * ms},
		{"h2d", ir.Work{Kind: ir.WorkH2D, Bytes: 1e7}, Link{}, 0.5 * ms},
		{"message in a node", ir.Work{Kind: ir.WorkP2P, Bytes: 1e8}, Link{Ranks: 2, Nodes: 1}, 1*ms + 1e-6},
		{"message across, a fourth of the network", ir.Work{Kind: ir.WorkP2P, Bytes: 1e7}, pair, 1*ms + 10e-6},
		{"all_gather in a node", ir.CollectiveWork(ir.AllGather, 1e8), inNode, 1.5*ms + 3e-6},
		{"reduce_scatter in a node", ir.CollectiveWork(ir.ReduceScatter, 1e8), inNode, 1.5*ms + 3e-6},
		{"all_reduce in a node", ir.CollectiveWork(ir.AllReduce, 1e8), inNode, 3*ms + 6e-6},
		{"all_gather across", ir.CollectiveWork(ir.AllGather, 160e6), across, 7*ms + 16e-6},
		{"all_reduce of pairs across", ir.CollectiveWork(ir.AllReduce, 1e7), pair, 2*ms + 20e-6},
		{"all_to_all in a node", ir.CollectiveWork(ir.AllToAll, 1e8), inNode, 1.5*ms + 1e-6},
		{"all_to_all across: four ranks send half of theirs by one way out", ir.CollectiveWork(ir.AllToAll, 1e7), across, 1*ms + 10e-6},
		{"rotate in a node", ir.CollectiveWork(ir.Rotate, 1e8), inNode, 2*ms + 1e-6},
		{"rotate across", ir.CollectiveWork(ir.Rotate, 160e6), across, 8*ms + 10e-6},
	} {
		got := float64(New(machine, 8).Time(c.w, c.l))
		if want := c.want + 2e-6; math.Abs(got-want) > 1e-9*want {
			t.Errorf("%s: %g s, want %g", c.name, got, want)
		}
	}
}

// Overhead stretches everything, including latencies.
func TestOverhead(t *testing.T) {
	slow := machine
	slow.Overhead = 0.25
	for _, w := range []ir.Work{{Kind: ir.WorkMatmul, Flops: 80e9, Rows: 100, DType: ir.BF16}, {Kind: ir.WorkD2H, Bytes: 1e7}, ir.CollectiveWork(ir.AllGather, 1e8)} {
		l := Link{Ranks: 4, Nodes: 1}
		if got, want := New(slow, 8).Time(w, l), 1.25*New(machine, 8).Time(w, l); math.Abs(float64(got-want)) > 1e-9*float64(want) {
			t.Errorf("%v: %g s, want %g", w.Kind, got, want)
		}
	}
}

func TestNothingTakesNoTime(t *testing.T) {
	m := New(machine, 8)
	for _, w := range []ir.Work{{}, ir.CollectiveWork(ir.AllGather, 1e9), ir.CollectiveWork(ir.AllReduce, 1e9)} {
		if got := m.Time(w, Link{Ranks: 1, Nodes: 1}); got != 0 {
			t.Errorf("%+v alone takes %s", w, got)
		}
	}
}

func TestNodeSharesItsCopies(t *testing.T) {
	shared := machine
	shared.NodeCopyBandwidth = 20e9
	w := ir.Work{Kind: ir.WorkD2H, Bytes: 1e7}
	for ranks, want := range map[int]float64{1: 1e-3, 2: 1e-3, 4: 2e-3, 8: 2e-3} {
		if got := float64(New(shared, ranks).Time(w, Link{})); math.Abs(got-want-2e-6) > 1e-12 {
			t.Errorf("%d ranks: %g s, want %g", ranks, got, want+2e-6)
		}
	}
}

// Every opcode of the table takes time, unless it has no work.
func TestEveryKindOfWorkHasAPrice(t *testing.T) {
	m := New(machine, 8)
	for op := range ir.Ops {
		w := ir.Work{Kind: ir.Ops[op].Work, Op: ir.Op(op), Flops: 1, Bytes: 1, Rows: 1}
		if got := m.Time(w, Link{Ranks: 2, Nodes: 1}); got < 0 || got == 0 && w.Kind != ir.WorkNone {
			t.Errorf("%s: %s", ir.Ops[op].Name, got)
		}
	}
}

func TestMoreNeverCostsLess(t *testing.T) {
	m := New(machine, 8)
	for op := range ir.Ops {
		var before ir.Seconds
		for n := int64(1); n < 1<<40; n *= 2 {
			got := m.Time(ir.Work{Kind: ir.Ops[op].Work, Op: ir.Op(op), Flops: ir.Flops(n), Bytes: ir.Bytes(n), Rows: n}, Link{Ranks: 8, Nodes: 2})
			if got < before {
				t.Errorf("%s of %d: %s, less than of half as much", ir.Ops[op].Name, n, got)
			}
			before = got
		}
	}
}

func TestEfficiency(t *testing.T) {
	curve := []ir.CurvePoint{{10, 0.1}, {1000, 0.5}}
	for _, c := range []struct {
		size int64
		want float64
	}{{0, 0.1}, {1, 0.1}, {10, 0.1}, {100, 0.3}, {1000, 0.5}, {1 << 40, 0.5}} {
		if got := Efficiency(curve, c.size); math.Abs(got-c.want) > 1e-12 {
			t.Errorf("at %d: %g, want %g", c.size, got, c.want)
		}
	}
	if Efficiency(nil, 5) != 1 {
		t.Error("no curve is no loss")
	}
}

func TestLinkOf(t *testing.T) {
	m := New(machine, 8)
	for _, c := range []struct {
		ranks []int32
		want  Link
	}{{[]int32{0, 1, 2, 3}, Link{4, 1}}, {[]int32{3, 4}, Link{2, 2}}, {[]int32{5}, Link{1, 1}}} {
		if got := m.LinkOf(c.ranks); got != c.want {
			t.Errorf("%v: %+v, want %+v", c.ranks, got, c.want)
		}
	}
}

// Ranks that share processors take turns if there are more ranks than processors. With at least two processors
// per rank, kernels spread and copies do not.
func TestParallelism(t *testing.T) {
	few := machine
	few.Parallelism, few.SpreadEfficiency, few.KernelLatency = 4, 0.5, 1e-3
	work := ir.Work{Kind: ir.WorkMatmul, Flops: 1 << 40, Bytes: 1 << 20, Rows: 1 << 10, DType: ir.F32}
	same := few
	same.GPUsPerNode = 8
	one := New(same, 4).Time(work, Link{})
	if at := float64(New(machine, 1).Time(work, Link{}) - one); math.Abs(at-machine.KernelLatency) > 1e-9 {
		t.Errorf("on a processor %g less than on a device, which has a latency of %g", at, machine.KernelLatency)
	}
	for ranks, want := range map[int]float64{1: float64(one)/(4*0.5) + 1e-3, 2: float64(one)/(2*0.5) + 1e-3, 3: float64(one), 4: float64(one), 6: 1.5 * float64(one), 8: 2 * float64(one)} {
		want = min(want, max(float64(one), float64(one)*float64(ranks)/4))
		if got := float64(New(same, ranks).Time(work, Link{})); math.Abs(got-want) > 1e-12*want {
			t.Errorf("%d ranks on 4 processors: %g, want %g", ranks, got, want)
		}
	}
	short := ir.Work{Kind: ir.WorkMemory, Bytes: 1 << 10}
	if got, want := New(same, 1).Time(short, Link{}), New(same, 4).Time(short, Link{}); got != want {
		t.Errorf("a short kernel takes %s alone, %s on a processor", got, want)
	}
	moved := ir.Work{Kind: ir.WorkD2H, Bytes: 1 << 30}
	for ranks, want := range map[int]float64{1: 1, 4: 1, 8: 2} {
		if got := float64(New(same, ranks).Time(moved, Link{}) / New(same, 4).Time(moved, Link{})); math.Abs(got-want) > 1e-12 {
			t.Errorf("copies of %d ranks on 4 processors: %g times as long, want %g", ranks, got, want)
		}
	}
}

// TestHeadsWithoutKernels checks that attention takes longer where a GPU lacks kernels for the heads, and only there.
func TestHeadsWithoutKernels(t *testing.T) {
	seconds := func(kind ir.WorkKind, dim int64, dtype ir.DType, parallelism float64) ir.Seconds {
		m := ir.Machine{PeakBF16: 1e15, PeakF32: 6e13, MemoryBandwidth: 1e15, CopyEfficiency: 1, Parallelism: parallelism, SpreadEfficiency: 1,
			AttentionEfficiency: []ir.CurvePoint{{1, 0.5}}, AttentionGradEff: []ir.CurvePoint{{1, 0.5}}}
		return New(m, 1).One(ir.Work{Kind: kind, Flops: 1e15, Rows: 1, DType: dtype, HeadDim: dim, ValueDim: dim}, Link{})
	}
	for _, c := range []struct {
		kind        ir.WorkKind
		dim         int64
		dtype       ir.DType
		parallelism float64
		want        ir.Seconds
	}{
		{ir.WorkAttention, 128, ir.BF16, 0, 2}, {ir.WorkAttention, 256, ir.BF16, 0, 2}, {ir.WorkAttentionGrad, 256, ir.BF16, 0, 2 / 0.80},
		{ir.WorkAttention, 112, ir.BF16, 0, 1000.0 / 6}, {ir.WorkAttention, 112, ir.BF16, 4, 2}, {ir.WorkAttention, 112, ir.F32, 0, 200.0 / 6},
	} {
		if got := seconds(c.kind, c.dim, c.dtype, c.parallelism); math.Abs(float64(got/c.want)-1) > 1e-9 {
			t.Errorf("heads of %d, %s, parallelism %g: %g s, want %g s", c.dim, c.dtype, c.parallelism, got, c.want)
		}
	}
}

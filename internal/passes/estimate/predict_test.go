package estimate

import (
	"math"
	"slices"
	"testing"

	"sppo.dev/internal/cost"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/plantest"
	"sppo.dev/internal/passes/strategy"
	"sppo.dev/internal/passes/walk"
	"sppo.dev/ir"
)

func BenchmarkSimulate(b *testing.B) {
	p := plantest.Plan(b, "paper/gpt-65b-1m.sppo")
	t := New(NewCache(), nil, p).Costs(cost.New(ir.Machine(p.Cluster), p.Parallel.Ranks()))
	for b.Loop() {
		simulate(p, t)
	}
}

// pipelineOf returns a plan with one layer per stage, in which only the fields that simulate reads are set, and
// its costs.
func pipelineOf(stages int, f, b []ir.Seconds) (*plan.Plan, *Costs) {
	return interleavedOf(stages, 1, f, b)
}

// interleavedOf is like pipelineOf, but with v virtual stages of one layer each per rank.
func interleavedOf(stages, v int, f, b []ir.Seconds) (*plan.Plan, *Costs) {
	n := len(f)
	p := &plan.Plan{
		Parallel:       plan.Parallel{PP: stages, SP: 1, DP: 1, VirtualStages: v, Microbatches: 1},
		Subsequences:   plan.Subsequences{N: n},
		LayersPerStage: slices.Repeat([]int{1}, stages*v),
		Offload:        plan.Offload{Lag: 1, Ahead: 1},
	}
	strategy.Order(p)
	none := make([]ir.Seconds, n)
	c := &Costs{kinds: []layerCosts{{Forward: f}}, embed: none, embedGrad: make([]backwardTime, n), head: none, message: none}
	for _, whole := range b {
		c.kinds[0].backward = append(c.kinds[0].backward, backwardTime{whole, whole / 2, whole / 2})
	}
	for range stages {
		c.d2h, c.h2d = append(c.d2h, noCopies(n, v)), append(c.h2d, noCopies(n, v))
	}
	return p, c
}

// copies returns the durations of copies for n subsequences and one layer, all equal to d.
func copies(n int, d ir.Seconds) [][]ir.Seconds {
	out := make([][]ir.Seconds, n)
	for i := range out {
		out[i] = []ir.Seconds{d}
	}
	return out
}

func noCopies(n, layers int) [][]ir.Seconds {
	out := make([][]ir.Seconds, n)
	for i := range out {
		out[i] = make([]ir.Seconds, layers)
	}
	return out
}

// TestBubbleOfVirtualStages checks that a step takes N(f+b) + (PP-1)(f+b)/v if N is a multiple of 2*PP. Here f
// and b are the times of a subsequence on all virtual stages of a rank.
func TestBubbleOfVirtualStages(t *testing.T) {
	for _, c := range [][3]int{{2, 2, 4}, {2, 4, 8}, {4, 2, 8}, {4, 8, 16}, {8, 4, 32}} {
		stages, v, n := c[0], c[1], c[2]
		p, costs := interleavedOf(stages, v, slices.Repeat([]ir.Seconds{1}, n), slices.Repeat([]ir.Seconds{2}, n))
		if err := walk.Visit(p, func(int, plan.Task) {}); err != nil {
			t.Fatal(err)
		}
		simulate(p, costs)
		if want := ir.Seconds(3 * (v*n + stages - 1)); !near(p.Time.StepS, want) {
			t.Errorf("%d stages, %d virtual, %d subsequences: %g, want %g", stages, v, n, p.Time.StepS, want)
		}
	}
}

func near(a, b ir.Seconds) bool { return math.Abs(float64(a-b)) <= 1e-9*math.Abs(float64(b)) }

func TestBubbleOfUniformCosts(t *testing.T) {
	for _, c := range [][2]int{{1, 1}, {2, 4}, {4, 8}, {4, 32}, {8, 8}, {8, 3}} {
		stages, n := c[0], c[1]
		p, costs := pipelineOf(stages, slices.Repeat([]ir.Seconds{1}, n), slices.Repeat([]ir.Seconds{2}, n))
		simulate(p, costs)
		if want := float64(stages-1) / float64(n); math.Abs(p.Time.BubbleRatio-want) > 1e-12 {
			t.Errorf("%d stages, %d subsequences: bubble %g, want %g", stages, n, p.Time.BubbleRatio, want)
		}
		if want := float64(stages-1) / float64(n+stages-1); math.Abs(p.Time.IdleShare-want) > 1e-12 {
			t.Errorf("%d stages, %d subsequences: idle share %g, want %g", stages, n, p.Time.IdleShare, want)
		}
	}
}

// TestMakespanOfUnequalCosts checks that a step takes sum f + sum b + (PP-1)(max f + max b).
func TestMakespanOfUnequalCosts(t *testing.T) {
	r := plantest.Random(t)
	for range 200 {
		stages, n := 1+r.IntN(6), 1+r.IntN(12)
		f, b := make([]ir.Seconds, n), make([]ir.Seconds, n)
		var want ir.Seconds
		for i := range n {
			f[i], b[i] = ir.Seconds(r.Float64()), ir.Seconds(r.Float64())
			want += f[i] + b[i]
		}
		want += ir.Seconds(stages-1) * (slices.Max(f) + slices.Max(b))
		p, c := pipelineOf(stages, f, b)
		simulate(p, c)
		if !near(p.Time.StepS, want) {
			t.Fatalf("%d stages, f %v, b %v: %g, want %g", stages, f, b, float64(p.Time.StepS), float64(want))
		}
	}
}

func TestMessagesDelay(t *testing.T) {
	p, c := pipelineOf(3, []ir.Seconds{1, 1}, []ir.Seconds{2, 2})
	c.message = []ir.Seconds{0.25, 0.25}
	simulate(p, c)
	if want := ir.Seconds(2*3 + 2*(1+2) + 4*0.25); !near(p.Time.StepS, want) {
		t.Errorf("%g, want %g", float64(p.Time.StepS), float64(want))
	}
}

// TestExposedOffload has one stage, and copies that take three times as long as a forward task. The second task
// waits 1 for the copies of the first, and the third waits 2 for those of the second. Nothing waits for the
// copies of the third, because its own backward follows.
func TestExposedOffload(t *testing.T) {
	p, c := pipelineOf(1, slices.Repeat([]ir.Seconds{1}, 3), slices.Repeat([]ir.Seconds{2}, 3))
	c.d2h[0] = copies(3, 3)
	simulate(p, c)
	if p.Time.ExposedTransferS != 3 || p.Time.StepS != 12 || p.Time.BubbleRatio != 0 {
		t.Errorf("exposed %g, step %g, bubble %g; want 3, 12, 0", float64(p.Time.ExposedTransferS), float64(p.Time.StepS), p.Time.BubbleRatio)
	}
}

// TestExposedReload checks that a layer is reloaded into the bytes that the same layer of the previous task
// has freed. A stage of one layer therefore waits for the whole reload, and a stage of two layers waits for
// the part that the other layer does not hide.
func TestExposedReload(t *testing.T) {
	p, c := pipelineOf(1, []ir.Seconds{1, 1}, []ir.Seconds{2, 2})
	c.h2d[0] = copies(2, 1)
	simulate(p, c)
	if p.Time.ExposedTransferS != 2 || p.Time.StepS != 8 {
		t.Errorf("one layer: exposed %g, step %g; want 2, 8", float64(p.Time.ExposedTransferS), float64(p.Time.StepS))
	}
	p.LayersPerStage, p.Offload.Ahead = []int{2}, 2
	c.h2d[0] = [][]ir.Seconds{{1, 1}, {1, 1}}
	c.d2h[0] = [][]ir.Seconds{{0, 0}, {0, 0}}
	simulate(p, c)
	if p.Time.ExposedTransferS != 1 || p.Time.StepS != 13 {
		t.Errorf("two layers: exposed %g, step %g; want 1, 13", float64(p.Time.ExposedTransferS), float64(p.Time.StepS))
	}
}

// TestOffloadTime checks that offloading takes no time if copies are fast, and some time if they are slow.
func TestOffloadTime(t *testing.T) {
	none := plantest.Plan(t, "paper/gpt-7b-512k.sppo", "schedule.offload=none").Time
	full := plantest.Plan(t, "paper/gpt-7b-512k.sppo", "schedule.offload=full").Time
	if !near(none.StepS, full.StepS) || full.ExposedTransferS != 0 {
		t.Errorf("at 32 GB/s: %s without, %s with offload, %s exposed", none.StepS, full.StepS, full.ExposedTransferS)
	}
	slow := plantest.Plan(t, "paper/gpt-7b-512k.sppo", "schedule.offload=full", "cluster.d2h_bandwidth=1GB/s", "cluster.h2d_bandwidth=1GB/s").Time
	if slow.StepS <= full.StepS || slow.ExposedTransferS <= 0 {
		t.Errorf("at 1 GB/s: step %s, exposed %s", slow.StepS, slow.ExposedTransferS)
	}
	for s := range slow.BusyS {
		if !near(slow.BusyS[s], full.BusyS[s]) {
			t.Errorf("waiting made stage %d busy: %s, not %s", s, slow.BusyS[s], full.BusyS[s])
		}
	}
}

// TestModelFlops compares the FLOPs of a tiny model with a count by hand: three times those of the forward
// pass.
func TestModelFlops(t *testing.T) {
	p := plantest.Plan(t, "tiny.sppo")
	const s, h, layers, vocab, batch = 64, 32, 2, 256, 2
	weights := float64(2 * s * (4*h*h + 8*h*h))
	attention := float64(2 * h * s * (s + 1))
	want := 3 * batch * (layers*(weights+attention) + 2*s*h*vocab)
	if p.Throughput.ModelFlops != want {
		t.Errorf("%g model FLOPs, want %g", p.Throughput.ModelFlops, want)
	}
	seconds := float64(p.Time.StepS) * 4
	if got := p.Throughput.TGS; math.Abs(got-s*batch/seconds) > 1e-9*got {
		t.Errorf("%g tokens a GPU and second, want %g", got, s*batch/seconds)
	}
}

// TestReplicasReduceGradients checks that the optimizer takes longer if gradients must be summed over replicas.
func TestReplicasReduceGradients(t *testing.T) {
	one := plantest.Plan(t, "gpt-docs.sppo", "schedule.sp=1", "schedule.pp=2", "schedule.dp=1")
	two := plantest.Plan(t, "gpt-docs.sppo", "schedule.sp=1", "schedule.pp=2", "schedule.dp=2", "schedule.zero=0")
	if one.Time.OptimizerS >= two.Time.OptimizerS {
		t.Errorf("optimizer %s with one replica, %s with two", one.Time.OptimizerS, two.Time.OptimizerS)
	}
}

// TestSPInsideANode checks that 65B at 640K tokens is slower with SP 16 x PP 8 than with SP 8 x PP 16,
// because the collectives of SP 16 leave the node.
func TestSPInsideANode(t *testing.T) {
	busy := func(p *plan.Plan) (sum ir.Seconds) {
		for _, b := range p.Time.BusyS {
			sum += b * ir.Seconds(p.Parallel.SP)
		}
		return sum
	}
	across := busy(plantest.Plan(t, "paper/gpt-65b-640k.sppo"))
	inside := busy(plantest.Plan(t, "paper/gpt-65b-640k.sppo", "schedule.sp=8", "schedule.pp=16"))
	if gain := 1 - float64(inside/across); gain < 0.04 || gain > 0.12 {
		t.Errorf("SP 8 x PP 16 is busy for %s, SP 16 x PP 8 for %s: %.1f%% less", inside, across, 100*gain)
	}
}

// TestOverlappedMakespan checks that a batch has only one bubble, T = (M N + PP-1) (f + b), if filling the
// pipeline takes no longer than a sequence. There is one layer per virtual stage, a forward task takes 1 and a
// backward task 2 to 3. With virtual stages, the step may take longer than that, but less time than with one
// sequence after another.
func TestOverlappedMakespan(t *testing.T) {
	for _, c := range [][4]int{{2, 1, 4, 2}, {2, 1, 4, 5}, {3, 1, 8, 2}, {4, 1, 16, 4}, {4, 1, 12, 3}, {8, 1, 40, 2}, {2, 2, 4, 3}, {4, 2, 16, 3}, {4, 3, 24, 2}} {
		stages, v, n, microbatches := c[0], c[1], c[2], c[3]
		for _, b := range []ir.Seconds{2, 2.5, 3} {
			p, costs := interleavedOf(stages, v, slices.Repeat([]ir.Seconds{1}, n), slices.Repeat([]ir.Seconds{b}, n))
			p.Parallel.Microbatches, p.Schedule.Strategy = microbatches, "overlapped-sppo"
			strategy.Order(p)
			if err := walk.Visit(p, func(int, plan.Task) {}); err != nil {
				t.Fatal(err)
			}
			simulate(p, costs)
			want := ir.Seconds(v*microbatches*n+stages-1) * (1 + b)
			if v > 1 {
				oneByOne := ir.Seconds(microbatches*(v*n+stages-1)) * (1 + b)
				if p.Time.StepS < want || p.Time.StepS >= oneByOne {
					t.Errorf("pp %d, v %d, n %d, m %d, b %g: makespan %g, want it from %g to below %g", stages, v, n, microbatches, b, p.Time.StepS, want, oneByOne)
				}
			} else if !near(p.Time.StepS, want) {
				t.Errorf("pp %d, v %d, n %d, m %d, b %g: makespan %g, want %g", stages, v, n, microbatches, b, p.Time.StepS, want)
			}
		}
	}
}

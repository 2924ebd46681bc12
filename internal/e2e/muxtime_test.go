package e2e

import (
	"fmt"
	"math/big"
	"testing"
	"time"

	"sppo.dev/internal/passes/plantest"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// workCluster is a spec whose cluster takes time only for floating-point operations.
const workCluster = `cluster work {
  nodes = 1
  gpus_per_node = 64
  device_memory = 1TiB
  host_memory = 100TiB
  peak_f32 = 1TFLOPS
  peak_bf16 = 1TFLOPS
  memory_bandwidth = 1000000TB/s
  d2h_bandwidth = 1000000TB/s
  h2d_bandwidth = 1000000TB/s
  nvlink_bandwidth = 1000000TB/s
  node_network_bandwidth = 1000000TB/s
  nvlink_latency = 0us
  network_latency = 0us
  kernel_latency = 0us
  matmul_efficiency = 1
  attention_efficiency = 1
  attention_grad_efficiency = 1
  copy_efficiency = 1
  collective_efficiency = 1
}
model work { family = gpt layers = %d hidden = 256 heads = 4 vocab = 64 positions = none dtype = f32 }
train { sequence = %d batch = 1 data = random() }
schedule { strategy = sppo virtual_stages = 1 pp = %d sp = 1 subsequences = %d offload = none recompute = none mux = %s }
`

// TestMuxMakespan checks in virtual time, counting only floating-point operations, that a pipeline with shared
// tasks takes little longer than one with ideal shares of equally long tasks. At the turnaround only attention
// is shared, so sequences are long enough for it to dominate.
func TestMuxMakespan(t *testing.T) {
	for _, c := range []struct {
		mux    string
		tokens int
		shares plantest.Shares
	}{
		{"left", 64, plantest.Shares{Left: true}}, {"right", 1024, plantest.Shares{Right: true}},
		{"on", 1024, plantest.Shares{Left: true, Right: true}},
	} {
		for _, size := range [][2]int{{2, 4}, {3, 7}, {4, 8}, {8, 16}} {
			pp, n := size[0], size[1]
			var predicted time.Duration
			span := func(mux string) (end, work time.Duration) {
				plan, p, err := compile(fmt.Sprintf(workCluster, pp, c.tokens*n*pp, pp, n, mux))
				if err != nil {
					t.Fatal(err)
				}
				predicted = time.Duration(float64(plan.Time.StepS-plan.Time.OptimizerS) * 1e9)
				return pipelineSpan(t, p)
			}
			plainEnd, work := span("off")
			end, muxWork := span(c.mux)
			ideal := plantest.Makespan(pp, n, c.shares, 1, 2)
			ideal.Quo(ideal, big.NewRat(int64(3*n), 1))
			bound, _ := ideal.Float64()
			bound *= float64(work) / float64(pp)
			t.Logf("%s, pp %d, n %d: plain %v (%.3f of work), mux %v, ideal %v: %.3f of it; work %v, with mux %v, predicted %v", c.mux, pp, n, plainEnd,
				float64(plainEnd)*float64(pp)/float64(work), end, time.Duration(bound), float64(end)/bound, work, muxWork, predicted)
			const most = 1.1
			if float64(end) > most*bound {
				t.Errorf("%s, pp %d, n %d: the pipeline takes %v with shared tasks, more than %g times %v", c.mux, pp, n, end, most, time.Duration(bound))
			}
			if ratio := float64(predicted) / float64(end); ratio < 0.98 || ratio > 1.02 {
				t.Errorf("%s, pp %d, n %d: %v are predicted, and simulated instruction by instruction it takes %v", c.mux, pp, n, predicted, end)
			}
		}
	}
}

// pipelineSpan simulates a step and returns when the last instruction of its forward and backward passes ends,
// and the total compute time of these instructions on all ranks.
func pipelineSpan(t *testing.T, p *ir.Program) (end, work time.Duration) {
	t.Helper()
	ranks, err := sim.New(p, sim.Options{})
	if err != nil {
		t.Fatal(err)
	}
	traces := make([]*vm.Trace, len(p.Ranks))
	job := openOn(t, p, func(rank int) vm.Device {
		traces[rank] = vm.NewTrace(ranks.Device(rank))
		return traces[rank]
	})
	if err := job.Init(t.Context()); err != nil {
		t.Fatal(err)
	}
	doSteps(t, job, 1)
	for r, trace := range traces {
		for _, timeline := range trace.Timelines {
			if timeline.Section != ir.SectionStep {
				continue
			}
			instrs := p.Codes[p.Ranks[r].Code].Sections[ir.SectionStep]
			for _, span := range timeline.Streams[ir.Compute] {
				in := &instrs[span.PC]
				if phase := in.Prov.Phase; in.Info().Class != ir.ClassSync && (phase == ir.PhaseForward || phase == ir.PhaseBackward) {
					end, work = max(end, span.End), work+span.End-span.Begin
				}
			}
		}
	}
	return end, work
}

package e2e

import (
	"fmt"
	"math"
	"runtime"
	"strings"
	"testing"
	"time"

	"sppo/ir"
	"sppo/vm"
	"sppo/vm/cpu"
	"sppo/vm/cpu/simd"
	"sppo/vm/probe"
	"sppo/vm/sim"
)

// calibrated are plans of one model that BenchmarkCalibration runs and simulates: pipelines, subsequences, offload,
// recomputation, virtual stages and splits of a layer, of one to four ranks.
var calibrated = []string{
	"pp=1 sp=1 subsequences=1 offload=none",
	"pp=1 sp=1 subsequences=4 offload=none",
	"pp=1 sp=1 subsequences=4 offload=full",
	"pp=2 sp=1 subsequences=4 offload=none",
	"pp=2 sp=1 subsequences=8 offload=full",
	"pp=4 sp=1 subsequences=4 offload=none",
	"pp=4 sp=1 subsequences=16 offload=full",
	"pp=2 sp=2 subsequences=4 offload=none",
	"pp=1 sp=2 subsequences=4 offload=0.5",
	"pp=2 sp=1 subsequences=8 offload=none recompute=full",
	"pp=2 sp=1 subsequences=8 offload=none virtual_stages=2",
	"pp=4 sp=1 subsequences=8 offload=none mux=off strategy=terapipe",
}

const calibratedSpec = `import "clusters/local.sppo"
model m { family = gpt layers = 4 hidden = 256 heads = 4 vocab = 256 dtype = f32 positions = rope }
cluster here = local(ranks = 4)
train { sequence = 1024 batch = 1 steps = 1000000 data = random() }
schedule s {
  pp = 1 sp = 1 dp = 1 sp_mode = megatron microbatch = 1 virtual_stages = 1 strategy = sppo recompute = none
  subsequences = 1 offload = none mux = off
}
`

// BenchmarkCalibration probes this computer, as `sppovm probe` does, and then sets simulated step times beside the cpu
// device's: one line a plan, the worst difference, and how many pairs of plans stand in the same order in both. Medians
// of steps count. With -v it shows the lines.
func BenchmarkCalibration(b *testing.B) {
	for b.Loop() {
		machine := probed(b)
		var lines []string
		var measured, simulated []float64
		worst := 0.0
		for _, plan := range calibrated {
			m, s := calibrate(b, machine, plan)
			measured, simulated = append(measured, m), append(simulated, s)
			worst = max(worst, math.Abs(s/m-1))
			lines = append(lines, fmt.Sprintf("%8.1f ms measured, %8.1f ms simulated, ratio %.2f  %s", 1e3*m, 1e3*s, s/m, plan))
		}
		b.Logf("parallelism %.2f, kernel latency %s\n%s", machine.Parallelism, ir.Seconds(machine.KernelLatency), strings.Join(lines, "\n"))
		b.ReportMetric(100*worst, "%worst")
		b.ReportMetric(100*agreement(measured, simulated), "%pairs-in-order")
		b.ReportMetric(0, "ns/op")
	}
}

// probed is this computer with four ranks.
func probed(b *testing.B) ir.Machine {
	pool := simd.NewPool(0)
	defer pool.Close()
	bench := &probe.Bench{Span: 100 * time.Millisecond, Open: func(*ir.Program) (func(int) vm.Device, vm.Transport, error) {
		return func(int) vm.Device { return cpu.New(pool) }, nil, nil
	}}
	facts := probe.Facts{Name: "here", Ranks: 4, Shared: true, DeviceMemory: 1 << 30, HostMemory: 8 << 30}
	figures, err := bench.Probe(b.Context(), facts, probe.CPU)
	if err != nil {
		b.Fatal(err)
	}
	for _, t := range figures.Timings {
		b.Logf("%-60s %d ranks %10s", t.Item.Name, t.Ranks, ir.Seconds(t.Seconds))
	}
	return figures.Machine
}

// calibrate is the median step of a plan, in seconds, measured and simulated.
func calibrate(b *testing.B, machine ir.Machine, plan string) (measured, simulated float64) {
	var set []string
	for _, request := range strings.Fields(plan) {
		set = append(set, "schedule."+request)
	}
	_, p, err := compile(calibratedSpec, set...)
	if err != nil {
		b.Fatal(err)
	}
	p.Machine = machine
	timeline, err := sim.Run(p, ir.SectionStep, sim.Options{})
	if err != nil {
		b.Fatal(err)
	}
	job := open(b, p, runtime.GOMAXPROCS(0), nil)
	if err := job.Init(b.Context()); err != nil {
		b.Fatal(err)
	}
	doSteps(b, job, 1) // touches all memory
	var seconds []float64
	for range 9 {
		seconds = append(seconds, doSteps(b, job, 1).Seconds)
	}
	return median(seconds), float64(timeline.Makespan)
}

// agreement is the share of pairs that two lists put in the same order; pairs that are equal to a twentieth in one of them count
// as in order.
func agreement(a, b []float64) float64 {
	pairs, same := 0, 0
	for i := range a {
		for j := range i {
			pairs++
			x, y := a[i]/a[j]-1, b[i]/b[j]-1
			if x*y > 0 || min(math.Abs(x), math.Abs(y)) < 0.05 {
				same++
			}
		}
	}
	return float64(same) / float64(max(1, pairs))
}

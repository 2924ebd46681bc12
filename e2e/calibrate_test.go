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
	"pp=4 sp=1 subsequences=8 offload=none strategy=terapipe",
	"pp=4 sp=1 subsequences=8 offload=none mux=on",
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

// BenchmarkCalibration probes this computer, as `sppovm probe` does, and sets simulated step times beside the cpu device's: one
// line a plan, how many plans are within 15%, the worst difference, and how many pairs of plans stand in the same order in both.
// Measurements of the probe and steps of the plans take turns, so that what else the computer does meets all of them, many times,
// and medians count. With -v it shows the lines.
func BenchmarkCalibration(b *testing.B) {
	for b.Loop() {
		plans := make([]calibration, len(calibrated))
		for i, plan := range calibrated {
			plans[i] = calibrate(b, plan)
		}
		machine := probed(b, func() {
			for i := range plans {
				plans[i].seconds = append(plans[i].seconds, doSteps(b, plans[i].job, 1).Seconds)
			}
		})
		for i := range plans {
			plans[i].simulate(b, machine)
		}
		report(b, plans)
	}
}

func report(b *testing.B, plans []calibration) {
	var lines []string
	var measured, simulated []float64
	worst, near := 0.0, 0
	for i := range plans {
		m, s := median(plans[i].seconds), plans[i].simulated
		measured, simulated = append(measured, m), append(simulated, s)
		worst = max(worst, math.Abs(s/m-1))
		if math.Abs(s/m-1) < 0.15 {
			near++
		}
		lines = append(lines, fmt.Sprintf("%8.1f ms measured, %8.1f ms simulated, ratio %.2f  %s", 1e3*m, 1e3*s, s/m, calibrated[i]))
	}
	b.Logf("\n%s", strings.Join(lines, "\n"))
	b.ReportMetric(float64(near), "plans-within-15%")
	b.ReportMetric(100*worst, "%worst")
	b.ReportMetric(100*agreement(measured, simulated), "%pairs-in-order")
	b.ReportMetric(0, "ns/op")
}

// probed is this computer with four ranks; something else is done behind each round of measurements.
func probed(b *testing.B, between func()) ir.Machine {
	pool := simd.NewPool(0)
	defer pool.Close()
	bench := &probe.Bench{Span: 50 * time.Millisecond, Rounds: 25, Between: between, Open: func(*ir.Program) (func(int) vm.Device, vm.Transport, error) {
		return func(int) vm.Device { return cpu.New(pool) }, nil, nil
	}}
	facts := probe.Facts{Name: "here", Ranks: 4, Processors: runtime.GOMAXPROCS(0), DeviceMemory: 1 << 30, HostMemory: 8 << 30}
	figures, err := bench.Probe(b.Context(), facts, probe.CPU)
	if err != nil {
		b.Fatal(err)
	}
	m := &figures.Machine
	b.Logf("%d processors, kernels spread at %.2f of their rate in %s", int(m.Parallelism), m.SpreadEfficiency, ir.Seconds(m.KernelLatency))
	return figures.Machine
}

// calibration is a plan, running and simulated.
type calibration struct {
	program   *ir.Program
	job       *vm.Job
	seconds   []float64 // of steps
	simulated float64   // of a step
}

func calibrate(b *testing.B, plan string) calibration {
	var set []string
	for _, request := range strings.Fields(plan) {
		set = append(set, "schedule."+request)
	}
	_, p, err := compile(calibratedSpec, set...)
	if err != nil {
		b.Fatal(err)
	}
	c := calibration{program: p, job: open(b, p, runtime.GOMAXPROCS(0), nil)}
	if err := c.job.Init(b.Context()); err != nil {
		b.Fatal(err)
	}
	doSteps(b, c.job, 1) // touches all memory
	return c
}

func (c *calibration) simulate(b *testing.B, machine ir.Machine) {
	c.program.Machine = machine
	timeline, err := sim.Run(c.program, ir.SectionStep, sim.Options{})
	if err != nil {
		b.Fatal(err)
	}
	c.simulated = float64(timeline.Makespan)
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

package e2e

import (
	"cmp"
	"fmt"
	"math"
	"runtime"
	"strings"
	"testing"
	"time"

	"sppo.dev/internal/train"
	"sppo.dev/internal/train/probe"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu"
	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// calibrated lists plans of one model for BenchmarkCalibration: pipelines, subsequences, offload,
// recomputation, virtual stages and splits of a layer, on one to four ranks.
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
	"pp=1 sp=1 subsequences=1 offload=none recompute=full",
	"pp=1 sp=1 subsequences=16 offload=full",
	"pp=2 sp=1 subsequences=32 offload=none",
	"pp=4 sp=1 subsequences=32 offload=full recompute=full",
	"pp=1 sp=4 subsequences=8 offload=none",
	"pp=4 sp=1 subsequences=1 offload=none",
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

// BenchmarkCalibration probes this computer, as `sppovm probe` does, and compares the simulated step times of
// plans with those measured on the cpu device. It reports how many plans are within 15%, the worst difference,
// how many pairs of plans the measurement distinguishes, how many of those the simulation puts in the same
// order, and how much other programs disturbed the measurements. With -v it also shows a line per plan. Rounds
// of the probe alternate with steps of the plans, each of which follows a warm-up step. Only undisturbed
// measurements are kept, and their medians are compared.
//
// The benchmark takes a quarter of an hour. With fewer rounds, noise decides the order of plans on a busy
// computer.
func BenchmarkCalibration(b *testing.B) {
	for b.Loop() {
		plans := make([]calibration, len(calibrated))
		for i, plan := range calibrated {
			plans[i] = calibrate(b, plan)
		}
		machine, disturbed := probed(b, plans)
		for i := range plans {
			plans[i].simulate(b, machine)
		}
		report(b, plans)
		b.ReportMetric(100*disturbed, "%disturbed")
	}
}

func report(b *testing.B, plans []calibration) {
	var lines []string
	worst, near := 0.0, 0
	for i := range plans {
		p := &plans[i]
		p.seconds = probe.Calm(p.samples)
		n, m := len(p.seconds), median(p.seconds)
		worst = max(worst, math.Abs(p.simulated/m-1))
		if math.Abs(p.simulated/m-1) < 0.15 {
			near++
		}
		lines = append(lines, fmt.Sprintf("%8.1f ms measured, half of %d in %.1f to %.1f, %8.1f ms simulated, ratio %.2f  %s",
			1e3*m, n, 1e3*p.seconds[n/4], 1e3*p.seconds[n-1-n/4], 1e3*p.simulated, p.simulated/m, calibrated[i]))
	}
	apart, same := 0, 0
	for i := range plans {
		for j := range i {
			faster := order(plans[i].seconds, plans[j].seconds)
			if faster == 0 {
				continue
			}
			apart++
			if faster == cmp.Compare(plans[i].simulated, plans[j].simulated) {
				same++
			} else {
				x, y := &plans[i], &plans[j]
				lines = append(lines, fmt.Sprintf("  in another order, by %.1f%% as measured and %.1f%% simulated: %s, %s",
					100*math.Abs(median(x.seconds)/median(y.seconds)-1), 100*math.Abs(x.simulated/y.simulated-1), calibrated[i], calibrated[j]))
			}
		}
	}
	b.Logf("\n%s", strings.Join(lines, "\n"))
	b.ReportMetric(float64(near), "plans-within-15%")
	b.ReportMetric(float64(len(plans)), "plans")
	b.ReportMetric(100*worst, "%worst")
	b.ReportMetric(float64(apart), "pairs-told-apart")
	b.ReportMetric(100*float64(same)/float64(max(1, apart)), "%of-these-in-order")
	b.ReportMetric(rankCorrelation(plans), "rank-correlation")
	b.ReportMetric(0, "ns/op")
}

// rankCorrelation returns Spearman's correlation between the plans' median measured times and their simulated
// times: 1 if both give the same order.
func rankCorrelation(plans []calibration) float64 {
	rank := func(of func(*calibration) float64) []float64 {
		ranks := make([]float64, len(plans))
		for i := range plans {
			for j := range plans {
				ranks[i] += float64(1+cmp.Compare(of(&plans[i]), of(&plans[j]))) / 2 // ties share their mean rank
			}
		}
		return ranks
	}
	measured := rank(func(p *calibration) float64 { return median(p.seconds) })
	simulated := rank(func(p *calibration) float64 { return p.simulated })
	mean := float64(len(plans)) / 2
	var both, of, other float64
	for i := range plans {
		x, y := measured[i]-mean, simulated[i]-mean
		both, of, other = both+x*y, of+x*x, other+y*y
	}
	return both / math.Sqrt(of*other)
}

// order returns -1 if the first list's values are smaller, 1 if they are larger, and 0 if the measurement
// cannot tell. It is the rank-sum test of Mann and Whitney, which assumes no distribution, at a significance
// level of 1%.
func order(a, b []float64) int {
	const sure = 2.576 // standard deviations
	n, m := float64(len(a)), float64(len(b))
	smaller := 0.0 // pairs in which the first value is smaller; ties count half
	for _, x := range a {
		for _, y := range b {
			smaller += float64(1-cmp.Compare(x, y)) / 2
		}
	}
	off := smaller - n*m/2
	if math.Abs(off)-0.5 <= sure*math.Sqrt(n*m*(n+m+1)/12) {
		return 0
	}
	return -cmp.Compare(off, 0)
}

// probed probes this computer with four ranks, and returns what it found and the share of disturbed
// measurements. After each round of measurements, it measures one step of each plan.
func probed(b *testing.B, plans []calibration) (machine ir.Machine, disturbed float64) {
	pool := simd.NewPool(0)
	defer pool.Close()
	bench := &probe.Bench{Span: 20 * time.Millisecond, Rounds: 60, Pulse: cpu.NewPulse(runtime.GOMAXPROCS(0)).Take,
		Open: func(*ir.Program) (func(int) vm.Device, vm.Transport, error) {
			return func(int) vm.Device { return cpu.New(pool) }, nil, nil
		}}
	bench.Between = func() {
		for i := range plans {
			p := &plans[i]
			doSteps(b, p.job, 1) // memory not used for a round is slow at first
			s, err := bench.Sample(func() (train.StepResult, error) { return p.job.Step(b.Context()) })
			if err != nil {
				b.Fatal(err)
			}
			p.samples = append(p.samples, s)
		}
	}
	facts := probe.Facts{Name: "here", Ranks: 4, Processors: runtime.GOMAXPROCS(0), DeviceMemory: 1 << 30, HostMemory: 8 << 30}
	figures, err := bench.Probe(b.Context(), facts, probe.CPU)
	if err != nil {
		b.Fatal(err)
	}
	m := &figures.Machine
	b.Logf("%d processors, kernels spread at %.2f of their rate in %s", int(m.Parallelism), m.SpreadEfficiency, ir.Seconds(m.KernelLatency))
	var steps [][]probe.Sample
	for _, p := range plans {
		steps = append(steps, p.samples)
	}
	return figures.Machine, max(figures.Disturbed, bench.Disturbed(steps...))
}

// calibration holds the measured and the simulated results of a plan.
type calibration struct {
	program   *ir.Program
	job       *train.Job
	samples   []probe.Sample // measured steps
	seconds   []float64      // durations of the counted samples, ascending
	simulated float64        // simulated duration of a step
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

// order distinguishes lists that differ, lists that do not, and lists that are too short.
func TestOrderOfPlans(t *testing.T) {
	few, many, more := []float64{1, 2, 3}, []float64{1, 2, 3, 4, 5, 6, 7, 8}, []float64{7, 8, 9, 10, 11, 12, 13, 14}
	for _, c := range []struct {
		a, b []float64
		want int
	}{{many, more, -1}, {more, many, 1}, {many, many, 0}, {few, more[3:], 0}} { // three measurements are not enough
		if got := order(c.a, c.b); got != c.want {
			t.Errorf("%v and %v: %d, want %d", c.a, c.b, got, c.want)
		}
	}
	plans := func(simulated ...float64) (list []calibration) {
		for i, s := range simulated {
			list = append(list, calibration{seconds: []float64{float64(i)}, simulated: s})
		}
		return list
	}
	for _, c := range []struct {
		plans []calibration
		want  float64
	}{{plans(10, 20, 21, 50), 1}, {plans(4, 3, 2, 1), -1}, {plans(1, 3, 2, 4), 0.8}} {
		if got := rankCorrelation(c.plans); math.Abs(got-c.want) > 1e-12 {
			t.Errorf("the rank correlation is %g, want %g", got, c.want)
		}
	}
}

package probe

import (
	"math"
	"testing"

	"sppo.dev/internal/cost"
	"sppo.dev/ir"
)

// computer answers with the cost model's own times, plus effects that appear only in a layer or after a kernel.
type computer struct {
	ir.Machine
	processors int
	longer     float64 // factor by which a layer lengthens the time of kernels with an efficiency curve
	meeting    float64 // minimum seconds that ranks take to meet after a kernel
}

// take measures an item. With as many ranks as processors, each rank has its own processor; a single rank has
// all of them.
func (c computer) take(t *testing.T, item Item, ranks int) Timing {
	t.Helper()
	p, err := item.program(ranks, 1)
	if err != nil {
		t.Fatal(err)
	}
	timing := Timing{Item: item, Ranks: ranks, Works: item.works(p)}
	c.NVLinkBandwidth /= max(float64(ranks)/float64(c.processors), 1)
	model := cost.New(c.Machine, 1)
	one, kernels := 0.0, 0
	for _, w := range timing.Works {
		took := float64(model.One(w, cost.Link{Ranks: ranks, Nodes: 1}))
		if len(timing.Works) > 2 && w.Kind != ir.WorkMemory {
			took *= c.longer
		}
		if cost.Spreads(w) {
			kernels++
		} else if len(timing.Works) == 2 {
			took = max(took, c.meeting)
		}
		one += took
	}
	timing.Seconds = one
	if ranks == 1 && kernels > 0 {
		timing.Seconds = float64(kernels)*c.KernelLatency + one/(c.Parallelism*c.SpreadEfficiency)
	}
	return timing
}

func (c computer) figures(t *testing.T) *ir.Machine {
	facts := Facts{Name: c.Name, Ranks: c.GPUsPerNode, Processors: c.processors}
	return &figures(facts, CPU, func(item Item, ranks int) Timing { return c.take(t, item, ranks) }).Machine
}

func few() computer {
	return computer{
		Machine: ir.Machine{
			Name: "few processors", Nodes: 1, GPUsPerNode: 4, Parallelism: 2, PeakF32: 80e9, PeakBF16: 60e9, MemoryBandwidth: 12e9, CopyEfficiency: 1,
			D2HBandwidth: 6e9, H2DBandwidth: 5e9, NVLinkBandwidth: 40e9, NVLinkLatency: 6e-6, CollectiveEfficiency: 0.7,
			KernelLatency: 4e-6, SpreadEfficiency: 0.9,
			MatmulEfficiency:    []ir.CurvePoint{{16, 0.5}, {64, 0.8}, {256, 1}},
			AttentionEfficiency: []ir.CurvePoint{{16, 0.3}, {64, 0.5}, {256, 0.6}, {1024, 0.7}},
			AttentionGradEff:    []ir.CurvePoint{{16, 0.2}, {64, 0.4}, {256, 0.5}, {1024, 0.6}},
		},
		processors: 2, longer: 1, meeting: 6e-6,
	}
}

// The figures recover the effects that appear only in layers or after kernels. Each effect has a value that no
// other figure explains.
func TestFiguresOfProcessors(t *testing.T) {
	for name, change := range map[string]func(*computer){
		"nothing shows there":     func(*computer) {},
		"slower in layers":        func(c *computer) { c.longer = 1.25 },
		"late to meet":            func(c *computer) { c.meeting = 36e-6 },
		"three processors":        func(c *computer) { c.processors, c.Parallelism, c.longer, c.meeting = 3, 3, 1.1, 60e-6 },
		"more to wake, less gain": func(c *computer) { c.KernelLatency, c.SpreadEfficiency, c.longer = 11e-6, 0.8, 1.1 },
	} {
		t.Run(name, func(t *testing.T) {
			c := few()
			change(&c)
			m := c.figures(t)
			check := func(name string, got, want float64) {
				if !(math.Abs(got-want) <= 0.03*want) {
					t.Errorf("%s: %g, the computer has %g", name, got, want)
				}
			}
			check("peak_f32", m.PeakF32, c.PeakF32)
			check("memory_bandwidth", m.MemoryBandwidth, c.MemoryBandwidth)
			check("d2h_bandwidth", m.D2HBandwidth, c.D2HBandwidth)
			check("kernel_latency", m.KernelLatency, c.KernelLatency)
			check("spread_efficiency", m.SpreadEfficiency, c.SpreadEfficiency)
			check("nvlink_latency", m.NVLinkLatency, max(c.NVLinkLatency, c.meeting/3))
			curve := func(name string, got, own []ir.CurvePoint) {
				for _, p := range got {
					check(name, p[1], cost.Efficiency(own, int64(p[0]))/c.longer)
				}
			}
			curve("matmul_efficiency", m.MatmulEfficiency, c.MatmulEfficiency)
			curve("attention_efficiency", m.AttentionEfficiency, c.AttentionEfficiency)
			curve("attention_grad_efficiency", m.AttentionGradEff, c.AttentionGradEff)
		})
	}
}

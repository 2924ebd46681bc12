package main

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"

	"sppo.dev/internal/train/probe"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// clusterText returns a cluster file in the standard style, with the measured figures and the origin of each.
func clusterText(name, about string, f *probe.Figures) ([]byte, error) {
	m := &f.Machine
	var b strings.Builder
	fmt.Fprintf(&b, "# %s.\ncluster %s {\n", about, name)
	line := func(key, value string) {
		fmt.Fprintf(&b, "%s = %s", key, value)
		if note := f.Notes[key]; note != "" {
			fmt.Fprintf(&b, "   # %s", note)
		}
		b.WriteByte('\n')
	}
	gap := func() { b.WriteByte('\n') }
	line("nodes", strconv.Itoa(m.Nodes))
	line("gpus_per_node", strconv.Itoa(m.GPUsPerNode))
	gap()
	line("device_memory", fmt.Sprintf("%dMiB", m.DeviceMemory>>20))
	line("host_memory", fmt.Sprintf("%dMiB", m.HostMemory>>20))
	gap()
	line("peak_bf16", quantity(m.PeakBF16, flopUnits))
	line("peak_f32", quantity(m.PeakF32, flopUnits))
	line("memory_bandwidth", quantity(m.MemoryBandwidth, rateUnits))
	line("d2h_bandwidth", quantity(m.D2HBandwidth, rateUnits))
	line("h2d_bandwidth", quantity(m.H2DBandwidth, rateUnits))
	line("node_copy_bandwidth", quantity(m.NodeCopyBandwidth, rateUnits))
	line("copy_duplex", cmp.Or(m.CopyDuplex, "full"))
	line("parallelism", digits(m.Parallelism))
	line("spread_efficiency", digits(m.SpreadEfficiency))
	gap()
	line("nvlink_bandwidth", quantity(m.NVLinkBandwidth, rateUnits))
	line("node_network_bandwidth", quantity(m.NodeNetworkBandwidth, rateUnits))
	line("nvlink_latency", quantity(m.NVLinkLatency, timeUnits))
	line("network_latency", quantity(m.NetworkLatency, timeUnits))
	line("kernel_latency", quantity(m.KernelLatency, timeUnits))
	gap()
	line("copy_efficiency", digits(m.CopyEfficiency))
	line("collective_efficiency", digits(m.CollectiveEfficiency))
	gap()
	line("matmul_efficiency", curveText(m.MatmulEfficiency))
	line("attention_efficiency", curveText(m.AttentionEfficiency))
	line("attention_grad_efficiency", curveText(m.AttentionGradEff))
	b.WriteString("}\n")
	return lang.Format("the cluster file", []byte(b.String()))
}

// unit is a unit of the language; lists of units begin with the largest.
type unit struct {
	name  string
	scale float64
}

var (
	flopUnits = []unit{{"TFLOPS", 1e12}, {"GFLOPS", 1e9}}
	rateUnits = []unit{{"TB/s", 1e12}, {"GB/s", 1e9}, {"MB/s", 1e6}}
	timeUnits = []unit{{"ms", 1e-3}, {"us", 1e-6}, {"ns", 1e-9}}
)

// quantity writes a figure in the largest unit that makes it at least one.
func quantity(x float64, units []unit) string {
	if x == 0 {
		return "0"
	}
	u := units[len(units)-1]
	for i := len(units) - 1; i >= 0; i-- {
		if x >= units[i].scale {
			u = units[i]
		}
	}
	return digits(x/u.scale) + u.name
}

// digits rounds to four significant digits, the precision of a measurement. Positive numbers stay positive.
func digits(x float64) string {
	rounded, err := strconv.ParseFloat(strconv.FormatFloat(x, 'g', 4, 64), 64)
	if err != nil {
		panic("internal: " + err.Error())
	}
	return strconv.FormatFloat(rounded, 'f', -1, 64)
}

func curveText(curve []ir.CurvePoint) string {
	var points []string
	for _, p := range curve {
		points = append(points, fmt.Sprintf("[%d, %s]", int64(p[0]), digits(p[1])))
	}
	return "[" + strings.Join(points, ", ") + "]"
}

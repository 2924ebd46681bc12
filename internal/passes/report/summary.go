package report

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/words"
	"sppo.dev/ir"
)

// Section is a part of the full report of a plan.
type Section struct {
	Name  string
	Doc   string
	write func(*plan.Plan, *strings.Builder)
}

// Sections lists the sections in the order in which Write writes them.
var Sections = []Section{
	{"job", "the model and the sizes of the schedule", reportJob},
	{"stages", "layers, idle time and peak memory of each stage", reportStages},
	{"time", "the time of a step, the bubble, exposed copies and throughput", reportTotals},
	{"path", "the critical path of a step", reportPath},
	{"memory", "peak memory by use, the largest buffers, and what does not fit", reportAllMemory},
	{"search", "the next best plans and the rejected values", reportSearch},
	{"why", "the reason for each decision", reportReasons},
}

// SectionNames returns the names of all sections.
func SectionNames() (names []string) {
	for i := range Sections {
		names = append(names, Sections[i].Name)
	}
	return names
}

// WriteSections writes the sections with the given names, in the order of Sections.
func WriteSections(w io.Writer, p *plan.Plan, names []string) error {
	var b strings.Builder
	for i := range Sections {
		if s := &Sections[i]; slices.Contains(names, s.Name) {
			s.write(p, &b)
		}
	}
	_, err := io.WriteString(w, strings.TrimRight(b.String(), "\n")+strings.Repeat("\n", min(1, b.Len())))
	return err
}

// worrying is the share of a step by which an unplanned candidate may be faster before the summary says so.
const worrying = 0.05

// summaryWidth is the width of the second column of the summary, so that no line has more than 120 columns.
const summaryWidth = 106

// WriteSummary writes the answer that a plan gives in at most 11 lines: whether the job fits, time, throughput, ranks,
// recomputation, offload and memory, and a warning for each reason to distrust it. The plan must be placed.
func WriteSummary(w io.Writer, p *plan.Plan) error {
	var b strings.Builder
	title(p, &b)
	par, m := p.Parallel, p.Memory
	table(&b, func(cells func(...string)) {
		line := func(name, text string) {
			for _, part := range words.Fold(text, summaryWidth) {
				cells(name, part)
				name = ""
			}
		}
		line("fits", fitsInWords(m))
		line("step", stepInWords(p))
		line("throughput", throughputInWords(p))
		line("ranks", ranksInWords(p)+fmt.Sprintf("; sp_mode %s, zero %d", par.SPMode, par.Zero))
		kept, offloaded, recomputed := Shares(p)
		line("recompute", fmt.Sprintf("%s of the saved activations", percent(recomputed)))
		line("offload", fmt.Sprintf("%s to host memory, %s kept on the device%s", percent(offloaded), percent(kept), inTransit(p, kept, offloaded)))
		device, host := slices.Max(m.DevicePeakBytes), slices.Max(m.HostPeakBytes)
		line("memory", fmt.Sprintf("device %s, host %s per rank", ofCapacity(device, m.DeviceCapacityBytes), ofCapacity(host, m.HostCapacityBytes)))
		for _, warning := range Warnings(p) {
			line("warning", warning)
		}
	})
	_, err := io.WriteString(w, b.String())
	return err
}

// fitsInWords returns yes, or what is short in each arena.
func fitsInWords(m plan.Memory) string {
	var lacking []string
	for _, s := range m.Shortfalls() {
		lacking = append(lacking, s.String())
	}
	if len(lacking) == 0 {
		return "yes"
	}
	return "no: " + strings.Join(lacking, "; ")
}

// Sums returns the times and the memory of a placed plan, by name.
func Sums(p *plan.Plan) map[string]string {
	m := p.Memory
	return map[string]string{
		"step":          p.Time.StepS.String(),
		"throughput":    throughputInWords(p),
		"device memory": ofCapacity(slices.Max(m.DevicePeakBytes), m.DeviceCapacityBytes),
		"host memory":   ofCapacity(slices.Max(m.HostPeakBytes), m.HostCapacityBytes),
	}
}

// throughputInWords describes the throughput of a plan.
func throughputInWords(p *plan.Plan) string {
	return fmt.Sprintf("%s tokens/s (%s per %s), %.1f%% model FLOPs utilization (MFU)",
		thousands(int64(math.Round(p.Throughput.TGS*float64(p.Parallel.Ranks())))), thousands(int64(math.Round(p.Throughput.TGS))), unitInUse(p), 100*p.Throughput.MFU)
}

// unitInUse names what throughput is divided by.
func unitInUse(p *plan.Plan) string {
	if p.Cluster.GPUs() > p.Parallel.Ranks() {
		return p.Cluster.Unit() + " in use"
	}
	return p.Cluster.Unit()
}

// stepInWords describes the time of a step, which is an upper bound if sequences have several documents.
func stepInWords(p *plan.Plan) string {
	text := p.Time.StepS.String()
	if !p.Time.Simulated {
		text += " (estimated)"
	}
	switch d := p.Documents; {
	case d != nil && d.Problem == "":
		text += fmt.Sprintf(" at most; about %s with the data's documents", d.StepS)
	case documentsInWords(p) != "":
		text += " at most, because documents end inside sequences"
	}
	return text
}

// ranksInWords describes the division of the ranks.
func ranksInWords(p *plan.Plan) string {
	par := p.Parallel
	return fmt.Sprintf("%d of %s: dp %d x pp %d x sp %s", par.Ranks(), words.Plural(p.Cluster.GPUs(), p.Cluster.Unit()), par.DP, par.PP, par.SPText())
}

// percent writes a share with at most three digits.
func percent(share float64) string {
	if share == 0 || share == 1 {
		return fmt.Sprintf("%.0f%%", 100*share)
	}
	return fmt.Sprintf("%.1f%%", 100*share)
}

// inTransit explains why saved activations take device memory at the peak although all of them go to the host.
func inTransit(p *plan.Plan, kept, offloaded float64) string {
	const noticeable = 0.005
	var most ir.Bytes
	for i := range p.Memory.Device {
		most = max(most, p.Memory.Device[i].Parts[ir.PartSaved])
	}
	if kept > noticeable || offloaded == 0 || float64(most) < noticeable*float64(p.Memory.DeviceCapacityBytes) {
		return ""
	}
	return fmt.Sprintf("; up to %s there before and after the copies", most)
}

// Shares returns the shares of the type-1 bytes that stay on the device, go to the host, and are recomputed.
func Shares(p *plan.Plan) (kept, offloaded, recomputed float64) {
	g := p.Graph()
	var bytes [256]ir.Bytes
	for s, stage := range p.Offload.Placement {
		kinds := p.KindsOn(g, s)
		for i, placement := range stage {
			for at, size := range plan.LetterSizes(kinds, plan.UnitSizes(g, p.Size(i))) {
				bytes[placement[at]] += size
			}
		}
	}
	all := float64(max(1, bytes[plan.PlacementKeep]+bytes[plan.PlacementOffload]+bytes[plan.PlacementRecompute]))
	return float64(bytes[plan.PlacementKeep]) / all, float64(bytes[plan.PlacementOffload]) / all, float64(bytes[plan.PlacementRecompute]) / all
}

// Unproved reports whether the search for a plan that fits ended before it had ruled out much faster ones.
func Unproved(p *plan.Plan) bool {
	return p.Search != nil && !p.Search.Stopped && p.Search.Within > worrying && p.Memory.Shortfall() == nil
}

// Warnings returns a sentence for each reason to doubt that a plan is the best one.
func Warnings(p *plan.Plan) (out []string) {
	if idle := p.Cluster.GPUs() - p.Parallel.Ranks(); idle > 0 {
		out = append(out, fmt.Sprintf("%d of the %s %s idle: %s", idle, words.Plural(p.Cluster.GPUs(), p.Cluster.Unit()), words.Are(idle), whyIdle(p)))
	}
	if text := scalarHeads(p); text != "" {
		out = append(out, text)
	}
	if p.Search != nil && p.Search.Stopped {
		out = append(out, "the search was stopped; this is the best plan so far")
	} else if s := p.Search; Unproved(p) {
		text := fmt.Sprintf("not proved the best: a step takes at most %.0f%% longer than that of the best plan", 100*s.Within)
		if f := s.Faster; f != nil {
			text = fmt.Sprintf("a plan with --set %s=%s is %.0f%% faster, by estimate (%s)", f.Key, quoted(f.Value), 100*(1-float64(f.StepS/s.StepS)), f.StepS)
		}
		out = append(out, text)
	}
	return out
}

// scalarHeads returns a sentence if GPUs compute the attention of a bf16 model without tensor cores, or "".
func scalarHeads(p *plan.Plan) string {
	dim, value := p.Model.HeadDim, cmp.Or(p.Model.ValueHeadDim, p.Model.HeadDim)
	if _, ok := ir.HeadKernelOf(int64(dim), int64(value)); ok || p.Model.DType != "bf16" || p.Cluster.Unit() != "GPU" {
		return ""
	}
	name := func(dim, value int64) string {
		if value != dim {
			return fmt.Sprintf("%d with values of %d", dim, value)
		}
		return fmt.Sprint(dim)
	}
	var dims, others []string
	for _, k := range ir.HeadKernels {
		if k.Dim == k.Value {
			dims = append(dims, name(k.Dim, k.Value))
		} else {
			others = append(others, name(k.Dim, k.Value))
		}
	}
	dims = append(dims, others...)
	return fmt.Sprintf("attention is slow: there are no kernels on tensor cores for heads of %s elements, only for %s", name(int64(dim), int64(value)), strings.Join(dims, ", "))
}

// whyIdle returns the reason why a plan leaves GPUs idle.
func whyIdle(p *plan.Plan) string {
	if p.Search == nil || p.Search.AllGPUs == nil {
		return "the spec sets sp, dp and pp"
	}
	switch r := p.Search.AllGPUs; {
	case r.StepS > 0:
		return fmt.Sprintf("on all of them (%s), a step takes %s, by estimate", r.Value, r.StepS)
	case r.BoundS > 0:
		return fmt.Sprintf("no plan on all of them was found to fit; one may exist that takes at least %s", r.BoundS)
	case r.Value != "":
		return fmt.Sprintf("the spec sets %s, which does not divide %d", r.Value, p.Cluster.GPUs())
	}
	heads := fmt.Sprintf("tokens and, unless sp_mode is ring, heads = %d", p.Model.Heads)
	if n := p.Model.LinearKeyHeads; n > 0 {
		heads = fmt.Sprintf("tokens, heads = %d and linear_num_key_heads = %d", p.Model.Heads, n)
	}
	return fmt.Sprintf("no plan on all of them was found; sp divides %s; dp divides the batch; pp is at most the number of layers", heads)
}

// quoted quotes a value for a shell if necessary.
func quoted(value string) string {
	if strings.ContainsAny(value, " []") {
		return "'" + value + "'"
	}
	return value
}

package probe

import (
	"context"
	"fmt"
	"slices"

	"sppo/ir"
)

// Facts are what cannot be measured.
type Facts struct {
	Name         string // of the machine, for people
	Ranks        int    // that a node of it runs
	Shared       bool   // they share its processors, as threads of one computer do
	DeviceMemory int64  // bytes that a rank may take
	HostMemory   int64  // bytes that all ranks of a node may take
	PeakBF16     float64
	PeakF32      float64 // of the data sheet; 0: the best that is measured
	PeakSource   string  // which data sheet
}

// Scale says how large the items are.
type Scale struct {
	DType  ir.DType // of most items: what models on such a machine are of
	Inner  int64    // columns and depth of products
	Rows   []int64  // of products, rising
	Tokens []int64  // of attention, rising
	Prefix int64    // tokens before them
	Heads  Heads
	Bytes  int64 // of what memory-bound kernels and copies work on: more than caches hold
	Cols   int64 // of a row of those kernels
}

// The scales of GPUs and of processors.
var (
	GPU = Scale{
		DType: ir.BF16, Inner: 4096, Rows: []int64{128, 512, 1024, 2048, 4096, 8192}, Tokens: []int64{128, 512, 1024, 2048, 4096, 8192},
		Prefix: 16384, Heads: Heads{16, 16, 128}, Bytes: 256 << 20, Cols: 4096,
	}
	CPU = Scale{
		DType: ir.F32, Inner: 256, Rows: []int64{16, 64, 256, 1024}, Tokens: []int64{16, 64, 256}, Prefix: 512,
		Heads: Heads{4, 4, 64}, Bytes: 32 << 20, Cols: 1024,
	}
)

// Figures is a machine as measured. Notes say of its fields, by their JSON names, where each figure comes from.
type Figures struct {
	Machine ir.Machine
	Notes   map[string]string
	Timings []Timing
}

// prober takes measurements in turn; after an error nothing is measured any more.
type prober struct {
	*Figures
	ctx   context.Context
	bench *Bench
	facts Facts
	scale Scale
	err   error
}

// Probe measures everything that a cluster file says, in the order in which figures depend on each other.
func (b *Bench) Probe(ctx context.Context, facts Facts, scale Scale) (*Figures, error) {
	p := &prober{Figures: &Figures{Notes: map[string]string{}}, ctx: ctx, bench: b, facts: facts, scale: scale}
	m := &p.Machine
	m.Name, m.Nodes, m.GPUsPerNode = facts.Name, 1, facts.Ranks
	m.DeviceMemory, m.HostMemory = facts.DeviceMemory, facts.HostMemory
	p.parallelism()
	p.latency()
	p.memory()
	p.products()
	p.attention()
	p.copies()
	p.links()
	return p.Figures, p.err
}

// measure is a measurement on so many ranks at once.
func (p *prober) measure(item Item, ranks int) Timing {
	if p.err != nil {
		return Timing{Seconds: 1}
	}
	t, err := p.bench.Measure(p.ctx, item, ranks)
	p.err = err
	p.Timings = append(p.Timings, t)
	return t
}

// own is an item that every rank of the node does at the same time, as in training. Where ranks share processors its time
// is what a rank alone would take, as far as all of them together get that much more done than one.
func (p *prober) own(item Item) Timing {
	t := p.measure(item, p.facts.Ranks)
	if p.Machine.Parallelism > 0 {
		t.Seconds *= p.Machine.Parallelism / float64(p.facts.Ranks)
	}
	return t
}

// parallelism is how much more work all ranks get done than one: what a kernel alone leaves of the processors. It is the
// median of products and attention, where most time goes; the rates are those of all ranks at work, so it only says what one gains
// while others wait.
func (p *prober) parallelism() {
	n, s := p.facts.Ranks, p.scale
	p.note("parallelism", "every rank has a processor of its own")
	if !p.facts.Shared || n < 2 {
		return
	}
	var gains []float64
	rows, tokens := s.Rows[len(s.Rows)-1], s.Tokens[len(s.Tokens)-1]
	for _, item := range []Item{
		Matmul(rows, s.Inner, s.Inner, s.DType), Attention(tokens, s.Prefix, s.Heads, s.DType), AttentionGrad(tokens, s.Prefix, s.Heads, s.DType),
	} {
		gains = append(gains, float64(n)*p.measure(item, 1).Seconds/p.measure(item, n).Seconds)
	}
	slices.Sort(gains)
	p.Machine.Parallelism = min(max(gains[len(gains)/2], 1), float64(n))
	p.note("parallelism", "%d ranks against one, the median of %d kernels; they differ from %.2f to %.2f", n, len(gains), gains[0], gains[len(gains)-1])
}

func (p *prober) note(field, format string, args ...any) {
	p.Notes[field] = fmt.Sprintf(format, args...)
}

func (p *prober) latency() {
	p.Machine.KernelLatency = p.own(Nothing()).Seconds
	p.note("kernel_latency", "kernels on 8 elements, one after another")
}

// memory: the bandwidth is that of the fastest copy or kernel, the efficiency what kernels reach of it in the middle.
func (p *prober) memory() {
	m := &p.Machine
	fastest := p.own(Copy(ir.CopyD2D, p.scale.Bytes))
	var rates []float64
	for _, item := range MemoryBound(p.scale.Bytes, p.scale.Cols, p.scale.DType) {
		t := p.own(item)
		rates = append(rates, t.Bytes(m.KernelLatency))
		if t.Bytes(m.KernelLatency) > fastest.Bytes(m.KernelLatency) {
			fastest = t
		}
	}
	slices.Sort(rates)
	m.MemoryBandwidth = fastest.Bytes(m.KernelLatency)
	m.CopyEfficiency = rates[len(rates)/2] / m.MemoryBandwidth
	p.note("memory_bandwidth", "%s, bytes read and written", fastest.Item.Name)
	p.note("copy_efficiency", "the median of %d memory-bound kernels; the slowest reaches %.2f", len(rates), rates[0]/m.MemoryBandwidth)
}

// products: the peaks, and the share of them by rows.
func (p *prober) products() {
	m, s := &p.Machine, p.scale
	peaks := map[ir.DType]*float64{ir.BF16: &m.PeakBF16, ir.F32: &m.PeakF32}
	m.PeakBF16, m.PeakF32 = p.facts.PeakBF16, p.facts.PeakF32
	other := ir.DType(ir.BF16)
	if s.DType == ir.BF16 {
		other = ir.F32
	}
	side := min(s.Rows[len(s.Rows)-1], s.Inner)
	timings := []Timing{p.own(Matmul(side, side, side, other))}
	for _, rows := range s.Rows {
		timings = append(timings, p.own(Matmul(rows, s.Inner, s.Inner, s.DType)))
	}
	for t, name := range map[ir.DType]string{ir.BF16: "peak_bf16", ir.F32: "peak_f32"} {
		p.note(name, "%s", p.facts.PeakSource)
		if *peaks[t] > 0 {
			continue
		}
		for _, x := range timings {
			if rate := x.Flops(m.KernelLatency); x.Work.DType == t && rate > *peaks[t] {
				*peaks[t] = rate
				p.note(name, "%s, the fastest", x.Item.Name)
			}
		}
	}
	m.MatmulEfficiency = p.curve(timings[1:], *peaks[s.DType])
	p.note("matmul_efficiency", "share of the peak by rows, %s, %d columns and as deep", s.DType, s.Inner)
}

// curve is the share of a peak that timings reach, by their size.
func (p *prober) curve(timings []Timing, peak float64) (points []ir.CurvePoint) {
	for _, t := range timings {
		share := min(t.Flops(p.Machine.KernelLatency)/peak, 1)
		if n := len(points); n > 0 && points[n-1][0] == float64(t.Work.Rows) {
			points[n-1][1] = max(points[n-1][1], share) // sizes beyond the other two dimensions count as those
			continue
		}
		points = append(points, ir.CurvePoint{float64(t.Work.Rows), share})
	}
	return points
}

func (p *prober) attention() {
	m, s := &p.Machine, p.scale
	peak := m.PeakF32
	if s.DType == ir.BF16 {
		peak = m.PeakBF16
	}
	var forward, backward []Timing
	for _, n := range s.Tokens {
		forward = append(forward, p.own(Attention(n, s.Prefix, s.Heads, s.DType)))
		backward = append(backward, p.own(AttentionGrad(n, s.Prefix, s.Heads, s.DType)))
	}
	m.AttentionEfficiency, m.AttentionGradEff = p.curve(forward, peak), p.curve(backward, peak)
	shape := fmt.Sprintf("by tokens, %s, behind %d others, %d heads of %d", s.DType, s.Prefix, s.Heads.Heads, s.Heads.Dim)
	p.note("attention_efficiency", "%s", shape)
	p.note("attention_grad_efficiency", "%s", shape)
}

// shared is the share of its own rate that a rank keeps while all copy, above which nothing counts as shared.
const shared = 0.95

func (p *prober) copies() {
	m, ranks := &p.Machine, float64(p.facts.Ranks)
	limit := 0.0
	for _, c := range []struct {
		op    ir.Op
		field string
		rate  *float64
	}{{ir.CopyD2H, "d2h_bandwidth", &m.D2HBandwidth}, {ir.CopyH2D, "h2d_bandwidth", &m.H2DBandwidth}} {
		if m.Parallelism > 0 { // what copies share with each other is the processors
			*c.rate = p.own(Copy(c.op, p.scale.Bytes)).Bytes(m.KernelLatency)
			p.note(c.field, "%s at a time", ir.Bytes(p.scale.Bytes))
			continue
		}
		*c.rate = p.measure(Copy(c.op, p.scale.Bytes), 1).Bytes(m.KernelLatency)
		p.note(c.field, "one rank alone, %s at a time", ir.Bytes(p.scale.Bytes))
		if p.facts.Ranks < 2 {
			continue
		}
		if all := p.own(Copy(c.op, p.scale.Bytes)).Bytes(m.KernelLatency); all < shared**c.rate && (limit == 0 || ranks*all < limit) {
			limit = ranks * all
		}
	}
	m.NodeCopyBandwidth = limit
	p.note("node_copy_bandwidth", "all ranks at once, one way")
	if limit == 0 {
		p.note("node_copy_bandwidth", "ranks do not slow each other down")
	}
}

// links: between two ranks, and among all. A rank alone has none, and a network is not looked for: then the figures are
// those of copies to the host, which messages would have to go through.
func (p *prober) links() {
	m := &p.Machine
	const small = 4096
	if p.facts.Ranks < 2 {
		m.NVLinkBandwidth, m.NVLinkLatency, m.CollectiveEfficiency = min(m.D2HBandwidth, m.H2DBandwidth), m.KernelLatency, 1
		for _, field := range []string{"nvlink_bandwidth", "nvlink_latency", "collective_efficiency"} {
			p.note(field, "not measured: there is one rank")
		}
	} else {
		m.NVLinkLatency = max(p.measure(Message(small), 2).Seconds-m.KernelLatency, 0)
		m.NVLinkBandwidth = p.measure(Message(p.scale.Bytes), 2).Bytes(m.KernelLatency + m.NVLinkLatency)
		n := p.facts.Ranks
		t := p.measure(Gather(p.scale.Bytes, n), n)
		moved := float64(t.Work.Bytes) * float64(n-1) / float64(n)
		rate := over(moved, t.Seconds-m.KernelLatency-m.NVLinkLatency*float64(n-1))
		m.CollectiveEfficiency = min(rate/m.NVLinkBandwidth, 1)
		p.note("nvlink_bandwidth", "messages of %s between two ranks", ir.Bytes(p.scale.Bytes))
		p.note("nvlink_latency", "messages of %s between two ranks", ir.Bytes(small))
		p.note("collective_efficiency", "%s", t.Item.Name)
	}
	m.NetworkBandwidth, m.NetworkLatency = m.NVLinkBandwidth, m.NVLinkLatency
	p.note("network_bandwidth", "not measured: there is one node")
	p.note("network_latency", "not measured: there is one node")
}

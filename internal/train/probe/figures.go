package probe

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"sppo.dev/internal/cost"
	"sppo.dev/ir"
)

// Facts are the properties of a machine that cannot be measured.
type Facts struct {
	Name         string // name of the machine
	Ranks        int    // per node
	Processors   int    // shared by the ranks, as threads of one computer; 0: each rank has its own
	DeviceMemory int64  // bytes per rank
	HostMemory   int64  // bytes per node
	PeakBF16     float64
	PeakF32      float64 // from the data sheet; 0: use the best measurement
	PeakSource   string  // the data sheet
}

// Scale holds the sizes of the items to measure.
type Scale struct {
	DType  ir.DType // type of most items: the usual one for models on such a machine
	Inner  int64    // columns and depth of products
	Rows   []int64  // rows of products, ascending; at least two if ranks share processors
	Tokens []int64  // tokens of attention, ascending; at least two if ranks share processors
	Prefix int64    // tokens before those of attention
	Heads  Heads
	Bytes  int64 // bytes per operand of memory-bound kernels, copies and messages, as in a layer's activations
	Cols   int64 // columns of the operands of memory-bound kernels
}

// GPU and CPU are the scales for GPUs and for processors.
var (
	GPU = Scale{
		DType: ir.BF16, Inner: 4096, Rows: []int64{128, 512, 1024, 2048, 4096, 8192}, Tokens: []int64{128, 512, 1024, 2048, 4096, 8192},
		Prefix: 16384, Heads: Heads{16, 16, 128}, Bytes: 256 << 20, Cols: 4096,
	}
	CPU = Scale{
		DType: ir.F32, Inner: 256, Rows: []int64{16, 64, 256, 1024}, Tokens: []int64{16, 64, 256, 1024}, Prefix: 512,
		Heads: Heads{4, 4, 64}, Bytes: 1 << 20, Cols: 1024,
	}
)

// Figures holds the measured figures of a machine. Notes state the origin of each figure, by the JSON name of
// its field.
type Figures struct {
	Machine   ir.Machine
	Notes     map[string]string
	Timings   []Timing
	Disturbed float64 // fraction of the used measurements that other work slowed down
}

// prober derives figures from measurements.
type prober struct {
	*Figures
	facts Facts
	scale Scale
	take  func(Item, int) Timing // measures an item that runs on the given number of ranks at the same time
}

// Probe measures all figures of a cluster file. The choice of measurements does not depend on their results, so
// the figures are derived twice: first to collect the list of measurements, which are then taken in rounds, and
// then from their results.
func (b *Bench) Probe(ctx context.Context, facts Facts, scale Scale) (*Figures, error) {
	t := newTurns()
	figures(facts, scale, t.ask)
	samples, err := t.measure(ctx, b)
	if err != nil {
		return nil, err
	}
	f := figures(facts, scale, t.answer)
	f.Timings, f.Disturbed = t.timings, b.Disturbed(samples...)
	return f, nil
}

// figures derives all figures in the order of their dependencies.
func figures(facts Facts, scale Scale, take func(Item, int) Timing) *Figures {
	p := &prober{Figures: &Figures{Notes: map[string]string{}}, facts: facts, scale: scale, take: take}
	m := &p.Machine
	m.Name, m.Nodes, m.GPUsPerNode = facts.Name, 1, facts.Ranks
	m.DeviceMemory, m.HostMemory = facts.DeviceMemory, facts.HostMemory
	m.Parallelism = float64(facts.Processors)
	p.note("parallelism", "every rank has its own processor")
	if facts.Processors > 0 {
		p.note("parallelism", "threads; rates are those of a single one")
	}
	p.latency()
	p.memory()
	p.products()
	p.attention()
	p.layers()
	p.copies()
	p.links()
	return p.Figures
}

// own measures an item on every rank of the node at the same time, as in training. If ranks share
// processors, it uses one rank for each processor.
func (p *prober) own(item Item) Timing {
	if n := p.facts.Processors; n > 0 {
		return p.take(item, n)
	}
	return p.take(item, p.facts.Ranks)
}

// start returns the time to start an instruction. On shared processors it is 0: the kernel latency is then the
// time to spread a kernel over several processors, which measurements of all ranks at the same time do not
// include.
func (p *prober) start() float64 {
	if p.facts.Processors > 0 {
		return 0
	}
	return p.Machine.KernelLatency
}

func (p *prober) note(field, format string, args ...any) {
	p.Notes[field] = fmt.Sprintf(format, args...)
}

func (p *prober) latency() {
	m := &p.Machine
	m.SpreadEfficiency = 1
	p.note("spread_efficiency", "every rank has its own processor")
	if p.facts.Processors == 0 {
		m.KernelLatency = p.own(Nothing()).Seconds
		p.note("kernel_latency", "kernels on 8 elements, one after another")
		return
	}
	p.note("kernel_latency", "there is one processor")
	p.note("spread_efficiency", "there is one processor")
	if p.facts.Processors == 1 {
		return
	}
	small, large := p.spread()
	var shares []float64
	for _, item := range large {
		shares = append(shares, p.own(item).Seconds/m.Parallelism/p.take(item, 1).Seconds)
	}
	// resident is the spread efficiency of kernels whose own earlier results are in each processor's cache.
	resident := min(cmp.Or(median(shares), 1), 1)

	late, sum := 0.0, 0.0 // measurement errors are relative, so short kernels are more informative
	for _, item := range small {
		alone, own := p.take(item, 1).Seconds, p.own(item).Seconds
		weight := 1 / (own * own)
		late, sum = late+weight*(alone-own/(m.Parallelism*resident)), sum+weight
	}
	if sum > 0 {
		m.KernelLatency = max(late/sum, 0)
	}
	p.note("kernel_latency", "extra time of %d kernels of a rank alone, especially the shortest, compared with larger ones", len(small))
}

// layers measures how much slower kernels with an efficiency curve are in a layer than on cached operands, and
// scales the curves accordingly. If there are several processors, it also calls layersAlone. It does nothing
// unless ranks share processors.
func (p *prober) layers() {
	m := &p.Machine
	if p.facts.Processors == 0 {
		return
	}
	model, rows := cost.New(*m, 1), p.scale.Rows[1:]
	var longer []float64
	for _, n := range rows {
		t := p.own(p.stack(n))
		curved, others := 0.0, 0.0
		for _, w := range t.Works {
			if one := float64(model.One(w, cost.Link{})); w.Kind == ir.WorkMemory {
				others += one
			} else {
				curved += one
			}
		}
		longer = append(longer, over(t.Seconds-others, curved))
	}
	by := max(median(longer), 1)
	for _, curve := range [][]ir.CurvePoint{m.MatmulEfficiency, m.AttentionEfficiency, m.AttentionGradEff} {
		for i := range curve {
			curve[i][1] /= by
		}
	}
	for _, field := range []string{"matmul_efficiency", "attention_efficiency", "attention_grad_efficiency"} {
		p.note(field, "%s; in layers of %v tokens they take %.2f times as long", p.Notes[field], rows, by)
	}
	if p.facts.Processors == 1 {
		return
	}
	p.layersAlone(rows)
}

// stack returns several layers, because the weights of a single one could stay in a processor's own cache.
func (p *prober) stack(tokens int64) Item { return Layers(4, tokens, p.scale) }

// layersAlone measures, in layers of many tokens, the fraction of the processors' combined rate that a single
// rank reaches, and, in layers of few tokens, the time to wake the processors. This time becomes the kernel
// latency if it is longer than the one measured with small kernels.
func (p *prober) layersAlone(rows []int64) {
	m := &p.Machine
	least, few, many := m.KernelLatency, rows[0], rows[max(len(rows)-2, 0):]
	for range 4 { // the two figures depend on each other
		m.SpreadEfficiency = 0
		for _, n := range many {
			own, alone := p.own(p.stack(n)), p.take(p.stack(n), 1)
			waking := m.KernelLatency * float64(len(own.Works))
			m.SpreadEfficiency += over(own.Seconds, m.Parallelism*(alone.Seconds-waking)) / float64(len(many))
		}
		m.SpreadEfficiency = min(m.SpreadEfficiency, 1)
		own, alone := p.own(p.stack(few)), p.take(p.stack(few), 1)
		late := alone.Seconds - own.Seconds/(m.Parallelism*m.SpreadEfficiency)
		m.KernelLatency = max(least, over(late, float64(len(own.Works))))
	}
	p.note("kernel_latency", "%s, or in layers of %d tokens, whichever is longer", p.Notes["kernel_latency"], few)
	p.note("spread_efficiency", "share that a rank alone reaches in layers of these numbers of tokens: %v", many)
}

// spread returns the kernels that are worth spreading over processors: large holds the largest of each kind, small
// the others.
func (p *prober) spread() (small, large []Item) {
	s := p.scale
	for i, rows := range s.Rows[1:] {
		list := &small
		if i+2 == len(s.Rows) {
			list = &large
		}
		*list = append(*list, Matmul(rows, s.Inner, s.Inner, s.DType))
	}
	for i, n := range s.Tokens[1:] {
		list := &small
		if i+2 == len(s.Tokens) {
			list = &large
		}
		*list = append(*list, Attention(n, s.Prefix, s.Heads, s.DType), AttentionGrad(n, s.Prefix, s.Heads, s.DType))
	}
	return small, large
}

func median(x []float64) float64 {
	if len(x) == 0 {
		return 0
	}
	slices.Sort(x)
	return x[len(x)/2]
}

// memory measures the memory bandwidth, which is that of the fastest copy or kernel, and the copy efficiency,
// which is the median fraction of this bandwidth that kernels reach.
func (p *prober) memory() {
	m := &p.Machine
	fastest := p.own(Copy(ir.CopyD2D, p.scale.Bytes))
	var rates []float64
	for _, item := range MemoryBound(p.scale.Bytes, p.scale.Cols, p.scale.DType) {
		t := p.own(item)
		rates = append(rates, t.Bytes(p.start()))
		if t.Bytes(p.start()) > fastest.Bytes(p.start()) {
			fastest = t
		}
	}
	m.MemoryBandwidth = fastest.Bytes(p.start())
	m.CopyEfficiency = median(rates) / m.MemoryBandwidth
	p.note("memory_bandwidth", "%s, bytes read and written", fastest.Item.Name)
	p.note("copy_efficiency", "the median of %d memory-bound kernels; the slowest reaches %.2f", len(rates), rates[0]/m.MemoryBandwidth)
}

// products measures the peak rates of matmuls, unless the facts state them, and the fraction of the peak that
// matmuls reach, by number of rows.
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
			if rate := x.Flops(p.start()); x.Work().DType == t && rate > *peaks[t] {
				*peaks[t] = rate
				p.note(name, "%s, the fastest", x.Item.Name)
			}
		}
	}
	m.MatmulEfficiency = p.curve(timings[1:], *peaks[s.DType])
	p.note("matmul_efficiency", "share of the peak by rows, %s, %d columns, with an equal inner size", s.DType, s.Inner)
}

// curve returns the fraction of the peak that each timing reaches, by number of rows or tokens.
func (p *prober) curve(timings []Timing, peak float64) (points []ir.CurvePoint) {
	for _, t := range timings {
		share := min(t.Flops(p.start())/peak, 1)
		if n := len(points); n > 0 && points[n-1][0] == float64(t.Work().Rows) {
			points[n-1][1] = max(points[n-1][1], share) // rows are capped at the other two dimensions
			continue
		}
		points = append(points, ir.CurvePoint{float64(t.Work().Rows), share})
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
	shape := fmt.Sprintf("by tokens, %s, after a prefix of %d, %d heads of %d", s.DType, s.Prefix, s.Heads.Heads, s.Heads.Dim)
	p.note("attention_efficiency", "%s", shape)
	p.note("attention_grad_efficiency", "%s", shape)
}

// shared is a threshold: if each rank keeps at least this fraction of its rate while all ranks copy, they are
// considered not to share the bandwidth.
const shared = 0.95

func (p *prober) copies() {
	m, ranks := &p.Machine, float64(p.facts.Ranks)
	limit := 0.0
	for _, c := range []struct {
		op    ir.Op
		field string
		rate  *float64
	}{{ir.CopyD2H, "d2h_bandwidth", &m.D2HBandwidth}, {ir.CopyH2D, "h2d_bandwidth", &m.H2DBandwidth}} {
		if p.facts.Processors > 0 { // copies share the processors with each other
			*c.rate = p.own(Copy(c.op, p.scale.Bytes)).Bytes(p.start())
			p.note(c.field, "%s at a time", ir.Bytes(p.scale.Bytes))
			continue
		}
		*c.rate = p.take(Copy(c.op, p.scale.Bytes), 1).Bytes(p.start())
		p.note(c.field, "one rank alone, %s at a time", ir.Bytes(p.scale.Bytes))
		if p.facts.Ranks < 2 {
			continue
		}
		if all := p.own(Copy(c.op, p.scale.Bytes)).Bytes(p.start()); all < shared**c.rate && (limit == 0 || ranks*all < limit) {
			limit = ranks * all
		}
	}
	p.note("copy_duplex", "not measured")
	m.NodeCopyBandwidth = limit
	p.note("node_copy_bandwidth", "all ranks at once, one way")
	if limit == 0 {
		p.note("node_copy_bandwidth", "ranks do not slow each other down")
	}
}

// smallMessage is the size of a message whose bytes take negligible time to send.
const smallMessage = 4096

// meeting returns how long ranks take to meet after a kernel if they share processors and each uses one. They
// do not arrive at the same time, and early ones may block, whereas ranks that do nothing but meet never block.
// The time does not depend on the number of ranks.
func (p *prober) meeting() float64 {
	s, n := p.scale, p.facts.Processors
	if n < 2 {
		return 0
	}
	kernel := Matmul(s.Rows[len(s.Rows)/2], s.Inner, s.Inner, s.DType)
	return p.own(Behind(kernel, Gather(smallMessage, n))).Seconds - p.own(kernel).Seconds
}

// links measures the links between two ranks, and among all ranks. If there is a single rank, the figures are
// those of copies between device and host, which messages would have to use. Networks are not measured; their
// figures are those of the links.
func (p *prober) links() {
	m := &p.Machine
	if p.facts.Ranks < 2 {
		m.NVLinkBandwidth, m.NVLinkLatency, m.CollectiveEfficiency = min(m.D2HBandwidth, m.H2DBandwidth), p.start(), 1
		for _, field := range []string{"nvlink_bandwidth", "nvlink_latency", "collective_efficiency"} {
			p.note(field, "not measured: there is one rank")
		}
	} else {
		n := p.facts.Ranks
		m.NVLinkLatency = max(p.take(Message(smallMessage), 2).Seconds, p.take(Gather(smallMessage, n), n).Seconds/float64(n-1)) - p.start()
		m.NVLinkLatency = max(m.NVLinkLatency, p.meeting()/float64(n-1), 0)
		m.NVLinkBandwidth = p.take(Message(p.scale.Bytes), 2).Bytes(p.start() + m.NVLinkLatency)
		moved, seconds := 0.0, 0.0
		for _, item := range []Item{Gather(p.scale.Bytes, n), Scatter(p.scale.Bytes, n)} {
			t := p.take(item, n)
			if c := p.facts.Processors; 0 < c && c < n {
				t.Seconds *= float64(c) / float64(n)
			}
			moved += float64(t.Work().Bytes) * float64(n-1) / float64(n)
			seconds += t.Seconds - p.start() - m.NVLinkLatency*float64(n-1)
		}
		m.CollectiveEfficiency = min(over(moved, seconds)/m.NVLinkBandwidth, 1)
		p.note("nvlink_bandwidth", "messages of %s between two ranks", ir.Bytes(p.scale.Bytes))
		p.note("nvlink_latency", "messages of %s between two ranks, or a step of an all_gather of that size, alone or after kernels, whichever takes longest", ir.Bytes(smallMessage))
		p.note("collective_efficiency", "all_gather and reduce_scatter of %s among %d ranks", ir.Bytes(p.scale.Bytes), n)
	}
	m.NodeNetworkBandwidth, m.NetworkLatency = m.NVLinkBandwidth, m.NVLinkLatency
	p.note("node_network_bandwidth", "not measured: there is one node")
	p.note("network_latency", "not measured: there is one node")
}

// Package cost computes how long work takes on a machine. The passes use it to estimate tasks
// before lowering, and the simulator uses it for instructions. An estimate and a simulation
// therefore differ in how detailed their input is, but never in the rates that they use.
//
// The package does not model streams or order. It computes the duration of one instruction, given its share of the
// machine's links, in a job that uses all ranks of a node equally; HostLink and Beside say what instructions of a rank that
// run at the same time take from each other.
//
// If ranks are threads on one computer, rates are those of one processor. A copy or a message uses one
// processor. A kernel uses all processors that are idle when it begins, if waking them is worthwhile.
package cost

import (
	"math"
	"slices"

	"sppo.dev/ir"
)

// Model computes durations on a machine for a job.
type Model struct {
	machine      ir.Machine
	ranksPerNode int // ranks of the job on a node, which divide shared resources evenly
}

// New returns the cost model of a job with the given number of ranks. Ranks are numbered node by node,
// and all of them use shared resources at the same time.
func New(m ir.Machine, ranks int) Model {
	return Model{machine: m, ranksPerNode: max(1, min(ranks, m.GPUsPerNode))}
}

// Alone returns the cost model without the limit on a node's total rate of host copies, for simulations that
// know at each moment which ranks are copying.
func (c Model) Alone() Model {
	c.machine.NodeCopyBandwidth = 0
	return c
}

// RanksPerNode returns the number of ranks of the job that share a node.
func (c Model) RanksPerNode() int { return c.ranksPerNode }

// Devices returns the factor by which to multiply the peak rate for the given number of ranks: their number
// or, if ranks share processors, the number of processors on their nodes.
func Devices(m ir.Machine, ranks int) float64 {
	if m.Parallelism == 0 {
		return float64(ranks)
	}
	per := max(1, m.GPUsPerNode)
	return float64((ranks+per-1)/per) * m.Parallelism
}

// Link describes the ranks and nodes that a message or collective connects.
type Link struct {
	Ranks int // number of ranks that take part
	Nodes int // number of nodes that they are on
}

// LinkOf returns the link among the given ranks of the job.
func (c Model) LinkOf(ranks []int32) Link {
	per := int32(max(1, c.machine.GPUsPerNode))
	nodes := make([]int32, len(ranks))
	for i, r := range ranks {
		nodes[i] = r / per
	}
	slices.Sort(nodes)
	return Link{Ranks: len(ranks), Nodes: len(slices.Compact(nodes))}
}

// Time returns the duration of an instruction. Only messages and collectives use the link. Ranks that
// share the processors of a node have equal shares of them.
func (c Model) Time(w ir.Work, l Link) ir.Seconds {
	if c.machine.Parallelism == 0 {
		return c.One(w, l)
	}
	return c.on(w, c.One(w, l), c.machine.Parallelism/float64(c.ranksPerNode))
}

// on returns the duration of work on the given number of processors, given its duration one on a
// single processor. With less than one processor per rank, ranks take turns.
func (c Model) on(w ir.Work, one ir.Seconds, processors float64) ir.Seconds {
	switch {
	case processors < 1:
		return one / ir.Seconds(processors)
	case processors < 2 || !Spreads(w):
		return one
	}
	return c.Spread(one, processors)
}

// Spread returns the duration of a kernel on several processors, given its duration one on a single
// processor. Waking processors takes time, so short kernels run on a single processor.
func (c Model) Spread(one ir.Seconds, processors float64) ir.Seconds {
	return min(one, ir.Seconds(c.machine.KernelLatency)+one/ir.Seconds(processors*c.machine.SpreadEfficiency))
}

// Spreads reports whether work can use several processors at once where ranks share processors.
func Spreads(w ir.Work) bool {
	switch w.Kind {
	case ir.WorkMatmul, ir.WorkAttention, ir.WorkAttentionGrad, ir.WorkScan, ir.WorkScanGrad, ir.WorkMemory:
		return true
	}
	return false
}

// One returns the duration of an instruction on a device, or on one processor if ranks share processors.
func (c Model) One(w ir.Work, l Link) ir.Seconds {
	return c.apart(w, l) * ir.Seconds(1+c.machine.Overhead)
}

// apart returns the duration that the machine's rates and latencies give, without its overhead.
func (c Model) apart(w ir.Work, l Link) ir.Seconds {
	switch w.Kind {
	case ir.WorkNone:
		return 0
	case ir.WorkMatmul:
		return c.kernel(w, c.Peak(w.DType)*Efficiency(c.machine.MatmulEfficiency, w.Rows))
	case ir.WorkAttention:
		return c.kernel(w, c.attention(w, c.machine.AttentionEfficiency))
	case ir.WorkAttentionGrad:
		return c.kernel(w, c.attention(w, c.machine.AttentionGradEff))
	case ir.WorkScan, ir.WorkScanGrad: // products of chunks
		return c.kernel(w, c.Peak(w.DType)*scanShare*Efficiency(c.machine.MatmulEfficiency, w.Rows))
	case ir.WorkMemory:
		return c.kernel(w, c.Peak(w.DType))
	case ir.WorkD2H:
		return c.copy(w.Bytes, c.machine.D2HBandwidth)
	case ir.WorkH2D:
		return c.copy(w.Bytes, c.machine.H2DBandwidth)
	case ir.WorkP2P:
		rate, latency := c.wire(l)
		return c.latency(latency) + over(w.Bytes, rate)
	case ir.WorkCollective:
		return c.collective(w, l)
	}
	panic("internal: no cost for this kind of work")
}

// Peak returns the FLOP rate of a device for matmuls with the given element type.
func (c Model) Peak(d ir.DType) float64 {
	if d == ir.BF16 {
		return c.machine.PeakBF16
	}
	return c.machine.PeakF32
}

// scalarShare is an assumption: the share of the f32 peak that attention of bf16 heads reaches on GPUs without tensor cores.
const scalarShare = 0.1

// scanShare is the rate of the products of a scan's chunks, relative to that of products with as many rows. On an H20, the forward pass of
// Kimi delta attention with 8,192 tokens and 64 heads of 128 takes 2.96 ms with the kernels of flash-linear-attention and 1.62 ms with
// FlashKDA (github.com/MoonshotAI/FlashKDA, BENCHMARK_H20.md, April 2026). For the work that ir counts, these are shares of 0.18 and 0.34. That
// the share is the same on other GPUs, in the backward pass and with our kernels is an assumption.
const scanShare = 0.2

// attention returns the FLOP rate of attention. Efficiency holds for heads of 128; others are slower on GPUs.
func (c Model) attention(w ir.Work, efficiency []ir.CurvePoint) float64 {
	rate := c.Peak(w.DType) * Efficiency(efficiency, w.Rows)
	if c.machine.Parallelism > 0 || w.DType != ir.BF16 {
		return rate
	}
	switch row, ok := ir.HeadKernelOf(w.HeadDim, w.ValueDim); {
	case !ok:
		return min(rate, scalarShare*c.machine.PeakF32)
	case w.Kind == ir.WorkAttention:
		return rate * row.Forward
	default:
		return rate * row.Backward
	}
}

// kernel returns the larger of the time for arithmetic, at a FLOP rate, and the time for memory traffic.
func (c Model) kernel(w ir.Work, rate float64) ir.Seconds {
	t := over(w.Bytes, c.memory(w.Kind))
	if w.Flops > 0 && rate > 0 {
		t = max(t, ir.Seconds(float64(w.Flops)/rate))
	}
	return c.latency(0) + t
}

// memory returns the rate at which a kernel reads and writes its operands. If ranks share processors,
// memory-bound kernels reach only part of the bandwidth, because they also execute other
// instructions, whereas matmuls prefetch while they multiply.
func (c Model) memory(k ir.WorkKind) float64 {
	if c.machine.Parallelism > 0 && k != ir.WorkMemory {
		return c.machine.MemoryBandwidth
	}
	return c.machine.MemoryBandwidth * c.machine.CopyEfficiency
}

// copy returns the duration of a copy. A node's total copy rate is divided among its ranks, which are assumed
// to copy at the same time.
func (c Model) copy(n ir.Bytes, rate float64) ir.Seconds {
	if node := c.machine.NodeCopyBandwidth; node > 0 {
		rate = min(rate, node/float64(c.ranksPerNode))
	}
	return c.latency(0) + over(n, rate)
}

// collective returns the time of a collective, according to the path of its bytes. If the result is
// copied to all members, the copy takes as long again.
func (c Model) collective(w ir.Work, l Link) ir.Seconds {
	if l.Ranks < 2 {
		return 0
	}
	row, passes := w.Op.Collective(), 1
	if row.Everywhere {
		passes = 2
	}
	switch row.Traffic {
	case ir.TrafficNeighbour:
		return c.rotate(w.Bytes, l)
	case ir.TrafficDirect:
		return c.allToAll(w.Bytes, l)
	}
	if w.Grouped && c.machine.Parallelism == 0 {
		return c.ring(w.Bytes, l, passes)
	}
	return c.steps(l, passes) + c.ring(w.Bytes, l, passes)
}

// ring returns the time for a number of passes of a ring collective over an entire operand of n bytes, without latencies.
// Among t ranks, a pass has t-1 steps, in each of which every rank passes on n/t bytes.
func (c Model) ring(n ir.Bytes, l Link, passes int) ir.Seconds {
	rate, _ := c.wire(l)
	return over(n, rate*c.machine.CollectiveEfficiency) * ir.Seconds(float64(passes*(l.Ranks-1))/float64(l.Ranks))
}

// steps returns the latencies of a collective, as in NCCL's own model (src/graph/tuning.cc): a chain of steps crosses the network
// once less than there are nodes; two passes may run over a tree, which has a level for each doubling of the number of nodes. The
// members of a group share the channels (src/enqueue.cc), so they have these latencies once.
func (c Model) steps(l Link, passes int) ir.Seconds {
	m, nodes := c.machine, max(1, l.Nodes)
	of := func(inside, across float64) float64 {
		return float64(passes) * (inside*m.NVLinkLatency + across*m.NetworkLatency)
	}
	latency := of(float64(l.Ranks-nodes), float64(nodes-1))
	if passes == 2 {
		latency = min(latency, of(float64((l.Ranks-1)/nodes), math.Ceil(math.Log2(float64(nodes)))))
	}
	return c.latency(latency)
}

// rotate returns the time of one step of a ring, in which each rank passes on n bytes.
func (c Model) rotate(n ir.Bytes, l Link) ir.Seconds {
	rate, latency := c.wire(l)
	return c.latency(latency) + over(n, rate*c.machine.CollectiveEfficiency)
}

// allToAll returns the time of an exchange in which each of t ranks sends n/t bytes to every other rank, all at
// the same time. Traffic within a node overlaps with traffic leaving the node, and the ranks of a node share
// the outgoing link.
func (c Model) allToAll(n ir.Bytes, l Link) ir.Seconds {
	rate, latency := c.wire(l)
	perNode := (l.Ranks + l.Nodes - 1) / l.Nodes
	efficiency, parts := c.machine.CollectiveEfficiency, ir.Seconds(l.Ranks)
	inside := over(n, c.machine.NVLinkBandwidth*efficiency) / parts * ir.Seconds(perNode-1)
	outside := over(n, rate*efficiency) / parts * ir.Seconds(perNode*(l.Ranks-perNode))
	return c.latency(latency) + max(inside, outside)
}

// wire returns the rate and latency of the slowest hop of a link. It assumes that groups of the
// same kind fill each node. Groups that span nodes share the node's network: a group with two ranks
// per node gets the share of two ranks.
func (c Model) wire(l Link) (rate, latency float64) {
	m := c.machine
	if l.Nodes < 2 {
		return m.NVLinkBandwidth, m.NVLinkLatency
	}
	perNode := (l.Ranks + l.Nodes - 1) / l.Nodes
	network := m.NodeNetworkBandwidth * float64(min(perNode, c.ranksPerNode)) / float64(c.ranksPerNode)
	if perNode > 1 {
		network = min(network, m.NVLinkBandwidth)
	}
	return network, m.NetworkLatency
}

// latency returns the launch time of an instruction plus the latency of its links. If ranks share processors,
// the launch time is the time to wake processors. Spread adds it, because only some instructions wake any.
func (c Model) latency(links float64) ir.Seconds {
	if c.machine.Parallelism > 0 {
		return ir.Seconds(links)
	}
	return ir.Seconds(c.machine.KernelLatency + links)
}

// over divides bytes by a rate. An unknown rate costs nothing.
func over(n ir.Bytes, rate float64) ir.Seconds {
	if rate <= 0 {
		return 0
	}
	return ir.Seconds(float64(n) / rate)
}

// Efficiency interpolates a curve at a size. The result is linear in the logarithm of the size between
// points, constant beyond them, and 1 for an empty curve.
func Efficiency(curve []ir.CurvePoint, size int64) float64 {
	if len(curve) == 0 {
		return 1
	}
	x := float64(max(size, 1))
	for i, p := range curve {
		if x > p[0] {
			continue
		}
		if i == 0 {
			return p[1]
		}
		q := curve[i-1]
		share := (math.Log(x) - math.Log(q[0])) / (math.Log(p[0]) - math.Log(q[0]))
		return q[1] + share*(p[1]-q[1])
	}
	return curve[len(curve)-1][1]
}

// Package cost says how long work takes on a machine. Passes price tasks with it before anything is lowered, and the
// simulator prices instructions with it, so a prediction and a simulation differ by what they know, never by rates.
//
// It knows nothing of streams, order or contention in time: it prices one instruction that has the machine's links to
// itself, as shared by a job that uses every rank of a node alike.
//
// Where ranks are threads of one computer, rates are those of one of its processors. A copy or a message is the work of
// one; a kernel is the work of all that are idle as it begins, if it is worth waking them.
package cost

import (
	"math"
	"slices"

	"sppo.dev/ir"
)

// Model prices work on a machine for a job.
type Model struct {
	machine      ir.Machine
	ranksPerNode int // of the job: what they share, each has a part of
}

// New is the cost model of a job of that many ranks, numbered node by node, which all use what they share at the same time.
func New(m ir.Machine, ranks int) Model {
	return Model{machine: m, ranksPerNode: max(1, min(ranks, m.GPUsPerNode))}
}

// Alone is the cost model in which copies to and from the host are not shared: for those who know at each moment who else
// copies.
func (c Model) Alone() Model {
	c.machine.NodeCopyBandwidth = 0
	return c
}

// RanksPerNode is how many ranks of the job share a node.
func (c Model) RanksPerNode() int { return c.ranksPerNode }

// Devices is how many devices of the peak compute for so many ranks: as many, or the processors that they share.
func Devices(m ir.Machine, ranks int) float64 {
	if m.Parallelism == 0 {
		return float64(ranks)
	}
	per := max(1, m.GPUsPerNode)
	return float64((ranks+per-1)/per) * m.Parallelism
}

// Link is what a message or a collective crosses.
type Link struct {
	Ranks int // that take part
	Nodes int // that they are spread over
}

// LinkOf is the link among ranks of the job.
func (c Model) LinkOf(ranks []int32) Link {
	per := int32(max(1, c.machine.GPUsPerNode))
	nodes := make([]int32, len(ranks))
	for i, r := range ranks {
		nodes[i] = r / per
	}
	slices.Sort(nodes)
	return Link{Ranks: len(ranks), Nodes: len(slices.Compact(nodes))}
}

// Time is the duration of an instruction. The link matters to messages and collectives only. Of processors that the ranks of a
// node share, each has its part.
func (c Model) Time(w ir.Work, l Link) ir.Seconds {
	if c.machine.Parallelism == 0 {
		return c.One(w, l)
	}
	return c.on(w, c.One(w, l), c.machine.Parallelism/float64(c.ranksPerNode))
}

// on is the duration on so many processors of work that takes one of them so long. Below one, ranks take turns.
func (c Model) on(w ir.Work, one ir.Seconds, processors float64) ir.Seconds {
	switch {
	case processors < 1:
		return one / ir.Seconds(processors)
	case processors < 2 || !Spreads(w):
		return one
	}
	return c.Spread(one, processors)
}

// Spread is the duration on several processors of a kernel that takes one of them so long: they have to be woken, which short
// kernels had better not do.
func (c Model) Spread(one ir.Seconds, processors float64) ir.Seconds {
	return min(one, ir.Seconds(c.machine.KernelLatency)+one/ir.Seconds(processors*c.machine.SpreadEfficiency))
}

// Spreads reports whether work is done by several processors at once where ranks share them.
func Spreads(w ir.Work) bool {
	switch w.Kind {
	case ir.WorkMatmul, ir.WorkAttention, ir.WorkAttentionGrad, ir.WorkMemory:
		return true
	}
	return false
}

// One is the duration of an instruction on a device, or on one processor where ranks share them.
func (c Model) One(w ir.Work, l Link) ir.Seconds {
	switch w.Kind {
	case ir.WorkNone:
		return 0
	case ir.WorkMatmul:
		return c.kernel(w, c.machine.MatmulEfficiency)
	case ir.WorkAttention:
		return c.kernel(w, c.machine.AttentionEfficiency)
	case ir.WorkAttentionGrad:
		return c.kernel(w, c.machine.AttentionGradEff)
	case ir.WorkMemory:
		return c.kernel(w, nil)
	case ir.WorkD2H:
		return c.copy(w.Bytes, c.machine.D2HBandwidth)
	case ir.WorkH2D:
		return c.copy(w.Bytes, c.machine.H2DBandwidth)
	case ir.WorkP2P:
		rate, latency := c.wire(l)
		return c.latency(latency) + over(w.Bytes, rate)
	case ir.WorkAllGather, ir.WorkReduceScatter:
		return c.ring(w.Bytes, l, 1)
	case ir.WorkAllReduce:
		return c.ring(w.Bytes, l, 2)
	case ir.WorkAllToAll:
		return c.allToAll(w.Bytes, l)
	case ir.WorkRotate:
		return c.rotate(w.Bytes, l)
	}
	panic("internal: no price for this kind of work")
}

// Peak is the FLOP rate of a device for products of an element type.
func (c Model) Peak(d ir.DType) float64 {
	if d == ir.BF16 {
		return c.machine.PeakBF16
	}
	return c.machine.PeakF32
}

// kernel takes as long as the slower of its arithmetic and its memory traffic.
func (c Model) kernel(w ir.Work, efficiency []ir.CurvePoint) ir.Seconds {
	t := over(w.Bytes, c.memory(w.Kind))
	if rate := c.Peak(w.DType) * Efficiency(efficiency, w.Rows); w.Flops > 0 && rate > 0 {
		t = max(t, ir.Seconds(float64(w.Flops)/rate))
	}
	return c.latency(0) + t
}

// memory is the rate at which a kernel's operands come and go. Where ranks share processors, what kernels that are bound by memory
// reach of it is what their own instructions leave of it; products fetch ahead while they multiply.
func (c Model) memory(k ir.WorkKind) float64 {
	if c.machine.Parallelism > 0 && k != ir.WorkMemory {
		return c.machine.MemoryBandwidth
	}
	return c.machine.MemoryBandwidth * c.machine.CopyEfficiency
}

// copy shares what a node can copy in all with the node's other ranks, which copy at the same time in such a job.
func (c Model) copy(n ir.Bytes, rate float64) ir.Seconds {
	if node := c.machine.NodeCopyBandwidth; node > 0 {
		rate = min(rate, node/float64(c.ranksPerNode))
	}
	return c.latency(0) + over(n, rate)
}

// ring is the time of passes of a ring collective over the whole operand of n bytes: in t-1 steps each rank passes on
// a part of n/t.
func (c Model) ring(n ir.Bytes, l Link, passes int) ir.Seconds {
	if l.Ranks < 2 {
		return 0
	}
	rate, latency := c.wire(l)
	steps := float64(passes * (l.Ranks - 1))
	moved := over(n, rate*c.machine.CollectiveEfficiency) * ir.Seconds(steps/float64(l.Ranks))
	return c.latency(latency*steps) + moved
}

// rotate is one step of a ring, in which each rank passes n bytes on.
func (c Model) rotate(n ir.Bytes, l Link) ir.Seconds {
	if l.Ranks < 2 {
		return 0
	}
	rate, latency := c.wire(l)
	return c.latency(latency) + over(n, rate*c.machine.CollectiveEfficiency)
}

// allToAll is the time in which each rank sends every other its part of n/t, all messages at once: what stays in the
// node and what leaves it go side by side, and the ranks of a node share the way out.
func (c Model) allToAll(n ir.Bytes, l Link) ir.Seconds {
	if l.Ranks < 2 {
		return 0
	}
	rate, latency := c.wire(l)
	perNode := (l.Ranks + l.Nodes - 1) / l.Nodes
	efficiency, parts := c.machine.CollectiveEfficiency, ir.Seconds(l.Ranks)
	inside := over(n, c.machine.NVLinkBandwidth*efficiency) / parts * ir.Seconds(perNode-1)
	outside := over(n, rate*efficiency) / parts * ir.Seconds(perNode*(l.Ranks-perNode))
	return c.latency(latency) + max(inside, outside)
}

// wire is the rate and latency of the slowest hop of a link. Groups like this one fill the node, and those that leave
// it share its network: a group with two ranks on each node has as much of it as they are of the node's ranks.
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

// latency is the start of any instruction plus that of its links. Where ranks share processors, it is waking some that takes
// time, and not every instruction does.
func (c Model) latency(links float64) ir.Seconds {
	if c.machine.Parallelism > 0 {
		return ir.Seconds(links)
	}
	return ir.Seconds(c.machine.KernelLatency + links)
}

// over divides bytes by a rate; a rate that a machine does not give costs nothing.
func over(n ir.Bytes, rate float64) ir.Seconds {
	if rate <= 0 {
		return 0
	}
	return ir.Seconds(float64(n) / rate)
}

// Efficiency reads a curve at a size: linear in the logarithm of the size between points, constant beyond them, and 1
// for an empty curve.
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

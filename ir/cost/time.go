// Package cost says how long work takes on a machine. Passes price tasks with it before anything is lowered, and the
// simulator prices instructions with it, so a prediction and a simulation differ by what they know, never by rates.
//
// It knows nothing of streams, order or contention in time: it prices one instruction that has the machine's links to
// itself, as shared by a job that uses every rank of a node alike.
package cost

import (
	"math"

	"sppo/ir"
)

// Model prices work on a machine for a job.
type Model struct {
	machine      ir.Machine
	ranksPerNode int     // of the job: what they share, each has a part of
	slowdown     float64 // by the other ranks of the node, where they share processors
}

// New is the cost model of a job of that many ranks, numbered node by node, which all use what they share at the same time.
func New(m ir.Machine, ranks int) Model {
	c := Model{machine: m, ranksPerNode: max(1, min(ranks, m.GPUsPerNode)), slowdown: 1}
	if m.Parallelism > 0 {
		c.slowdown = max(1, float64(c.ranksPerNode)/m.Parallelism)
	}
	return c
}

// Alone is the cost model in which processors and copies to and from the host are not shared: for those who know at each
// moment who else uses them.
func (c Model) Alone() Model {
	c.machine.NodeCopyBandwidth, c.slowdown = 0, 1
	return c
}

// Link is what a message or a collective crosses.
type Link struct {
	Ranks int // that take part
	Nodes int // that they are spread over
}

// LinkOf is the link among ranks of the job.
func (c Model) LinkOf(ranks []int32) Link {
	per := int32(max(1, c.machine.GPUsPerNode))
	nodes := map[int32]bool{}
	for _, r := range ranks {
		nodes[r/per] = true
	}
	return Link{Ranks: len(ranks), Nodes: len(nodes)}
}

// Time is the duration of an instruction. The link matters to messages and collectives only.
func (c Model) Time(w ir.Work, l Link) ir.Seconds {
	return c.time(w, l) * ir.Seconds(c.slowdown)
}

func (c Model) time(w ir.Work, l Link) ir.Seconds {
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
	t := over(w.Bytes, c.machine.MemoryBandwidth*c.machine.CopyEfficiency)
	if rate := c.Peak(w.DType) * Efficiency(efficiency, w.Rows); w.Flops > 0 && rate > 0 {
		t = max(t, ir.Seconds(float64(w.Flops)/rate))
	}
	return c.latency(0) + t
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
	network := m.NetworkBandwidth * float64(min(perNode, c.ranksPerNode)) / float64(c.ranksPerNode)
	if perNode > 1 {
		network = min(network, m.NVLinkBandwidth)
	}
	return network, m.NetworkLatency
}

// latency is the start of any instruction plus that of its links.
func (c Model) latency(links float64) ir.Seconds {
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

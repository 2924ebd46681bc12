package cost

import (
	"math"
	"slices"

	"sppo.dev/ir"
)

// Share returns the share of their speed that kernels of a rank lose while it takes part in a collective on a link. Collectives
// take processors and memory bandwidth in proportion to the bytes that they move, so one on a slower link takes less. Ranks that
// share processors lose the processor on which they take part.
func (c Model) Share(l Link) float64 {
	if c.machine.Parallelism > 0 {
		return c.ShareOfCopies()
	}
	if c.machine.Contention == 0 || c.machine.NVLinkBandwidth == 0 {
		return 0
	}
	rate, _ := c.wire(l)
	return min(1, c.machine.Contention*rate/c.machine.NVLinkBandwidth)
}

// ShareOfCopies returns the share of their speed that kernels of a rank lose while it copies to or from the host: none, unless ranks
// share processors. With at most one processor, kernels wait; with more, they take their turn, or run on the others.
func (c Model) ShareOfCopies() float64 {
	switch processors := c.machine.Parallelism / float64(c.ranksPerNode); {
	case processors == 0:
		return 0
	case processors <= 1:
		return 1
	case processors < 2:
		return 2/processors - 1
	default:
		return 1 / processors
	}
}

// Beside tracks the collectives that run beside a rank's other work, and what they take from each other. Kernels lose a share
// of their speed; collectives on links of the same kind, within nodes or between them, share the link equally.
type Beside struct{ running []beside }

type beside struct {
	interval
	share  float64
	within bool // the link is within a node
	stream ir.Stream
}

// Kernel returns how long a kernel takes that begins at a given time and takes d alone. Kernels are given in order.
func (b *Beside) Kernel(begin, d ir.Seconds) ir.Seconds {
	b.running = slices.DeleteFunc(b.running, func(x beside) bool { return x.end <= begin })
	if len(b.running) == 0 {
		return d
	}
	for at := begin; ; {
		speed, until := b.speed(at)
		if end := at + d/speed; end <= until {
			return end - begin
		}
		d -= (until - at) * speed
		at = until
	}
}

// speed returns the speed of kernels at a time, and until when they keep it.
func (b *Beside) speed(at ir.Seconds) (speed, until ir.Seconds) {
	speed, until = 1, ir.Seconds(math.Inf(1))
	for _, x := range b.running {
		switch {
		case at < x.begin:
			until = min(until, x.begin)
		case at < x.end:
			speed -= ir.Seconds(x.share)
			until = min(until, x.end)
		}
	}
	return max(speed, 0), until
}

// Collective is a collective of a rank on a stream other than that of kernels.
type Collective struct {
	Stream   ir.Stream
	Link     Link
	Share    float64    // see Model.Share
	Begin, D ir.Seconds // D: how long it takes alone
}

// Takes returns how long a collective takes. Of two at the same time on one link, each has half of it until the shorter one ends.
func (b *Beside) Takes(c *Collective) ir.Seconds {
	d := c.D
	for i := range b.running {
		d += b.running[i].delays(c)
	}
	return d
}

// delays returns by how much a collective and another one delay each other.
func (x *beside) delays(c *Collective) ir.Seconds {
	if x.within != (c.Link.Nodes < 2) || x.stream == c.Stream {
		return 0
	}
	return max(0, min(x.end, c.Begin+c.D)-max(x.begin, c.Begin))
}

// Add records a collective and how long it takes. It calls slow for each stream whose work, as far as it is known, ends later because of
// it: for kernels, which are known up to a time, and for other collectives.
func (b *Beside) Add(c *Collective, takes, kernels ir.Seconds, slow func(ir.Stream, ir.Seconds)) {
	if c.D <= 0 {
		return
	}
	for i := range b.running {
		if x := &b.running[i]; x.delays(c) > 0 {
			late := x.delays(c)
			x.end += late
			slow(x.stream, late)
		}
	}
	begin, end, within := c.Begin, c.Begin+takes, c.Link.Nodes < 2
	if c.Share > 0 && kernels > begin {
		keeps := 1 - ir.Seconds(c.Share)
		late := min((kernels-begin)/keeps-(kernels-begin), (end-begin)*(1-keeps))
		slow(ir.Compute, late)
		begin = min(end, kernels+late)
	}
	for i := range b.running {
		if x := &b.running[i]; x.stream == c.Stream && x.end == begin && x.within == within && x.share == c.Share {
			x.end = end
			return
		}
	}
	b.running = append(b.running, beside{interval{begin, end}, c.Share, within, c.Stream})
}

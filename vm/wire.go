package vm

import (
	"cmp"

	"sppo.dev/ir"
)

// Wires connect ranks of this process with ranks of others. Local builds links and teams on them.
type Wires interface {
	// Here reports whether a rank is in this process.
	Here(rank int) bool
	// Wire returns the channel from one rank to another, one of which is in this process. Both ends give the
	// same purpose.
	Wire(from, to int, purpose string) Wire
	// Failed tells the other processes why this one cannot continue.
	Failed(reason error)
}

// Wire is one end of an ordered channel for messages. The receiver announces where the next one goes before
// it is sent, so that no process buffers messages, and bytes arrive at their destination.
type Wire interface {
	Link
	// Expect announces the destination of the next message. Arrived waits until it is there or, after an
	// error, until nothing writes there any more. Recv does both.
	Expect(y []byte)
	Arrived() error
}

// channelNames are the purposes of links.
var channelNames = [...]string{ChannelNext: "next", ChannelPrev: "prev", ChannelMux: "mux"}

// isHere reports whether another member of the team is in this process.
func (m *localMember) isHere(i int) bool { return m.in == nil || m.in[i] == nil }

// wire opens the channels to and from members in other processes.
func (m *localMember) wire(l *Local, team string) {
	n := len(m.team.members)
	m.in, m.out, m.staged = make([]Wire, n), make([]Wire, n), make([][]byte, n)
	me := int(m.team.members[m.index])
	for i, other := range m.team.members {
		if !l.here(int(other)) {
			m.in[i], m.out[i] = l.wires.Wire(int(other), me, team), l.wires.Wire(me, int(other), team)
		}
	}
}

// exchange sends members in other processes the parts that they need of this one's x, and receives theirs.
// All announce their parts before sending any, so every part sent is received.
func (m *localMember) exchange(c *teamCall) error {
	n := len(m.parts)
	for i, in := range m.in {
		if p := c.part(n, m.index, i); in != nil && p.bytes() > 0 {
			m.parts[i] = piece{m.place(c, i, p.bytes()), p.row}
			in.Expect(m.parts[i].x)
		}
	}
	var err error
	for k := 1; k < n && err == nil; k++ {
		i := (m.index + k) % n
		if p := c.part(n, i, m.index); m.out[i] != nil && p.bytes() > 0 {
			err = m.out[i].Send(m.pack(c.x, p))
		}
	}
	for i, in := range m.in {
		if in != nil && c.part(n, m.index, i).bytes() > 0 {
			err = cmp.Or(err, in.Arrived())
		}
	}
	return err
}

// place returns the destination of a remote part: the result, if the part is contiguous there, or a buffer.
func (m *localMember) place(c *teamCall, from, bytes int) []byte {
	switch {
	case c.op == ir.AllGather, c.op == ir.AllToAll && !c.e.Inverse:
		return c.y[from*bytes : (from+1)*bytes]
	case c.op == ir.Rotate:
		return c.y
	case cap(m.staged[from]) < bytes:
		m.staged[from] = make([]byte, bytes)
	}
	return m.staged[from][:bytes]
}

// pack copies a part into contiguous bytes.
func (m *localMember) pack(x []byte, p part) []byte {
	if p.rows == 1 {
		return x[p.at : p.at+p.row]
	}
	if cap(m.packed) < p.bytes() {
		m.packed = make([]byte, p.bytes())
	}
	out := m.packed[:p.bytes()]
	for row := range p.rows {
		copy(out[row*p.row:(row+1)*p.row], x[p.at+row*p.stride:])
	}
	return out
}

// spreadFar sends this member's share of an all_reduce to members in other processes, and receives theirs.
func (m *localMember) spreadFar(c *teamCall) error {
	n := len(m.parts)
	for i, in := range m.in {
		if from, to := c.share(n, i); in != nil && from < to {
			in.Expect(c.x[from:to])
		}
	}
	var err error
	mine, end := c.share(n, m.index)
	for k := 1; k < n && err == nil && mine < end; k++ {
		if i := (m.index + k) % n; m.out[i] != nil {
			err = m.out[i].Send(c.x[mine:end])
		}
	}
	for i, in := range m.in {
		if from, to := c.share(n, i); in != nil && from < to {
			err = cmp.Or(err, in.Arrived())
		}
	}
	return err
}

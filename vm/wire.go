package vm

import (
	"cmp"

	"sppo.dev/ir"
)

// Wires join ranks of this process to ranks of others. Local makes of them what programs ask for.
type Wires interface {
	// Here tells whether a rank is of this process.
	Here(rank int) bool
	// Wire is the way from one rank to another, one of which is here, for a purpose: both ends call it the same.
	Wire(from, to int, purpose string) Wire
	// Failed tells the other processes why this one cannot go on.
	Failed(reason error)
}

// Wire is one end of a way for messages, which keep their order. The receiving end says first where the next one goes, and
// nothing is sent before: so nobody keeps bytes that nobody has asked for yet, and they arrive where they belong.
type Wire interface {
	Link
	// Expect says where the next message goes; Arrived waits until it is there, or in case of an error until nobody writes
	// there any more. Recv is both.
	Expect(y []byte)
	Arrived() error
}

// channelNames are the purposes of links.
var channelNames = [...]string{ChannelNext: "next", ChannelPrev: "prev", ChannelMux: "mux"}

// isHere tells whether another member of the team is in this process.
func (m *localMember) isHere(i int) bool { return m.in == nil || m.in[i] == nil }

// wire opens the ways to and from members in other processes.
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

// exchange sends members in other processes the parts that they need of this one's x, and brings theirs. Everybody says where
// parts go before it sends any, so every part that is sent is taken.
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

// place is where a part from afar goes: into the result, if it is a run of bytes there as it is, or aside.
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

// pack makes one run of bytes of a part.
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

// spreadFar sends this member's share of an all_reduce to members in other processes, and brings theirs.
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

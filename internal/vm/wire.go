package vm

import (
	"cmp"

	"sppo.dev/ir"
)

// Wires connects ranks of this process with ranks of other processes. Local builds links and collectives on top
// of it.
type Wires interface {
	// Here reports whether a rank is in this process.
	Here(rank int) bool
	// Wire returns the channel from one rank to another; one of the two is in this process. Both ends must pass
	// the same purpose.
	Wire(from, to int, purpose string) Wire
	// Failed tells the other processes why this process cannot continue.
	Failed(reason error)
}

// Wire is one end of an ordered channel for messages. The receiver announces the destination of the next
// message before that message is sent, so that the bytes go directly to their destination and processes do not
// buffer messages.
type Wire interface {
	Link
	// Expect announces the destination of the next message. Arrived waits until the message is complete or,
	// after an error, until the destination is no longer being written to. Recv does both.
	Expect(y []byte)
	Arrived() error
}

// channelNames gives, for each channel, the purpose that links pass to Wire.
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

// exchange sends the members in other processes their parts of this member's x, and receives their
// contributions. All members announce what they expect before they send anything, so everything that is sent is
// received.
func (m *localMember) exchange() error {
	if m.in == nil {
		return nil
	}
	gets, gives := m.meeting.Gets, m.meeting.Gives
	for i, in := range m.in {
		if in != nil && gets[i].Size() > 0 {
			m.from[i] = m.place(i)
			in.Expect(m.from[i].x)
		}
	}
	var err error
	for k := 1; k < len(m.in) && err == nil; k++ {
		i := (m.index + k) % len(m.in)
		if m.out[i] != nil && gives[i].Size() > 0 {
			err = m.out[i].Send(m.pack(gives[i]))
		}
	}
	for i, in := range m.in {
		if in != nil && gets[i].Size() > 0 {
			err = cmp.Or(err, in.Arrived())
		}
	}
	return err
}

// place returns the memory that receives a remote member's contribution: part of the result, if the
// contribution is contiguous there and nothing is added to it, otherwise a buffer.
func (m *localMember) place(from int) source {
	g, row := m.meeting.Gets[from].Packed(), int(m.meeting.Gets[from].Width)
	if alone := !m.meeting.Adds(from) && (from+1 == len(m.from) || !m.meeting.Adds(from+1)); alone && g.Rows == 1 {
		return source{m.call.y[g.Y : g.Y+g.Width], row}
	}
	if m.staged[from] == nil {
		m.staged[from] = make([]byte, g.Size())
	}
	return source{m.staged[from], row}
}

// pack returns the part of x that a transfer sends, as contiguous bytes.
func (m *localMember) pack(t ir.Transfer) []byte {
	x, row := m.call.x[t.X:], int(t.Width)
	if t.Rows == 1 {
		return x[:row]
	}
	if cap(m.packed) < int(t.Size()) {
		m.packed = make([]byte, t.Size())
	}
	out := m.packed[:t.Size()]
	for i := range int(t.Rows) {
		copy(out[i*row:(i+1)*row], x[i*int(t.XStride):])
	}
	return out
}

// spreadFar sends this member's result to members in other processes, and receives theirs.
func (m *localMember) spreadFar() error {
	for i, in := range m.in {
		if first, end := m.result(i); in != nil && first < end {
			in.Expect(m.call.y[first:end])
		}
	}
	var err error
	mine, end := m.result(m.index)
	for k := 1; k < len(m.in) && err == nil && mine < end; k++ {
		if i := (m.index + k) % len(m.in); m.out[i] != nil {
			err = m.out[i].Send(m.call.y[mine:end])
		}
	}
	for i, in := range m.in {
		if first, end := m.result(i); in != nil && first < end {
			err = cmp.Or(err, in.Arrived())
		}
	}
	return err
}

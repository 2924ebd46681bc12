package vm

import (
	"fmt"
	"slices"
	"sync"

	"sppo/ir"
)

// Local is the Transport between ranks of one process: messages are copies from the sender's memory to the
// receiver's, and every member of a collective does its share of the work on all members' memory.
type Local struct {
	mu      sync.Mutex
	links   map[linkKey]*localLink
	teams   map[string]*localTeam
	reason  error         // set once, before aborted closes
	aborted chan struct{} // closed by Abort
}

type linkKey struct {
	from, to int
	channel  Channel
}

// NewLocal is a transport for the ranks of one process.
func NewLocal() *Local {
	return &Local{links: map[linkKey]*localLink{}, teams: map[string]*localTeam{}, aborted: make(chan struct{})}
}

// Abort implements Transport.
func (l *Local) Abort(reason error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.reason != nil {
		return
	}
	l.reason = fmt.Errorf("%w: %w", ErrAborted, reason)
	close(l.aborted)
	for _, t := range l.teams {
		t.mu.Lock()
		t.failed = l.reason
		t.round.Broadcast()
		t.mu.Unlock()
	}
}

// Link implements Transport.
func (l *Local) Link(from, to int, channel Channel) Link {
	l.mu.Lock()
	defer l.mu.Unlock()
	key := linkKey{from, to, channel}
	if l.links[key] == nil {
		l.links[key] = &localLink{local: l, key: key, offers: make(chan []byte), taken: make(chan struct{}, 1)}
	}
	return l.links[key]
}

type localLink struct {
	local  *Local
	key    linkKey
	offers chan []byte
	taken  chan struct{} // holds one, so that a receiver never waits to say that it is done
}

func (l *localLink) Send(x []byte) error {
	select {
	case l.offers <- x:
	case <-l.local.aborted:
		return l.local.reason
	}
	select {
	case <-l.taken:
		return nil
	case <-l.local.aborted:
		return l.local.reason
	}
}

func (l *localLink) Recv(y []byte) error {
	select {
	case x := <-l.offers:
		if len(x) != len(y) {
			return fmt.Errorf("rank %d sends %d bytes, rank %d receives %d", l.key.from, len(x), l.key.to, len(y))
		}
		copy(y, x)
		l.taken <- struct{}{}
		return nil
	case <-l.local.aborted:
		return l.local.reason
	}
}

// Team implements Transport.
func (l *Local) Team(rank int, members []int32, stream ir.Stream) (Team, error) {
	index := slices.Index(members, int32(rank))
	if index < 0 {
		return nil, fmt.Errorf("rank %d is not in the group %v", rank, members)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	key := fmt.Sprint(stream, members)
	if l.teams[key] == nil {
		t := &localTeam{members: slices.Clone(members), calls: make([]teamCall, len(members)), failed: l.reason}
		t.round.L = &t.mu
		l.teams[key] = t
	}
	return &localMember{team: l.teams[key], index: index}, nil
}

// localTeam is where the members of a collective meet. A call has two meetings: the first after everybody has laid
// down what it brings, the second after everybody has done its share, so that nobody leaves with its buffers in use.
type localTeam struct {
	members []int32
	calls   []teamCall

	mu      sync.Mutex
	round   sync.Cond
	meeting uint64
	present int
	failed  error
}

// teamCall is what a member brings.
type teamCall struct {
	op   ir.Op
	t    ir.DType
	y, x []byte
	e    Exchange // of all_to_all
}

type localMember struct {
	team  *localTeam
	index int
}

func (t *localTeam) meet() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.present++; t.present == len(t.members) {
		t.present = 0
		t.meeting++
		t.round.Broadcast()
		return t.failed
	}
	for meeting := t.meeting; meeting == t.meeting && t.failed == nil; {
		t.round.Wait()
	}
	return t.failed
}

func (m *localMember) AllGather(y, x []byte) error {
	if len(y) != len(x)*len(m.team.members) {
		return fmt.Errorf("gathering %d bytes from each of %d ranks does not give %d", len(x), len(m.team.members), len(y))
	}
	return m.call(teamCall{op: ir.AllGather, y: y, x: x})
}

func (m *localMember) ReduceScatter(y, x []byte, t ir.DType) error {
	if len(x) != len(y)*len(m.team.members) {
		return fmt.Errorf("scattering %d bytes over %d ranks does not give %d", len(x), len(m.team.members), len(y))
	}
	return m.call(teamCall{op: ir.ReduceScatter, t: t, y: y, x: x})
}

func (m *localMember) AllReduce(x []byte, t ir.DType) error {
	return m.call(teamCall{op: ir.AllReduce, t: t, y: x, x: x})
}

func (m *localMember) AllToAll(y, x []byte, e Exchange) error {
	n, size := len(m.team.members), int(e.DType.Bytes())
	if e.Copies < 1 || n%e.Copies != 0 {
		return fmt.Errorf("columns cannot be shared by %d of %d ranks each", e.Copies, n)
	}
	from, to := e.Rows*e.wide(n)*size, e.Rows*n*e.Cols*size
	if e.Inverse {
		from, to = to, from
	}
	if len(x) != from || len(y) != to {
		return fmt.Errorf("%d bytes to %d where %d ranks exchange %d bytes to %d", len(x), len(y), n, from, to)
	}
	return m.call(teamCall{op: ir.AllToAll, t: e.DType, y: y, x: x, e: e})
}

func (m *localMember) Rotate(y, x []byte) error {
	if len(y) != len(x) {
		return fmt.Errorf("%d bytes go round, and %d come", len(x), len(y))
	}
	return m.call(teamCall{op: ir.Rotate, y: y, x: x})
}

func (m *localMember) call(c teamCall) error {
	t := m.team
	t.calls[m.index] = c
	if err := t.meet(); err != nil {
		return err
	}
	for i := range t.calls {
		if other := &t.calls[i]; other.op != c.op || other.t != c.t || len(other.x) != len(c.x) || other.e != c.e {
			return fmt.Errorf("rank %d calls %s of %d bytes of %s where rank %d calls %s of %d bytes of %s",
				t.members[m.index], ir.Ops[c.op].Name, len(c.x), c.t,
				t.members[i], ir.Ops[other.op].Name, len(other.x), other.t)
		}
	}
	switch c.op {
	case ir.AllGather:
		for i := range t.calls {
			copy(c.y[i*len(c.x):], t.calls[i].x)
		}
	case ir.ReduceScatter:
		sum(c.y, t.calls, m.index*len(c.y), c.t)
	case ir.AllReduce:
		m.allReduce(c)
	case ir.Rotate:
		copy(c.y, t.calls[(m.index+len(t.calls)-1)%len(t.calls)].x)
	case ir.AllToAll:
		if c.e.Inverse {
			m.columnsToRows(c)
		} else {
			m.rowsToColumns(c)
		}
	}
	return t.meet()
}

// allReduce sums one share of the elements and writes it to every member: nobody else touches that share.
func (m *localMember) allReduce(c teamCall) {
	size, n := int(c.t.Bytes()), len(m.team.members)
	elements := len(c.x) / size
	from, to := elements*m.index/n*size, elements*(m.index+1)/n*size
	sum(c.x[from:to], m.team.calls, from, c.t)
	for i := range m.team.calls {
		if i != m.index {
			copy(m.team.calls[i].x[from:to], c.x[from:to])
		}
	}
}

// rowsToColumns takes this member's columns out of every member's rows.
func (m *localMember) rowsToColumns(c teamCall) {
	size := int(c.t.Bytes())
	n, wide := c.e.Cols*size, c.e.wide(len(m.team.members))*size
	at := m.index / c.e.Copies * n
	y := c.y
	for i := range m.team.calls {
		for row := range c.e.Rows {
			copy(y[:n], m.team.calls[i].x[row*wide+at:])
			y = y[n:]
		}
	}
}

// columnsToRows takes this member's rows out of every member's columns, and adds those of members with equal columns.
func (m *localMember) columnsToRows(c teamCall) {
	n, team, y := c.e.Cols*int(c.t.Bytes()), m.team, c.y
	for row := range c.e.Rows {
		at := (m.index*c.e.Rows + row) * n
		for first := 0; first < len(team.calls); first += c.e.Copies {
			if c.e.Copies == 1 {
				copy(y[:n], team.calls[first].x[at:])
			} else {
				sum(y[:n], team.calls[first:first+c.e.Copies], at, c.t)
			}
			y = y[n:]
		}
	}
}

// sum puts into y the sum over calls, in their order and in f32, of x from byte at on. y may be a part of a call's x:
// every block is read from all calls before it is written.
func sum(y []byte, calls []teamCall, at int, dtype ir.DType) {
	var sums, addend [256]float32
	size := int(dtype.Bytes())
	for len(y) > 0 {
		block := y[:min(len(y), len(sums)*size)]
		n := len(block) / size
		widen(sums[:n], calls[0].x[at:at+len(block)], dtype)
		for m := 1; m < len(calls); m++ {
			widen(addend[:n], calls[m].x[at:at+len(block)], dtype)
			for i, v := range addend[:n] {
				sums[i] += v
			}
		}
		narrow(block, sums[:n], dtype)
		y, at = y[len(block):], at+len(block)
	}
}

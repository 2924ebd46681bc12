package vm

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"sppo.dev/ir"
)

// Local is the Transport between ranks of one process. Messages are copies from the sender's memory to the
// receiver's, and every member of a collective does its share of the work in all members' memory. Over wires
// it also connects ranks of other processes: then a member works on the parts received from them, in the same
// order.
type Local struct {
	wires   Wires // nil: all ranks are in this process
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

// NewLocal returns a transport for the ranks of one process.
func NewLocal() *Local { return NewWired(nil) }

// NewWired returns a transport for the ranks of this process and, over wires, those of others.
func NewWired(wires Wires) *Local {
	return &Local{wires: wires, links: map[linkKey]*localLink{}, teams: map[string]*localTeam{}, aborted: make(chan struct{})}
}

func (l *Local) here(rank int) bool { return l.wires == nil || l.wires.Here(rank) }

// Abort implements Transport.
func (l *Local) Abort(reason error) {
	if l.abort(reason) && l.wires != nil {
		l.wires.Failed(reason)
	}
}

// abort reports whether the reason is the first.
func (l *Local) abort(reason error) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.reason != nil {
		return false
	}
	l.reason = fmt.Errorf("%w: %w", ErrAborted, reason)
	close(l.aborted)
	for _, t := range l.teams {
		t.mu.Lock()
		t.failed = l.reason
		t.round.Broadcast()
		t.mu.Unlock()
	}
	return true
}

// Link implements Transport.
func (l *Local) Link(from, to int, channel Channel) Link {
	if !l.here(from) || !l.here(to) {
		return l.wires.Wire(from, to, channelNames[channel])
	}
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
	taken  chan struct{} // has capacity 1, so a receiver need not wait to report that it is done
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
	t := l.teams[key]
	if t == nil {
		t = &localTeam{members: slices.Clone(members), calls: make([]teamCall, len(members)), failed: l.reason}
		t.round.L = &t.mu
		for _, m := range members {
			if l.here(int(m)) {
				t.here++
			}
		}
		l.teams[key] = t
	}
	m := &localMember{team: t, index: index, parts: make([]piece, len(members))}
	if t.here < len(members) {
		m.wire(l, key)
	}
	return m, nil
}

// localTeam is where the members of a collective meet. A call has two barriers: the first after all members
// have published their buffers, the second after all have done their share, so that no member leaves while
// its buffers are in use.
type localTeam struct {
	members []int32
	here    int        // number in this process
	calls   []teamCall // by local member

	mu      sync.Mutex
	round   sync.Cond
	meeting atomic.Uint64
	present int
	failed  error
}

// teamCall is a member's contribution to a call.
type teamCall struct {
	op   ir.Op
	t    ir.DType
	y, x []byte
	e    Exchange // for all_to_all
}

type localMember struct {
	team    *localTeam
	index   int
	parts   []piece // by member: the part that this one needs
	in, out []Wire  // by member: nil for members in this process; all nil if every member is
	staged  [][]byte
	packed  []byte
}

// part is what one member needs of another's x: rows of bytes at a fixed stride.
type part struct{ at, row, stride, rows int }

func (p part) bytes() int { return p.row * p.rows }

// piece is a readable part: in place, or as received.
type piece struct {
	x      []byte
	stride int
}

// share returns the range of elements of an all_reduce that a member sums.
func (c *teamCall) share(members, member int) (from, to int) {
	size := int(c.t.Bytes())
	elements := len(c.x) / size
	return elements * member / members * size, elements * (member + 1) / members * size
}

// part returns what one member needs of another's x. All calls of a collective are alike, so any of them will
// do.
func (c *teamCall) part(members, to, from int) part {
	whole := part{row: len(c.x), rows: 1}
	switch c.op {
	case ir.ReduceScatter:
		n := len(c.x) / members
		return part{at: to * n, row: n, rows: 1}
	case ir.AllReduce:
		first, end := c.share(members, to)
		return part{at: first, row: end - first, rows: 1}
	case ir.Rotate:
		if (from+1)%members != to {
			return part{}
		}
	case ir.AllToAll:
		size := int(c.t.Bytes())
		n := c.e.Cols * size
		if c.e.Inverse { // its rows of all columns
			return part{at: to * c.e.Rows * n, row: c.e.Rows * n, rows: 1}
		}
		return part{at: to / c.e.Copies * n, row: n, stride: c.e.wide(members) * size, rows: c.e.Rows} // its columns of all rows
	}
	return whole
}

// meetYields is how often a member yields before it blocks. The others usually arrive soon, and an awake
// goroutine can be taken over by any idle processor.
const meetYields = 200

func (t *localTeam) meet() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	meeting := t.meeting.Load()
	if t.present++; t.present == t.here {
		t.present = 0
		t.meeting.Store(meeting + 1)
		t.round.Broadcast()
		return t.failed
	}
	t.mu.Unlock()
	for tries := 0; tries < meetYields && t.meeting.Load() == meeting; tries++ {
		runtime.Gosched()
	}
	t.mu.Lock()
	for t.meeting.Load() == meeting && t.failed == nil {
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
		return fmt.Errorf("%d bytes to %d, but %d ranks exchange %d bytes to %d", len(x), len(y), n, from, to)
	}
	return m.call(teamCall{op: ir.AllToAll, t: e.DType, y: y, x: x, e: e})
}

func (m *localMember) Rotate(y, x []byte) error {
	if len(y) != len(x) {
		return fmt.Errorf("%d bytes are sent around, and %d are received", len(x), len(y))
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
		if other := &t.calls[i]; m.isHere(i) && (other.op != c.op || other.t != c.t || len(other.x) != len(c.x) || other.e != c.e) {
			return fmt.Errorf("rank %d calls %s of %d bytes of %s, but rank %d calls %s of %d bytes of %s",
				t.members[m.index], ir.Ops[c.op].Name, len(c.x), c.t,
				t.members[i], ir.Ops[other.op].Name, len(other.x), other.t)
		}
	}
	if err := m.gather(&c); err != nil {
		return err
	}
	m.work(&c)
	if c.op == ir.AllReduce {
		if err := m.spread(&c); err != nil {
			return err
		}
	}
	return t.meet()
}

// gather collects the parts that this member needs.
func (m *localMember) gather(c *teamCall) error {
	n := len(m.parts)
	for i := range m.parts {
		if m.isHere(i) {
			p := c.part(n, m.index, i)
			m.parts[i] = piece{m.team.calls[i].x[p.at:], p.stride}
		}
	}
	if m.in == nil {
		return nil
	}
	return m.exchange(c)
}

// work computes this member's result from the parts.
func (m *localMember) work(c *teamCall) {
	switch c.op {
	case ir.AllGather:
		for i, p := range m.parts {
			if m.isHere(i) {
				copy(c.y[i*len(c.x):], p.x)
			}
		}
	case ir.ReduceScatter:
		sum(c.y, m.parts, 0, c.t)
	case ir.AllReduce:
		from, to := c.share(len(m.parts), m.index)
		sum(c.x[from:to], m.parts, 0, c.t)
	case ir.Rotate:
		if before := (m.index + len(m.parts) - 1) % len(m.parts); m.isHere(before) {
			copy(c.y, m.parts[before].x)
		}
	case ir.AllToAll:
		if c.e.Inverse {
			m.columnsToRows(c)
		} else {
			m.rowsToColumns(c)
		}
	}
}

// spread writes this member's share of an all_reduce to every member; no other member writes that share.
func (m *localMember) spread(c *teamCall) error {
	from, to := c.share(len(m.parts), m.index)
	for i := range m.parts {
		if i != m.index && m.isHere(i) {
			copy(m.team.calls[i].x[from:to], c.x[from:to])
		}
	}
	if m.in == nil {
		return nil
	}
	return m.spreadFar(c)
}

// rowsToColumns takes this member's columns from every member's rows.
func (m *localMember) rowsToColumns(c *teamCall) {
	n, y := c.e.Cols*int(c.t.Bytes()), c.y
	for i, p := range m.parts {
		for row := 0; row < c.e.Rows && m.isHere(i); row++ {
			copy(y[row*n:(row+1)*n], p.x[row*p.stride:])
		}
		y = y[c.e.Rows*n:]
	}
}

// columnsToRows takes this member's rows from every member's columns, and adds those of members with equal
// columns.
func (m *localMember) columnsToRows(c *teamCall) {
	n, y := c.e.Cols*int(c.t.Bytes()), c.y
	for row := range c.e.Rows {
		at := row * n
		for first := 0; first < len(m.parts); first += c.e.Copies {
			if c.e.Copies == 1 {
				copy(y[:n], m.parts[first].x[at:])
			} else {
				sum(y[:n], m.parts[first:first+c.e.Copies], at, c.t)
			}
			y = y[n:]
		}
	}
}

// sum writes to y the sum of the parts, in order and in f32, starting at byte at. y may alias a part: every
// block is read from all parts before it is written.
func sum(y []byte, parts []piece, at int, dtype ir.DType) {
	var sums, addend [256]float32
	size := int(dtype.Bytes())
	for len(y) > 0 {
		block := y[:min(len(y), len(sums)*size)]
		n := len(block) / size
		widen(sums[:n], parts[0].x[at:at+len(block)], dtype)
		for _, p := range parts[1:] {
			widen(addend[:n], p.x[at:at+len(block)], dtype)
			for i, v := range addend[:n] {
				sums[i] += v
			}
		}
		narrow(block, sums[:n], dtype)
		y, at = y[len(block):], at+len(block)
	}
}

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
// receiver's. Every member of a collective does its share of the work in the memory of all members. Over wires,
// Local also connects ranks of other processes. Members then also process the data received from those
// processes, in the same order as if all ranks were in one process.
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

// abort records the reason and reports whether it is the first.
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
	taken  chan struct{} // has capacity 1, so a receiver can report that it is done without waiting
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

// Collective implements Transport.
func (l *Local) Collective(rank int, members []int32, in *ir.Instr, y, x []byte) (func() error, error) {
	index := slices.Index(members, int32(rank))
	if index < 0 {
		return nil, fmt.Errorf("rank %d is not in the group %v", rank, members)
	}
	meeting, err := in.Meeting(index, len(members))
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	key := fmt.Sprint(in.Stream, members)
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
	m := &localMember{team: t, index: index, meeting: meeting, call: teamCall{in, y, x}, from: make([]source, len(members))}
	if t.here < len(members) {
		m.wire(l, key)
	}
	return m.run, nil
}

// localTeam synchronises the members of a group for the collectives on a stream. A call has two barriers: the
// first after all members have published their buffers, the second after all have done their share, so that no
// member leaves while its buffers are in use.
type localTeam struct {
	members []int32
	here    int        // number of members in this process
	calls   []teamCall // by member; only those in this process are set

	mu      sync.Mutex
	round   sync.Cond
	meeting atomic.Uint64
	present int
	failed  error
}

// teamCall is a member's contribution to a call.
type teamCall struct {
	in   *ir.Instr
	y, x []byte
}

// localMember is one member's side of one collective.
type localMember struct {
	team    *localTeam
	index   int
	meeting ir.Meeting
	call    teamCall
	from    []source // by member: the transfers to this one
	in, out []Wire   // by member: nil for members in this process; both slices are nil if every member is
	staged  [][]byte
	packed  []byte
}

// source is memory from which a transfer is read: a member's x, or received bytes.
type source struct {
	x      []byte // starting at the transfer's first byte
	stride int    // between rows
}

// meetYields is the number of times that a member yields before it blocks. The other members usually arrive
// soon, and any idle processor can resume a member that has yielded.
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

// run runs the collective once.
func (m *localMember) run() error {
	t := m.team
	t.calls[m.index] = m.call
	if err := t.meet(); err != nil {
		return err
	}
	if err := m.match(); err != nil {
		return err
	}
	for i, g := range m.meeting.Gets {
		if m.isHere(i) && g.Size() > 0 {
			m.from[i] = source{t.calls[i].x[g.X:], int(g.XStride)}
		}
	}
	if err := m.exchange(); err != nil {
		return err
	}
	if err := m.meeting.Sums(m.add); err != nil {
		return err
	}
	if err := m.spread(); err != nil {
		return err
	}
	return t.meet()
}

// match returns an error if the calls of members in this process do not match.
func (m *localMember) match() error {
	t, in := m.team, m.call.in
	for i := range t.calls {
		if !m.isHere(i) {
			continue
		}
		if other := t.calls[i].in; other != in && in.Differs(other) != "" {
			return fmt.Errorf("rank %d calls %s, but rank %d calls %s", t.members[m.index], callText(in), t.members[i], callText(other))
		}
	}
	return nil
}

func callText(in *ir.Instr) string {
	return fmt.Sprintf("%s of %d bytes of %s", in.Info().Name, in.X().Bytes(), in.X().DType)
}

// add writes the sum of the transfers from members first .. end-1 to its place in the result.
func (m *localMember) add(first, end int) error {
	g := &m.meeting.Gets[first]
	for row := range int(g.Rows) {
		at := int(g.Y) + row*int(g.YStride)
		if y := m.call.y[at : at+int(g.Width)]; end == first+1 {
			if from := m.from[first]; &from.x[row*from.stride] != &y[0] {
				copy(y, from.x[row*from.stride:])
			}
		} else {
			sum(y, m.from[first:end], row, m.call.in.X().DType)
		}
	}
	return nil
}

// spread copies this member's result, which no other member writes, to every other member, if the collective
// requires it.
func (m *localMember) spread() error {
	if !m.meeting.Everywhere {
		return nil
	}
	first, end := m.result(m.index)
	for i := range m.from {
		if i != m.index && m.isHere(i) {
			copy(m.team.calls[i].y[first:end], m.call.y[first:end])
		}
	}
	if m.in == nil {
		return nil
	}
	return m.spreadFar()
}

// result returns the byte range of a member's result, in a collective whose result is copied to all members.
func (m *localMember) result(member int) (first, end ir.Bytes) {
	t := m.call.in.Op.Collective().Transfer(m.call.in, int64(member), 0, int64(len(m.from)))
	return t.Y, t.Y + t.Size()
}

// sum adds the given row of all sources, in order and in f32, and writes the result to y. y may alias a source:
// every block is read from all sources before it is written.
func sum(y []byte, sources []source, row int, dtype ir.DType) {
	var sums, addend [256]float32
	size := int(dtype.Bytes())
	for at := 0; at < len(y); {
		block := y[at:min(len(y), at+len(sums)*size)]
		n := len(block) / size
		for i, s := range sources {
			from := s.x[row*s.stride+at:][:len(block)]
			if i == 0 {
				Widen(sums[:n], from, dtype)
				continue
			}
			Widen(addend[:n], from, dtype)
			for i, v := range addend[:n] {
				sums[i] += v
			}
		}
		Narrow(block, sums[:n], dtype)
		at += len(block)
	}
}

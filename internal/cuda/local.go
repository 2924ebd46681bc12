package cuda

import (
	"encoding/binary"
	"fmt"
	"slices"
	"sync"

	"sppo.dev/internal/cuda/driver"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// meetings connects ranks of one process. A rank that issues a message or a collective waits on the host until its
// peers have issued theirs; after that, only events order their streams. Work is therefore submitted only after
// everything it waits for, so streams that share a GPU queue cannot block each other forever. Programs issue
// communication in an order in which all ranks can meet.
type meetings struct {
	mu      sync.Mutex
	links   map[linkKey]*link
	teams   map[string]*team
	reason  error
	aborted chan struct{}
}

type linkKey struct {
	from, to int
	channel  vm.Channel
}

func newMeetings() *meetings {
	return &meetings{links: map[linkKey]*link{}, teams: map[string]*team{}, aborted: make(chan struct{})}
}

func (m *meetings) abort(reason error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.reason != nil {
		return
	}
	m.reason = fmt.Errorf("%w: %w", vm.ErrAborted, reason)
	close(m.aborted)
	for _, t := range m.teams {
		t.mu.Lock()
		t.failed = m.reason
		t.round.Broadcast()
		t.mu.Unlock()
	}
}

// failed returns why ranks can no longer meet, or nil.
func (m *meetings) failed() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.reason
}

// link carries the messages in one direction on one channel.
type link struct {
	offers chan offer
	taken  chan driver.Event // has capacity 1, so a receiver need not wait to report that it is done
}

// offer is a sender's buffer, which is ready once the event has completed.
type offer struct {
	span
	there driver.Event
}

func (m *meetings) link(from, to int, channel vm.Channel) *link {
	m.mu.Lock()
	defer m.mu.Unlock()
	key := linkKey{from, to, channel}
	if m.links[key] == nil {
		m.links[key] = &link{offers: make(chan offer), taken: make(chan driver.Event, 1)}
	}
	return m.links[key]
}

// comm binds a message or a collective to the network in use.
func (m *Machine) comm(b *binder) error {
	if m.collect != nil {
		return m.collect.bind(b)
	}
	switch b.in.Op {
	case ir.Send, ir.Recv:
		return b.message()
	}
	return b.collective()
}

// endpoint is one side of a link: an event that it records, and calls that are updated for each message.
type endpoint struct {
	meetings *meetings
	link     *link
	mine     driver.Event
	record   driver.Call
	wait     driver.Call
}

func (b *binder) message() error {
	d, rank, peer := b.device, b.device.rank, b.int("peer")
	if peer < 0 || peer >= len(d.program.Ranks) || peer == rank {
		return fmt.Errorf("rank %d has no messages with rank %d", rank, peer)
	}
	event, err := d.newEvent(false)
	if err != nil {
		return err
	}
	e := endpoint{meetings: d.machine.meeting, mine: event, record: d.api.Record(event, b.stream), wait: d.api.Wait(b.stream, event)}
	if b.in.Op == ir.Send {
		e.link = d.machine.meeting.link(rank, peer, vm.ChannelOf(b.in.Stream))
		b.out.actions = append(b.out.actions, &sending{e, b.operand(0)})
		return nil
	}
	e.link = d.machine.meeting.link(peer, rank, vm.ChannelOf(b.in.Stream))
	b.out.actions = append(b.out.actions, &receiving{e, b.operand(0), d.api.Copy(0, 0, 0, b.stream)})
	return nil
}

type sending struct {
	endpoint
	x span
}

// Make implements action: the stream continues once the receiver's copy is done.
func (s *sending) Make() error {
	if err := s.record.Make(); err != nil {
		return err
	}
	select {
	case s.link.offers <- offer{s.x, s.mine}:
	case <-s.meetings.aborted:
		return s.meetings.failed()
	}
	select {
	case done := <-s.link.taken:
		s.wait.SetEvent(done)
		return s.wait.Make()
	case <-s.meetings.aborted:
		return s.meetings.failed()
	}
}

type receiving struct {
	endpoint
	y    span
	copy driver.Call
}

// Make implements action.
func (r *receiving) Make() error {
	select {
	case o := <-r.link.offers:
		if o.bytes != r.y.bytes {
			return fmt.Errorf("the peer sends %d bytes, but this rank receives %d", o.bytes, r.y.bytes)
		}
		if err := r.take(o); err != nil {
			return err
		}
		r.link.taken <- r.mine
		return nil
	case <-r.meetings.aborted:
		return r.meetings.failed()
	}
}

func (r *receiving) take(o offer) error {
	r.wait.SetEvent(o.there)
	if err := r.wait.Make(); err != nil {
		return err
	}
	if o.bytes > 0 {
		r.copy.SetCopy(r.y.at, o.at, o.bytes)
		if err := r.copy.Make(); err != nil {
			return err
		}
	}
	return r.record.Make()
}

// team is the meeting point of a collective's members. They meet twice: when all have published their buffers,
// and when all have issued their share of the work.
type team struct {
	members []int32
	calls   []teamCall

	mu      sync.Mutex
	round   sync.Cond
	meeting uint64
	present int
	failed  error
}

// teamCall is a member's contribution. Of its two events, `there` signals that the member's data is ready, and
// `done` that its share of the work is finished.
type teamCall struct {
	in          *ir.Instr
	y, x        span
	there, done driver.Event
}

func (m *meetings) team(members []int32, stream ir.Stream) *team {
	m.mu.Lock()
	defer m.mu.Unlock()
	key := fmt.Sprint(stream, members)
	if m.teams[key] == nil {
		t := &team{members: slices.Clone(members), calls: make([]teamCall, len(members)), failed: m.reason}
		t.round.L = &t.mu
		m.teams[key] = t
	}
	return m.teams[key]
}

func (t *team) meet() error {
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

// member is one rank's side of one collective instruction.
type member struct {
	d       *Device
	team    *team
	index   int
	meeting ir.Meeting
	call    teamCall
	theirs  []driver.Event // each signals that one member's share is done
	there   driver.Call
	done    driver.Call
	wait    driver.Call
	copy    driver.Call
	sum     summer
}

// collectiveOf returns the operands of a collective and what this rank exchanges with the others.
func (b *binder) collectiveOf(index, n int) (teamCall, ir.Meeting, error) {
	meeting, err := b.in.Meeting(index, n)
	return teamCall{in: b.in, y: b.operand(0), x: b.operand(len(b.in.Args) - 1)}, meeting, err
}

// groupOf returns the members of a collective's group and the index of this rank.
func (d *Device) groupOf(in *ir.Instr) (members []int32, index int, err error) {
	group := int(in.Attr("group").Int(d.program.Ranks[d.rank].Consts))
	if group < 0 || group >= len(d.program.Ranks[d.rank].Groups) {
		return nil, 0, fmt.Errorf("group %d does not exist", group)
	}
	members = d.program.Ranks[d.rank].Groups[group]
	if index = slices.Index(members, int32(d.rank)); index < 0 {
		return nil, 0, fmt.Errorf("rank %d is not in the group %v", d.rank, members)
	}
	return members, index, nil
}

func (b *binder) collective() error {
	d := b.device
	members, index, err := d.groupOf(b.in)
	if err != nil {
		return err
	}
	if len(members) > maxSummands {
		return fmt.Errorf("one process has %d ranks on GPUs, but at most %d can communicate through copies: use "+
			"NCCL", len(members), maxSummands)
	}
	m := &member{d: d, team: d.machine.meeting.team(members, b.in.Stream), index: index, theirs: make([]driver.Event, len(members))}
	if m.call, m.meeting, err = b.collectiveOf(index, len(members)); err != nil {
		return err
	}
	for _, e := range []*driver.Event{&m.call.there, &m.call.done} {
		if *e, err = d.newEvent(false); err != nil {
			return err
		}
	}
	m.there, m.done = d.api.Record(m.call.there, b.stream), d.api.Record(m.call.done, b.stream)
	m.wait, m.copy = d.api.Wait(b.stream, m.call.done), d.api.Copy(0, 0, 0, b.stream)
	if m.meeting.Computes() {
		if m.sum, err = d.sumCall(b.in.X().DType, b.stream); err != nil {
			return err
		}
	}
	b.out.actions = append(b.out.actions, m)
	return nil
}

// Make implements action.
func (m *member) Make() error {
	t := m.team
	if err := m.there.Make(); err != nil {
		return err
	}
	t.calls[m.index] = m.call
	if err := t.meet(); err != nil {
		return err
	}
	if err := m.match(); err != nil {
		return err
	}
	// After the second meeting, members may overwrite the published values, so the values needed later are copied.
	for i := range t.calls {
		m.theirs[i] = t.calls[i].done
		if err := m.waitFor(i, t.calls[i].there); err != nil {
			return err
		}
	}
	if err := m.share(); err != nil {
		return err
	}
	if err := m.done.Make(); err != nil {
		return err
	}
	if err := t.meet(); err != nil {
		return err
	}
	for i, done := range m.theirs {
		if err := m.waitFor(i, done); err != nil {
			return err
		}
	}
	return nil
}

// match refuses calls that do not belong together.
func (m *member) match() error {
	in := m.call.in
	for i := range m.team.calls {
		if other := m.team.calls[i].in; other != in && in.Differs(other) != "" {
			return fmt.Errorf("rank %d calls %s of %d bytes of %s, but rank %d calls %s of %d bytes of %s",
				m.team.members[m.index], in.Info().Name, in.X().Bytes(), in.X().DType,
				m.team.members[i], other.Info().Name, other.X().Bytes(), other.X().DType)
		}
	}
	return nil
}

// waitFor makes the stream wait for an event of another member.
func (m *member) waitFor(i int, e driver.Event) error {
	if i == m.index {
		return nil
	}
	m.wait.SetEvent(e)
	return m.wait.Make()
}

// share issues this member's part of the work, which may read and write the memory of all members. If the
// result goes to all members, only this member copies its part to each of them.
func (m *member) share() error {
	return m.meeting.Sums(m.add)
}

// add writes the sum of the contributions of members first .. end-1 to its place in the result.
func (m *member) add(first, end int) error {
	t, calls := m.meeting.Gets[first], m.team.calls
	at, bytes := driver.Ptr(t.Y), int64(t.Size())
	if end == first+1 && t.Rows == 1 {
		if err := m.copyBytes(m.call.y.at+at, calls[first].x.at+driver.Ptr(t.X), bytes); err != nil {
			return err
		}
	} else if err := m.sum.rows(sumOf(m.call.y.at, calls[first:end], t, m.call.in.X().DType)); err != nil {
		return err
	}
	for i := range calls {
		if m.meeting.Everywhere {
			if err := m.copyBytes(calls[i].y.at+at, m.call.y.at+at, bytes); err != nil {
				return err
			}
		}
	}
	return nil
}

func (m *member) copyBytes(to, from driver.Ptr, bytes int64) error {
	if bytes == 0 || to == from {
		return nil
	}
	m.copy.SetCopy(to, from, bytes)
	return m.copy.Make()
}

// sumArgs describes y[row,col] = the sum over calls, in order and in f32, of x[row,col], where each x starts at
// byte `at` of the call's operand.
type sumArgs struct {
	y                driver.Ptr
	calls            []teamCall
	at               int64
	rows, cols       int64
	yStride, xStride int64 // row stride, in elements
}

// sumOf describes the sum of a transfer to which several calls contribute.
func sumOf(y driver.Ptr, calls []teamCall, t ir.Transfer, d ir.DType) sumArgs {
	size := d.Bytes()
	return sumArgs{y: y + driver.Ptr(t.Y), calls: calls, at: int64(t.X), rows: int64(t.Rows), cols: int64(t.Width / size),
		yStride: int64(t.YStride / size), xStride: int64(t.XStride / size)}
}

// maxSummands is the number of addresses that the summing kernel accepts.
const maxSummands = 16

// sumThreads is the number of threads in a block of the summing kernel; sumBlocks is the maximum number of blocks.
const (
	sumThreads = 256
	sumBlocks  = 1024
)

// sumCall prepares a launch of the summing kernel; rows sets its arguments.
func (d *Device) sumCall(t ir.DType, stream driver.Stream) (summer, error) {
	name := "sum_ranks_f32"
	if t == ir.BF16 {
		name = "sum_ranks_bf16"
	}
	f, err := d.kernel(sumSource, name)
	if err != nil {
		return summer{}, err
	}
	arguments := make([][]byte, maxSummands+6)
	for i := range arguments {
		arguments[i] = make([]byte, 8)
	}
	l := driver.Launch{Func: f, Grid: [3]int{1, 1, 1}, Block: [3]int{sumThreads, 1, 1}, Stream: stream}
	return summer{d.api.Launch(l, arguments...)}, nil
}

// summer is a prepared launch of the summing kernel.
type summer struct{ call driver.Call }

// rows launches the kernel with the given arguments.
func (s *summer) rows(a sumArgs) error {
	if a.rows*a.cols == 0 {
		return nil
	}
	s.call.SetGrid(int(min((a.rows*a.cols+sumThreads-1)/sumThreads, sumBlocks)))
	set := func(i int, v int64) { binary.LittleEndian.PutUint64(s.call.Argument(i), uint64(v)) }
	set(0, int64(a.y))
	set(1, int64(len(a.calls)))
	set(2, a.rows)
	set(3, a.cols)
	set(4, a.yStride)
	set(5, a.xStride)
	for i := range maxSummands {
		at := int64(0)
		if i < len(a.calls) {
			at = int64(a.calls[i].x.at) + a.at
		}
		set(6+i, at)
	}
	return s.call.Make()
}

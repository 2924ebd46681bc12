package field

import (
	"fmt"
	"slices"
	"sync"

	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// meetings connects ranks. A message waits for its receiver, and the last member to arrive at a collective does the work of all.
type meetings struct {
	mu      sync.Mutex
	changed sync.Cond
	ranks   int
	blocked int // ranks that have found nothing to do since the last change
	resting int // ranks that have finished the section
	failed  error

	messages map[route][][]element
	teams    map[string]*team
}

// route identifies the messages from one rank to another on a channel, which keep their order.
type route struct {
	from, to int
	channel  vm.Channel
}

// team is a group of ranks that run collectives on a stream.
type team struct {
	calls   []*call // of members that have arrived; nil for others
	arrived int
	round   int
}

func (m *meetings) init(ranks int) {
	m.ranks, m.messages, m.teams = ranks, map[route][][]element{}, map[string]*team{}
	m.changed.L = &m.mu
}

// fail ends all waits with an error.
func (m *meetings) fail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.stop(fmt.Errorf("%w: %w", vm.ErrAborted, err))
}

func (m *meetings) stop(err error) {
	if m.failed == nil {
		m.failed = err
	}
	m.wake()
}

// wake makes all waiting ranks look again.
func (m *meetings) wake() {
	m.blocked = 0
	m.changed.Broadcast()
}

// await waits until a condition holds. If no rank can do anything else, all fail.
func (m *meetings) await(ready func() bool) error {
	for m.failed == nil && !ready() {
		if m.blocked++; m.blocked+m.resting == m.ranks {
			m.stop(m.deadlock())
			break
		}
		m.changed.Wait()
	}
	return m.failed
}

func (m *meetings) deadlock() error {
	return fmt.Errorf("deadlock: %d ranks wait for messages or members that never come", m.blocked)
}

// rest records that a rank has finished its section.
func (m *meetings) rest() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch m.resting++; {
	case m.resting == m.ranks:
		m.resting = 0
	case m.blocked+m.resting == m.ranks:
		m.stop(m.deadlock())
	}
	return m.failed
}

func send(c *call) {
	m := &c.machine.meetings
	m.mu.Lock()
	defer m.mu.Unlock()
	key := route{c.rank, c.int("peer"), vm.ChannelOf(c.in.Stream)}
	m.messages[key] = append(m.messages[key], slices.Clone(c.bytes("x")))
	m.wake()
}

func recv(c *call) {
	m := &c.machine.meetings
	m.mu.Lock()
	defer m.mu.Unlock()
	key, y := route{c.int("peer"), c.rank, vm.ChannelOf(c.in.Stream)}, c.bytes("y")
	if c.err = m.await(func() bool { return len(m.messages[key]) > 0 }); c.err != nil {
		return
	}
	x := m.messages[key][0]
	if m.messages[key] = m.messages[key][1:]; len(x) != len(y) {
		c.err = fmt.Errorf("rank %d sends %d bytes, rank %d receives %d", key.from, 2*len(x), key.to, 2*len(y))
	}
	copy(y, x)
}

func collective(c *call) {
	m, members := &c.machine.meetings, c.program.Ranks[c.rank].Groups[c.int("group")]
	index := slices.Index(members, int32(c.rank))
	if index < 0 {
		c.err = fmt.Errorf("rank %d is not in the group %v", c.rank, members)
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	key := fmt.Sprint(c.in.Stream, members)
	t := m.teams[key]
	if t == nil {
		t = &team{calls: make([]*call, len(members))}
		m.teams[key] = t
	}
	round := t.round
	t.calls[index] = c
	if t.arrived++; t.arrived < len(members) {
		c.err = m.await(func() bool { return t.round != round })
		return
	}
	c.err = t.meet(members)
	t.arrived = 0
	t.round++
	m.wake()
}

// meet computes the results of all members before it stores any, because operands may be updated in place.
func (t *team) meet(members []int32) error {
	var results []part
	for i, c := range t.calls {
		if differs := c.in.Differs(t.calls[0].in); differs != "" {
			return fmt.Errorf("rank %d and rank %d call collectives that differ in their %s", members[0], members[i], differs)
		}
		meeting, err := c.in.Meeting(i, len(members))
		if err != nil {
			return err
		}
		receivers := t.calls[i : i+1]
		if meeting.Everywhere {
			receivers = t.calls
		}
		if err := meeting.Sums(func(first, end int) error {
			results = append(results, t.sum(meeting.Gets, first, end, receivers)...)
			return nil
		}); err != nil {
			return err
		}
	}
	for _, r := range results {
		for _, c := range r.receivers {
			copy(c.arg(0)[r.at:], r.elements)
		}
	}
	return nil
}

// part is a row of a collective's result.
type part struct {
	receivers []*call
	at        ir.Bytes // index of its first element
	elements  []element
}

// sum returns the rows of the sum of the transfers from members first to end-1.
func (t *team) sum(gets []ir.Transfer, first, end int, receivers []*call) (rows []part) {
	for row := range gets[first].Rows {
		g := &gets[first]
		out := part{receivers, (g.Y + row*g.YStride) / 2, make([]element, g.Width/2)}
		for i := first; i < end; i++ {
			c := t.calls[i]
			x := c.arg(len(c.in.Args) - 1)[(gets[i].X+row*gets[i].XStride)/2:][:len(out.elements)]
			for j, e := range x {
				if i == first {
					out.elements[j] = e
				} else {
					out.elements[j] = out.elements[j].plus(e)
				}
			}
		}
		rows = append(rows, out)
	}
	return rows
}

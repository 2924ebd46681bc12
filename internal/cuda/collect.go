package cuda

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"sppo.dev/internal/cuda/driver"
	"sppo.dev/internal/cuda/nccl"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// collective connects ranks through NCCL. Every communicator has one stream per member (see layout), so streams
// wait only as the program requires. NCCL computes sums in the type of the elements and in its own order.
type collective struct {
	api     *nccl.API
	world   *World
	ids     once[string, nccl.ID]
	layouts once[*ir.Program, *layout]
	mu      sync.Mutex
	open    []*guarded
	failed  error
}

// layout returns the communicators of a program.
func (c *collective) layout(p *ir.Program) (*layout, error) {
	return c.layouts.get(p, func() (*layout, error) { return layoutOf(p) })
}

func newCollective(world *World) (*collective, error) {
	api, err := nccl.Open()
	return &collective{api: api, world: world}, err
}

// id returns the ID of a communicator, created by the process of its first member.
func (c *collective) id(p *place) (nccl.ID, error) {
	return c.ids.get(p.name, func() (id nccl.ID, err error) {
		if c.world == nil {
			return c.api.NewID()
		}
		var create func() ([]byte, error)
		if c.world.here(int(p.members[0])) {
			create = func() ([]byte, error) {
				id, err := c.api.NewID()
				return id[:], err
			}
		}
		value, err := c.world.Share(p.name, create)
		if err == nil && copy(id[:], value) != len(value) {
			err = fmt.Errorf("internal: an ID does not have %d bytes", len(value))
		}
		return id, err
	})
}

// guarded is a communicator that may be aborted at any time: a call holds the lock for reading, an abort for
// writing.
type guarded struct {
	mu     sync.RWMutex
	comm   *nccl.Comm
	place  place
	index  int // this rank's index among the members
	ended  bool
	shared *collective
}

// use makes a call, unless the communicator has been aborted, and waits until NCCL has accepted it.
func (g *guarded) use(f func(c *nccl.Comm) error) error {
	if err := g.call(f); err != nil {
		return err
	}
	return g.settle()
}

func (g *guarded) call(f func(c *nccl.Comm) error) error {
	g.mu.RLock()
	defer g.mu.RUnlock()
	if g.ended {
		return g.shared.why()
	}
	return f(g.comm)
}

// settle waits until NCCL has accepted the last call. It polls without pausing at first, because most calls are
// accepted before a sleeping thread would wake.
func (g *guarded) settle() error {
	const eager = 64
	pause := 5 * time.Microsecond
	for polls := 0; ; polls++ {
		var settled bool
		err := g.call(func(c *nccl.Comm) (err error) {
			settled, err = c.Poll()
			return err
		})
		if err != nil || settled {
			return err
		}
		if polls >= eager {
			time.Sleep(pause)
			pause = min(2*pause, time.Millisecond)
		}
	}
}

// why returns the reason why communicators were aborted.
func (c *collective) why() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failed != nil {
		return c.failed
	}
	return vm.ErrAborted
}

// abort aborts all communicators of the process, even those in use.
func (c *collective) abort(reason error) {
	c.mu.Lock()
	if c.failed != nil {
		c.mu.Unlock()
		return
	}
	c.failed = fmt.Errorf("%w: %w", vm.ErrAborted, reason)
	open := slices.Clone(c.open)
	c.mu.Unlock()
	for _, g := range open {
		g.abort()
	}
}

func (g *guarded) abort() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.ended {
		g.ended = true
		_ = g.comm.Abort() // nothing can be done about an error
	}
}

// close shuts the communicator down cleanly, or aborts it if that fails or takes too long.
func (g *guarded) close() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ended {
		return nil
	}
	g.ended = true
	deadline := time.Now().Add(closeTimeout)
	err := g.comm.Destroy(func() error {
		if time.Now().After(deadline) {
			return errors.New("NCCL does not finish")
		}
		return nil
	})
	if err != nil {
		return errors.Join(err, g.comm.Abort())
	}
	return nil
}

const closeTimeout = 30 * time.Second

// join opens the communicators of a rank. It returns once all members have joined them.
func (c *collective) join(d *Device) (map[int]*guarded, error) {
	layout, err := c.layout(d.program)
	if err != nil {
		return nil, err
	}
	out := map[int]*guarded{}
	for i, p := range layout.places {
		index := slices.Index(p.members, int32(d.rank))
		if index < 0 {
			continue
		}
		id, err := c.id(&p)
		if err != nil {
			return nil, err
		}
		comm, err := c.api.Init(len(p.members), id, index, layout.channels)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", p.name, err)
		}
		g := &guarded{comm: comm, place: p, index: index, shared: c}
		if err := c.register(g); err != nil {
			return nil, err
		}
		d.later(g.close)
		if err := g.settle(); err != nil {
			return nil, fmt.Errorf("%s: %w", p.name, err)
		}
		out[i] = g
	}
	return out, nil
}

// register adds a communicator to those that an abort reaches. If an abort has already happened, it aborts this
// communicator too and returns the reason.
func (c *collective) register(g *guarded) error {
	c.mu.Lock()
	failed := c.failed
	c.open = append(c.open, g)
	c.mu.Unlock()
	if failed != nil {
		g.abort()
	}
	return failed
}

// await waits for a stream. In the meantime, it watches for errors in the rank's communicators.
func (c *collective) await(d *Device, stream driver.Stream) error {
	for pause := 20 * time.Microsecond; ; pause = min(2*pause, time.Millisecond) {
		done, err := d.api.Done(stream)
		if done || err != nil {
			return err
		}
		for _, g := range d.comms {
			err := g.call(func(comm *nccl.Comm) error { _, err := comm.Poll(); return err })
			if err != nil && !errors.Is(err, vm.ErrAborted) {
				// This aborts all communicators, so that the stream finishes.
				d.keep(fmt.Errorf("%s: %w", g.place.name, err))
			}
		}
		time.Sleep(pause)
	}
}

// collecting is a message or a collective issued through NCCL.
type collecting struct {
	g             *guarded
	op            func(c *nccl.Comm) error
	sum           summer
	before, after []sumArgs // for layout changes and sums that NCCL has no function for
	spread        func(c *nccl.Comm) error
}

// Make implements action.
func (c *collecting) Make() error {
	for _, a := range c.before {
		if err := c.sum.rows(a); err != nil {
			return err
		}
	}
	if c.op == nil { // the last member of its group issues it
		return nil
	}
	if err := c.g.use(c.op); err != nil {
		return err
	}
	for _, a := range c.after {
		if err := c.sum.rows(a); err != nil {
			return err
		}
	}
	if c.spread != nil {
		return c.g.use(c.spread)
	}
	return nil
}

func (c *collective) bind(b *binder) error {
	d := b.device
	layout, err := c.layout(d.program)
	if err != nil {
		return err
	}
	rank := &d.program.Ranks[d.rank]
	g := d.comms[layout.of(b.in, d.rank, rank)]
	if g == nil {
		return fmt.Errorf("internal: rank %d is in no communicator for %s", d.rank, b.in.Info().Name)
	}
	peer := func() int { return slices.Index(g.place.members, int32(b.in.Attr("peer").Int(rank.Consts))) }
	out := &collecting{g: g}
	stream := uintptr(b.stream)
	switch b.in.Op {
	case ir.Send:
		x, to := b.operand(0), peer()
		out.op = func(c *nccl.Comm) error { return c.Send(uintptr(x.at), x.bytes, nccl.Int8, to, stream) }
	case ir.Recv:
		y, from := b.operand(0), peer()
		out.op = func(c *nccl.Comm) error { return c.Recv(uintptr(y.at), y.bytes, nccl.Int8, from, stream) }
	default:
		if err := c.collect(b, out); err != nil {
			return err
		}
	}
	b.out.actions = append(b.out.actions, out)
	return nil
}

// native calls an NCCL function that performs an entire collective.
type native func(c *nccl.Comm, call *teamCall, stream uintptr) error

// natives lists the collectives that NCCL has a function for. The others are exchanged as messages among all
// members.
var natives = map[ir.Op]native{
	ir.AllGather: func(c *nccl.Comm, call *teamCall, stream uintptr) error {
		return c.AllGather(uintptr(call.y.at), uintptr(call.x.at), call.x.bytes, nccl.Int8, stream)
	},
	ir.ReduceScatter: func(c *nccl.Comm, call *teamCall, stream uintptr) error {
		t, size := call.numbers()
		return c.ReduceScatter(uintptr(call.y.at), uintptr(call.x.at), call.y.bytes/size, t, stream)
	},
	ir.AllReduce: func(c *nccl.Comm, call *teamCall, stream uintptr) error {
		t, size := call.numbers()
		return c.AllReduce(uintptr(call.x.at), call.x.bytes/size, t, stream)
	},
}

// numbers returns the type and size of the elements that a collective adds.
func (c *teamCall) numbers() (nccl.DType, int64) {
	if t := c.in.X().DType; t == ir.BF16 {
		return nccl.BF16, int64(t.Bytes())
	}
	return nccl.F32, int64(ir.F32.Bytes())
}

func (c *collective) collect(b *binder, out *collecting) error {
	call, meeting, err := b.collectiveOf(out.g.index, len(out.g.place.members))
	if err != nil {
		return err
	}
	stream := uintptr(b.stream)
	if f := natives[b.in.Op]; f != nil {
		c.group(b, out, func(c *nccl.Comm) error { return f(c, &call, stream) })
		return nil
	}
	if meeting.Computes() {
		if out.sum, err = b.device.sumCall(b.in.X().DType, b.stream); err != nil {
			return err
		}
	}
	e, err := exchangeOf(&call, meeting, b.device.scratch[b.in.Stream])
	if err != nil {
		return err
	}
	out.before, out.after = e.before, e.after
	out.op = c.send(e.messages, stream)
	if meeting.Everywhere {
		out.spread = c.send(spreading(&call, out.g.index, len(out.g.place.members)), stream)
	}
	return nil
}

// group adds a collective to its group, whose last member issues all of them at once, so that they share NCCL's channels instead
// of following each other. NCCL requires all members to form the same groups, which ranks that run the same code do.
func (c *collective) group(b *binder, out *collecting, op func(*nccl.Comm) error) {
	ranks := b.device.program.Ranks
	alike := !slices.ContainsFunc(out.g.place.members, func(r int32) bool { return ranks[r].Code != ranks[b.device.rank].Code })
	*b.group = append(*b.group, op)
	ops := *b.group
	if alike && !b.ends {
		out.op = nil
		return
	}
	*b.group = nil
	if out.op = op; len(ops) > 1 {
		out.op = func(comm *nccl.Comm) error {
			return c.api.Group(func() error {
				for _, op := range ops {
					if err := op(comm); err != nil {
						return err
					}
				}
				return nil
			})
		}
	}
}

// message is one side of a message within a collective.
type message struct {
	span
	peer  int
	sends bool
}

// send issues all messages as one group.
func (c *collective) send(messages []message, stream uintptr) func(*nccl.Comm) error {
	return func(comm *nccl.Comm) error {
		return c.api.Group(func() error {
			for _, m := range messages {
				issue := comm.Recv
				if m.sends {
					issue = comm.Send
				}
				if err := issue(uintptr(m.at), m.bytes, nccl.Int8, m.peer, stream); err != nil {
					return err
				}
			}
			return nil
		})
	}
}

// exchange is a collective made of messages. Rows are packed before they are sent. Data that must be added or has
// row gaps is received in the workspace.
type exchange struct {
	before, after []sumArgs
	messages      []message
	workspace     int64 // bytes
}

func exchangeOf(call *teamCall, meeting ir.Meeting, workspace driver.Ptr) (exchange, error) {
	var e exchange
	d := call.in.X().DType
	reserve := func(t ir.Transfer) span {
		at := workspace + driver.Ptr(e.workspace)
		e.workspace += int64(t.Size())
		return span{at, int64(t.Size())}
	}
	for i, t := range meeting.Gives {
		from := span{call.x.at + driver.Ptr(t.X), int64(t.Size())}
		if t.Rows > 1 {
			from = reserve(t)
			t.Y, t.YStride = 0, t.Width
			e.before = append(e.before, sumOf(from.at, []teamCall{*call}, t, d))
		}
		if t.Size() > 0 {
			e.messages = append(e.messages, message{from, i, true})
		}
	}
	err := meeting.Sums(func(first, end int) error {
		t := meeting.Gets[first].Packed()
		if end == first+1 && t.Rows == 1 {
			e.messages = append(e.messages, message{span{call.y.at + driver.Ptr(t.Y), int64(t.Size())}, first, false})
			return nil
		}
		if end-first > maxSummands {
			return fmt.Errorf("%s sums the contributions of %d ranks, but at most %d are supported",
				call.in.Info().Name, end-first, maxSummands)
		}
		received := make([]teamCall, end-first)
		for i := range received {
			received[i].x = reserve(t)
			e.messages = append(e.messages, message{received[i].x, first + i, false})
		}
		e.after = append(e.after, sumOf(call.y.at, received, t, d))
		return nil
	})
	return e, err
}

// spreading lists the messages that bring each member's result to all others.
func spreading(call *teamCall, index, n int) (messages []message) {
	result := func(member int) span {
		t := call.in.Op.Collective().Transfer(call.in, int64(member), 0, int64(n))
		return span{call.y.at + driver.Ptr(t.Y), int64(t.Size())}
	}
	for i := range n {
		if mine := result(index); i != index && mine.bytes > 0 {
			messages = append(messages, message{mine, i, true})
		}
		if theirs := result(i); i != index && theirs.bytes > 0 {
			messages = append(messages, message{theirs, i, false})
		}
	}
	return messages
}

// workspaceOf returns the size of the workspace that a collective needs.
func (c *collective) workspaceOf(d *Device, in *ir.Instr) (int64, error) {
	if in.Op.Collective() == nil || natives[in.Op] != nil {
		return 0, nil
	}
	members, index, err := d.groupOf(in)
	if err != nil {
		return 0, err
	}
	meeting, err := in.Meeting(index, len(members))
	if err != nil {
		return 0, err
	}
	e, err := exchangeOf(&teamCall{in: in}, meeting, 0)
	return e.workspace, err
}

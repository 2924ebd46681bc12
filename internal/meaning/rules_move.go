package meaning

import (
	"fmt"
	"slices"

	"sppo.dev/ir"
)

// Copies, messages and collectives.

func move(c *call) {
	x := c.in.Args[1]
	list, err := c.read(c.list(), &x)
	if err != nil {
		c.refuse("x %v", err)
	}
	c.moved(&c.in.Args[0], list)
}

// moved stores pieces that come from elsewhere, whose elements keep their type.
func (c *call) moved(v *ir.View, list []piece) {
	m, lo, hi := c.extent(v)
	if total((*piece).length, list) != hi-lo {
		c.refuse("%d bytes arrive at a place of %d", total((*piece).length, list), hi-lo)
	}
	m.write(lo, hi, list)
}

// channelOf returns the channel of a stream's messages: those sent on send_next are received on recv_prev.
func channelOf(s ir.Stream) ir.Stream {
	switch s {
	case ir.RecvPrev:
		return ir.SendNext
	case ir.RecvNext:
		return ir.SendPrev
	case ir.MuxIn:
		return ir.Mux
	}
	return s
}

func send(c *call) {
	list, err := c.pieces(&c.in.Args[0])
	if err != nil {
		c.refuse("x %v", err)
	}
	to := path{c.rank.index, int32(c.int("peer")), channelOf(c.in.Stream)}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.messages[to] = append(c.messages[to], list)
	if r := c.ranks[to.to]; r.waits != nil && *r.waits == to {
		r.waits = nil
		c.wake(r)
	}
}

// receive stores the next message of its channel. It returns false if there is none yet.
func (c *call) receive() bool {
	from := path{int32(c.int("peer")), c.rank.index, channelOf(c.in.Stream)}
	c.mu.Lock()
	waiting := c.messages[from]
	if len(waiting) == 0 {
		c.waits = &from
		c.mu.Unlock()
		return false
	}
	c.messages[from] = waiting[1:]
	c.mu.Unlock()
	c.moved(&c.in.Args[0], waiting[0])
	return true
}

// team is a group of ranks that run collectives.
type team struct {
	members []int32
	calls   [ir.NumStreams][]*call // by stream and member; nil: has not arrived
	arrived [ir.NumStreams]int
}

func (c *call) team() *team {
	group := int(c.int("group"))
	if t := c.rank.teams[group]; t != nil {
		return t
	}
	members := c.p.Ranks[c.rank.index].Groups[group]
	name := fmt.Sprint(members)
	if c.prover.teams[name] == nil {
		c.prover.teams[name] = &team{members: members}
	}
	c.rank.teams[group] = c.prover.teams[name]
	return c.rank.teams[group]
}

// collective joins a collective. The last member to arrive does the work of all; the others return false, and wait until then.
func (c *call) collective() bool {
	calls := c.arrive()
	if calls == nil {
		return false
	}
	for _, m := range calls {
		if m.scratch = c.scratch; m.in.Differs(c.in) != "" {
			c.refuse("rank %d and rank %d call collectives that differ in their %s", m.rank.index, c.rank.index, m.in.Differs(c.in))
		}
	}
	gathers[c.in.Op](calls)
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, m := range calls {
		if m != c {
			m.rank.pc++
			c.wake(m.rank)
		}
	}
	return true
}

// arrive adds a call to those of the rank's team. It returns the calls of all members to the last of them, and nil to the others.
func (c *call) arrive() []*call {
	c.mu.Lock()
	defer c.mu.Unlock()
	t, s := c.team(), c.in.Stream
	if t.calls[s] == nil {
		t.calls[s] = make([]*call, len(t.members))
	}
	at := slices.Index(t.members, c.rank.index)
	if at < 0 || t.calls[s][at] != nil {
		c.refuse("rank %d does not belong to the group %v", c.rank.index, t.members)
	}
	t.calls[s][at] = c
	if t.arrived[s]++; t.arrived[s] < len(t.members) {
		return nil
	}
	calls := t.calls[s]
	t.calls[s], t.arrived[s] = nil, 0
	return calls
}

// gathers holds the rules of collectives, which compute the results of all members.
var gathers = [ir.NumOps]func(calls []*call){
	ir.AllGather: allGather, ir.ReduceScatter: reduceScatter, ir.AllReduce: allReduce, ir.Rotate: rotateRing, ir.AllToAll: allToAll,
}

// contributions returns the pieces that members contribute.
func contributions(calls []*call) (lists [][]piece) {
	for _, c := range calls {
		list, err := c.pieces(c.in.X())
		if err != nil {
			c.refuse("x %v", err)
		}
		lists = append(lists, list)
	}
	return lists
}

func allGather(calls []*call) {
	var whole []piece
	for _, list := range contributions(calls) {
		for _, p := range list {
			whole = join(whole, p)
		}
	}
	for _, c := range calls {
		c.moved(c.in.Y(), whole)
	}
}

func rotateRing(calls []*call) {
	lists := contributions(calls)
	for i, c := range calls {
		c.moved(c.in.Y(), lists[(i+len(lists)-1)%len(lists)])
	}
}

// reduced returns the sum of what members contribute. Bytes that a member has not written are in no sum; the result has them as
// not written, too.
func reduced(calls []*call, lists [][]piece) []piece {
	c, out := calls[0], lists[0]
	for i, list := range lists[1:] {
		lo, hi := written(out), written(list)
		if lo != hi {
			calls[i+1].refuse("the members of the sum have written different parts of their operands")
		}
		out = calls[i+1].sum(trimmed(out), trimmed(list))
		if whole := int64(c.in.X().Bytes()); hi < whole {
			out = append(out, hole(whole-hi))
		}
	}
	return out
}

// written returns the number of bytes before the first that has not been written, after which none may have been.
func written(list []piece) (n int64) {
	for i := range list {
		if list[i].content == nil {
			break
		}
		n += list[i].length()
	}
	return n
}

func trimmed(list []piece) []piece {
	if n := len(list); n > 0 && list[n-1].content == nil {
		return list[:n-1]
	}
	return list
}

func allReduce(calls []*call) {
	lists := contributions(calls)
	sum := reduced(calls, lists)
	for _, c := range calls {
		c.store(c.in.Y(), sum)
	}
}

func reduceScatter(calls []*call) {
	sum, lo := reduced(calls, contributions(calls)), int64(0)
	for _, c := range calls {
		hi := lo + int64(c.in.Y().Bytes())
		c.store(c.in.Y(), between(c, sum, lo, hi))
		lo = hi
	}
}

// between returns the part of a list between two bytes.
func between(c *call, list []piece, lo, hi int64) (out []piece) {
	at := int64(0)
	for i := range list {
		end := at + list[i].length()
		if from, to := max(lo, at), min(hi, end); from < to {
			var ok bool
			if out, ok = list[i].slice(out, from-at, to-at); !ok {
				c.refuse("cuts an element")
			}
		}
		at = end
	}
	return out
}

func allToAll(calls []*call) {
	if calls[0].bool("inverse") {
		toRows(calls)
		return
	}
	// member k gets column block k/copies of all members' rows
	copies := calls[0].int("copies")
	width := calls[0].in.Y().Cols()
	var whole [][]piece
	for i := range calls {
		whole = append(whole, calls[i].known(calls[i].in.X()))
	}
	for k, c := range calls {
		first := int64(k) / copies * width
		var out []piece
		for _, list := range whole {
			for _, p := range list {
				out = join(out, c.columns(p, first, width))
			}
		}
		c.store(c.in.Y(), out)
	}
}

// known returns pieces of whole rows, all of whose bytes have been written.
func (c *call) known(v *ir.View) []piece {
	list, err := c.pieces(v)
	if err != nil {
		c.refuse("x %v", err)
	}
	for i := range list {
		if p := &list[i]; p.content == nil || p.anywhere || p.cols.size() != v.Cols() {
			c.refuse("x does not consist of rows of a value")
		}
	}
	return list
}

// columns returns some columns of a piece.
func (c *call) columns(p piece, first, width int64) piece {
	p.cols = interval{p.cols.lo + first, p.cols.lo + first + width}
	p.content = p.content.settled(p.rectangle)
	return p
}

// toRows is the inverse all_to_all: member k gets row block k of all members, side by side; those with the same columns are added.
func toRows(calls []*call) {
	copies := int(calls[0].int("copies"))
	blockBytes := int64(calls[0].in.X().Bytes()) / int64(len(calls))
	var whole [][]piece
	for _, c := range calls {
		whole = append(whole, c.known(c.in.X()))
	}
	for k, c := range calls {
		var blocks [][]piece
		for i := 0; i < len(calls); i += copies {
			sum := between(c, whole[i], int64(k)*blockBytes, int64(k+1)*blockBytes)
			for j := i + 1; j < i+copies; j++ {
				sum = c.sum(sum, between(c, whole[j], int64(k)*blockBytes, int64(k+1)*blockBytes))
			}
			blocks = append(blocks, sum)
		}
		blocks = c.rows(blocks...)
		var out []piece
		for r := range blocks[0] {
			p := blocks[0][r]
			for _, b := range blocks[1:] {
				q := &b[r]
				if q.cols.lo != p.cols.hi || !q.content.equal(p.content) {
					c.refuse("puts different values side by side: %s and %s", c.ref.describe(&p), c.ref.describe(q))
				}
				p.cols.hi = q.cols.hi
			}
			out = join(out, p)
		}
		c.store(c.in.Y(), out)
	}
}

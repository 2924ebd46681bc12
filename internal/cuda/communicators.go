package cuda

import (
	"cmp"
	"fmt"
	"maps"
	"math/bits"
	"slices"

	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// place identifies a communicator. All ranks of a program derive the same list of communicators, and each rank
// joins its own in the order of that list.
type place struct {
	name    string
	members []int32 // ascending for messages; in the order of the group for collectives
}

// route identifies the messages from one rank to another on a channel.
type route struct {
	from, to int32
	channel  vm.Channel
}

// layout holds the communicators of a program. Every member of a communicator uses it on only one stream,
// because NCCL runs the calls of a communicator in the order of issue. If a member used two streams, a receive
// that waits for its peer would delay later calls on the other stream.
//
// Collectives share a communicator if they have the same members and stream. Messages of a channel leave each rank
// on one stream and arrive on another, so a communicator for messages is a set of routes from ranks that only send
// to ranks that only receive. The communicator of a route is determined by the lowest bit in which the positions
// of its two ranks differ, and by the value of that bit in the sender's position. If n ranks are connected by
// messages, each of them is therefore in at most 2*log2(n) communicators per channel, and never in more than one
// per peer and direction.
type layout struct {
	places   []place
	groups   map[string]int // by name
	routes   map[route]int
	streams  int // maximum number of streams on which a rank communicates
	channels int // upper limit on the channels of a communicator; 0: NCCL chooses
}

// mostPlaces is the maximum number of communicators of a rank.
const mostPlaces = 64

// layoutOf returns the communicators of a program, or an error if a rank is in more than mostPlaces.
func layoutOf(p *ir.Program) (*layout, error) {
	l := &layout{groups: map[string]int{}, routes: map[route]int{}}
	for r := range p.Ranks {
		rank := &p.Ranks[r]
		streams := map[ir.Stream]bool{}
		for s := range ir.NumSections {
			code := p.Codes[rank.Code].Sections[s]
			for i := range code {
				if in := &code[i]; in.Info().Class == ir.ClassComm {
					streams[in.Stream] = true
					l.add(in, r, rank)
				}
			}
		}
		l.streams = max(l.streams, len(streams))
	}
	l.share(cmp.Or(p.Machine.GPUsPerNode, len(p.Ranks)))
	l.channels = channelsFor(l.streams)
	l.limit(len(p.Ranks))
	return l, l.check(len(p.Ranks))
}

// check reports the first rank that is in too many communicators.
func (l *layout) check(ranks int) error {
	for r, n := range l.count(ranks) {
		if n > mostPlaces {
			return fmt.Errorf("rank %d needs %d NCCL communicators, but a rank can have at most %d, because each takes "+
				"additional device memory; use fewer stages or schedule.mux = off", r, n, mostPlaces)
		}
	}
	return nil
}

// count returns the number of communicators of each rank.
func (l *layout) count(ranks int) []int {
	counts := make([]int, ranks)
	for _, p := range l.places {
		for _, m := range p.members {
			counts[m]++
		}
	}
	return counts
}

// add records the communicator that an instruction of a rank needs.
func (l *layout) add(in *ir.Instr, r int, rank *ir.Rank) {
	if in.Op == ir.Send || in.Op == ir.Recv {
		l.routes[routeOf(in, r, rank)] = -1
		return
	}
	members := rank.Groups[in.Attr("group").Int(rank.Consts)]
	if name := groupName(in, members); !has(l.groups, name) {
		l.groups[name] = len(l.places)
		l.places = append(l.places, place{name, members})
	}
}

func has[K comparable, V any](m map[K]V, key K) bool {
	_, ok := m[key]
	return ok
}

func groupName(in *ir.Instr, members []int32) string {
	return fmt.Sprintf("ranks %v on stream %s", members, in.Stream)
}

func routeOf(in *ir.Instr, rank int, of *ir.Rank) route {
	l := route{int32(rank), int32(in.Attr("peer").Int(of.Consts)), vm.ChannelOf(in.Stream)}
	if in.Op == ir.Recv {
		l.from, l.to = l.to, l.from
	}
	return l
}

// of returns the index of the communicator that a rank's instruction uses.
func (l *layout) of(in *ir.Instr, rank int, of *ir.Rank) int {
	if in.Op == ir.Send || in.Op == ir.Recv {
		return l.routes[routeOf(in, rank, of)]
	}
	return l.groups[groupName(in, of.Groups[in.Attr("group").Int(of.Consts)])]
}

// side holds the common properties of a communicator's routes. Routes within a node have separate communicators,
// because NCCL gives every peer in a communicator only as many channels as the slowest peer gets.
type side struct {
	channel vm.Channel
	remote  bool
	bit     int   // the lowest bit in which positions differ
	one     bool  // whether this bit is 1 at the senders
	root    int32 // the smallest rank that the routes connect
}

// share divides the routes among communicators.
func (l *layout) share(perNode int) {
	sorted := slices.SortedFunc(maps.Keys(l.routes), func(a, b route) int {
		return cmp.Or(cmp.Compare(a.channel, b.channel), cmp.Compare(a.from, b.from), cmp.Compare(a.to, b.to))
	})
	far := func(k route) bool { return int(k.from)/perNode != int(k.to)/perNode }
	position := positions(sorted, func(k route) side { return side{channel: k.channel, remote: far(k)} })
	sideOf := func(k route) side {
		s := side{channel: k.channel, remote: far(k)}
		a, b := position[seat{s, k.from}], position[seat{s, k.to}]
		s.bit = bits.TrailingZeros(uint(a.index ^ b.index))
		s.one = a.index>>s.bit&1 == 1
		return s
	}
	parts := positions(sorted, sideOf)
	found := map[side]int{}
	for _, k := range sorted {
		s := sideOf(k)
		s.root = parts[seat{s, k.from}].root
		if !has(found, s) {
			found[s] = len(l.places)
			l.places = append(l.places, place{})
		}
		at := found[s]
		l.routes[k] = at
		l.places[at].members = append(l.places[at].members, k.from, k.to)
	}
	for s, at := range found {
		p := &l.places[at]
		slices.Sort(p.members)
		p.members = slices.Compact(p.members)
		p.name = fmt.Sprintf("messages of channel %d among ranks %v, side %d %t", s.channel, p.members, s.bit, s.one)
	}
}

// seat is a rank among those connected by the routes of a side.
type seat struct {
	side
	rank int32
}

// spot is the position of a rank among the ranks to which routes connect it, directly or through others.
type spot struct {
	root  int32 // the smallest of these ranks
	index int   // its index among them, in ascending order
}

// positions returns, for each side, the position of every rank among the ranks that the side's routes connect.
func positions(routes []route, sideOf func(route) side) map[seat]spot {
	parent := map[seat]int32{}
	var find func(s seat) int32
	find = func(s seat) int32 {
		up, known := parent[s]
		if !known || up == s.rank {
			parent[s] = s.rank
			return s.rank
		}
		root := find(seat{s.side, up})
		parent[s] = root
		return root
	}
	for _, k := range routes {
		s := sideOf(k)
		a, b := find(seat{s, k.from}), find(seat{s, k.to})
		parent[seat{s, max(a, b)}] = min(a, b)
	}
	seats := slices.SortedFunc(maps.Keys(parent), func(a, b seat) int { return cmp.Compare(a.rank, b.rank) })
	out, sizes := map[seat]spot{}, map[seat]int{}
	for _, s := range seats {
		root := seat{s.side, find(s)}
		out[s] = spot{root.rank, sizes[root]}
		sizes[root]++
	}
	return out
}

// smallestCard is the number of multiprocessors of the smallest card meant to be used with NCCL, an A100.
const smallestCard = 108

// mostChannels is NCCL's usual number of channels within a node of Hopper cards.
const mostChannels = 32

// channelsFor returns the limit on the channels of every communicator if ranks communicate on up to the given
// number of streams. A call runs one thread block per channel, and each block occupies a multiprocessor. The
// calls in progress, one per stream, wait for their peers. If all of them fit on the card at the same time,
// none prevents another from starting on any rank. The limit is the same on all ranks, and a power of two, like
// NCCL's number of channels for messages. The user's NCCL_MAX_CTAS takes precedence.
func channelsFor(streams int) int {
	if streams <= 1 {
		return 0
	}
	return min(mostChannels, 1<<(bits.Len(uint(max(1, smallestCard/streams)))-1))
}

// mostBuffers is the device memory of a rank that NCCL's buffers may take by our estimate. Plans do not count them: clusters set
// 4 GiB of each GPU aside, for these buffers, the context (about 0.5 GB) and the workspace of libraries.
const mostBuffers = 3 << 30

// limit halves the number of channels until the buffers of every rank take at most mostBuffers.
func (l *layout) limit(ranks int) {
	most := func() (n ir.Bytes) {
		for r := range ranks {
			n = max(n, l.buffers(r))
		}
		return n
	}
	for n := cmp.Or(l.channels, mostChannels); n > 1 && most() > mostBuffers; {
		n /= 2
		l.channels = n
	}
}

// Sizes of NCCL's buffers for one channel between two ranks, from the sources of release 2.30 (src/init.cc,
// src/transport/p2p.cc). The receiver has 512 KiB (LL), 4800 KiB (LL128) and NCCL_BUFFSIZE, by default 4 MiB
// (Simple), in total rounded up to a multiple of 2 MiB; the sender has 2 MiB.
const (
	receiveBuffer = 10 << 20
	sendBuffer    = 2 << 20
)

// buffers estimates the device memory that NCCL needs for the communicators of a rank. Collectives use a ring, and
// a tree with up to three neighbours.
func (l *layout) buffers(rank int) ir.Bytes {
	channels, total := int64(cmp.Or(l.channels, mostChannels)), int64(0)
	for _, at := range l.groups {
		if members := l.places[at].members; slices.Contains(members, int32(rank)) {
			peers := int64(min(len(members)-1, 1) + min(len(members)-1, 3))
			total += channels * peers * (receiveBuffer + sendBuffer)
		}
	}
	for k := range l.routes {
		switch int32(rank) {
		case k.from:
			total += channels * sendBuffer
		case k.to:
			total += channels * receiveBuffer
		}
	}
	return ir.Bytes(total)
}

package sim

import (
	"encoding/binary"
	"math"

	"sppo.dev/internal/cost"
	"sppo.dev/ir"
)

// fold divides ranks into classes, w.classes. One member of a class is simulated for all.
//
// Two ranks are in one class if they run the same code at the same speed, and if each port of the code
// leads both of them, over a link of the same kind, to ranks of one class that use the same port for the
// meeting. The n-th operation on that port then meets the same instruction of the same class for both
// ranks. By induction over the meetings in chronological order, all their clocks are equal. Initially, a
// class contains all ranks with the same code and speed; classes are split until the condition holds.
func (w *world) fold(f *folding) {
	w.classes = make([]int32, len(w.program.Ranks))
	if w.options.NoFold || w.options.Jitter > 0 || w.options.shares(w.program) || !f.refine() {
		for r := range w.classes {
			w.classes[r] = int32(r)
		}
	}
}

// folding records the other ends of every port of every rank.
type folding struct {
	*world
	ways    [][]way // by rank and port
	lists   map[string]int32
	gathers map[gathering]*ends
}

// way tells where a port of a rank leads. If several ports of the rank lead to the same meeting, the first of
// them identifies it.
type way struct {
	meets int32 // the peer, or the number of the member list
	same  int32 // first port that leads to the same place
	*ends
}

// gathering is a member list on a stream.
type gathering struct {
	list   int32
	stream ir.Stream
}

// ends holds the ranks to which a way leads. All members of a team share it.
type ends struct {
	ranks []int32
	ports []int32 // by rank: its first port that leads here; -1: none
	link  cost.Link
	key   int32 // equal for ends that lead to the same classes in the same way
}

func newFolding(w *world) *folding {
	f := &folding{world: w, ways: make([][]way, len(w.program.Ranks)), lists: map[string]int32{}, gathers: map[gathering]*ends{}}
	for r := range f.ways {
		ports := w.binding(r).ports
		f.ways[r] = make([]way, len(ports))
		for i := range ports {
			if ports[i].team {
				f.ways[r][i].meets = f.list(w.program.Ranks[r].Groups[ports[i].group])
			} else {
				f.ways[r][i].meets = int32(ports[i].resolve(w.program, r))
			}
		}
	}
	for r := range f.ways {
		for i := range f.ways[r] {
			x := &f.ways[r][i]
			mine := &f.binding(r).ports[i]
			x.same = f.find(int32(r), mine, mine.sends, x.meets)
			x.ends = f.look(int32(r), mine, x.meets)
		}
	}
	return f
}

// list numbers a list of members.
func (f *folding) list(members []int32) int32 {
	key := make([]byte, 0, 4*len(members))
	for _, m := range members {
		key = binary.LittleEndian.AppendUint32(key, uint32(m))
	}
	n, ok := f.lists[string(key)]
	if !ok {
		n = int32(len(f.lists))
		f.lists[string(key)] = n
	}
	return n
}

// look finds the other ends of a rank's port.
func (f *folding) look(r int32, mine *port, meets int32) *ends {
	if !mine.team {
		port := f.find(meets, mine, !mine.sends, r)
		return &ends{ranks: []int32{meets}, ports: []int32{port}, link: f.prices.model.LinkOf([]int32{r, meets})}
	}
	at := gathering{meets, mine.stream}
	e := f.gathers[at]
	if e == nil {
		members := f.program.Ranks[r].Groups[mine.group]
		e = &ends{ranks: members, ports: make([]int32, len(members)), link: f.prices.model.LinkOf(members)}
		for k, m := range members {
			e.ports[k] = f.find(m, mine, false, meets)
		}
		f.gathers[at] = e
	}
	return e
}

// find returns rank r's first port that is like a given port, but has the given direction and meets the given
// peer or team; -1: none.
func (f *folding) find(r int32, like *port, sends bool, meets int32) int32 {
	for i, p := range f.binding(int(r)).ports {
		if p.team == like.team && p.sends == sends && p.stream == like.stream && p.channel == like.channel && f.ways[r][i].meets == meets {
			return int32(i)
		}
	}
	return -1
}

// refine splits classes until they are stable, and reports whether they can be used.
func (f *folding) refine() bool {
	keys := make([]string, len(f.ways))
	for r := range keys {
		k := binary.LittleEndian.AppendUint64(nil, uint64(f.program.Ranks[r].Code))
		keys[r] = string(binary.LittleEndian.AppendUint64(k, math.Float64bits(f.options.slow(r))))
	}
	for count := 0; ; {
		next := f.number(keys)
		if next == count {
			return f.sound()
		}
		count = next
		f.numberEnds()
		for r := range keys {
			keys[r] = f.key(r)
		}
	}
}

// number turns keys into classes, in the order of their first ranks.
func (f *folding) number(keys []string) int {
	seen := map[string]int32{}
	for r, k := range keys {
		c, ok := seen[k]
		if !ok {
			c = int32(len(seen))
			seen[k] = c
		}
		f.classes[r] = c
	}
	return len(seen)
}

// key returns the properties that must be equal for ranks to stay in one class.
func (f *folding) key(r int) string {
	k := binary.LittleEndian.AppendUint32(nil, uint32(f.classes[r]))
	for i := range f.ways[r] {
		k = binary.LittleEndian.AppendUint32(k, uint32(f.ways[r][i].same))
		k = binary.LittleEndian.AppendUint32(k, uint32(f.ways[r][i].key))
	}
	return string(k)
}

// numberEnds gives equal numbers to ends whose links are of the same kind and whose ranks are in the same
// classes and use the same ports.
func (f *folding) numberEnds() {
	seen := map[string]int32{}
	number := func(e *ends) {
		k := binary.LittleEndian.AppendUint32(nil, uint32(e.link.Ranks))
		k = binary.LittleEndian.AppendUint32(k, uint32(e.link.Nodes))
		for j, m := range e.ranks {
			k = binary.LittleEndian.AppendUint32(k, uint32(f.classes[m]))
			k = binary.LittleEndian.AppendUint32(k, uint32(e.ports[j]))
		}
		n, ok := seen[string(k)]
		if !ok {
			n = int32(len(seen))
			seen[string(k)] = n
		}
		e.key = n
	}
	for r := range f.ways {
		for i, p := range f.binding(r).ports {
			if x := &f.ways[r][i]; !p.team || int(x.ranks[0]) == r { // once for each team
				number(x.ends)
			}
		}
	}
}

// sound returns false if members of one class meet each other through different ports, because the simulated
// member would then wait for itself.
func (f *folding) sound() bool {
	for r := range f.ways {
		for i, p := range f.binding(r).ports {
			x := &f.ways[r][i]
			if p.team && int(x.ranks[0]) != r { // once for each team
				continue
			}
			if f.twisted(r, p.team, x.ends) {
				return false
			}
		}
	}
	return true
}

func (f *folding) twisted(r int, team bool, x *ends) bool {
	if !team {
		return f.classes[x.ranks[0]] == f.classes[r] && int(x.ranks[0]) != r
	}
	seen := map[int32]int32{}
	for k, m := range x.ranks {
		c := f.classes[m]
		if port, ok := seen[c]; ok && port != x.ports[k] || x.ports[k] < 0 {
			return true
		}
		seen[c] = x.ports[k]
	}
	return false
}

// connect gives the simulated ranks the meetings of their ports.
func (w *world) connect(f *folding) {
	type place struct{ rank, port int32 } // a sender, or a team's first member
	meetings := map[place]*meeting{}
	for _, r := range w.ranks {
		ports := r.binding.ports
		r.meetings = make([]*meeting, len(ports))
		for i := range ports {
			x := &f.ways[r.index][i]
			at := place{int32(r.index), x.same}
			if ports[i].team || !ports[i].sends { // identified by another port
				at = place{int32(w.ranks[w.classes[x.ranks[0]]].index), x.ports[0]}
			}
			if at.port < 0 { // no rank ever arrives
				at = place{int32(-1 - r.index), int32(i)}
			}
			if meetings[at] == nil {
				meetings[at] = w.meeting(r, &ports[i], x)
			}
			r.meetings[i] = meetings[at]
		}
	}
}

func (w *world) meeting(r *rank, p *port, x *way) *meeting {
	m := &meeting{need: 2, members: []int32{int32(r.index), x.meets}, link: x.link, price: w.prices.on(x.link)}
	if p.team {
		m.members = x.ranks
		if !w.prices.one { // otherwise the pool of processors is shared
			m.share = w.prices.model.Share(x.link)
		}
		seen := map[int32]bool{}
		for _, member := range x.ranks {
			seen[w.classes[member]] = true
		}
		m.need = len(seen)
	}
	return m
}

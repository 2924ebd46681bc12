package sim

import (
	"encoding/binary"
	"math"
	"slices"

	"sppo/ir/cost"
)

// fold puts ranks into classes of which one member is simulated for all: w.classes.
//
// Two ranks stay in one class when they run the same code at the same speed, and each way in which the code meets
// others leads, over a link of the same kind, to ranks that are in one class again and that see the meeting as the
// same way of theirs. Then the n-th operation on that way meets the same instruction of the same class for both, so
// that all their clocks are equal, by induction over the meetings in the order in which they take place. Classes begin
// as ranks of one code and speed and are split until that holds.
func (w *world) fold(f *folding) {
	w.classes = make([]int32, len(w.program.Ranks))
	if w.options.NoFold || w.options.Jitter > 0 || !f.refine() {
		for r := range w.classes {
			w.classes[r] = int32(r)
		}
	}
}

// folding knows where every way of every rank leads.
type folding struct {
	*world
	ways  [][]way // by rank and port
	teams map[string]int32
}

// way is a port of a rank. Ports of a rank that lead to the same meeting are one way, named by the first of them.
type way struct {
	meets   int32   // the peer, or the number of the members' list
	members []int32 // the peer, or the members
	same    int32   // first port that leads where this one does
	theirs  []int32 // of each member: the first port of its own that leads here; -1: none does
	link    cost.Link
}

func newFolding(w *world) *folding {
	f := &folding{world: w, ways: make([][]way, len(w.program.Ranks)), teams: map[string]int32{}}
	for r := range f.ways {
		ports := w.binding(r).ports
		f.ways[r] = make([]way, len(ports))
		for i := range ports {
			x := &f.ways[r][i]
			if ports[i].team {
				x.members = w.program.Ranks[r].Groups[ports[i].group]
				x.meets = f.team(x.members)
			} else {
				x.meets = int32(ports[i].resolve(w.program, r))
				x.members = []int32{x.meets}
			}
		}
	}
	links := map[int32]cost.Link{} // of teams
	for r := range f.ways {
		for i := range f.ways[r] {
			f.look(r, i, links)
		}
	}
	return f
}

// team numbers a list of members.
func (f *folding) team(members []int32) int32 {
	key := make([]byte, 0, 4*len(members))
	for _, m := range members {
		key = binary.LittleEndian.AppendUint32(key, uint32(m))
	}
	n, ok := f.teams[string(key)]
	if !ok {
		n = int32(len(f.teams))
		f.teams[string(key)] = n
	}
	return n
}

// look fills in what is the same way, how the others see it, and the link.
func (f *folding) look(r, i int, links map[int32]cost.Link) {
	x, mine := &f.ways[r][i], &f.binding(r).ports[i]
	x.same = f.find(r, mine, mine.sends, x.meets)
	x.theirs = make([]int32, len(x.members))
	for k, m := range x.members {
		if mine.team {
			x.theirs[k] = f.find(int(m), mine, false, x.meets)
		} else {
			x.theirs[k] = f.find(int(m), mine, !mine.sends, int32(r))
		}
	}
	l, known := links[x.meets]
	switch {
	case !mine.team:
		x.link = f.prices.model.LinkOf([]int32{int32(r), x.meets})
	case known:
		x.link = l
	default:
		x.link = f.prices.model.LinkOf(x.members)
		links[x.meets] = x.link
	}
}

// find is the first port of a rank that meets a team, or a peer in a direction, as a port like this one does; -1: none.
func (f *folding) find(r int, like *port, sends bool, meets int32) int32 {
	return int32(slices.IndexFunc(f.binding(r).ports, func(p port) bool {
		return p.team == like.team && p.sends == sends && p.stream == like.stream && p.channel == like.channel &&
			f.meets(r, &p) == meets
	}))
}

func (f *folding) meets(r int, p *port) int32 {
	if p.team {
		return f.team(f.program.Ranks[r].Groups[p.group])
	}
	return int32(p.resolve(f.program, r))
}

// refine splits classes until they stand; it says whether they can be used.
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

// key is all that has to be equal for ranks to stay in one class.
func (f *folding) key(r int) string {
	k := binary.LittleEndian.AppendUint32(nil, uint32(f.classes[r]))
	for i := range f.ways[r] {
		x := &f.ways[r][i]
		for _, v := range [...]int32{x.same, int32(x.link.Ranks), int32(x.link.Nodes), int32(len(x.members))} {
			k = binary.LittleEndian.AppendUint32(k, uint32(v))
		}
		for j, m := range x.members {
			k = binary.LittleEndian.AppendUint32(k, uint32(f.classes[m]))
			k = binary.LittleEndian.AppendUint32(k, uint32(x.theirs[j]))
		}
	}
	return string(k)
}

// sound refuses classes whose members meet each other in different ways: the one that is simulated would wait for
// itself.
func (f *folding) sound() bool {
	for r := range f.ways {
		for i := range f.ways[r] {
			x := &f.ways[r][i]
			if f.twisted(r, i, x) {
				return false
			}
		}
	}
	return true
}

func (f *folding) twisted(r, i int, x *way) bool {
	if !f.binding(r).ports[i].team {
		return f.classes[x.members[0]] == f.classes[r] && int(x.members[0]) != r
	}
	seen := map[int32]int32{}
	for k, m := range x.members {
		c := f.classes[m]
		if way, ok := seen[c]; ok && way != x.theirs[k] || x.theirs[k] < 0 {
			return true
		}
		seen[c] = x.theirs[k]
	}
	return false
}

// connect gives the ranks that are simulated the meetings that their ports lead to.
func (w *world) connect(f *folding) {
	type place struct{ rank, port int32 } // of a sender, or of a team's first member
	meetings := map[place]*meeting{}
	for _, r := range w.ranks {
		ports := r.binding.ports
		r.meetings = make([]*meeting, len(ports))
		for i := range ports {
			x := &f.ways[r.index][i]
			at := place{int32(r.index), x.same}
			if ports[i].team || !ports[i].sends { // named by another
				at = place{int32(w.ranks[w.classes[x.members[0]]].index), x.theirs[0]}
			}
			if at.port < 0 { // nobody ever comes
				at = place{int32(-1 - r.index), int32(i)}
			}
			m := meetings[at]
			if m == nil {
				m = &meeting{need: 2, members: []int32{int32(r.index), x.meets}, link: x.link, price: w.prices.on(x.link)}
				if ports[i].team {
					m.members, m.need = x.members, w.classesOf(x.members)
				}
				meetings[at] = m
			}
			r.meetings[i] = m
		}
	}
}

// classesOf counts the classes that ranks are in.
func (w *world) classesOf(ranks []int32) int {
	seen := map[int32]bool{}
	for _, r := range ranks {
		seen[w.classes[r]] = true
	}
	return len(seen)
}

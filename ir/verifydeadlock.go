package ir

import (
	"fmt"
	"strings"
)

// job executes the communication of a section, rank by rank in issue order, without moving data or modelling
// time.
type job struct {
	v       *ranksVerifier
	next    []int  // by rank: position in the traffic of its code
	blocked []bool // by rank: whether it is waiting
	group   [][]*meeting
	ready   []int
}

// meeting is a group of ranks, and the number of them that have arrived at their next collective.
type meeting struct {
	members []int32
	arrived int
}

// deadlock executes the section and, if a rank does not reach its end, reports ranks that wait for each other.
func (v *ranksVerifier) deadlock() {
	n := len(v.p.Ranks)
	j := job{v: v, next: make([]int, n), blocked: make([]bool, n), group: make([][]*meeting, n)}
	for r := range n {
		j.group[r] = make([]*meeting, len(v.p.Groups))
	}
	for r := range n {
		for g, members := range v.p.Ranks[r].Groups {
			if len(members) > 0 && members[0] == int32(r) {
				m := &meeting{members: members}
				for _, x := range members {
					j.group[x][g] = m
				}
			}
		}
	}
	for r := range n {
		j.ready = append(j.ready, r)
	}
	for len(j.ready) > 0 {
		r := j.ready[len(j.ready)-1]
		j.ready = j.ready[:len(j.ready)-1]
		j.run(r)
	}
	for r := range n {
		if j.current(r) != nil {
			j.report(r)
			return
		}
	}
}

// current returns the instruction that a rank has reached, or nil at the end.
func (j *job) current(r int) *Instr {
	list := j.v.traffic[j.v.p.Ranks[r].Code].all
	if j.next[r] == len(list) {
		return nil
	}
	return j.v.instr(r, list[j.next[r]])
}

// run advances a rank until it must wait for another.
func (j *job) run(r int) {
	for t := &j.v.traffic[j.v.p.Ranks[r].Code]; j.next[r] < len(t.all); j.next[r]++ {
		if t.group[j.next[r]] == None {
			j.blocked[r] = !j.message(r, j.current(r))
		} else {
			j.blocked[r] = !j.meet(j.meetingOf(r), r)
		}
		if j.blocked[r] {
			return
		}
	}
}

// meetingOf returns the group of the collective that a rank has reached.
func (j *job) meetingOf(r int) *meeting {
	return j.group[r][j.v.traffic[j.v.p.Ranks[r].Code].group[j.next[r]]]
}

func (j *job) peer(r int, in *Instr) int {
	return int(in.Attrs[0].Int(j.v.p.Ranks[r].Consts))
}

// release lets a waiting rank continue.
func (j *job) release(r int) {
	j.next[r]++
	j.blocked[r] = false
	j.ready = append(j.ready, r)
}

// message reports whether the peer is waiting at the other end of the message, and if so releases the peer.
func (j *job) message(r int, in *Instr) bool {
	peer := j.peer(r, in)
	if !j.blocked[peer] || !j.atOtherEnd(r, in, peer) {
		return false
	}
	j.release(peer)
	return true
}

// atOtherEnd reports whether the peer has reached the other half of a rank's message.
func (j *job) atOtherEnd(r int, in *Instr, peer int) bool {
	other := j.current(peer)
	if other == nil || other.Op == in.Op || other.Op != Send && other.Op != Recv {
		return false
	}
	return channelOf(other.Stream) == channelOf(in.Stream) && j.peer(peer, other) == r
}

// meet reports whether r is the last to arrive, and if so releases the others.
func (j *job) meet(m *meeting, r int) bool {
	m.arrived++
	if m.arrived < len(m.members) {
		return false
	}
	m.arrived = 0
	for _, x := range m.members {
		if int(x) != r {
			j.release(int(x))
		}
	}
	return true
}

// waitsFor returns a rank that r waits for.
func (j *job) waitsFor(r int) int {
	in := j.current(r)
	if in == nil {
		return None
	}
	if in.Op == Send || in.Op == Recv {
		return j.peer(r, in)
	}
	m := j.meetingOf(r)
	for _, x := range m.members {
		at := j.current(int(x))
		if at == nil || at.Op == Send || at.Op == Recv || j.meetingOf(int(x)) != m {
			return int(x)
		}
	}
	return None
}

// report follows the waits from a stuck rank until a rank repeats, and reports that cycle.
func (j *job) report(r int) {
	seen := map[int]bool{}
	for r != None && !seen[r] {
		seen[r] = true
		if next := j.waitsFor(r); next != None {
			r = next
		}
	}
	circle, at := []string{}, r
	for {
		circle = append(circle, fmt.Sprintf("rank %d", at))
		if at = j.waitsFor(at); at == None || at == r {
			break
		}
	}
	f := Finding{Kind: FindDeadlock, At: j.site(r)}
	f.Msg = "waits forever: " + strings.Join(append(circle, circle[0]), " waits for ")
	if next := j.waitsFor(r); next != None && j.current(next) != nil {
		other := j.site(next)
		f.Other = &other
	}
	j.v.add(f)
}

func (j *job) site(r int) Site {
	if j.current(r) == nil {
		return Site{Rank: r, Code: j.v.codeOf(r).Name, Section: j.v.section, Index: None}
	}
	return j.v.site(r, j.v.traffic[j.v.p.Ranks[r].Code].all[j.next[r]])
}

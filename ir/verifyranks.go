package ir

import (
	"fmt"
	"slices"
)

// This file verifies that ranks agree. Every section is checked separately, because all ranks run
// the same sections in the same order.
//
// The proof against deadlock is stricter than streams require: every rank runs its instructions one after
// another in issue order, and each message blocks the whole rank until its peers arrive. A job that
// terminates under these rules terminates on any device: streams only let instructions start earlier, and
// devices that run communication kernels one at a time run them in issue order.

// channel is a connection between two ranks over which messages arrive in the order in which they are sent.
type channel uint8

const (
	chanNext channel = iota // send_next to recv_prev
	chanPrev                // send_prev to recv_next
	chanMux                 // mux to mux_in
)

func channelOf(s Stream) channel {
	switch s {
	case SendNext, RecvPrev:
		return chanNext
	case SendPrev, RecvNext:
		return chanPrev
	}
	return chanMux
}

// traffic lists the communication instructions in one section of a code, as indices in issue order.
type traffic struct {
	all    []int32
	group  []int32 // by position in all: its group; None: a message
	links  map[link][]int32
	groups [][]int32 // by group
}

// link identifies one end of a channel in a code. Its peer may be a constant that differs between ranks.
type link struct {
	peer    Attr
	channel channel
	sends   bool
}

// ranksVerifier checks one section of the job.
type ranksVerifier struct {
	p       *Program
	section Section
	traffic []traffic // by code
	*findings
}

func verifyRanks(p *Program, all *findings) {
	known := len(all.list)
	verifyGroups(p, all)
	verifyConstants(p, all)
	if len(all.list) > known {
		return
	}
	for s := range NumSections {
		v := ranksVerifier{p: p, section: s, findings: all}
		for i := range p.Codes {
			v.traffic = append(v.traffic, trafficOf(p, &p.Codes[i], s))
		}
		v.gathers()
		v.messages()
		v.collectives()
		if len(all.list) == known {
			v.deadlock()
		}
	}
}

func trafficOf(p *Program, c *Code, s Section) traffic {
	t := traffic{links: map[link][]int32{}, groups: make([][]int32, len(p.Groups))}
	for i := range c.Sections[s] {
		in := &c.Sections[s][i]
		if in.Info().Class != ClassComm {
			continue
		}
		t.all = append(t.all, int32(i))
		if g := in.Info().findAttr(KindGroup); g >= 0 {
			id := in.Attrs[g].Bits
			t.group = append(t.group, int32(id))
			t.groups[id] = append(t.groups[id], int32(i))
			continue
		}
		t.group = append(t.group, None)
		l := link{in.Attrs[0], channelOf(in.Stream), in.Op == Send}
		t.links[l] = append(t.links[l], int32(i))
	}
	return t
}

func rankFinding(kind FindingKind, rank int, format string, args ...any) Finding {
	return Finding{Kind: kind, At: Site{Rank: rank, Index: None}, Msg: fmt.Sprintf(format, args...)}
}

// site returns the site of an instruction that a rank runs.
func (v *ranksVerifier) site(rank int, i int32) Site {
	s := siteOf(v.p, v.codeOf(rank), v.section, int(i))
	s.Rank = rank
	return s
}

func (v *ranksVerifier) codeOf(rank int) *Code { return &v.p.Codes[v.p.Ranks[rank].Code] }

func (v *ranksVerifier) instr(rank int, i int32) *Instr {
	return &v.codeOf(rank).Sections[v.section][i]
}

// verifyGroups checks that a rank is in its own groups, that no member is listed twice, and that all members of
// a group have the same list.
func verifyGroups(p *Program, all *findings) {
	for r := range p.Ranks {
		for g, members := range p.Ranks[r].Groups {
			if len(members) == 0 {
				continue
			}
			sorted := slices.Clone(members)
			slices.Sort(sorted)
			if len(slices.Compact(sorted)) != len(members) {
				all.add(rankFinding(FindCollective, r, "group %s has a member twice: %v", p.Groups[g], members))
				continue
			}
			if !slices.Contains(members, int32(r)) {
				all.add(rankFinding(FindCollective, r, "is not a member of its own group %s, %v", p.Groups[g], members))
				continue
			}
			if m := disagrees(p, g, members); m != None {
				all.add(rankFinding(FindCollective, r, "group %s is %v here, but %v on rank %d", p.Groups[g], members, p.Ranks[m].Groups[g], m))
			}
		}
	}
}

// disagrees returns a member whose own list differs from the given one, or None. Because comparing all lists
// would take cubic time, it compares the given list only with that of the list's first member, and checks that
// the lists of all other members begin with the same rank.
func disagrees(p *Program, g int, members []int32) int {
	first := int(members[0])
	if !slices.Equal(p.Ranks[first].Groups[g], members) {
		return first
	}
	for _, m := range members {
		if theirs := p.Ranks[m].Groups[g]; len(theirs) == 0 || theirs[0] != members[0] {
			return int(m)
		}
	}
	return None
}

// gathers checks that the group sizes implied by operands are the actual ones, and that every rank has the
// groups that its code uses.
func (v *ranksVerifier) gathers() {
	type use struct {
		group int
		ratio int64 // 0: any
		i     int32
	}
	uses := make([][]use, len(v.p.Codes))
	for c := range v.traffic {
		seen := map[[2]int64]bool{}
		for g, list := range v.traffic[c].groups {
			for _, i := range list {
				u := use{g, v.p.Codes[c].Sections[v.section][i].members(), i}
				if key := [2]int64{int64(g), u.ratio}; !seen[key] {
					seen[key] = true
					uses[c] = append(uses[c], u)
				}
			}
		}
	}
	for r := range v.p.Ranks {
		for _, u := range uses[v.p.Ranks[r].Code] {
			n := len(v.p.Ranks[r].Groups[u.group])
			switch {
			case n == 0:
				v.addOnce(Finding{Kind: FindCollective, At: v.site(r, u.i), Msg: fmt.Sprintf("has no group %s", v.p.Groups[u.group])})
			case u.ratio != 0 && u.ratio != int64(n):
				v.addOnce(Finding{Kind: FindCollective, At: v.site(r, u.i), Msg: fmt.Sprintf("the whole is %d times the share, in a group of %d", u.ratio, n)})
			}
		}
	}
}

// conversation holds the messages of one channel from one rank to another: the sends and the receives.
type conversation struct{ sends, recvs []int32 }

type channelKey struct {
	from, to int32
	channel  channel
}

// messages matches sends with receives.
func (v *ranksVerifier) messages() {
	talks := map[channelKey]*conversation{}
	for r := range v.p.Ranks {
		rank := &v.p.Ranks[r]
		for l, list := range v.traffic[rank.Code].links {
			peer := int32(l.peer.Int(rank.Consts))
			key := channelKey{int32(r), peer, l.channel}
			if !l.sends {
				key.from, key.to = peer, int32(r)
			}
			talk := talks[key]
			if talk == nil {
				talk = &conversation{}
				talks[key] = talk
			}
			if l.sends {
				talk.sends = mergeSorted(talk.sends, list)
			} else {
				talk.recvs = mergeSorted(talk.recvs, list)
			}
		}
	}
	keys := make([]channelKey, 0, len(talks))
	for k := range talks {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(a, b channelKey) int {
		return slices.Compare([]int32{a.from, a.to, int32(a.channel)}, []int32{b.from, b.to, int32(b.channel)})
	})
	for _, k := range keys {
		v.match(k, talks[k])
	}
}

// mergeSorted merges two lists in issue order. The first is usually empty.
func mergeSorted(a, b []int32) []int32 {
	if len(a) == 0 {
		return b
	}
	all := slices.Concat(a, b)
	slices.Sort(all)
	return all
}

// match compares the messages sent with those received on a channel.
func (v *ranksVerifier) match(k channelKey, talk *conversation) {
	from, to := int(k.from), int(k.to)
	for n := range max(len(talk.sends), len(talk.recvs)) {
		switch {
		case n >= len(talk.recvs):
			v.mismatch(from, talk.sends[n], nil, "rank %d receives %d of the %d messages sent to it", to, n, len(talk.sends))
			return
		case n >= len(talk.sends):
			v.mismatch(to, talk.recvs[n], nil, "rank %d sends %d of the %d messages expected from it", from, n, len(talk.recvs))
			return
		}
		a, b := &v.instr(from, talk.sends[n]).Args[0], &v.instr(to, talk.recvs[n]).Args[0]
		if a.DType != b.DType || a.Elements() != b.Elements() {
			other := v.site(to, talk.recvs[n])
			v.mismatch(from, talk.sends[n], &other, "message %d sends %d of %s, but rank %d receives %d of %s",
				n, a.Elements(), a.DType, to, b.Elements(), b.DType)
			return
		}
	}
}

func (v *ranksVerifier) mismatch(rank int, i int32, other *Site, format string, args ...any) {
	v.addOnce(Finding{Kind: FindMessage, At: v.site(rank, i), Other: other, Msg: fmt.Sprintf(format, args...)})
}

// collectives checks that the members of a group run matching collectives.
func (v *ranksVerifier) collectives() {
	for g := range v.p.Groups {
		for r := range v.p.Ranks {
			members := v.p.Ranks[r].Groups[g]
			if len(members) == 0 || members[0] == int32(r) {
				continue
			}
			v.agree(g, int(members[0]), r)
		}
	}
}

// agree compares the instructions of two members of a group.
func (v *ranksVerifier) agree(g, first, r int) {
	if v.p.Ranks[first].Code == v.p.Ranks[r].Code {
		return
	}
	a := v.traffic[v.p.Ranks[first].Code].groups[g]
	b := v.traffic[v.p.Ranks[r].Code].groups[g]
	for n := range min(len(a), len(b)) {
		if why := v.instr(first, a[n]).Differs(v.instr(r, b[n])); why != "" {
			other := v.site(first, a[n])
			v.addOnce(Finding{Kind: FindCollective, At: v.site(r, b[n]), Other: &other, Msg: fmt.Sprintf(
				"collective %d of group %s differs from that of rank %d in its %s", n, v.p.Groups[g], first, why)})
			return
		}
	}
	if len(a) != len(b) {
		at := Site{Rank: r, Code: v.codeOf(r).Name, Section: v.section, Index: None}
		v.addOnce(Finding{Kind: FindCollective, At: at, Msg: fmt.Sprintf(
			"%d collectives of group %s in section %s, but %d on rank %d", len(b), v.p.Groups[g], v.section, len(a), first)})
	}
}

package sim

import (
	"slices"

	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// The spans explain the duration of a section: every instruction begins when the last of its dependencies ends.
// The program defines the dependencies: the previous instruction on the same stream, the instruction before an
// event, the last rank at a meeting.

// Site is an instruction of a rank.
type Site struct{ Rank, PC int }

// Nowhere is the absence of a site.
var Nowhere = Site{-1, -1}

// Segment is a part of a critical path. A pause, during which nothing is known to have run, has the site
// Nowhere.
type Segment struct {
	Site
	Begin, End ir.Seconds
}

// Causes finds the dependency that each instruction of a timeline waited for. The timeline needs spans.
type Causes struct {
	timeline *Timeline
	codes    []*codeOrder // by code; nil until requested
	ranks    map[int]*rankMeetings
}

// Causes returns the causes of the timeline.
func (t *Timeline) Causes() *Causes {
	return &Causes{t, make([]*codeOrder, len(t.program.Codes)), map[int]*rankMeetings{}}
}

// codeOrder is the order of the instructions of a section on each stream.
type codeOrder struct {
	before []int32                // by pc: the instruction before it on its stream, or -1
	record []int32                // by pc of a wait: the pc of its record
	copies [ir.NumStreams][]int32 // copies to and from the host, by stream
}

func (c *Causes) order(rank int) *codeOrder {
	p := c.timeline.program
	number := p.Ranks[rank].Code
	if c.codes[number] == nil {
		code := &p.Codes[number]
		c.codes[number] = newCodeOrder(code.Sections[c.timeline.Section], code.Events[c.timeline.Section])
	}
	return c.codes[number]
}

func newCodeOrder(instrs []ir.Instr, events int32) *codeOrder {
	o := &codeOrder{before: make([]int32, len(instrs)), record: make([]int32, len(instrs))}
	recorded := make([]int32, events)
	var last [ir.NumStreams]int32
	for s := range last {
		last[s] = -1
	}
	for pc := range instrs {
		in := &instrs[pc]
		o.before[pc], o.record[pc] = last[in.Stream], -1
		last[in.Stream] = int32(pc)
		switch in.Op {
		case ir.Record:
			recorded[in.Attr("event").Bits] = int32(pc)
		case ir.Wait:
			o.record[pc] = recorded[in.Attr("event").Bits]
		case ir.CopyD2H, ir.CopyH2D:
			o.copies[in.Stream] = append(o.copies[in.Stream], int32(pc))
		}
	}
	return o
}

// rankMeetings numbers the meetings of a rank: its n-th operation of a kind meets the n-th of that kind on each
// peer.
type rankMeetings struct {
	lists map[meetingKind][]int32
	nth   map[int32]int32 // by pc
	kinds map[int32]meetingKind
}

// meetingKind, together with a number, identifies a meeting of a rank.
type meetingKind struct {
	team    bool
	group   int32 // the rank's first group with these members
	stream  ir.Stream
	peer    int
	sends   bool
	channel vm.Channel
}

// firstGroup returns a rank's first group with these members.
func firstGroup(r *ir.Rank, members []int32) int32 {
	return int32(slices.IndexFunc(r.Groups, func(g []int32) bool { return slices.Equal(g, members) }))
}

func (c *Causes) meetings(rank int) *rankMeetings {
	m := c.ranks[rank]
	if m != nil {
		return m
	}
	m = &rankMeetings{map[meetingKind][]int32{}, map[int32]int32{}, map[int32]meetingKind{}}
	c.ranks[rank] = m
	p := c.timeline.program
	r := &p.Ranks[rank]
	first := make([]int32, len(r.Groups))
	for g := range first {
		first[g] = firstGroup(r, r.Groups[g])
	}
	instrs := p.Codes[r.Code].Sections[c.timeline.Section]
	for pc := range instrs {
		in := &instrs[pc]
		if in.Info().Class != ir.ClassComm {
			continue
		}
		var k meetingKind
		if in.Op == ir.Send || in.Op == ir.Recv {
			k = meetingKind{peer: int(in.Attr("peer").Int(r.Consts)), sends: in.Op == ir.Send, channel: vm.ChannelOf(in.Stream)}
		} else {
			k = meetingKind{team: true, group: first[in.Attr("group").Bits], stream: in.Stream}
		}
		m.kinds[int32(pc)], m.nth[int32(pc)] = k, int32(len(m.lists[k]))
		m.lists[k] = append(m.lists[k], int32(pc))
	}
	return m
}

// others returns the instructions of other ranks that an instruction meets. Of ranks that do the same work at
// the same times, it includes only one.
func (c *Causes) others(at Site) (out []Site) {
	p, t := c.timeline.program, c.timeline
	mine := c.meetings(at.Rank)
	kind, nth := mine.kinds[int32(at.PC)], mine.nth[int32(at.PC)]
	if !kind.team {
		there := kind
		there.peer, there.sends = at.Rank, !kind.sends
		return c.append(out, kind.peer, there, nth)
	}
	members := p.Ranks[at.Rank].Groups[kind.group]
	seen := []int32{t.Class[at.Rank]}
	for _, m := range members {
		if class := t.Class[m]; !slices.Contains(seen, class) {
			seen = append(seen, class)
			there := kind
			there.group = firstGroup(&p.Ranks[m], members)
			out = c.append(out, int(m), there, nth)
		}
	}
	return out
}

func (c *Causes) append(out []Site, rank int, kind meetingKind, nth int32) []Site {
	if list := c.meetings(rank).lists[kind]; int(nth) < len(list) {
		out = append(out, Site{rank, int(list[nth])})
	}
	return out
}

func (c *Causes) span(at Site) Span { return c.timeline.Rank(at.Rank).Spans[at.PC] }

func (c *Causes) instr(at Site) *ir.Instr {
	p := c.timeline.program
	return &p.Codes[p.Ranks[at.Rank].Code].Sections[c.timeline.Section][at.PC]
}

// Of returns the last dependency of an instruction: for a wait, the work whose end the event marks; for a
// message or collective, the preceding work on the rank that arrives last; otherwise, the predecessor on its
// stream. The result is an instruction that takes time, or Nowhere if there is none.
func (c *Causes) Of(at Site) Site {
	for next := c.step(at); next != Nowhere; next = c.step(next) {
		if span := c.span(next); c.instr(next).Op != ir.Wait && span.End > span.Begin {
			return next
		}
	}
	return Nowhere
}

// step returns the direct dependency of an instruction, even if it takes no time.
func (c *Causes) step(at Site) Site {
	order, in := c.order(at.Rank), c.instr(at)
	span := c.span(at)
	before := Site{at.Rank, int(order.before[at.PC])}
	switch {
	case in.Op == ir.Wait && span.End > span.Begin:
		return Site{at.Rank, int(order.record[at.PC])}
	case in.Info().Class == ir.ClassComm:
		last, end := before, c.end(before)
		for _, o := range c.others(at) {
			arrived := Site{o.Rank, int(c.order(o.Rank).before[o.PC])}
			if e := c.end(arrived); e > end {
				last, end = arrived, e
			}
		}
		before = last
	case in.Op == ir.CopyD2H || in.Op == ir.CopyH2D:
		before = c.turn(at, before)
	}
	if before.PC < 0 {
		return Nowhere
	}
	return before
}

func (c *Causes) end(at Site) ir.Seconds {
	if at.PC < 0 {
		return 0
	}
	return c.span(at).End
}

// turn returns the copy in the other direction that delayed a copy. If there is none, it returns the copy's
// predecessor on its stream.
func (c *Causes) turn(at, before Site) Site {
	if !c.timeline.program.Machine.HalfDuplex() || c.end(before) >= c.span(at).Begin {
		return before
	}
	other := ir.D2H
	if c.instr(at).Stream == ir.D2H {
		other = ir.H2D
	}
	list := c.order(at.Rank).copies[other]
	spans, begin := c.timeline.Rank(at.Rank).Spans, c.span(at).Begin
	i, _ := slices.BinarySearchFunc(list, begin, func(pc int32, t ir.Seconds) int {
		if spans[pc].End <= t+nearly*c.timeline.Makespan {
			return -1
		}
		return 1
	})
	if i > 0 && spans[list[i-1]].End > c.end(before) {
		return Site{at.Rank, int(list[i-1])}
	}
	return before
}

// nearly is a fraction of the section's duration: times that differ by less are treated as equal, because sums
// taken in different orders differ by rounding errors.
const nearly = 1e-12

// Path returns the critical path of the section: from start to end without a gap, each segment the dependency
// of the next.
func (c *Causes) Path() []Segment {
	at, end := c.last()
	var path []Segment
	for end > 0 {
		if at == Nowhere {
			path = append(path, Segment{Nowhere, 0, end})
			break
		}
		span := c.span(at)
		if span.End < end-nearly*c.timeline.Makespan {
			path = append(path, Segment{Nowhere, span.End, end})
			end = span.End
		}
		next := c.Of(at)
		begin := span.Begin
		if next != Nowhere && c.end(next) > begin || begin <= nearly*c.timeline.Makespan {
			begin = c.end(next)
		}
		if begin < end {
			path = append(path, Segment{at, begin, end})
			end = begin
		}
		at = next
	}
	slices.Reverse(path)
	return path
}

// last returns the instruction that ends last.
func (c *Causes) last() (at Site, end ir.Seconds) {
	at = Nowhere
	for i := range c.timeline.Ranks {
		r := &c.timeline.Ranks[i]
		for pc := range r.Spans {
			site := Site{r.Index, pc}
			if e := r.Spans[pc].End; e > end && c.instr(site).Info().Class != ir.ClassSync {
				at, end = site, e
			}
		}
	}
	return at, end
}

// Sort is a category of work that can be sped up in the same way.
type Sort int

// Kinds of work. The head's work is the products and the loss of its loop. Pauses are times between the instructions of a measured device.
const (
	SortMatmul Sort = iota
	SortHead
	SortAttention
	SortScan
	SortMemory
	SortD2H
	SortH2D
	SortMessages
	SortCollectives
	SortOther
	SortPauses
	NumSorts
)

// sorts lists the name of each sort, its kinds of work, and the keys of a schedule that affect it.
var sorts = [NumSorts]struct {
	name  string
	kinds []ir.WorkKind
	keys  []string
}{
	SortMatmul:      {"matmul", []ir.WorkKind{ir.WorkMatmul}, []string{"recompute", "align"}},
	SortHead:        {"loss head", nil, []string{"loss_chunk", "sp"}},
	SortAttention:   {"attention", []ir.WorkKind{ir.WorkAttention, ir.WorkAttentionGrad}, []string{"recompute"}},
	SortScan:        {"scans", []ir.WorkKind{ir.WorkScan, ir.WorkScanGrad}, []string{"recompute"}},
	SortMemory:      {"memory-bound kernels", []ir.WorkKind{ir.WorkMemory}, []string{"subsequences", "recompute"}},
	SortD2H:         {"copies to the host", []ir.WorkKind{ir.WorkD2H}, []string{"offload", "recompute"}},
	SortH2D:         {"copies to the device", []ir.WorkKind{ir.WorkH2D}, []string{"offload", "recompute"}},
	SortMessages:    {"messages", []ir.WorkKind{ir.WorkP2P}, []string{"pp", "mux"}},
	SortCollectives: {"collectives", []ir.WorkKind{ir.WorkCollective}, []string{"sp", "sp_mode", "zero"}},
	SortOther:       {"other", []ir.WorkKind{ir.WorkNone}, nil},
	SortPauses:      {"pauses", nil, nil},
}

func (s Sort) String() string { return sorts[s].name }

// Keys returns the names of the schedule's keys that affect work of this sort.
func (s Sort) Keys() []string { return sorts[s].keys }

// Kinds returns the kinds of work of the sort.
func (s Sort) Kinds() []ir.WorkKind { return sorts[s].kinds }

// inHead reports whether an instruction is part of the head's loop over chunks of tokens.
func inHead(in *ir.Instr) bool {
	switch in.Op {
	case ir.CrossEntropyStats, ir.CrossEntropy, ir.CrossEntropyGrad:
		return true
	}
	return in.Op == ir.Matmul && in.Prov.Layer == ir.None && in.Prov.Phase == ir.PhaseBackward
}

// SortOf returns the sort of a segment's work.
func (c *Causes) SortOf(s Segment) Sort {
	if s.Site == Nowhere {
		return SortPauses
	}
	if inHead(c.instr(s.Site)) {
		return SortHead
	}
	kind := c.instr(s.Site).Work().Kind
	for sort := range NumSorts {
		if slices.Contains(sorts[sort].kinds, kind) {
			return sort
		}
	}
	return SortOther
}

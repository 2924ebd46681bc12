package ir

import (
	"fmt"
	"sort"
)

// Order and lives. Issue order is the order of the instructions of a section; an instruction comes after those before
// it on its stream, and a wait after its record and all that the record comes after. A clock for each stream holds how
// far on every stream it has come; a section's end joins all streams. Messages order nothing: a rank must not depend
// on another's timing.
//
// Lives: a byte holds the buffer through which it was written last, and may be read through no other. What a section
// finds at its start is what the init section has left and no section puts another buffer over: steps and evaluations
// may come in any number and order, so nothing that only one of them writes may be read by the next before it is
// written again.

// clock is how many instructions of each stream something comes after.
type clock [NumStreams]uint32

func (c *clock) join(o *clock) {
	for i := range c {
		c[i] = max(c[i], o[i])
	}
}

// order checks all sections of the code.
func (v *codeVerifier) order() {
	var sections [NumSections]*orderer
	for s := range NumSections {
		o := newOrderer(v, s)
		o.run()
		sections[s] = o
	}
	v.lives(&sections)
}

// orderer walks a section.
type orderer struct {
	v       *codeVerifier
	section Section
	clocks  [NumStreams]clock // of the last instruction of each stream; its own entry counts the stream
	events  []event
	number  [NumStreams][]int32 // instructions of each stream by their number less 1
	shadows [NumArenas]*shadow
	needs   []need
	raced   int                // 1 + the last instruction with a race
	left    [NumArenas][]owned // what the section leaves
}

type event struct {
	recorded int32 // instruction, or None
	at       clock
}

// need is a range that must hold its buffer when the section begins.
type need struct {
	arena  Arena
	lo, hi Bytes
	buffer uint32
	at     int    // instruction, or None
	by     string // who reads where no instruction does
}

func newOrderer(v *codeVerifier, s Section) *orderer {
	o := &orderer{v: v, section: s, events: make([]event, v.code.Events[s])}
	for i := range o.events {
		o.events[i].recorded = None
	}
	for a := range o.shadows {
		o.shadows[a] = newShadow(v.code.Arenas[a])
	}
	return o
}

func (o *orderer) run() {
	instrs := o.v.code.Sections[o.section]
	if len(instrs) > 0 {
		o.fill()
	}
	for i := range instrs {
		in := &instrs[i]
		o.number[in.Stream] = append(o.number[in.Stream], int32(i))
		o.clocks[in.Stream][in.Stream]++
		if in.Info().Class == ClassSync {
			o.sync(i, in)
			continue
		}
		o.access(i, in)
	}
	if len(instrs) > 0 {
		o.after()
	}
	for a, s := range o.shadows {
		o.left[a] = s.written()
	}
}

func (o *orderer) sync(i int, in *Instr) {
	e := &o.events[in.Attrs[0].Bits]
	switch {
	case in.Op == Record && e.recorded != None:
		o.v.report(FindEvent, o.section, i, int(e.recorded), "event %d is recorded a second time", in.Attrs[0].Bits)
	case in.Op == Record:
		e.recorded, e.at = int32(i), o.clocks[in.Stream]
	case e.recorded == None:
		o.v.report(FindEvent, o.section, i, None, "waits for event %d, which no instruction before it records", in.Attrs[0].Bits)
	default:
		o.clocks[in.Stream].join(&e.at)
	}
}

// access looks at what the instruction reads before what it writes: it may do both to the same bytes.
func (o *orderer) access(i int, in *Instr) {
	for j := range in.Args {
		if reads, _ := in.Access(j); reads {
			o.read(i, in, j)
		}
	}
	for j := range in.Args {
		if _, writes := in.Access(j); writes {
			o.write(i, in, j)
		}
	}
}

// instrAt is the instruction of an access.
func (o *orderer) instrAt(a access) int {
	if a.stream == byVM {
		return None
	}
	return int(o.number[a.stream][a.number-1])
}

// comesAfter says whether stream s has what is needed to come after an access.
func (o *orderer) comesAfter(s Stream, a access) bool {
	return a.stream == byVM || o.clocks[s][a.stream] >= a.number
}

// forgive lets stream s come after an access from now on, so that one missing wait is one finding.
func (o *orderer) forgive(s Stream, a access) {
	o.clocks[s][a.stream] = max(o.clocks[s][a.stream], a.number)
}

func (o *orderer) read(i int, in *Instr, j int) {
	view := &in.Args[j]
	arena := in.Info().Operands[j].Arena
	lo, hi := o.v.code.extent(view)
	number := o.clocks[in.Stream][in.Stream]
	o.shadows[arena].visit(lo, hi, func(lo, hi Bytes, st *state) {
		switch {
		case st.writer.number == 0:
			o.claim(need{arena, lo, hi, view.Buffer, i, ""}, st)
		case !o.comesAfter(in.Stream, st.writer):
			o.race(i, j, st.writer, lo, hi, "reads", "written")
		case st.buffer != view.Buffer:
			o.stranger(i, o.v.code.Buffers[view.Buffer].Name, st, lo, hi)
		}
		st.buffer = view.Buffer
		st.reads[in.Stream] = number
	})
}

func (o *orderer) write(i int, in *Instr, j int) {
	view := &in.Args[j]
	arena := in.Info().Operands[j].Arena
	lo, hi := o.v.code.extent(view)
	o.shadows[arena].visit(lo, hi, func(lo, hi Bytes, st *state) {
		for t, n := range st.reads {
			if a := (access{Stream(t), n}); n != 0 && !o.comesAfter(in.Stream, a) {
				o.race(i, j, a, lo, hi, "writes", "read")
			}
		}
		if st.writer.number != 0 && !o.comesAfter(in.Stream, st.writer) {
			o.race(i, j, st.writer, lo, hi, "writes", "written")
		}
	})
	st := state{buffer: view.Buffer, writer: access{in.Stream, o.clocks[in.Stream][in.Stream]}}
	o.shadows[arena].replace(lo, hi, st)
}

// race reports two accesses that nothing orders; one an instruction, since what lacks a wait often meets several.
func (o *orderer) race(i, j int, other access, lo, hi Bytes, mine, theirs string) {
	in := &o.v.code.Sections[o.section][i]
	o.forgive(in.Stream, other)
	if o.raced == i+1 {
		return
	}
	o.raced = i + 1
	k := o.instrAt(other)
	o.v.report(FindRace, o.section, i, k, "%s %s (%s) while %s %d on stream %s may not yet have %s it: no event orders them",
		mine, o.v.code.Buffers[in.Args[j].Buffer].Name, byteRange(lo, hi), o.section, k, other.stream, theirs)
}

func byteRange(lo, hi Bytes) string { return fmt.Sprintf("bytes 0x%x to 0x%x", int64(lo), int64(hi)) }

// stranger reports bytes that hold another buffer than the one they are read through.
func (o *orderer) stranger(i int, name string, st *state, lo, hi Bytes) {
	o.v.report(FindUninitialised, o.section, i, o.instrAt(st.writer), "reads %s, but bytes 0x%x to 0x%x now hold %s",
		name, int64(lo), int64(hi), o.v.code.Buffers[st.buffer].Name)
}

// claim notes that bytes which this section has not written must hold a buffer when it begins.
func (o *orderer) claim(n need, st *state) {
	if st.buffer != n.buffer {
		o.needs = append(o.needs, n)
		st.buffer = n.buffer
	}
}

// fill is what the VM writes before the section.
func (o *orderer) fill() {
	for i := range o.v.code.Results {
		r := &o.v.code.Results[i]
		if rule := resultRuleOf(r.Name); rule != nil && rule.filled && rule.section == o.section {
			lo, hi := o.v.code.extent(&r.View)
			st := state{buffer: r.View.Buffer, writer: access{byVM, 1}}
			o.shadows[o.v.code.Buffers[r.View.Buffer].Arena].replace(lo, hi, st)
		}
	}
}

// after is what the VM reads after the section: its results, and after a step the gradients.
func (o *orderer) after() {
	for i := range o.v.code.Results {
		r := &o.v.code.Results[i]
		if rule := resultRuleOf(r.Name); rule != nil && !rule.filled && rule.section == o.section {
			o.readByVM("result "+r.Name, &r.View)
		}
	}
	for i := range o.v.code.States {
		if s := &o.v.code.States[i]; s.Role == RoleGrad && o.section == SectionStep {
			o.readByVM("the gradient of "+o.v.p.Tensors[s.Tensor].Name, &s.View)
		}
	}
}

func (o *orderer) readByVM(name string, view *View) {
	b := &o.v.code.Buffers[view.Buffer]
	lo, hi := o.v.code.extent(view)
	o.shadows[b.Arena].visit(lo, hi, func(lo, hi Bytes, st *state) {
		switch {
		case st.writer.number == 0:
			o.claim(need{b.Arena, lo, hi, view.Buffer, None, name}, st)
		case st.buffer != view.Buffer:
			o.v.reportCode(FindUninitialised, "%s is to be read after the %s section, but bytes 0x%x to 0x%x then hold %s",
				name, o.section, int64(lo), int64(hi), o.v.code.Buffers[st.buffer].Name)
		}
	})
}

// lives settles what sections need to find: the init section must have written it, and no other section may leave
// another buffer there. Checkpoints need the same of every state but gradients.
func (v *codeVerifier) lives(sections *[NumSections]*orderer) {
	for s, o := range sections {
		for _, n := range o.needs {
			v.settle(sections, Section(s), n)
		}
	}
	for i := range v.code.States {
		s := &v.code.States[i]
		if s.Role == RoleGrad || len(v.code.Sections[SectionInit]) == 0 {
			continue
		}
		lo, hi := v.code.extent(&s.View)
		name := fmt.Sprintf("a checkpoint's %s of %s", roleNames[s.Role], v.p.Tensors[s.Tensor].Name)
		v.settle(sections, SectionStep, need{v.code.Buffers[s.View.Buffer].Arena, lo, hi, s.View.Buffer, None, name})
	}
}

func (v *codeVerifier) settle(sections *[NumSections]*orderer, s Section, n need) {
	name := v.code.Buffers[n.buffer].Name
	if s == SectionInit {
		v.unmet(s, n, "reads %s before anything has written bytes 0x%x to 0x%x of it", name, int64(n.lo), int64(n.hi))
		return
	}
	at := n.lo
	for _, w := range overlapping(sections[SectionInit].left[n.arena], n.lo, n.hi) {
		if w.buffer != n.buffer || w.lo > at {
			break
		}
		at = w.hi
	}
	if at < n.hi {
		v.unmet(s, n, "reads %s, of which neither this section so far nor the init section has written bytes 0x%x to 0x%x", name, int64(at), int64(n.hi))
		return
	}
	for other := SectionStep; other < NumSections; other++ {
		for _, w := range overlapping(sections[other].left[n.arena], n.lo, n.hi) {
			if w.buffer != n.buffer {
				v.unmet(s, n, "reads %s as the init section left it, but the %s section puts %s there", name, other, v.code.Buffers[w.buffer].Name)
				return
			}
		}
	}
}

// unmet reports a need.
func (v *codeVerifier) unmet(s Section, n need, format string, args ...any) {
	if n.at != None {
		v.report(FindUninitialised, s, n.at, None, format, args...)
		return
	}
	v.reportCode(FindUninitialised, "%s %s", n.by, fmt.Sprintf(format, args...))
}

// overlapping is the part of a sorted list that meets a range.
func overlapping(list []owned, lo, hi Bytes) []owned {
	i := sort.Search(len(list), func(i int) bool { return list[i].hi > lo })
	j := sort.Search(len(list), func(j int) bool { return list[j].lo >= hi })
	return list[i:max(i, j)]
}

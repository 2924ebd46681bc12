package ir

import "fmt"

// This file verifies order. Issue order is the order of the instructions in a section. An instruction comes
// after all earlier instructions on its stream, and a wait comes after its record and everything that precedes
// the record. Each stream has a clock, which counts the instructions on every stream that precede its current
// position; the end of a section joins all streams. Messages do not order instructions, because a rank must not
// depend on another rank's timing. The contents of bytes are checked in verifylives.go.

// clock counts, for each stream, the instructions that precede a point.
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

// orderer visits the instructions of a section.
type orderer struct {
	v       *codeVerifier
	section Section
	clocks  [NumStreams]clock // of the last instruction of each stream; a stream's own entry counts its instructions
	events  []event
	number  [NumStreams][]int32 // by stream and by position in the stream, from 0: index of the instruction in the section
	shadows [NumArenas]*shadow
	needs   []need
	ended   []int32            // [buffer]: 1 + the instruction that overwrote it through another buffer; 0: none
	read    []uint8            // [instruction]: a bit for each operand that was read later, at least in part
	raced   int                // 1 + the last instruction with a race
	abused  int                // 1 + the last instruction with a finding about values
	left    [NumArenas][]owned // contents at the end of the section
}

type event struct {
	recorded int32 // instruction, or None
	at       clock
}

// need is a range of bytes that must belong to a buffer when the section begins.
type need struct {
	arena  Arena
	lo, hi Bytes
	buffer uint32
	at     int    // instruction, or None
	by     string // what reads the bytes, if it is not an instruction
}

func newOrderer(v *codeVerifier, s Section) *orderer {
	o := &orderer{
		v: v, section: s, events: make([]event, v.code.Events[s]),
		ended: make([]int32, len(v.code.Buffers)), read: make([]uint8, len(v.code.Sections[s])),
	}
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
		o.found()
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
		o.v.report(FindEvent, o.section, i, int(e.recorded), "event %d is recorded twice", in.Attrs[0].Bits)
	case in.Op == Record:
		e.recorded, e.at = int32(i), o.clocks[in.Stream]
	case e.recorded == None:
		o.v.report(FindEvent, o.section, i, None, "waits for event %d, which no instruction before it records", in.Attrs[0].Bits)
	default:
		o.clocks[in.Stream].join(&e.at)
	}
}

// access checks reads before writes, because an instruction may read and write the same bytes.
func (o *orderer) access(i int, in *Instr) {
	for j := range in.Args {
		if reads, _ := in.Access(j); reads {
			o.reads(i, in, j)
		}
	}
	for j := range in.Args {
		if _, writes := in.Access(j); writes {
			o.writes(i, in, j)
		}
	}
}

// instrAt returns the instruction of an access.
func (o *orderer) instrAt(a access) int {
	if a.stream == byVM || a.number == 0 {
		return None
	}
	return int(o.number[a.stream][a.number-1])
}

// comesAfter reports whether the latest instruction of stream s comes after an access.
func (o *orderer) comesAfter(s Stream, a access) bool {
	return a.stream == byVM || o.clocks[s][a.stream] >= a.number
}

// forgive makes stream s count as ordered after an access from now on, so that one missing wait causes only one
// finding.
func (o *orderer) forgive(s Stream, a access) {
	o.clocks[s][a.stream] = max(o.clocks[s][a.stream], a.number)
}

func (o *orderer) reads(i int, in *Instr, j int) {
	view := &in.Args[j]
	arena := in.Info().Operands[j].Arena
	lo, hi := o.v.code.extent(view)
	number, changes := o.clocks[in.Stream][in.Stream], in.changes(j)
	o.shadows[arena].visit(lo, hi, func(lo, hi Bytes, st *state) {
		switch {
		case st.writer.number == 0:
			o.claim(need{arena, lo, hi, view.Buffer, i, ""}, st)
		case !o.comesAfter(in.Stream, st.writer):
			o.race(i, j, st.writer, lo, hi, "reads", "written")
		case st.buffer != view.Buffer:
			o.stranger(i, o.v.code.Buffers[view.Buffer].Name, st, lo, hi)
		case !changes && st.past&readAsWas != 0:
			o.abuse(i, o.instrAt(st.writer), "reads %s (%s) after a change, and the section has also read it before the change",
				o.v.code.Buffers[view.Buffer].Name, byteRange(lo, hi))
		case st.past&stale != 0:
			o.abuse(i, o.otherOf(in, st), "reads %s (%s), of which a copy was changed and not copied back",
				o.v.code.Buffers[view.Buffer].Name, byteRange(lo, hi))
		}
		o.noteRead(st.writer)
		if !changes {
			st.past |= readOnce | st.past&readOnce<<1
		}
		st.buffer = view.Buffer
		st.reads[in.Stream] = number
	})
}

func (o *orderer) writes(i int, in *Instr, j int) {
	view := &in.Args[j]
	arena := in.Info().Operands[j].Arena
	lo, hi := o.v.code.extent(view)
	o.shadows[arena].visit(lo, hi, func(lo, hi Bytes, st *state) {
		for t, n := range st.reads {
			if a := (access{Stream(t), 0, n}); n != 0 && !o.comesAfter(in.Stream, a) {
				o.race(i, j, a, lo, hi, "writes", "read")
			}
		}
		if st.writer.number != 0 && !o.comesAfter(in.Stream, st.writer) {
			o.race(i, j, st.writer, lo, hi, "writes", "written")
		}
	})
	if in.changes(j) {
		o.change(i, in, j)
	} else {
		o.begin(i, in, j)
	}
}

// race reports two unordered accesses, at most once per instruction, because a missing wait often
// affects several accesses.
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

package ir

import (
	"fmt"
	"slices"
	"sort"
)

// This file verifies lifetimes and values.
//
// A byte belongs to the buffer through which it was last written, and may be read only through that buffer. A
// section starts with the values that the init section left, except where some section writes another buffer
// to the same bytes. Any number of steps and evaluations may run, in any order, so a section must not rely on
// values that only a step or only an evaluation writes: it must write them itself before it reads them.
//
// In a section, a buffer has one lifetime, which ends when another buffer is written over any of its bytes.
// Each byte of the buffer has one value: it is written once, possibly changed in place, and then read. A read
// therefore sees the same value at every point in the section. There are three exceptions. First, values that
// the section found at its start, such as optimizer state and weights, may be read, then changed in place or
// overwritten once, but not read after that. Second, a value that a reload or a rotation has moved elsewhere,
// and that nothing else has read, may be overwritten by the copy or rotation that returns it to the same
// bytes. Third, an instruction may change a value in place if every instruction that has read the value so
// far also changed it in place.
//
// At least part of every result must be read: in its section, in a later one, by the VM, or for a
// checkpoint. Operands that the opcode's row marks as spare are exempt.

// changes reports whether an instruction changes operand j in place: it reads and writes the same view, through
// only this operand or through two.
func (in *Instr) changes(j int) bool {
	reads, writes := in.Access(j)
	for k := range in.Args {
		if in.Args[k] == in.Args[j] {
			r, w := in.Access(k)
			reads, writes = reads || r, writes || w
		}
	}
	return reads && writes
}

// noteRead records that bytes written by an access have been read, at least in part.
func (o *orderer) noteRead(a access) {
	if i := o.instrAt(a); i != None {
		o.read[i] |= 1 << a.operand
	}
}

// abuse reports, at most once per instruction, an access that breaks the rule of one value per buffer.
func (o *orderer) abuse(i, other int, format string, args ...any) {
	if o.abused != i+1 && !o.v.AllowReuse {
		o.abused = i + 1
		o.v.report(FindLife, o.section, i, other, format, args...)
	}
}

// found marks the bytes that hold values when the section starts: those of states, which persist from one
// section to the next.
func (o *orderer) found() {
	for i := range o.v.code.States {
		s := &o.v.code.States[i]
		if s.Role != RoleGrad && o.section != SectionInit {
			lo, hi := o.v.code.extent(&s.View)
			o.shadows[o.v.code.Buffers[s.View.Buffer].Arena].replace(lo, hi, state{buffer: s.View.Buffer})
		}
	}
}

// change changes the value of operand j in place.
func (o *orderer) change(i int, in *Instr, j int) {
	view := &in.Args[j]
	lo, hi := o.v.code.extent(view)
	writer := access{in.Stream, uint8(j), o.clocks[in.Stream][in.Stream]}
	o.shadows[in.Info().Operands[j].Arena].visit(lo, hi, func(lo, hi Bytes, st *state) {
		next := state{buffer: view.Buffer, writer: writer, past: st.past & (readAsWas | replaced), origin: st.origin}
		switch {
		case st.writer.number == 0 && st.past&readOnce != 0:
			next.past |= readAsWas
		case st.writer.number != 0 && st.past&(readOnce|replaced) != 0:
			o.abuse(i, o.otherOf(in, st), "changes %s (%s) in place after it has been read or replaced",
				o.v.code.Buffers[view.Buffer].Name, byteRange(lo, hi))
		case st.writer.number != 0 && o.section == SectionStep && o.abused != i+1 && o.v.isState(view.Buffer):
			o.abused = i + 1
			o.v.report(FindState, o.section, i, o.instrAt(st.writer), "changes %s (%s), a state, a second time in a step",
				o.v.code.Buffers[view.Buffer].Name, byteRange(lo, hi))
		}
		if st.origin != 0 {
			o.spoil(lo, hi, st.origin)
		}
		*st = next
	})
}

// spoil marks the bytes on the host from which a reload has copied a value that is now changed in place.
func (o *orderer) spoil(lo, hi Bytes, origin uint32) {
	reload := &o.v.code.Sections[o.section][origin-1]
	to, end := o.v.code.extent(&reload.Args[0])
	from, _ := o.v.code.extent(&reload.Args[1])
	if reload.Op != CopyH2D || lo < to || hi > end {
		return
	}
	o.shadows[Host].visit(from+lo-to, from+hi-to, func(_, _ Bytes, st *state) {
		if st.buffer == reload.Args[1].Buffer && o.instrAt(st.writer) < int(origin)-1 {
			st.past |= stale
		}
	})
}

// otherOf returns another instruction that has read a value or, if there is none, the one that wrote it.
func (o *orderer) otherOf(in *Instr, st *state) int {
	for t, n := range st.reads {
		if n != 0 && (Stream(t) != in.Stream || n != o.clocks[in.Stream][in.Stream]) {
			return int(o.number[t][n-1])
		}
	}
	return o.instrAt(st.writer)
}

// begin records that operand j writes a new value.
func (o *orderer) begin(i int, in *Instr, j int) {
	view, arena := &in.Args[j], in.Info().Operands[j].Arena
	name := o.v.code.Buffers[view.Buffer].Name
	if by := o.ended[view.Buffer]; by > 0 {
		o.abuse(i, int(by-1), "writes %s, whose life has ended: another buffer was written over it", name)
	}
	lo, hi := o.v.code.extent(view)
	next := state{buffer: view.Buffer, writer: access{in.Stream, uint8(j), o.clocks[in.Stream][in.Stream]}, origin: o.originOf(i, in)}
	back := false
	o.shadows[arena].visit(lo, hi, func(lo, hi Bytes, st *state) {
		switch {
		case st.buffer == NoBuffer:
		case st.buffer != view.Buffer:
			o.ended[st.buffer] = int32(i) + 1
		case st.writer.number == 0:
			next.past |= replaced
			if st.past&readOnce != 0 {
				next.past |= readAsWas
			}
		case o.bringsBack(in, st, next.origin):
			back = true
		default:
			o.abuse(i, o.instrAt(st.writer), "writes %s (%s) a second time: its first value is lost to later readers",
				name, byteRange(lo, hi))
		}
	})
	if back {
		next.origin = 0 // the value is back in its place
	}
	o.shadows[arena].replace(lo, hi, next)
}

// originOf returns the origin (see state) of the value that an instruction writes. A reload is the origin of
// its output. A copy to the host, or a rotation in a ring, passes on the origin of its input; a rotation whose
// input has none is the origin of its output.
func (o *orderer) originOf(i int, in *Instr) uint32 {
	switch in.Op {
	case CopyH2D:
		return uint32(i) + 1
	case CopyD2H, Rotate:
	default:
		return 0
	}
	origin, some := uint32(0), false
	lo, hi := o.v.code.extent(&in.Args[1])
	o.shadows[Device].visit(lo, hi, func(_, _ Bytes, st *state) {
		if some && st.origin != origin {
			origin = 0
		} else if !some {
			origin, some = st.origin, true
		}
	})
	if origin == 0 && in.Op == Rotate {
		return uint32(i) + 1
	}
	return origin
}

// bringsBack reports whether an instruction returns a value to the bytes from which the value's origin moved
// it, and no other instruction has read the value there.
func (o *orderer) bringsBack(in *Instr, st *state, origin uint32) bool {
	if origin == 0 || st.past&(readOnce|readTwice) != readOnce {
		return false
	}
	moved := &o.v.code.Sections[o.section][origin-1]
	n := st.reads[moved.Stream]
	return n != 0 && o.number[moved.Stream][n-1] == int32(origin-1) &&
		moved.Args[1].Buffer == in.Args[0].Buffer && moved.Args[1].Offset == in.Args[0].Offset &&
		moved.Args[1].Bytes() == in.Args[0].Bytes()
}

// stranger reports a read of bytes through a buffer other than the one to which they belong.
func (o *orderer) stranger(i int, name string, st *state, lo, hi Bytes) {
	o.v.report(FindUninitialised, o.section, i, o.instrAt(st.writer), "reads %s, but bytes 0x%x to 0x%x now hold %s",
		name, int64(lo), int64(hi), o.v.code.Buffers[st.buffer].Name)
}

// claim records a need: bytes that the section has not written yet must already belong to a buffer when the
// section begins.
func (o *orderer) claim(n need, st *state) {
	if st.buffer != n.buffer {
		o.needs = append(o.needs, n)
		st.buffer = n.buffer
	}
}

// fill marks the bytes that the VM writes before the section.
func (o *orderer) fill() {
	for i := range o.v.code.Results {
		r := &o.v.code.Results[i]
		if rule := resultRuleOf(r.Name); rule != nil && rule.filled && rule.section == o.section {
			lo, hi := o.v.code.extent(&r.View)
			st := state{buffer: r.View.Buffer, writer: access{byVM, 0, 1}}
			o.shadows[o.v.code.Buffers[r.View.Buffer].Arena].replace(lo, hi, st)
		}
	}
}

// after checks the values that the VM reads after the section: its results and, after a step, the gradients.
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
			o.v.reportCode(FindUninitialised, "%s must be readable after the %s section, but bytes 0x%x to 0x%x then hold %s",
				name, o.section, int64(lo), int64(hi), o.v.code.Buffers[st.buffer].Name)
		}
		o.noteRead(st.writer)
	})
}

// lives checks the values that sections need at their start. The init section must have written
// them, and no other section may leave another buffer in their place. The same holds for every
// state that checkpoints need, that is, for all states except gradients.
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
		name := fmt.Sprintf("a checkpoint's %s of %s", s.Role, v.p.Tensors[s.Tensor].Name)
		v.settle(sections, SectionStep, need{v.code.Buffers[s.View.Buffer].Arena, lo, hi, s.View.Buffer, None, name})
	}
	v.unread = unreadResults(v.code, sections)
	v.updated = sections[SectionStep].updated()
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
	for other := SectionInit; other < NumSections; other++ {
		for _, w := range overlapping(sections[other].left[n.arena], n.lo, n.hi) {
			if w.buffer != n.buffer {
				v.unmet(s, n, "reads %s as the init section left it, but the %s section puts %s there", name, other, v.code.Buffers[w.buffer].Name)
				return
			}
			sections[other].noteRead(w.writer)
			if other != SectionInit && n.at != None {
				v.survives(s, n, max(w.lo, n.lo), min(w.hi, n.hi), other)
			}
		}
	}
}

// survives checks that bytes that a section reads as an earlier run of a section left them are a state, which
// checkpoints contain. A code without states trains nothing and is exempt.
func (v *codeVerifier) survives(s Section, n need, lo, hi Bytes, by Section) {
	if v.AllowReuse || len(v.code.States) == 0 {
		return
	}
	at := lo
	for _, w := range overlapping(v.kept()[n.arena], lo, hi) {
		if w.lo > at {
			break
		}
		at = max(at, w.hi)
	}
	if at < hi {
		v.unsaved.addOnce(Finding{Kind: FindState, At: siteOf(v.p, v.code, s, n.at), Msg: fmt.Sprintf(
			"reads %s, which the %s section changes, but bytes 0x%x to 0x%x of it are no state: checkpoints would not contain them",
			v.code.Buffers[n.buffer].Name, by, int64(at), int64(hi))})
	}
}

// isState reports whether a buffer holds a state that checkpoints contain.
func (v *codeVerifier) isState(buffer uint32) bool {
	if v.stateBuffers == nil {
		v.stateBuffers = make([]bool, len(v.code.Buffers))
		for i := range v.code.States {
			s := &v.code.States[i]
			v.stateBuffers[s.View.Buffer] = s.Role != RoleGrad
		}
	}
	return v.stateBuffers[buffer] && !v.AllowReuse
}

// updated returns, for each state, how much of it a step writes.
func (o *orderer) updated() []extent {
	list := make([]extent, len(o.v.code.States))
	for i := range o.v.code.States {
		s := &o.v.code.States[i]
		lo, hi := o.v.code.extent(&s.View)
		n := Bytes(0)
		for _, w := range overlapping(o.left[o.v.code.Buffers[s.View.Buffer].Arena], lo, hi) {
			n += min(w.hi, hi) - max(w.lo, lo)
		}
		switch n {
		case 0:
		case hi - lo:
			list[i] = whole
		default:
			list[i] = part
		}
	}
	return list
}

// extent is how much of something is meant.
type extent uint8

const (
	none extent = iota
	part
	whole
)

// verifyUpdates checks that a step updates all states of each trained tensor on all ranks, each as a whole. A tensor
// is trained if a step updates a state of it, if it has a state other than weights, or if the header does not list it as frozen.
func verifyUpdates(p *Program, updated [][]extent, all *findings) {
	trained := map[int32]string{} // with the reason
	for c := range updated {
		for i, e := range updated[c] {
			switch s := &p.Codes[c].States[i]; {
			case trained[s.Tensor] != "":
			case s.Role != RoleWeight:
				trained[s.Tensor] = fmt.Sprintf("it has a %s on %s", s.Role, p.Codes[c].Name)
			case e != none:
				trained[s.Tensor] = "its weight is updated on " + p.Codes[c].Name
			case p.Run.Optimizer != "" && !slices.Contains(p.Run.Frozen, p.Tensors[s.Tensor].Name):
				trained[s.Tensor] = "it is not frozen"
			}
		}
	}
	for c := range updated {
		for i, e := range updated[c] {
			s := &p.Codes[c].States[i]
			why := trained[s.Tensor]
			if s.Role == RoleGrad || why == "" || e == whole {
				continue
			}
			amount := map[extent]string{none: "does not update", part: "updates only part of"}[e]
			all.add(Finding{Kind: FindState, At: Site{Rank: None, Code: p.Codes[c].Name, Index: None}, Msg: fmt.Sprintf(
				"a step %s %s, the %s of %s, a trained tensor (%s): all its states are updated in every step",
				amount, p.Codes[c].Buffers[s.View.Buffer].Name, s.Role, p.Tensors[s.Tensor].Name, why)})
			delete(trained, s.Tensor) // one finding is enough
		}
	}
}

// kept lists the bytes of each arena that checkpoints contain.
func (v *codeVerifier) kept() *[NumArenas][]owned {
	if v.states == nil {
		var shadows [NumArenas]*shadow
		for a := range shadows {
			shadows[a] = newShadow(v.code.Arenas[a])
		}
		for i := range v.code.States {
			if s := &v.code.States[i]; s.Role != RoleGrad {
				lo, hi := v.code.extent(&s.View)
				shadows[v.code.Buffers[s.View.Buffer].Arena].replace(lo, hi, state{buffer: s.View.Buffer, writer: access{byVM, 0, 1}})
			}
		}
		v.states = new([NumArenas][]owned)
		for a := range shadows {
			v.states[a] = shadows[a].written()
		}
	}
	return v.states
}

// unmet adds a finding about a need that is not met.
func (v *codeVerifier) unmet(s Section, n need, format string, args ...any) {
	if n.at != None {
		v.report(FindUninitialised, s, n.at, None, format, args...)
		return
	}
	v.reportCode(FindUninitialised, "%s %s", n.by, fmt.Sprintf(format, args...))
}

// overlapping returns the part of a sorted list that overlaps a range.
func overlapping(list []owned, lo, hi Bytes) []owned {
	i := sort.Search(len(list), func(i int) bool { return list[i].hi > lo })
	j := sort.Search(len(list), func(j int) bool { return list[j].lo >= hi })
	return list[i:max(i, j)]
}

// result is an operand that an instruction writes.
type result struct {
	section        Section
	index, operand int
}

// unreadResults lists the results that are never read and that the opcode's row does not call spare. If all
// results of an instruction are spare, one of them must be read.
func unreadResults(c *Code, sections *[NumSections]*orderer) (list []result) {
	for s, o := range sections {
		for i := range c.Sections[s] {
			in := &c.Sections[s][i]
			row := in.Info()
			for j := range row.Written() {
				spare := row.Operands[j].Spare && (j > 0 || o.read[i]&(1<<row.Written()-1) != 0)
				if in.Args[j].Present() && !spare && o.read[i]>>j&1 == 0 {
					list = append(list, result{Section(s), i, j})
				}
			}
		}
	}
	return list
}

// verifyUnread reports results that are never read. A collective is not reported on one member if another
// member of the group reads the result that it receives.
func verifyUnread(p *Program, unread [][]result, all *findings) {
	u := unusedCollectives{p: p, calls: map[[2]int][][]int32{}, unused: map[collective]bool{}}
	for c, list := range unread {
		for _, r := range list {
			if p.Codes[c].Sections[r.section][r.index].Info().findAttr(KindGroup) >= 0 {
				u.unused[collective{c, r.section, int32(r.index)}] = true
			}
		}
	}
	for c, list := range unread {
		v := codeVerifier{p: p, code: &p.Codes[c], findings: findings{limit: findingLimit}}
		for _, r := range list {
			at := collective{c, r.section, int32(r.index)}
			if u.unused[at] && u.usedElsewhere(at) {
				continue
			}
			in := &v.code.Sections[r.section][r.index]
			v.report(FindDead, r.section, r.index, None, "nothing reads %s, which it writes to %s: the work is wasted",
				in.Info().Operands[r.operand].Name, v.code.Buffers[in.Args[r.operand].Buffer].Name)
		}
		all.append(&v.findings)
	}
}

// unusedCollectives holds the collectives that have a result that their own code never reads.
type unusedCollectives struct {
	p      *Program
	calls  map[[2]int][][]int32 // [code, section][group]: instructions
	unused map[collective]bool
}

// collective identifies a collective instruction of a code.
type collective struct {
	code    int
	section Section
	index   int32
}

func (u *unusedCollectives) callsOf(code int, s Section) [][]int32 {
	key := [2]int{code, int(s)}
	if u.calls[key] == nil {
		u.calls[key] = trafficOf(u.p, &u.p.Codes[code], s).groups
	}
	return u.calls[key]
}

// usedElsewhere reports whether some member of a collective's group reads all results that it receives.
func (u *unusedCollectives) usedElsewhere(at collective) bool {
	in := &u.p.Codes[at.code].Sections[at.section][at.index]
	group := in.Attrs[in.Info().findAttr(KindGroup)].Bits
	n, _ := slices.BinarySearch(u.callsOf(at.code, at.section)[group], at.index)
	for r := range u.p.Ranks {
		if int(u.p.Ranks[r].Code) != at.code {
			continue
		}
		for _, m := range u.p.Ranks[r].Groups[group] {
			other := int(u.p.Ranks[m].Code)
			if !u.unused[collective{other, at.section, u.callsOf(other, at.section)[group][n]}] {
				return true
			}
		}
	}
	return false
}

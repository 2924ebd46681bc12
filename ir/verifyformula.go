package ir

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"slices"
)

// This file verifies what values are made of. The formula of a value says by which opcodes it is computed from which weights and which
// data, but not for which tokens: corresponding values of all subsequences, microbatches and ranks have one formula, whether they are
// computed once, in pieces, or again. The step is interpreted over formulas, one rank of each code, after all other rules hold. Then
//
//   - values that are added to the same sum have the same formula, or their sum is a formula of its own;
//   - an instruction that computes a gradient reads the operands of the instruction that it is the gradient of, and the complete
//     gradient of that instruction's result: one contribution from each instruction that reads the result;
//   - an update of a weight reads the complete gradient of that weight, which is summed over all ranks that hold the weight;
//   - the gradients of all weights, and the loss, contain the same tokens;
//   - a validation computes the same loss as a step.
//
// Attributes that say which tokens an instruction works on do not belong to formulas, except that the rows of its operands must be those of
// the same tokens. Nothing else is known about them here: the formulas of a program say what is computed, not how it is divided.

// formula is a hash of how a value is computed; 0: not known.
type formula uint64

// nothing is the formula of a value to which others are added, such as zeros.
const nothing formula = 1

// mix returns the hash of a sequence of numbers.
func mix(words ...uint64) uint64 {
	h := uint64(0x9e3779b97f4a7c15)
	for _, w := range words {
		hi, lo := bits.Mul64(h^w, 0xd6e8feb86659fd93)
		h = (hi ^ lo) + 0x9e3779b97f4a7c15
	}
	return h
}

// meaning is what is known about the value in some bytes.
type meaning struct {
	formula formula
	of      formula // the value that it is the gradient of; 0: it is no gradient
	terms   uint64  // of a gradient: a bit for each use of that value from which a contribution has been added
	summed  uint64  // the groups over which it has been summed
	moved   uint64  // the groups in which it has been gathered or exchanged; groups of the same ranks are one
	rows    rows
	apart   bool      // a gradient of keys or values that does not last: those of earlier tokens, to which this is not the only contribution
	cover   [2]uint64 // of a sum over tokens: which tokens, each with its number of rows; 0: not known
	chain   formula   // the weight whose update the value is computed for; 0: none
}

// rows says which tokens a value has rows for.
type rows struct {
	sequence, position, n int64 // n is 0 if it is not known
}

// key returns a hash of a value as an operand: of its formula, and of the ranks whose shares it contains.
func (m *meaning) key() uint64 { return mix(uint64(m.formula), m.summed, m.moved) }

// covered returns the cover of a sum over n rows.
func (r rows) covered(n int64) [2]uint64 {
	h := mix(uint64(r.sequence), uint64(r.position))
	return [2]uint64{uint64(n) * (h>>32 | 1), uint64(n) * (h&math.MaxUint32 | 1)}
}

// piece is a range of a buffer with one meaning.
type piece struct {
	lo, hi Bytes
	meaning
}

// node is a formula's instruction.
type node struct {
	op   Op
	in   *Instr
	sum  bool      // it adds its operands
	args []formula // by operand
	outs []formula // by operand
	uses []formula // first results of the instructions that read it
	at   place
}

// place is an instruction of a section.
type place struct {
	code, index int32
	section     Section
}

// interpreter interprets a program over formulas.
type interpreter struct {
	p       *Program
	section Section
	nodes   map[formula]*node
	codes   []*interpreted
	traffic []traffic
	tensors map[formula]int32  // of weights and masters
	bare    map[formula]uint64 // by gradient: the groups over which it was summed when it was used
	shared  map[sharedKey]sharedAttr
	covers  [2]uint64            // of the first weight that was updated, or of the loss
	coverAt *place               // the instruction that updated it
	loss    meaning              // of a step
	muon    map[[4]int64]formula // by shape: the update of a matrix
	left    map[reduction]int    // a rank that a sum leaves out
	counted []*counted           // what the losses of routers take
	slots   map[formula]int64    // by places: the most rows of a token among those of the experts of route
	found   *findings
	dropout bool // a step drops elements, so it computes another loss than a validation
	stop    bool

	divisions map[tensorRole]*division
}

// sharedKey is an attribute in a section. Several opcodes may have the attribute.
type sharedKey struct {
	section Section
	attr    AttrInfo
}

// sharedAttr is the value of an attribute where it occurred first.
type sharedAttr struct {
	value Attr
	at    place
}

// interpreted is the state of a code.
type interpreted struct {
	*interpreter
	code    *Code
	number  int32
	rank    int // the rank on behalf of which the code is interpreted
	buffers [][]piece
	next    int
	sent    map[int32]meaning         // by instruction
	from    map[int32]message         // where what an instruction receives comes from
	given   map[int32][]piece         // by instruction: the contributions to a sum over ranks of several codes
	round   []int32                   // by group: number of collectives so far
	alike   []int                     // by group: the first that has the same members, in whatever order
	inplace map[uint64]struct{}       // changes in place
	reached map[uint64]map[int32]bool // see reach
}

// message is an instruction of a code that sends.
type message struct {
	code  int32
	index int32
}

// differentiates reports whether steps compute the gradient of a loss. Programs that do not are made by hand, and their gradients mean
// nothing.
func differentiates(p *Program) bool {
	return slices.ContainsFunc(p.Codes, func(c Code) bool {
		return slices.ContainsFunc(c.Sections[SectionStep], func(in Instr) bool { return in.Op == CrossEntropyGrad })
	})
}

// verifyFormulas interprets a program that trains.
func verifyFormulas(p *Program, all *findings) {
	x := &interpreter{p: p, nodes: map[formula]*node{}, tensors: map[formula]int32{}, bare: map[formula]uint64{}, shared: map[sharedKey]sharedAttr{}, muon: map[[4]int64]formula{}, slots: map[formula]int64{}, left: map[reduction]int{}, found: all}
	for _, s := range []Section{SectionStep, SectionEval} {
		x.section = s
		x.start()
		for progress := true; progress && !x.stop; {
			progress = false
			for _, c := range x.codes {
				progress = c.run() || progress
			}
		}
		if x.stop {
			return
		}
		x.end()
	}
}

// start prepares a section: its messages, and the values of states.
func (x *interpreter) start() {
	x.codes = x.codes[:0]
	first := make([]int, len(x.p.Codes))
	for i := range first {
		first[i] = None
	}
	for r := range x.p.Ranks {
		if c := x.p.Ranks[r].Code; first[c] == None {
			first[c] = r
		}
	}
	v := ranksVerifier{p: x.p, section: x.section}
	for i := range x.p.Codes {
		v.traffic = append(v.traffic, trafficOf(x.p, &x.p.Codes[i], x.section))
	}
	for i := range x.p.Codes {
		code := &x.p.Codes[i]
		c := &interpreted{interpreter: x, code: code, number: int32(i), rank: first[i], buffers: make([][]piece, len(code.Buffers)),
			sent: map[int32]meaning{}, given: map[int32][]piece{}, inplace: map[uint64]struct{}{}, round: make([]int32, len(x.p.Groups))}
		if x.codes = append(x.codes, c); c.rank == None {
			c.next = math.MaxInt
			continue
		}
		c.alike = alike(x.p.Ranks[c.rank].Groups)
		c.from = v.senders(c.rank)
		for j := range code.States {
			if s := &code.States[j]; s.Role != RoleGrad {
				f := x.state(s.Tensor, s.Role)
				if x.tensors[f] = s.Tensor; x.nodes[f] == nil {
					x.nodes[f] = &node{}
				}
				c.write(&s.View, meaning{formula: f})
			}
		}
		for j := range code.Results {
			if r := &code.Results[j]; resultRuleOf(r.Name).filled {
				c.write(&r.View, meaning{formula: given(r.Name)})
			}
		}
	}
	x.traffic = v.traffic
	x.dropout = x.dropout || slices.ContainsFunc(x.p.Codes, func(c Code) bool {
		return slices.ContainsFunc(c.Sections[x.section], func(in Instr) bool { return in.Op == Dropout })
	})
}

// state returns the formula of a tensor's state. Masters and their rounded copies are one value.
func (x *interpreter) state(tensor int32, role Role) formula {
	if role == RoleMaster {
		role = RoleWeight
	}
	return formula(mix(uint64(tensor), uint64(role), 99))
}

// given returns the formula of a value that the VM fills. A step and a validation each have their own weight of labels.
func given(result string) formula {
	if result == ResultEvalWeight {
		result = ResultWeight
	}
	return formula(mix(uint64(slices.IndexFunc(resultRules, func(r resultRule) bool { return r.name == result })), 77))
}

// senders returns, for every message that a rank receives, the instruction that sends it.
func (v *ranksVerifier) senders(rank int) map[int32]message {
	code, consts := v.p.Ranks[rank].Code, v.p.Ranks[rank].Consts
	recvs := map[channelKey][]int32{}
	for l, list := range v.traffic[code].links {
		if !l.sends {
			key := channelKey{int32(l.peer.Int(consts)), int32(rank), l.channel}
			recvs[key] = mergeSorted(recvs[key], list)
		}
	}
	n := 0
	for _, list := range recvs {
		n += len(list)
	}
	from := make(map[int32]message, n)
	for key, list := range recvs {
		peer := &v.p.Ranks[key.from]
		var sends []int32
		for l, theirs := range v.traffic[peer.Code].links {
			if l.sends && l.channel == key.channel && l.peer.Int(peer.Consts) == int64(rank) {
				sends = mergeSorted(sends, theirs)
			}
		}
		for n, i := range list[:min(len(list), len(sends))] {
			from[i] = message{peer.Code, sends[n]}
		}
	}
	return from
}

// run interprets instructions until one must wait for another code. It returns whether any were interpreted.
func (c *interpreted) run() bool {
	list := c.code.Sections[c.section]
	from := c.next
	for c.next < len(list) && !c.stop && c.instr(c.next, &list[c.next]) {
		c.next++
	}
	return c.next > from
}

// read returns the meaning of a view.
func (c *interpreted) read(v *View) meaning {
	var m meaning
	seen := false
	lo, hi := v.Offset, v.Offset+v.Bytes()
	for i := range c.buffers[v.Buffer] {
		p := &c.buffers[v.Buffer][i]
		if p.hi <= lo || p.lo >= hi {
			continue
		}
		switch {
		case !seen:
			m, seen = p.meaning, true
		case m.formula == nothing:
			m.formula, m.of, m.terms, m.apart = p.formula, p.of, p.terms, p.apart
		case p.formula == nothing:
		case m.formula != p.formula || m.of != p.of:
			return meaning{}
		default:
			m.terms &= p.terms
			m.summed &= p.summed
			m.moved |= p.moved
			m.apart = m.apart && p.apart
			if p.rows != m.rows {
				m.rows.n = 0
			}
		}
	}
	return m
}

// write gives a view a meaning.
func (c *interpreted) write(v *View, m meaning) {
	if old := c.buffers[v.Buffer]; len(old) == 1 && old[0].lo == v.Offset && old[0].hi == v.Offset+v.Bytes() {
		old[0].meaning = m
		return
	}
	c.clear(v)
	c.buffers[v.Buffer] = append(c.buffers[v.Buffer], piece{v.Offset, v.Offset + v.Bytes(), m})
}

// clear removes what is known about a view.
func (c *interpreted) clear(v *View) {
	old := c.buffers[v.Buffer]
	if len(old) == 0 {
		return
	}
	lo, hi := v.Offset, v.Offset+v.Bytes()
	kept := old[:0]
	var beyond []piece
	for _, p := range old {
		switch {
		case p.hi <= lo || p.lo >= hi:
			kept = append(kept, p)
			continue
		case p.lo < lo && p.hi > hi:
			after := p
			after.lo = hi
			beyond = append(beyond, after)
			p.hi = lo
			kept = append(kept, p)
		case p.lo < lo:
			p.hi = lo
			kept = append(kept, p)
		case p.hi > hi:
			p.lo = hi
			kept = append(kept, p)
		}
	}
	c.buffers[v.Buffer] = append(kept, beyond...)
}

// move copies the meanings of a view to another one of the same size, part by part.
func (c *interpreted) move(to, from *View) {
	parts := c.buffers[from.Buffer]
	if from.Buffer == to.Buffer {
		parts = slices.Clone(parts)
	}
	c.clear(to)
	lo, hi := from.Offset, from.Offset+from.Bytes()
	for _, p := range parts {
		if p.hi <= lo || p.lo >= hi {
			continue
		}
		p.lo, p.hi = max(p.lo, lo)-lo+to.Offset, min(p.hi, hi)-lo+to.Offset
		c.buffers[to.Buffer] = append(c.buffers[to.Buffer], p)
	}
}

// here returns the current instruction.
func (c *interpreted) here() place { return place{c.number, int32(c.next), c.section} }

// wrong reports a finding about the current instruction. The interpretation ends.
func (c *interpreted) wrong(other *place, format string, args ...any) {
	if c.stop {
		return
	}
	c.stop = true
	f := Finding{Kind: FindFormula, At: siteOf(c.p, c.code, c.section, c.next), Msg: fmt.Sprintf(format, args...)}
	if other != nil && *other != c.here() {
		o := siteOf(c.p, &c.p.Codes[other.code], other.section, int(other.index))
		f.Other = &o
	}
	c.found.add(f)
}

// instr interprets an instruction. It returns false if the instruction must wait for another code.
func (c *interpreted) instr(i int, in *Instr) bool {
	switch row := in.Info(); {
	case row.Class == ClassSync:
	case row.Class == ClassMove:
		c.move(&in.Args[0], &in.Args[1])
	case in.Op == Send:
		c.sent[int32(i)] = c.read(&in.Args[0])
	case in.Op == Recv:
		m, known := c.from[int32(i)]
		if known {
			sender := c.codes[m.code]
			if sender.next > int(m.index) {
				c.write(&in.Args[0], sender.sent[m.index])
				return true
			}
			if sender != c {
				return false
			}
		}
		c.write(&in.Args[0], meaning{})
	case in.Op.Collective() != nil:
		return c.collective(int32(i), in)
	default:
		c.compute(in)
	}
	return true
}

// collective interprets a collective. A sum over ranks of several codes waits for all of them.
func (c *interpreted) collective(i int32, in *Instr) bool {
	m := c.read(in.X())
	group := int(in.Attrs[in.Info().findAttr(KindGroup)].Bits)
	members := c.p.Ranks[c.rank].Groups[group]
	if in.Op != AllReduce && in.Op != ReduceScatter {
		c.uniform(in)
		if m.formula != 0 && in.Op != Rotate {
			m.moved |= 1 << min(c.alike[group], 63)
		}
		c.round[group]++
		c.write(in.Y(), m)
		return true
	}
	parts := []piece{{0, in.X().Bytes(), m}}
	if in.Op == AllReduce {
		parts = c.parts(in.X())
	}
	if _, there := c.given[i]; !there && c.shares(members) {
		c.given[i] = parts
	}
	for _, r := range members {
		other := c.codes[c.p.Ranks[r].Code]
		if other == c {
			continue
		}
		theirs, there := other.given[c.traffic[other.number].groups[group][c.round[group]]]
		if !there {
			return false
		}
		parts = c.addedParts(parts, theirs)
	}
	c.round[group]++
	for k := range parts {
		m := &parts[k].meaning
		if bit := uint64(1) << min(group, 63); len(members) > 1 && m.formula != 0 {
			if m.summed&bit != 0 && group < 63 {
				c.wrong(nil, "sums %s over group %s a second time", c.code.Buffers[in.X().Buffer].Name, c.p.Groups[group])
			}
			m.summed |= bit
		}
	}
	if in.Op == ReduceScatter {
		c.write(in.Y(), parts[0].meaning)
		return true
	}
	c.clear(in.Y())
	for _, p := range parts {
		p.lo, p.hi = p.lo+in.Y().Offset, p.hi+in.Y().Offset
		c.buffers[in.Y().Buffer] = append(c.buffers[in.Y().Buffer], p)
	}
	return true
}

// parts returns the meanings of the parts of a view, in order, from its start on. What is not known has no part.
func (c *interpreted) parts(v *View) (list []piece) {
	lo, hi := v.Offset, v.Offset+v.Bytes()
	for _, p := range c.buffers[v.Buffer] {
		if p.hi > lo && p.lo < hi {
			p.lo, p.hi = max(p.lo, lo)-lo, min(p.hi, hi)-lo
			list = append(list, p)
		}
	}
	slices.SortFunc(list, func(a, b piece) int { return cmp.Compare(a.lo, b.lo) })
	return list
}

// addedParts returns the parts of a sum of two values: where either is not known, nor is the sum.
func (c *interpreted) addedParts(a, b []piece) (sum []piece) {
	for i, j := 0, 0; i < len(a) && j < len(b); {
		lo, hi := max(a[i].lo, b[j].lo), min(a[i].hi, b[j].hi)
		if lo < hi {
			sum = append(sum, piece{lo, hi, c.added(a[i].meaning, b[j].meaning, nil)})
		}
		if a[i].hi == hi {
			i++
		} else {
			j++
		}
	}
	return sum
}

// alike returns, for each group of a rank, the first that has the same members.
func alike(groups [][]int32) (first []int) {
	var known [][]int32
	for _, members := range groups {
		members = slices.Sorted(slices.Values(members))
		known = append(known, members)
		first = append(first, slices.IndexFunc(known, func(k []int32) bool { return slices.Equal(k, members) }))
	}
	return first
}

// shares reports whether a group has members that run another code.
func (c *interpreted) shares(members []int32) bool {
	return slices.ContainsFunc(members, func(r int32) bool { return c.p.Ranks[r].Code != c.number })
}

// full returns the bits of all uses of a value.
func (n *node) full() uint64 {
	if len(n.uses) >= 64 {
		return math.MaxUint64
	}
	return 1<<len(n.uses) - 1
}

// use returns the bit of a use of a value, or 0 if the value is not used in this way.
func (x *interpreter) use(value, by formula) uint64 {
	n := x.nodes[value]
	if n == nil {
		return 0
	}
	if i := slices.Index(n.uses, by); i >= 0 {
		return 1 << min(i, 63)
	}
	return 0
}

// add registers the instruction that computes a formula.
func (c *interpreted) add(in *Instr, sum bool, args []formula, outs []formula) {
	if c.nodes[outs[0]] != nil && c.nodes[outs[0]].in != nil {
		return
	}
	n := c.nodes[outs[0]]
	if n == nil {
		n = &node{}
		c.nodes[outs[0]] = n
	}
	n.op, n.in, n.sum, n.args, n.outs, n.at = in.Op, in, sum || in.Op == PositionEmbed, args, outs, c.here()
	if sum {
		n.op = Add
	}
	for _, arg := range args {
		if arg <= nothing {
			continue
		}
		m := c.nodes[arg]
		if m == nil {
			m = &node{}
			c.nodes[arg] = m
		}
		if !slices.Contains(m.uses, outs[0]) {
			m.uses = append(m.uses, outs[0])
		}
	}
}

// added returns the meaning of a sum of two values. The instruction is nil if the two are shares of one value.
func (c *interpreted) added(a, b meaning, in *Instr) meaning {
	switch {
	case a.formula == nothing:
		return b
	case b.formula == nothing:
		return a
	case a.formula == 0 || b.formula == 0:
		return meaning{}
	case a.of != 0 && b.of != 0:
		return c.addedGradients(a, b)
	case a.of != 0 || b.of != 0:
		if in != nil {
			c.wrong(nil, "adds a gradient to a value that is no gradient")
		}
		return meaning{}
	}
	sum := a
	sum.cover = addCovers(a.cover, b.cover)
	sum.rows = common(a.rows, b.rows)
	sum.summed &= b.summed
	sum.moved |= b.moved
	if a.formula == b.formula {
		return sum
	}
	if in == nil {
		return meaning{}
	}
	x, y := a.key(), b.key()
	sum.formula, sum.summed, sum.moved = formula(mix(uint64(Add), min(x, y), max(x, y))), 0, 0
	c.add(in, true, []formula{a.formula, b.formula}, []formula{sum.formula})
	return sum
}

// coverNone is the cover of a sum over tokens that are counted elsewhere.
var coverNone = [2]uint64{math.MaxUint64, math.MaxUint64}

// addCovers returns the cover of a sum of two sums.
func addCovers(a, b [2]uint64) [2]uint64 {
	switch {
	case a == coverNone:
		return b
	case b == coverNone:
		return a
	}
	if a == [2]uint64{} || b == [2]uint64{} {
		return [2]uint64{}
	}
	return [2]uint64{a[0] + b[0], a[1] + b[1]}
}

// common returns the rows of a value that is computed from two others.
func common(a, b rows) rows {
	if a == b || b.n == 0 {
		return a
	}
	if a.n == 0 {
		return b
	}
	return rows{}
}

// addedGradients adds two contributions to a gradient. Their value is one of the two values that they are gradients of, if the other is
// a sum that contains it, or a term of both.
func (c *interpreted) addedGradients(a, b meaning) meaning {
	values := []formula{a.of, b.of}
	if n := c.nodes[a.of]; n != nil && n.sum {
		values = append(values, n.args...)
	}
	for _, value := range values {
		s, t := c.share(a, value), c.share(b, value)
		if s == 0 || t == 0 {
			continue
		}
		sum := meaning{formula: gradient(value), of: value, terms: s | t, summed: a.summed & b.summed, moved: a.moved | b.moved, rows: common(a.rows, b.rows), apart: a.apart && b.apart, cover: addCovers(a.cover, b.cover)}
		return sum
	}
	c.wrong(c.origin(a.of), "adds gradients of different values")
	return meaning{}
}

// origin returns the instruction that computes a formula, or nil.
func (x *interpreter) origin(f formula) *place {
	if n := x.nodes[f]; n != nil && n.in != nil {
		return &n.at
	}
	return nil
}

// gradient returns the formula of the gradient of a value.
func gradient(value formula) formula { return formula(mix(uint64(value), 5)) }

// share returns which contributions to the gradient of a value a gradient contains: its own or, if it is the complete gradient of a sum,
// that of the sum.
func (x *interpreter) share(m meaning, value formula) uint64 {
	if m.of == value {
		return m.terms
	}
	n := x.nodes[m.of]
	if n == nil || !n.sum || !x.whole(m) {
		return 0
	}
	if slices.Contains(n.args, value) {
		return x.use(value, m.of)
	}
	for _, arg := range n.args {
		if inner := x.nodes[arg]; inner != nil && inner.sum && len(inner.uses) == 1 {
			if s := x.share(meaning{of: arg, terms: inner.full()}, value); s != 0 {
				return s
			}
		}
	}
	return 0
}

// whole reports whether a gradient has contributions from all uses of its value.
func (x *interpreter) whole(m meaning) bool {
	n := x.nodes[m.of]
	return n == nil || m.terms == n.full()
}

// find returns the instruction of which a value is the result, looking through sums of which the other terms get the same gradient.
func (x *interpreter) find(value formula, depth int, suits func(n *node) bool) *node {
	n := x.nodes[value]
	if n == nil || n.in == nil || depth == 0 {
		return nil
	}
	if suits(n) {
		return n
	}
	if !n.sum {
		return nil
	}
	for _, arg := range n.args {
		if term := x.nodes[arg]; term != nil && len(term.uses) == 1 {
			if found := x.find(arg, depth-1, suits); found != nil {
				return found
			}
		}
	}
	return nil
}

// end compares losses at the end of a section.
func (x *interpreter) end() {
	x.checkCounts()
	for _, c := range x.codes {
		for i := range c.code.Results {
			r := &c.code.Results[i]
			if resultRuleOf(r.Name).section != x.section {
				continue
			}
			m := c.read(&r.View)
			switch r.Name {
			case ResultLoss:
				x.loss = m
				x.compareCovers(c, m.cover, None)
			case ResultEvalLoss:
				if m.formula != 0 && x.loss.formula != 0 && m.key() != x.loss.key() && !x.dropout && !x.stop {
					x.stop = true
					x.found.add(Finding{Kind: FindFormula, At: Site{Rank: None, Code: c.code.Name, Index: None},
						Msg: "a validation computes another loss than a step"})
				}
			}
		}
	}
}

// compareCovers checks that sums over tokens contain the same tokens, each as often as the others.
func (x *interpreter) compareCovers(c *interpreted, cover [2]uint64, i int) {
	if cover == [2]uint64{} || x.stop {
		return
	}
	at := place{c.number, int32(i), x.section}
	if x.coverAt == nil {
		x.covers, x.coverAt = cover, &at
		return
	}
	if cover[0]*x.covers[1] != cover[1]*x.covers[0] {
		x.stop = true
		f := Finding{Kind: FindFormula, At: Site{Rank: None, Code: c.code.Name, Section: x.section, Index: None}, Msg: "the loss contains other tokens than the gradients"}
		if i != None {
			f.At, f.Msg = siteOf(x.p, c.code, x.section, i), "the gradient contains other tokens, or some of them more often, than that of another weight"
		}
		if x.coverAt.index != None {
			o := siteOf(x.p, &x.p.Codes[x.coverAt.code], x.coverAt.section, int(x.coverAt.index))
			f.Other = &o
		}
		x.found.add(f)
	}
}

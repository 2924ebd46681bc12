// Package meaning proves what a program computes: the loss, the gradients and the updates of the model that its header describes.
//
//	value.go      values: sums of terms, identified by hashes that are linear
//	cover.go      sets of indices over which a sum is taken
//	term.go       terms, and incomplete sums of them
//	piece.go      what the bytes of a rank's memory mean; memory.go where they are
//	model.go      the reference: the model's dataflow on one rank, with its gradients
//	layer.go      its layers, head and updates; muon.go the updates of Muon
//	prove.go      Prove: interprets all ranks of a program
//	rules*.go     one rule for each opcode
//	demand.go     what must be known before a section, and what must hold after it
//
// Every instruction of every rank is interpreted over pieces instead of numbers. A piece says which value of the reference some bytes
// hold, which rows and columns of it, and which part of a sum. The terms that an instruction makes are found by its opcode, its
// attributes and the values of its operands, never by the names of buffers. A term that the reference lacks is refused where it is made.
//
// The package relies on ir.Verify having accepted the program: it follows that any order of execution that events allow gives the
// same values. It shares nothing with the compiler.
package meaning

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"

	"sppo.dev/ir"
)

// Proof is what has been proved.
type Proof struct {
	Instructions int // interpreted, over all ranks
	Trained      int // tensors that a step updates
	Frozen       int // tensors that it leaves unchanged
}

// Refusal says where the meaning of a program is lost.
type Refusal struct {
	Rank     int // -1: no instruction of a rank
	Section  ir.Section
	Index    int
	Text     string // the instruction; empty after the end of the section
	Problem  string
	Operands []string // how the operands came
	Unknown  bool     // the program may be right, but a rule is missing
}

func (r *Refusal) Error() string {
	var b strings.Builder
	if r.Unknown {
		b.WriteString("meaning not proved: ")
	} else {
		b.WriteString("meaning refused: ")
	}
	b.WriteString(r.Problem)
	if r.Rank >= 0 {
		fmt.Fprintf(&b, "\n  at rank %d, ", r.Rank)
		if r.Text == "" {
			fmt.Fprintf(&b, "the end of section %s", r.Section)
		} else {
			fmt.Fprintf(&b, "%s %d: %s", r.Section, r.Index, r.Text)
		}
	}
	for _, o := range r.Operands {
		b.WriteString("\n  " + o)
	}
	return b.String()
}

// Prove proves that a program, which ir.Verify has accepted, computes what its model is. If it cannot, the error is a *Refusal.
// It uses all processors.
func Prove(p *ir.Program) (Proof, error) {
	proof, err := prove(p, runtime.GOMAXPROCS(0), false)
	if err != nil { // again, in an order that is always the same, to name the first instruction, and to record how its operands came
		if _, first := prove(p, 1, true); first != nil {
			err = first
		}
	}
	return proof, err
}

func prove(p *ir.Program, workers int, trace bool) (Proof, error) {
	v := &prover{p: p, workers: workers, trace: trace}
	if p.Model.IsZero() || p.Run.Optimizer == "" {
		return v.proof, &Refusal{Rank: -1, Problem: "the header does not describe the model and its update", Unknown: true}
	}
	for s := range ir.NumSections {
		if v.guard(func() { v.run(s) }); v.refused != nil {
			return Proof{}, v.refused
		}
	}
	return v.proof, nil
}

// prover interprets a program, one section at a time.
type prover struct {
	p       *ir.Program
	section ir.Section
	ref     *reference
	ranks   []*rank
	workers int
	trace   bool // record what made the first operand of each instruction
	proof   Proof
	queue   queue

	mu       sync.Mutex // of all that follows, and of the queue
	messages map[path][][]piece
	teams    map[string]*team
	orders   map[int64]*order // of experts, by number
	totaled  []*content       // the numbers that a norm was last computed from
	totals   *content         // their sum
	refused  *Refusal
}

// rank is the state of a rank.
type rank struct {
	index  int32
	pc     int32
	code   *ir.Code
	consts []int64
	arenas [ir.NumArenas]*memory
	teams  []*team // by group
	call   call    // of the instruction at pc
	waits  *path   // of the message at pc, which has not arrived
	from   []site  // if traced: what made the first operand of each instruction
}

// path identifies the messages from one rank to another on a channel, which keep their order.
type path struct {
	from, to int32
	channel  ir.Stream
}

// guard calls a function, and records the refusal with which it panics.
func (v *prover) guard(f func()) {
	defer func() {
		r := recover()
		if r == nil {
			return
		}
		refused, ok := r.(*Refusal)
		if !ok { // such as an index outside an operand that a rule has not checked
			refused = &Refusal{Rank: -1, Section: v.section, Problem: fmt.Sprintf("a rule fails: %v", r), Unknown: true}
		}
		v.mu.Lock()
		defer v.mu.Unlock()
		if v.refused == nil {
			v.refused = refused
		}
	}()
	f()
}

// run interprets a section of all ranks.
func (v *prover) run(s ir.Section) {
	v.section, v.messages, v.teams, v.ranks = s, map[path][][]piece{}, map[string]*team{}, nil
	v.orders = map[int64]*order{}
	v.ref = newReference(v.p, s)
	for i := range v.p.Ranks {
		v.ranks = append(v.ranks, v.newRank(i))
		v.proof.Instructions += len(v.ranks[i].code.Sections[s])
	}
	v.queue = queue{ready: slices.Clone(v.ranks), changed: sync.NewCond(&v.mu)}
	var workers sync.WaitGroup
	for range v.workers {
		workers.Go(v.work)
	}
	if workers.Wait(); v.refused != nil {
		return
	}
	for _, r := range v.ranks {
		if int(r.pc) < len(r.code.Sections[s]) {
			panic(&Refusal{Rank: -1, Problem: "ranks wait for each other forever", Unknown: true})
		}
	}
	v.demand()
}

// queue has the ranks that can go on.
type queue struct {
	ready   []*rank
	running int // ranks that workers are interpreting
	changed *sync.Cond
}

// work interprets ranks until none can go on.
func (v *prover) work() {
	space := &scratch{}
	v.mu.Lock()
	defer v.mu.Unlock()
	for {
		for len(v.queue.ready) == 0 && v.queue.running > 0 {
			v.queue.changed.Wait()
		}
		if len(v.queue.ready) == 0 || v.refused != nil {
			break
		}
		r := v.queue.ready[0]
		v.queue.ready = v.queue.ready[1:]
		v.queue.running++
		v.mu.Unlock()
		v.guard(func() { v.advance(r, space) })
		v.mu.Lock()
		v.queue.running--
	}
	v.queue.changed.Broadcast()
}

// wake puts ranks that can go on into the queue.
func (v *prover) wake(ranks ...*rank) {
	v.queue.ready = append(v.queue.ready, ranks...)
	v.queue.changed.Broadcast()
}

// advance interprets the instructions of a rank up to one that must wait for another rank.
func (v *prover) advance(r *rank, space *scratch) {
	list := r.code.Sections[v.section]
	c := &r.call
	defer func() {
		if p := recover(); p != nil {
			if _, ok := p.(*Refusal); !ok {
				p = &Refusal{Rank: int(r.index), Section: v.section, Index: int(c.pc), Text: v.p.Text(c.code, c.in), Problem: fmt.Sprintf("a rule fails: %v", p), Unknown: true}
			}
			panic(p)
		}
	}()
	for int(r.pc) < len(list) {
		*c = call{prover: v, rank: r, in: &list[r.pc], scratch: space}
		if space.used = 0; !c.execute() {
			return
		}
		r.pc++
	}
}

// scratch is room for the lists of pieces of an instruction.
type scratch struct {
	block []piece
	used  int
}

// list returns an empty list with some room.
func (s *scratch) list() []piece {
	const room = 8
	if s.used+room > len(s.block) {
		s.block, s.used = make([]piece, 64*room), 0
	}
	s.used += room
	return s.block[s.used-room : s.used-room : s.used]
}

// call is the interpretation of an instruction.
type call struct {
	*prover
	*rank
	*scratch
	in *ir.Instr
}

// execute interprets an instruction. It returns false if the instruction must wait.
func (c *call) execute() bool {
	switch rule := rules[c.in.Op]; {
	case c.in.Op.Collective() != nil:
		return c.collective()
	case c.in.Op == ir.Recv:
		return c.receive()
	case rule == nil:
		c.unknown("%s has no rule", c.in.Info().Name)
	default:
		rule(c)
	}
	return true
}

// refuse ends the proof at this instruction.
func (c *call) refuse(format string, args ...any) {
	panic(c.refusal(fmt.Sprintf(format, args...)))
}

// unknown ends the proof at an instruction for which a rule is missing.
func (c *call) unknown(format string, args ...any) {
	r := c.refusal(fmt.Sprintf(format, args...))
	r.Unknown = true
	panic(r)
}

func (c *call) refusal(problem string) *Refusal {
	r := &Refusal{Rank: int(c.rank.index), Section: c.section, Index: int(c.pc), Text: c.p.Text(c.code, c.in), Problem: problem}
	for i := range c.in.Args {
		if reads, _ := c.in.Access(i); reads {
			r.Operands = append(r.Operands, c.came(i)...)
		}
	}
	return r
}

// came says what an operand is and how it came.
func (c *call) came(operand int) []string {
	list, err := c.pieces(&c.in.Args[operand])
	if err != nil || len(list) == 0 {
		return nil
	}
	lines := []string{fmt.Sprintf("%s is %s", c.in.Info().Operands[operand].Name, c.ref.describe(&list[0]))}
	if len(list) > 1 {
		lines[0] += fmt.Sprintf(", and %d more", len(list)-1)
	}
	if list[0].content != nil {
		lines = append(lines, c.chain(list[0].made)...)
	}
	return lines
}

// shown is how many instructions of a chain are listed on its side of the operand, before those in the middle are only counted.
const shown = 6

// chain lists the instructions that made a value, from the last to the first, following first operands.
func (v *prover) chain(s site) (lines []string) {
	how := "made by"
	for s != (site{}) {
		r := v.ranks[s.rank]
		lines = append(lines, fmt.Sprintf("  %s rank %d, %s %d: %s", how, s.rank, v.section, s.index-1, v.p.Text(r.code, &r.code.Sections[v.section][s.index-1])))
		if how = "from"; r.from == nil {
			break
		}
		s = r.from[s.index-1]
	}
	if n := len(lines) - shown - 2; n > 1 {
		lines = slices.Replace(lines, shown, shown+n, fmt.Sprintf("  from %d more instructions, of which the first are", n))
	}
	return lines
}

var errCut = errors.New("cuts an element of another type")

// extent returns the arena and the bytes of a view.
func (r *rank) extent(v *ir.View) (m *memory, lo, hi int64) {
	b := &r.code.Buffers[v.Buffer]
	lo = int64(b.Offset + v.Offset)
	return r.arenas[b.Arena], lo, lo + int64(v.Bytes())
}

func (r *rank) pieces(v *ir.View) ([]piece, error) {
	return r.read(nil, v)
}

// read appends the pieces of a view to a list.
func (r *rank) read(list []piece, v *ir.View) ([]piece, error) {
	m, lo, hi := r.extent(v)
	list, ok := m.read(list, lo, hi)
	if !ok {
		return nil, errCut
	}
	return list, nil
}

func (c *call) int(name string) int64     { return c.in.Attr(name).Int(c.consts) }
func (c *call) float(name string) float64 { return c.in.Attr(name).Float(c.consts) }
func (c *call) bool(name string) bool     { return c.int(name) != 0 }
func (c *call) has(name string) bool      { return c.in.Arg(name).Present() }

// factor is an attribute whose absence, 0, means 1.
func (c *call) factor(name string) float64 {
	if x := c.float(name); x != 0 {
		return x
	}
	return 1
}

// raw returns the pieces of an operand, which may be incomplete sums.
func (c *call) raw(name string) []piece {
	v := c.in.Arg(name)
	if !v.Present() {
		return nil
	}
	list, err := c.read(c.list(), &v)
	if err != nil {
		c.refuse("%s %v", name, err)
	}
	for i := range list {
		if list[i].content == nil {
			c.refuse("%s has bytes that nothing has written", name)
		}
		p, size := &list[i], int64(v.DType.Bytes())
		if p.size == 1 && p.anywhere && p.content.value.isZero() && p.length()%size == 0 { // bytes that are 0 are elements that are 0
			*p = uniform(p.content, p.length()/size, size)
		}
		if int64(p.size) != size {
			c.refuse("%s has elements of another type", name)
		}
	}
	return list
}

// operand returns the pieces of an operand, which must be complete.
func (c *call) operand(name string) []piece {
	list := c.raw(name)
	for i := range list {
		p := &list[i]
		switch {
		case len(p.parts) > 0:
			c.refuse("%s is incomplete: %s", name, p.parts[0].describe(p.rectangle))
		case p.anywhere:
			c.refuse("%s is filled with a number, and not computed", name)
		}
	}
	return list
}

// linear returns the pieces of an operand in which an instruction is linear. They may be sums over some of the query heads that share a
// head of keys, or over some columns of a product; the field part says which.
func (c *call) linear(name string) []piece {
	list := c.raw(name)
	for i := range list {
		p := &list[i]
		if len(p.parts) > 0 {
			if has, complete := p.sharesOf(p.rectangle); has != nil {
				p.content, p.part = complete, has
				continue
			}
		}
		if len(p.parts) > 0 || p.anywhere {
			c.operand(name)
		}
	}
	return list
}

// only returns the single piece of an operand, which must be complete.
func (c *call) only(name string) piece {
	list := c.operand(name)
	if len(list) != 1 {
		c.refuse("%s is not one rectangle of one value, but %d", name, len(list))
	}
	return list[0]
}

// make returns the content that is a term, or a sum of it over some indices.
func (c *call) make(k key, over cover, r rectangle, operands ...value) *content {
	return c.makeSome(k, over, r, nil, operands...)
}

// makeSome is like make, for an operand that is a sum over some shares, unless there are none.
func (c *call) makeSome(k key, over cover, r rectangle, some *share, operands ...value) *content {
	t := c.term(k, operands...)
	if some != nil {
		c.mu.Lock()
		t = t.overSome(some.of)
		c.mu.Unlock()
		over = over.shared(some)
	}
	if t.kind == plain {
		return t.whole
	}
	return sumOver(t, over, 1, r)
}

// term returns the term of the reference with a key.
func (c *call) term(k key, operands ...value) *term {
	t := c.ref.terms[k.of(operands...).value()]
	if t == nil {
		c.stranger(operands)
	}
	return t
}

// stranger refuses an instruction whose result the reference lacks.
func (c *call) stranger(operands []value) {
	c.refuse("the model has no %s of these operands%s", c.in.Info().Name, c.ref.nearest(c.in.Op, operands))
}

// write stores the results of an instruction in an operand, or adds them if its attribute says so.
func (c *call) write(name string, list []piece) {
	v := c.in.Arg(name)
	if !v.Present() {
		return
	}
	operands := c.in.Info().Operands
	at := slices.IndexFunc(operands, func(o ir.Operand) bool { return o.Name == name })
	if reads, _ := c.in.Access(at); reads && operands[at].Dir == ir.WriteOrAdd {
		accumulate := c.in.Attr(operands[at].AddsBy())
		if accumulate.Int(c.consts) != 0 {
			list = c.sum(c.raw(name), list)
		}
	}
	c.store(&v, list)
}

// store replaces the bytes of a view, and records who made them.
func (c *call) store(v *ir.View, list []piece) {
	m, lo, hi := c.extent(v)
	length, size := int64(0), int32(v.DType.Bytes())
	for i := range list {
		p := &list[i]
		if p.content != nil {
			p.made, p.size = site{c.rank.index, c.pc + 1}, size
		}
		length += p.length()
	}
	if length != hi-lo {
		c.refuse("the result has %d bytes, and its place has %d", length, hi-lo)
	}
	if c.trace {
		c.record()
	}
	m.write(lo, hi, list)
}

// record records what made the first operand.
func (c *call) record() {
	if c.from == nil {
		c.from = make([]site, len(c.code.Sections[c.section]))
	}
	reads := c.in.Info().Written()
	if reads >= len(c.in.Args) || !c.in.Args[reads].Present() || c.from[c.pc] != (site{}) {
		return
	}
	if first, err := c.pieces(&c.in.Args[reads]); err == nil && len(first) > 0 && first[0].content != nil {
		c.from[c.pc] = first[0].made
	}
}

// sum returns the elementwise sum of two lists.
func (c *call) sum(a, b []piece) []piece {
	var out []piece
	lists := c.alignBy(elementsOf, a, b)
	for i := range lists[0] {
		p, q := &lists[0][i], &lists[1][i]
		if p.anywhere && p.content.value.isZero() && len(p.parts) == 0 {
			out = join(out, *q)
			continue
		}
		if q.anywhere && q.content.value.isZero() && len(q.parts) == 0 {
			out = join(out, *p)
			continue
		}
		if p.rectangle != q.rectangle || p.anywhere != q.anywhere {
			c.refuse("adds different places: %s to %s", c.ref.describe(q), c.ref.describe(p))
		}
		total, why := p.content.plus(q.content, p.rectangle)
		if why != "" {
			c.refuse("%s", why)
		}
		out = join(out, piece{rectangle: p.rectangle, content: total, size: p.size, anywhere: p.anywhere})
	}
	return out
}

func elementsOf(p *piece) int64 { return p.elements() }
func rowsOf(p *piece) int64     { return p.count() }

// rows cuts operands into pieces with the same rows.
func (c *call) rows(lists ...[]piece) [][]piece {
	lists = c.alignBy(rowsOf, lists...)
	for i := range lists[0] {
		for _, l := range lists[1:] {
			if l[i].with(full) != lists[0][i].with(full) {
				c.refuse("works on different rows: %s and %s", c.ref.describe(&lists[0][i]), c.ref.describe(&l[i]))
			}
		}
	}
	return lists
}

// alignBy cuts lists into pieces of the same numbers of units.
func (c *call) alignBy(units func(*piece) int64, lists ...[]piece) [][]piece {
	for _, l := range lists {
		if total(units, l) != total(units, lists[0]) {
			c.refuse("the operands have different numbers of rows")
		}
	}
	for {
		same := true
		for _, l := range lists[1:] {
			same = same && sameUnits(units, lists[0], l)
		}
		if same {
			return lists
		}
		var ends []int64
		for _, l := range lists {
			at := int64(0)
			for i := range l {
				at += units(&l[i])
				ends = append(ends, at)
			}
		}
		out := make([][]piece, len(lists))
		for k, l := range lists {
			out[k] = c.cut(units, l, ends)
		}
		lists = out
	}
}

func sameUnits(units func(*piece) int64, a, b []piece) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if units(&a[i]) != units(&b[i]) {
			return false
		}
	}
	return true
}

// cut cuts pieces wherever one of some ends lies inside them.
func (c *call) cut(units func(*piece) int64, list []piece, ends []int64) (out []piece) {
	at := int64(0)
	for i := range list {
		p := &list[i]
		n := units(p)
		each, done := p.length()/max(n, 1), at
		for done < at+n {
			next := at + n
			for _, e := range ends {
				if e > done && e < next {
					next = e
				}
			}
			part, ok := p.slice(nil, (done-at)*each, (next-at)*each)
			if !ok {
				c.refuse("cuts an element")
			}
			out, done = append(out, part...), next
		}
		at += n
	}
	return out
}

func total(units func(*piece) int64, list []piece) (n int64) {
	for i := range list {
		n += units(&list[i])
	}
	return n
}

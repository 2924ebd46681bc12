package e2e

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"sppo.dev/ir"
)

// mutation breaks a section of a code in one way, or returns false if it finds nothing to break. The verifier
// must refuse the result if promised is set. For other mutations, the verifier cannot know what was intended,
// and the test only counts what it accepts.
type mutation struct {
	name     string
	promised bool
	apply    func(m *mutant) bool
}

var mutations = []mutation{
	{"drop wait", true, func(m *mutant) bool { return m.drop(isOp(ir.Wait)) }},
	{"drop record", true, func(m *mutant) bool { return m.drop(isOp(ir.Record)) }},
	{"drop copy", true, func(m *mutant) bool { return m.drop(isCopy) }},
	{"drop write", true, func(m *mutant) bool { return m.drop(m.writesNoState) }},
	{"drop message", true, func(m *mutant) bool { return m.drop(isOp(ir.Send, ir.Recv)) }},
	{"redirect copy", true, func(m *mutant) bool { return m.redirect(isCopy, 0) }},
	{"redirect write", true, func(m *mutant) bool { return m.redirect(onlyWrites, 0) }},
	{"shift destination", true, (*mutant).shift},
	{"overwrite before read", true, (*mutant).overwrite},
	{"write again after read", true, (*mutant).rewrite},
	{"share bytes", true, func(m *mutant) bool { return m.share(onlyWrites) }},
	{"share bytes of the host", true, func(m *mutant) bool { return m.share(m.writesHost) }},
	{"dead instruction", true, (*mutant).dead},
	{"dead repetition", true, (*mutant).deadAgain},
	{"read before write", true, (*mutant).hoist},
	{"swap outputs", true, (*mutant).swapOutputs},
	{"drop write of state", true, func(m *mutant) bool { return m.drop(m.writesState) }},
	{"drop update", true, func(m *mutant) bool { return m.drop(updates) }},
	{"repeat update", true, (*mutant).updateAgain},
	{"drop change in place", false, func(m *mutant) bool { return m.drop(changesAlone) }},
	{"repeat change in place", true, (*mutant).changeAgain},
	{"redirect source of copy", false, func(m *mutant) bool { return m.redirect(isCopy, 1) }},
	{"swap inputs", false, (*mutant).swapInputs},
	{"take another input", false, (*mutant).takeAnother},
	{"swap messages", false, (*mutant).swapMessages},
	{"drop collective", false, func(m *mutant) bool { return m.drop(isCollective) }},
	{"change group", false, (*mutant).changeGroup},
	{"change attribute", false, (*mutant).changeAttribute},
	{"change opcode", false, (*mutant).changeOpcode},
}

// TestDroppedCopies drops each copy of a program that keeps neither keys nor values on the device. Their
// gradients are summed on the host, where a dropped copy leaves an earlier sum in place.
func TestDroppedCopies(t *testing.T) {
	_, p := mustCompile(t, Case{Family: "llama", Positions: "rope", DType: "f32", KVHeads: 4, Batch: 1, PP: 1, SP: 1, DP: 1, N: 3, Microbatch: 1,
		Keep: "[]", Offload: "full", Partition: "flops", Steps: 1, Layers: 2, Sequence: 48, Vocab: tinyVocab})
	code := &p.Codes[0]
	whole, copies := code.Sections[ir.SectionStep], 0
	for i := range whole {
		if !isCopy(&whole[i]) {
			continue
		}
		copies++
		code.Sections[ir.SectionStep] = slices.Delete(slices.Clone(whole), i, i+1)
		if err := ir.Verify(p); err == nil {
			t.Errorf("accepted without step %d: %s", i, p.Text(code, &whole[i]))
		}
	}
	if copies < 50 {
		t.Errorf("only %d copies", copies)
	}
}

// drawnProgram draws specs until one can be scheduled, and returns its program.
func drawnProgram(t testing.TB, r *rand.Rand) *ir.Program {
	t.Helper()
	for {
		d := drawSpec(r)
		_, p, err := compile(d.text, d.drawn()...)
		if err != nil {
			continue
		}
		if err := (ir.VerifyOptions{AllowOverCapacity: true}).Verify(p); err != nil {
			t.Fatalf("%v\n%v\n%s", err, d.drawn(), d.text)
		}
		return p
	}
}

// mutant is a copy of a program in which one section of one code may be changed.
type mutant struct {
	*rand.Rand
	p    *ir.Program
	code *ir.Code
	s    ir.Section
	what string
}

func newMutant(r *rand.Rand, p *ir.Program) *mutant {
	q := *p
	q.Codes = slices.Clone(p.Codes)
	m := &mutant{Rand: r, p: &q, code: &q.Codes[r.IntN(len(q.Codes))], s: ir.SectionStep}
	if r.IntN(4) == 0 && len(m.code.Sections[ir.SectionEval]) > 0 {
		m.s = ir.SectionEval
	}
	m.code.Buffers = slices.Clone(m.code.Buffers)
	m.enter(m.s)
	return m
}

// enter makes a section the one that may be changed.
func (m *mutant) enter(s ir.Section) {
	m.s = s
	m.code.Sections[s] = slices.Clone(m.code.Sections[s])
	for i := range m.code.Sections[s] {
		in := &m.code.Sections[s][i]
		in.Args = slices.Clone(in.Args)
	}
}

func (m *mutant) instrs() []ir.Instr { return m.code.Sections[m.s] }

// any returns the index of a random suitable instruction, or -1 if there is none.
func (m *mutant) any(suits func(*ir.Instr) bool) int {
	list := m.instrs()
	for n, at := 0, m.IntN(len(list)); n < len(list); n++ {
		if i := (at + n) % len(list); suits(&list[i]) {
			m.what = fmt.Sprintf("%s, %s %d: %s", m.code.Name, m.s, i, m.p.Text(m.code, &list[i]))
			return i
		}
	}
	return -1
}

func isOp(ops ...ir.Op) func(*ir.Instr) bool {
	return func(in *ir.Instr) bool { return slices.Contains(ops, in.Op) }
}

func isCopy(in *ir.Instr) bool { return in.Info().Class == ir.ClassMove }

// onlyWrites reports whether an instruction writes new results and changes nothing in place.
func onlyWrites(in *ir.Instr) bool {
	return in.Info().Written() > 0 && !changes(in) && class(in) != ir.ClassSync
}

// writesState reports whether an instruction overwrites weights or optimizer state, which would otherwise
// keep their values.
func (m *mutant) writesState(in *ir.Instr) bool {
	return onlyWrites(in) && slices.ContainsFunc(m.code.States, func(s ir.State) bool {
		return s.Role != ir.RoleGrad && s.View.Buffer == in.Args[0].Buffer
	})
}

func (m *mutant) writesNoState(in *ir.Instr) bool { return onlyWrites(in) && !m.writesState(in) }

func class(in *ir.Instr) ir.Class { return in.Info().Class }

// changes reports whether an instruction changes an operand in place.
func changes(in *ir.Instr) bool {
	for j, v := range in.Args {
		reads, writes := in.Access(j)
		for k := range in.Args {
			r, w := in.Access(k)
			reads, writes = reads || r && in.Args[k] == v, writes || w && in.Args[k] == v
		}
		if reads && writes {
			return true
		}
	}
	return false
}

func updates(in *ir.Instr) bool { return in.Info().Updates }

// updateAgain repeats an update of a weight.
func (m *mutant) updateAgain() bool {
	i := m.any(updates)
	if i >= 0 {
		m.insert(i+1, m.instrs()[i])
	}
	return i >= 0
}

func changesAlone(in *ir.Instr) bool { return in.Info().Written() == 1 && changes(in) }

func (m *mutant) drop(suits func(*ir.Instr) bool) bool {
	i := m.any(suits)
	if i >= 0 {
		m.code.Sections[m.s] = slices.Delete(m.code.Sections[m.s], i, i+1)
	}
	return i >= 0
}

func (m *mutant) insert(i int, in ir.Instr) {
	in.Args = slices.Clone(in.Args)
	m.code.Sections[m.s] = slices.Insert(m.code.Sections[m.s], i, in)
}

// redirect gives an operand another buffer of its arena that is large enough.
func (m *mutant) redirect(suits func(*ir.Instr) bool, operand int) bool {
	i := m.any(suits)
	if i < 0 {
		return false
	}
	v := &m.instrs()[i].Args[operand]
	old := m.code.Buffers[v.Buffer]
	for range 100 {
		b := uint32(m.IntN(len(m.code.Buffers)))
		to := m.code.Buffers[b]
		if b != v.Buffer && to.Arena == old.Arena && to.Size >= v.Offset+v.Bytes() && (to.Offset+v.Offset)%v.DType.Bytes() == 0 {
			m.what += " with " + to.Name
			v.Buffer = b
			return true
		}
	}
	return false
}

// shift moves an instruction's output by one element.
func (m *mutant) shift() bool {
	room := func(in *ir.Instr) bool {
		return onlyWrites(in) && in.Args[0].Offset+in.Args[0].Bytes()+in.Args[0].DType.Bytes() <= m.code.Buffers[in.Args[0].Buffer].Size
	}
	i := m.any(room)
	if i >= 0 {
		m.instrs()[i].Args[0].Offset += m.instrs()[i].Args[0].DType.Bytes()
	}
	return i >= 0
}

// overlap reports whether two views of the code share bytes.
func (m *mutant) overlap(v, w ir.View) bool {
	if !v.Present() || !w.Present() {
		return false
	}
	b, c := m.code.Buffers[v.Buffer], m.code.Buffers[w.Buffer]
	return b.Arena == c.Arena && b.Offset+v.Offset < c.Offset+w.Offset+w.Bytes() && c.Offset+w.Offset < b.Offset+v.Offset+v.Bytes()
}

// readers returns the instructions after a given one that read some of a view's bytes through the same buffer.
func (m *mutant) readers(after int, v ir.View) (list []int) {
	for i := after + 1; i < len(m.instrs()); i++ {
		in := &m.instrs()[i]
		for j, a := range in.Args {
			if reads, _ := in.Access(j); reads && a.Buffer == v.Buffer && m.overlap(a, v) {
				list = append(list, i)
				break
			}
		}
	}
	return list
}

// overwrite repeats a write just before its result is first read.
func (m *mutant) overwrite() bool { return m.repeat(func(readers []int) int { return readers[0] }) }

// rewrite repeats a write just before its result is last read.
func (m *mutant) rewrite() bool {
	return m.repeat(func(readers []int) int { return readers[len(readers)-1] })
}

func (m *mutant) repeat(where func([]int) int) bool {
	i := m.any(func(in *ir.Instr) bool { return onlyWrites(in) && class(in) != ir.ClassComm })
	if i < 0 {
		return false
	}
	readers := m.readers(i, m.instrs()[i].Args[0])
	if len(readers) == 0 {
		return false
	}
	m.insert(where(readers), m.instrs()[i])
	return true
}

// writesHost reports whether an instruction writes new results to host memory.
func (m *mutant) writesHost(in *ir.Instr) bool {
	return onlyWrites(in) && m.code.Buffers[in.Args[0].Buffer].Arena == ir.Host
}

// share moves a buffer to the place of another one that is in use at the same time.
func (m *mutant) share(suits func(*ir.Instr) bool) bool {
	i := m.any(suits)
	if i < 0 {
		return false
	}
	v := m.instrs()[i].Args[0]
	readers := m.readers(i, v)
	if len(readers) == 0 {
		return false
	}
	last := readers[len(readers)-1]
	for k := i + 1; k < last; k++ {
		other := &m.instrs()[k]
		if !onlyWrites(other) || m.instrs()[last].Op == ir.Send && k > last {
			continue
		}
		w := other.Args[0]
		from, to := &m.code.Buffers[v.Buffer], &m.code.Buffers[w.Buffer]
		if v.Buffer == w.Buffer || from.Arena != to.Arena || v.Offset > 0 || w.Offset > 0 || from.Size > to.Size || len(m.readers(k, w)) == 0 {
			continue
		}
		m.what += " in the place of " + to.Name
		from.Offset = to.Offset
		return true
	}
	return false
}

// dead adds an instruction whose result is never read.
func (m *mutant) dead() bool {
	i := m.any(func(in *ir.Instr) bool {
		return onlyWrites(in) && class(in) != ir.ClassComm && in.Info().Written() == 1
	})
	if i < 0 {
		return false
	}
	in := m.instrs()[i]
	arena := m.code.Buffers[in.Args[0].Buffer].Arena
	end := (m.code.Arenas[arena] + ir.Alignment - 1) / ir.Alignment * ir.Alignment
	b := ir.Buffer{Name: "nowhere", Arena: arena, Offset: end, Size: in.Args[0].Bytes()}
	m.code.Buffers = append(m.code.Buffers, b)
	m.code.Arenas[arena] = end + b.Size
	m.insert(i+1, in)
	m.instrs()[i+1].Args[0].Buffer, m.instrs()[i+1].Args[0].Offset = uint32(len(m.code.Buffers)-1), 0
	return true
}

// deadAgain repeats a write after its result is last read, so that nothing reads the repeated result. It leaves
// out states and results, which are read after the section.
func (m *mutant) deadAgain() bool {
	i := m.any(func(in *ir.Instr) bool {
		of := in.Args
		return m.writesNoState(in) && class(in) != ir.ClassComm && !slices.ContainsFunc(m.code.Results, func(r ir.Result) bool { return r.View.Buffer == of[0].Buffer })
	})
	if i < 0 {
		return false
	}
	readers := m.readers(i, m.instrs()[i].Args[0])
	if len(readers) == 0 {
		return false
	}
	m.insert(readers[len(readers)-1]+1, m.instrs()[i])
	return true
}

// hoist moves an instruction to before the write whose result it reads.
func (m *mutant) hoist() bool {
	i := m.any(func(in *ir.Instr) bool { return onlyWrites(in) && class(in) != ir.ClassComm })
	if i < 0 {
		return false
	}
	for _, k := range m.readers(i, m.instrs()[i].Args[0]) {
		if in := m.instrs()[k]; class(&in) != ir.ClassComm {
			m.code.Sections[m.s] = slices.Delete(m.code.Sections[m.s], k, k+1)
			m.insert(i, in)
			return true
		}
	}
	return false
}

// swapOutputs exchanges the outputs of two instructions.
func (m *mutant) swapOutputs() bool {
	i := m.any(func(in *ir.Instr) bool { return onlyWrites(in) && class(in) != ir.ClassComm })
	if i < 0 {
		return false
	}
	a := &m.instrs()[i]
	for k := i + 1; k < len(m.instrs()); k++ {
		b := &m.instrs()[k]
		if onlyWrites(b) && b.Args[0].DType == a.Args[0].DType && b.Args[0].Shape == a.Args[0].Shape && b.Args[0] != a.Args[0] &&
			m.code.Buffers[a.Args[0].Buffer].Arena == m.code.Buffers[b.Args[0].Buffer].Arena && m.between(i, k) {
			a.Args[0], b.Args[0] = b.Args[0], a.Args[0]
			return true
		}
	}
	return false
}

// between reports whether an instruction between i and k reads what instruction i writes.
func (m *mutant) between(i, k int) bool {
	readers := m.readers(i, m.instrs()[i].Args[0])
	return len(readers) > 0 && readers[0] < k
}

// swapInputs exchanges two operands of equal type that an instruction reads.
func (m *mutant) swapInputs() bool {
	var a, b int
	i := m.any(func(in *ir.Instr) bool {
		for a = in.Info().Written(); a < len(in.Args); a++ {
			for b = a + 1; b < len(in.Args); b++ {
				v, w := in.Args[a], in.Args[b]
				if v.Present() && w.Present() && v.DType == w.DType && v.Shape == w.Shape && v != w && !changes(in) && in.Op != ir.Add {
					return true
				}
			}
		}
		return false
	})
	if i >= 0 {
		args := m.instrs()[i].Args
		args[a], args[b] = args[b], args[a]
	}
	return i >= 0
}

func isCollective(in *ir.Instr) bool { return in.Op.Collective() != nil }

// changeAgain repeats a change in place, such as a sum over ranks or an addition to a gradient.
func (m *mutant) changeAgain() bool {
	i := m.any(func(in *ir.Instr) bool { return changes(in) && !updates(in) })
	if i >= 0 {
		m.insert(i+1, m.instrs()[i])
	}
	return i >= 0
}

// takeAnother replaces an operand that an instruction reads by one of the same type and shape that another instruction nearby uses.
func (m *mutant) takeAnother() bool {
	i := m.any(func(in *ir.Instr) bool {
		return in.Info().Written() < len(in.Args) && class(in) != ir.ClassSync && !isCopy(in)
	})
	if i < 0 {
		return false
	}
	in := &m.instrs()[i]
	j := in.Info().Written() + m.IntN(len(in.Args)-in.Info().Written())
	v := &in.Args[j]
	if !v.Present() {
		return false
	}
	var others []ir.View
	for k := max(0, i-100); k < min(len(m.instrs()), i+100); k++ {
		for a, w := range m.instrs()[k].Args {
			if w.Present() && w != *v && w.DType == v.DType && w.Shape == v.Shape && m.instrs()[k].Info().Operands[a].Arena == ir.Device && !slices.Contains(in.Args, w) {
				others = append(others, w)
			}
		}
	}
	if len(others) == 0 {
		return false
	}
	*v = others[m.IntN(len(others))]
	m.what += fmt.Sprintf(" with %s for operand %d", m.code.Buffers[v.Buffer].Name, j)
	return true
}

// swapMessages exchanges the operands of two messages between the same ranks.
func (m *mutant) swapMessages() bool {
	i := m.any(isOp(ir.Send, ir.Recv))
	if i < 0 {
		return false
	}
	a := &m.instrs()[i]
	for k := i + 1; k < len(m.instrs()); k++ {
		b := &m.instrs()[k]
		if b.Op == a.Op && b.Stream == a.Stream && b.Attrs[0] == a.Attrs[0] && b.Args[0].DType == a.Args[0].DType &&
			b.Args[0].Elements() == a.Args[0].Elements() && b.Args[0] != a.Args[0] {
			a.Args[0], b.Args[0] = b.Args[0], a.Args[0]
			return true
		}
	}
	return false
}

// changeGroup gives a collective another group.
func (m *mutant) changeGroup() bool {
	i := m.any(isCollective)
	if i < 0 || len(m.p.Groups) < 2 {
		return false
	}
	in := &m.instrs()[i]
	in.Attrs = slices.Clone(in.Attrs)
	for j, a := range in.Info().Attrs {
		if a.Kind == ir.KindGroup {
			in.Attrs[j] = ir.Int((in.Attrs[j].Int(nil) + 1 + m.Int64N(int64(len(m.p.Groups)-1))) % int64(len(m.p.Groups)))
		}
	}
	return true
}

// changeAttribute changes the value of an attribute that is no event, group or peer.
func (m *mutant) changeAttribute() bool {
	suits := func(a ir.AttrKind) bool { return a != ir.KindEvent && a != ir.KindGroup && a != ir.KindRank }
	i := m.any(func(in *ir.Instr) bool {
		return slices.ContainsFunc(in.Info().Attrs, func(a ir.AttrInfo) bool { return suits(a.Kind) })
	})
	if i < 0 {
		return false
	}
	in := &m.instrs()[i]
	j := m.IntN(len(in.Attrs))
	for !suits(in.Info().Attrs[j].Kind) {
		j = (j + 1) % len(in.Attrs)
	}
	in.Attrs = slices.Clone(in.Attrs)
	a := &in.Attrs[j]
	switch info := in.Info().Attrs[j]; {
	case a.Const != 0:
		*a = ir.Int(a.Int(m.p.Ranks[0].Consts) + 1)
	case info.Kind.IsFloat():
		*a = ir.Float(a.Float(nil)*1.5 + 0.01)
	case info.Kind == ir.KindBool:
		*a = ir.Int(1 - a.Int(nil))
	case info.Kind == ir.KindFunction:
		*a = ir.Int((a.Int(nil) + 1) % int64(len(ir.Functions)))
	case info.Kind == ir.KindTensor:
		*a = ir.Int((a.Int(nil) + 1) % int64(len(m.p.Tensors)))
	default:
		*a = ir.Int(max(0, a.Int(nil)+2*m.Int64N(2)-1))
	}
	m.what += fmt.Sprintf(" with another %s", in.Info().Attrs[j].Name)
	return true
}

// changeOpcode replaces an opcode by another one with the same kinds of operands and attributes.
func (m *mutant) changeOpcode() bool {
	other := func(in *ir.Instr) (ops []ir.Op) {
		kinds := func(o *ir.OpInfo) (list []ir.AttrKind) {
			for _, a := range o.Attrs {
				list = append(list, a.Kind)
			}
			return list
		}
		for op := range ir.NumOps {
			changed := *in
			changed.Op = op
			row := &ir.Ops[op]
			if op != in.Op && row.Class == class(in) && len(row.Operands) == len(in.Args) && slices.Equal(kinds(row), kinds(in.Info())) && changed.CheckShapes() == nil {
				ops = append(ops, op)
			}
		}
		return ops
	}
	i := m.any(func(in *ir.Instr) bool { return class(in) != ir.ClassSync && len(other(in)) > 0 })
	if i < 0 {
		return false
	}
	ops := other(&m.instrs()[i])
	m.instrs()[i].Op = ops[m.IntN(len(ops))]
	m.what += " as " + m.instrs()[i].Info().Name
	return true
}

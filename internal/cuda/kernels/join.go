package kernels

import "sppo.dev/ir"

// Successive instructions on a stream may be launched as one kernel, which reads shared operands from memory only
// once. Results equal those of separate launches to the last bit: a tensor passed between instructions is rounded
// as for storage, and is stored because other instructions may read it.

// join describes a sequence of instructions that may be joined.
type join struct {
	ops  []ir.Op
	runs bool // any number of instructions with the single opcode in ops
	// hands names, for each instruction, the operand through which a tensor is passed on: the first instruction
	// writes it, the others read it.
	hands []string
	fits  func(ins []*ir.Instr) bool // further conditions
	bind  func(*binder)              // prepares the launch from the members
}

// joins lists all joins. Among those that start with the same opcodes, longer ones come first.
var joins = []join{
	{ops: []ir.Op{ir.Add, ir.LayerNorm}, hands: []string{"y", "x"}, fits: oneType, bind: addNorm},
	{ops: []ir.Op{ir.Add, ir.RMSNorm}, hands: []string{"y", "x"}, fits: oneType, bind: addNorm},
	{ops: []ir.Op{ir.CrossEntropyStats, ir.CrossEntropy, ir.CrossEntropyGrad}, hands: []string{"stats", "stats", "stats"}, fits: wholeVocabulary, bind: crossEntropyWhole},
	{ops: []ir.Op{ir.AdamW}, runs: true, fits: oneUpdate, bind: adamW},
	{ops: []ir.Op{ir.SumSq}, runs: true, fits: oneType, bind: sumSq},
}

// Join finds instructions of a section that can be launched as one and changes their plans: one of them launches
// the joint kernel, the others launch nothing.
func Join(card Card, p *ir.Program, rank int, code *ir.Code, section ir.Section, plans []Plan) error {
	j := &joiner{code: code, ins: code.Sections[section], plans: plans}
	for pc := range j.ins {
		for i := range joins {
			group, at, ok := j.find(pc, &joins[i])
			if !ok {
				continue
			}
			b := &binder{card: card, program: p, rank: rank, consts: p.Ranks[rank].Consts, source: table[j.ins[pc].Op].source}
			for _, member := range group {
				b.members = append(b.members, &j.ins[member])
				b.apart = append(b.apart, int32(member-at))
				plans[member] = Plan{}
			}
			b.take(0)
			joins[i].bind(b)
			if b.err != nil {
				return b.err
			}
			plans[at] = b.plan
			break
		}
	}
	return nil
}

// joiner joins instructions of one section.
type joiner struct {
	code  *ir.Code
	ins   []ir.Instr
	plans []Plan
}

// find finds a group of instructions, starting at pc, that can be launched as one, and the member that launches
// it. The first member launches the group if the stream waits for nothing between the members; a record between
// them then merely comes after more work than it has to. The last member launches the group if the stream
// records nothing between the members; all waits between them have ended by then.
func (j *joiner) find(pc int, row *join) (group []int, at int, ok bool) {
	if j.ins[pc].Op != row.ops[0] {
		return nil, 0, false
	}
	waits, records := false, false
	for i := pc; i < len(j.ins); i++ {
		in := &j.ins[i]
		if in.Stream != j.ins[pc].Stream {
			continue
		}
		if in.Op == ir.Wait || in.Op == ir.Record {
			waits, records = waits || in.Op == ir.Wait, records || in.Op == ir.Record
			if waits && (row.runs || records) { // delaying a run past a wait would delay work that does not depend on it
				break
			}
			continue
		}
		if in.Op != row.ops[min(len(group), len(row.ops)-1)] || len(j.plans[i].Launches) == 0 || !j.joins(append(group, i), row) {
			break
		}
		group = append(group, i)
		if !row.runs && len(group) == len(row.ops) {
			break
		}
	}
	if len(group) < max(len(row.ops), 2) {
		return nil, 0, false
	}
	if waits && !row.runs {
		return group, group[len(group)-1], true
	}
	return group, pc, true
}

// joins reports whether the last member of a group can be launched together with those before it.
func (j *joiner) joins(group []int, row *join) bool {
	ins := make([]*ir.Instr, len(group))
	for i, pc := range group {
		ins[i] = &j.ins[pc]
	}
	last := len(ins) - 1
	for i := range last {
		if !j.independent(ins[i], ins[last], i, last, row) {
			return false
		}
	}
	return last == 0 || row.fits(ins)
}

// independent reports whether two instructions, members i and k of a group, can run interleaved row by row. They
// must not share bytes that either writes, with two exceptions: the tensor that a passes to b, and an output of b
// that exactly overlaps an input of a of the same shape.
func (j *joiner) independent(a, b *ir.Instr, i, k int, row *join) bool {
	for x, u := range a.Args {
		for y, v := range b.Args {
			_, first := a.Access(x)
			_, second := b.Access(y)
			if !first && !second || !j.meet(u, v) {
				continue
			}
			handed := !row.runs && i == 0 && !second && a.Info().Operands[x].Name == row.hands[0] && b.Info().Operands[y].Name == row.hands[k]
			inPlace := !row.runs && !first && u.DType == v.DType && u.Shape == v.Shape
			if !(handed || inPlace) || j.start(u) != j.start(v) || u.Bytes() != v.Bytes() {
				return false
			}
		}
	}
	return row.runs || i > 0 || j.start(a.Arg(row.hands[0])) == j.start(b.Arg(row.hands[k]))
}

func (j *joiner) start(v ir.View) ir.Bytes { return j.code.Buffers[v.Buffer].Offset + v.Offset }

// meet reports whether two views share bytes.
func (j *joiner) meet(u, v ir.View) bool {
	if !u.Present() || !v.Present() || j.code.Buffers[u.Buffer].Arena != j.code.Buffers[v.Buffer].Arena {
		return false
	}
	return j.start(u) < j.start(v)+v.Bytes() && j.start(v) < j.start(u)+u.Bytes()
}

// oneType reports whether the main tensors of the instructions have the same type and, for a sum and its norm,
// the same number of columns.
func oneType(ins []*ir.Instr) bool {
	first, last := ins[0], ins[len(ins)-1]
	if first.Op == ir.SumSq {
		return first.Arg("x").DType == last.Arg("x").DType
	}
	t := last.Arg("x")
	for _, name := range []string{"y", "a", "b"} {
		if first.Arg(name).DType != t.DType || first.Arg(name).Cols() != t.Cols() {
			return false
		}
	}
	return true
}

// oneUpdate reports whether the instructions apply the same optimizer step to different tensors.
func oneUpdate(ins []*ir.Instr) bool {
	a, b := ins[0], ins[len(ins)-1]
	for _, name := range []string{"beta1", "beta2", "eps"} {
		if a.Attr(name) != b.Attr(name) {
			return false
		}
	}
	return a.Arg("m").DType == b.Arg("m").DType && a.Arg("step") == b.Arg("step") && a.Arg("norm") == b.Arg("norm")
}

// wholeVocabulary reports whether the rank has the whole vocabulary, so that its statistics are complete.
func wholeVocabulary(ins []*ir.Instr) bool {
	last := ins[len(ins)-1]
	if last.Arg("stats").Dims()[0] != 1 {
		return false
	}
	if last.Op != ir.CrossEntropyGrad {
		return true
	}
	first := ins[0]
	return first.Arg("logits") == last.Arg("logits") && first.Arg("labels") == last.Arg("labels") &&
		first.Attr("first") == last.Attr("first") && first.Attr("valid") == last.Attr("valid") && first.Attr("softcap") == last.Attr("softcap")
}

// addNorm launches a sum together with its norm.
func addNorm(b *binder) {
	b.source = "norm.cu"
	bias := b.biasType()
	args := []any{b.arg("y"), b.arg("a"), b.arg("b"), b.arg("bias"), bias}
	b.take(1)
	r, c := b.shape("x")
	name := "add_layernorm_"
	args = append(args, "y", "stats", "gamma")
	if b.in.Op == ir.RMSNorm {
		name = "add_rmsnorm_"
	} else {
		args = append(args, "beta")
	}
	l := b.launch(name+b.types("x"), rows(r), append(args, c, b.float("eps"), b.float("offset"))...)
	if b.in.Op == ir.RMSNorm {
		l.Block = rowThreads(c)
	}
}

// crossEntropyWhole launches the kernel that computes statistics and gradient row by row, and then the one that
// computes the loss.
func crossEntropyWhole(b *binder) {
	stats, logits, labels := b.arg("stats"), b.arg("logits"), b.arg("labels")
	b.take(2)
	r, c := b.shape("logits")
	size := int64(b.in.Arg("logits").DType.Bytes())
	kept := min(c, rowBytes/size)
	l := b.launch("cross_entropy_whole_"+b.types("dlogits", "logits"), rows(r), stats, "dlogits", logits, labels, c, kept,
		b.int("first"), b.int("valid"), b.float("scale"), b.float("softcap"), "weight")
	l.Block, l.SharedBytes = wideThreads, kept*size
	b.take(1)
	crossEntropy(b)
}

// rowBytes is the maximum number of bytes of a row of logits that a block keeps in shared memory; with this
// limit, two blocks fit on a multiprocessor.
const rowBytes = 96 << 10

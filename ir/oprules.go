package ir

import (
	"fmt"
	"math"
)

// This file computes the work of instructions, and applies the shape rules that dimensions cannot express.

// Work returns the work of the instruction, which does not depend on the machine. It uses only literal
// attributes.
func (in *Instr) Work() Work {
	switch kind := in.Info().Work; kind {
	case WorkNone:
		return Work{}
	case WorkMemory:
		if rule := in.Info().Rule; rule == RulePlaced || rule == RuleSorted {
			return placedWork(in)
		}
		return memoryWork(in)
	case WorkMatmul:
		if in.Info().Rule == RuleGrouped {
			return groupedWork(in)
		}
		return matmulWork(in)
	case WorkAttention:
		return attentionWork(in, 1, 1, kind)
	case WorkAttentionGrad:
		return attentionWork(in, 3, 2, kind)
	case WorkScan:
		return scanWork(in, 1, kind)
	case WorkScanGrad: // computes the states anew, and has two products for each other one
		return scanWork(in, 2.7, kind)
	default:
		return linkWork(in, kind)
	}
}

// CheckRule applies the opcode's rule that Dims and Types cannot express.
func (in *Instr) CheckRule() error {
	switch in.Info().Rule {
	case RuleMatmul:
		return checkMatmul(in)
	case RuleAttention:
		return checkAttention(in)
	case RuleUpdate:
		return checkUpdate(in)
	case RuleCollective:
		if check := in.Op.Collective().Check; check != nil {
			return check(in)
		}
	case RuleZigzag:
		return checkZigzag(in)
	case RuleRoute:
		return checkRoute(in)
	case RuleRouterLoss:
		return checkRouterLoss(in)
	case RulePlaced:
		return checkPlaced(in)
	case RuleGrouped:
		return checkGrouped(in)
	case RuleSorted:
		return checkShare(in)
	case RuleScan:
		return checkScan(in)
	case RuleConcat:
		return checkConcat(in)
	}
	return nil
}

// checkConcat checks that heads are as wide as their two parts together.
func checkConcat(in *Instr) error {
	shared, x := &in.Args[1], &in.Args[2]
	if in.Op == ConcatHeadsGrad {
		shared, x = &in.Args[0], &in.Args[1]
	}
	first, rest := shared.Cols(), x.Cols()/int64(in.Attr("heads").Bits)
	if dim := int64(in.Attr("head_dim").Bits); dim != first+rest {
		return fmt.Errorf("head_dim is %d, but the parts of a head have %d and %d columns", dim, first, rest)
	}
	return nil
}

// memoryWork counts the bytes of every operand: once if it is read or written, twice if both.
func memoryWork(in *Instr) Work {
	var bytes Bytes
	for i := range in.Args {
		reads, writes := in.Access(i)
		if reads {
			bytes = Plus(bytes, in.Args[i].Bytes())
		}
		if writes {
			bytes = Plus(bytes, in.Args[i].Bytes())
		}
	}
	return Work{Kind: WorkMemory, Bytes: bytes}
}

// linkWork counts the bytes that cross the link: those of the largest operand, which for collectives is the whole.
func linkWork(in *Instr, kind WorkKind) Work {
	var bytes Bytes
	for i := range in.Args {
		bytes = max(bytes, in.Args[i].Bytes())
	}
	if kind == WorkCollective {
		return CollectiveWork(in.Op, bytes)
	}
	return Work{Kind: kind, Bytes: bytes}
}

func matmulWork(in *Instr) Work {
	w := memoryWork(in)
	c, k := in.Args[0], matmulDepth(in)
	w.Kind = WorkMatmul
	w.Flops = 2 * Flops(c.Elements()) * Flops(k)
	w.Rows = min(c.Rows(), c.Cols(), k)
	w.DType = in.Args[1].DType
	return w
}

func matmulDepth(in *Instr) int64 {
	a := in.Arg("a")
	if in.Attr("trans_a").Bits != 0 {
		return a.Rows()
	}
	return a.Cols()
}

func checkMatmul(in *Instr) error {
	c, a, b := in.Args[0], in.Args[1], in.Args[2]
	am, ak := a.Rows(), a.Cols()
	if in.Attr("trans_a").Bits != 0 {
		am, ak = ak, am
	}
	bk, bn := b.Rows(), b.Cols()
	if in.Attr("trans_b").Bits != 0 {
		bk, bn = bn, bk
	}
	if am != c.Rows() || bn != c.Cols() || ak != bk {
		return fmt.Errorf("matmul of [%d,%d] by [%d,%d] does not give [%d,%d]", am, ak, bk, bn, c.Rows(), c.Cols())
	}
	if in.Args[3].Present() && in.Attr("accumulate").Bits != 0 {
		return fmt.Errorf("bias and accumulate cannot be combined")
	}
	return nil
}

// checkUpdate checks that every operand without explicit dimensions has as many elements as the first operand.
// In sgd, the gradient may have more rows than its weight.
func checkUpdate(in *Instr) error {
	first := in.Args[0]
	for i, o := range in.Info().Operands {
		switch v := in.Args[i]; {
		case !v.Present() || o.Dims != "" || v.Elements() == first.Elements():
		case o.Name == "grad" && in.Op == SGD && v.Cols() == first.Cols() && v.Rows() > first.Rows():
		default:
			return fmt.Errorf("%s has %d elements, %s has %d", o.Name, v.Elements(), in.Info().Operands[0].Name, first.Elements())
		}
	}
	return nil
}

// checkRow checks that the rows of grad that belong to w can be counted in 64 bits. Those that do not exist are
// padding of w. If grad has as many elements as w, there is nothing to choose.
func (in *Instr) checkRow(row int64) error {
	w, grad := in.Arg("w"), in.Arg("grad")
	if row < 0 || Plus(row, w.Rows()) == math.MaxInt64 || row > 0 && grad.Elements() == w.Elements() {
		return fmt.Errorf("%d rows of a gradient of %d from row %d on", w.Rows(), grad.Rows(), row)
	}
	return nil
}

// UpdatedRows returns the number of rows of w that an sgd instruction updates if its attribute row has the given
// value; the others are padding.
func (in *Instr) UpdatedRows(row int64) int64 {
	w, grad := in.Arg("w"), in.Arg("grad")
	if grad.Elements() == w.Elements() {
		return w.Rows()
	}
	return max(0, min(w.Rows(), grad.Rows()-row))
}

// limitsValues reports whether checkValues, or the verifier's check of peers, limits the values of attributes.
func (in *Instr) limitsValues() bool {
	switch in.Op {
	case LoadTokens, InitNormal, CrossEntropyStats, CrossEntropyGrad, Embed, EmbedGrad, Rope, SGD, Dropout, Send, Recv:
		return true
	case Attention, AttentionGrad:
		return in.zigzag() || in.Attr("chunks").Bits != 0
	}
	return false
}

// checkValues checks attributes that may differ between ranks against their limits: tokens of the
// run, rows of a tensor, entries of the vocabulary. Figures of the run that are 0 are unknown and
// not used as limits.
func (in *Instr) checkValues(run *Run, s Section, consts []int64) error {
	value := func(name string) int64 { return in.Attr(name).Int(consts) }
	switch in.Op {
	case LoadTokens:
		return in.checkTokens(run, s, value)
	case InitNormal:
		return checkCorner(value("row"), value("col"), in.Args[0].Rows(), in.Args[0].Cols(), value("end"))
	case SGD:
		return in.checkRow(value("row"))
	case Rope:
		member, chunks, position := value("member"), value("chunks"), value("position")
		if rows := times(in.Args[0].Rows(), max(1, chunks)); position < 0 || Plus(position, rows) > maxPosition {
			return fmt.Errorf("positions %d to %d exceed %d, up to which float64 is exact", position, Plus(position, rows), int64(maxPosition))
		}
		if err := checkRotation(run, value("rotation"), value("head_dim")); err != nil {
			return err
		}
		return checkPlace(member, chunks)
	case Dropout:
		return in.checkDropout(in.Attr("rate").Float(consts), value)
	case Attention, AttentionGrad:
		return in.checkMember(value)
	case CrossEntropyStats, CrossEntropyGrad:
		if valid, width := value("valid"), in.Arg("logits").Cols(); valid < 0 || valid > width {
			return fmt.Errorf("%d valid entries in %d columns", valid, width)
		}
		if c := in.Attr("softcap").Float(consts); !(c >= 0 && c <= math.MaxFloat32) {
			return fmt.Errorf("softcap is %g", c)
		}
		return checkFirstEntry(value("first"), in.Arg("logits").Cols())
	case Embed:
		return checkFirstEntry(value("first"), in.Arg("table").Rows())
	case EmbedGrad:
		return checkFirstEntry(value("first"), in.Arg("dtable").Rows())
	case Route:
		if first, n, all := value("first"), in.Arg("ends").Elements(), in.Arg("logits").Cols(); first < 0 || Plus(first, n) > all {
			return fmt.Errorf("ends has %d experts from %d on, of %d", n, first, all)
		}
	}
	return nil
}

// checkDropout checks that the rate is at least 0 and below 1, and that the positions of the elements are in
// range.
func (in *Instr) checkDropout(rate float64, value func(string) int64) error {
	if !(rate >= 0 && rate < 1) {
		return fmt.Errorf("rate is %g, not at least 0 and below 1", rate)
	}
	for _, name := range []string{"col", "first", "replica", "position", "member"} {
		if n := value(name); n < 0 || n > maxPosition {
			return fmt.Errorf("%s is %d, not 0 to %d", name, n, int64(maxPosition))
		}
	}
	return checkPlace(value("member"), value("chunks"))
}

// checkRotation checks that a rotation exists and is no wider than a head.
func checkRotation(run *Run, number, dim int64) error {
	switch {
	case number < 0 || number > int64(len(run.Rotations)):
		return fmt.Errorf("rotation %d of %d", number, len(run.Rotations))
	case number > 0 && 2*int64(len(run.Rotations[number-1].Rates)) > dim:
		return fmt.Errorf("rotation %d turns %d pairs of a head of %d", number, len(run.Rotations[number-1].Rates), dim)
	case number > 0 && run.Rotations[number-1].Beta != 0 && run.Rotations[number-1].Period <= 0:
		return fmt.Errorf("rotation %d has a period of %d tokens", number, run.Rotations[number-1].Period)
	}
	return nil
}

// checkTokens checks that the run has the sequences and tokens that an instruction loads.
func (in *Instr) checkTokens(run *Run, s Section, value func(string) int64) error {
	sequences := int64(run.Batch)
	if s == SectionEval {
		sequences = int64(run.EvalSequences)
	}
	limit := func(n, least int64) int64 { // unknown if n is 0
		if n == 0 {
			return math.MaxInt64 - 1
		}
		return Plus(n, least)
	}
	first, replica, batch, position := value("first"), value("replica"), value("batch"), value("position")
	if as := value("as"); as < AsTokens || as > AsPositions {
		return fmt.Errorf("as is %d, not %d to %d", as, AsTokens, AsPositions)
	}
	if first < 0 || replica < 0 || position < 0 {
		return fmt.Errorf("first is %d, replica %d and position %d, none of which may be negative", first, replica, position)
	}
	first = Plus(first, replica)
	if last := Plus(first, batch); last > limit(sequences, 0) {
		return fmt.Errorf("sequences %d to %d of %d", first, last, sequences)
	}
	if last := Plus(position, in.Args[0].Elements()/batch); last > limit(run.Sequence, 1) {
		return fmt.Errorf("tokens %d to %d of a sequence of %d and one more", position, last, run.Sequence)
	}
	return nil
}

// checkCorner checks that the rows and columns of a rectangle can be counted in 64 bits. The rectangle may
// exceed its tensor: the excess is padding, as are rows from end on unless end is 0.
func checkCorner(row, col, rows, cols, end int64) error {
	switch {
	case end < 0:
		return fmt.Errorf("ends at row %d of its tensor", end)
	case row < 0 || col < 0:
		return fmt.Errorf("starts at row %d, column %d of its tensor", row, col)
	case Plus(row, rows) == math.MaxInt64 || Plus(col, cols) == math.MaxInt64:
		return fmt.Errorf("has %d rows from %d on and %d columns from %d on, which exceed 64 bits", rows, row, cols, col)
	}
	return nil
}

// maxPosition limits token positions. Angles are computed from positions in float64, which cannot
// represent all larger integers.
const maxPosition = 1 << 53

// checkFirstEntry checks that the entries of a part of the vocabulary are valid tokens.
func checkFirstEntry(first, entries int64) error {
	if first < 0 || Plus(first, entries) > math.MaxInt32+1 {
		return fmt.Errorf("%d entries of the vocabulary from %d on exceed the 32 bits of tokens", entries, first)
	}
	return nil
}

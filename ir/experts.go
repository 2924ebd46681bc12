package ir

import (
	"fmt"
	"math"
	"strings"
)

// This file has the rules and the work of instructions that route tokens to experts and multiply by the experts' matrices.

// checkRoute checks that the attributes of route, or of its gradient, are literals in range.
func checkRoute(in *Instr) error {
	info := in.Info()
	for i := range info.Attrs {
		if in.Attrs[i].Const != 0 && info.Attrs[i].Name != "first" {
			return fmt.Errorf("attribute %s must be literal", info.Attrs[i].Name)
		}
	}
	experts, top := in.Arg("logits").Cols(), int64(in.Attr("top").Bits)
	if top > experts {
		return fmt.Errorf("top is %d, but there are %d experts", top, experts)
	}
	if scores := in.Attr("scores").Bits; scores > ScoresOfChosen {
		return fmt.Errorf("scores is %d, not %d to %d", int64(scores), ScoresSoftmax, ScoresOfChosen)
	}
	for _, name := range []string{"eps", "scale"} {
		if x := in.Attr(name).Float(nil); !(x >= 0 && x <= math.MaxFloat32) {
			return fmt.Errorf("%s is %g", name, x)
		}
	}
	if in.Op == RouteGrad {
		return nil
	}
	if n := in.Arg("ends").Elements(); n > experts {
		return fmt.Errorf("ends has %d experts, but a row of logits %d", n, experts)
	}
	groups, chosen, by := int64(in.Attr("groups").Bits), int64(in.Attr("top_groups").Bits), in.Attr("group_scores").Bits
	switch {
	case by > GroupsByMax:
		return fmt.Errorf("group_scores is %d, not %d or %d", int64(by), GroupsByTwo, GroupsByMax)
	case groups == 0 && chosen == 0 && by == 0:
	case groups < 1 || experts%groups != 0:
		return fmt.Errorf("%d experts are not in %d groups", experts, groups)
	case by == GroupsByTwo && experts == groups:
		return fmt.Errorf("groups of one expert have no two scores")
	case chosen < 1 || chosen > groups || top > chosen*(experts/groups):
		return fmt.Errorf("top_groups is %d, of %d groups of %d experts, of which %d are chosen", chosen, groups, experts/groups, top)
	}
	return nil
}

// checkRouterLoss checks the instructions of a router's losses.
func checkRouterLoss(in *Instr) error {
	if in.Op == ExpertCounts {
		if top := int64(in.Attr("top").Bits); in.Attr("top").Const != 0 || top < 1 || top > in.Arg("logits").Cols() {
			return fmt.Errorf("top is %d, of %d experts", top, in.Arg("logits").Cols())
		}
		return nil
	}
	if scores := in.Attr("scores"); scores.Const != 0 || scores.Bits > ScoresOfChosen {
		return fmt.Errorf("scores is %d, not %d to %d", int64(scores.Bits), ScoresSoftmax, ScoresOfChosen)
	}
	for _, name := range []string{"z", "balance"} {
		if a := in.Attr(name); a.Const != 0 || !(a.Float(nil) >= 0 && a.Float(nil) <= math.MaxFloat32) {
			return fmt.Errorf("%s is not a literal of at least 0", name)
		}
	}
	return nil
}

// checkPlaced checks that there is room for no more rows than choices, and for as many of each token.
func checkPlaced(in *Instr) error {
	rows, n := in.Arg("places").Rows(), in.sorted().Rows()
	if n%rows != 0 || n > in.Arg("places").Elements() {
		return fmt.Errorf("%d rows in the order of experts are not those of %d tokens with at most %d places each", n, rows, in.Arg("places").Cols())
	}
	return checkShare(in)
}

func checkShare(in *Instr) error {
	if a := in.Attr("share"); a.Const != 0 || !(a.Float(nil) >= 0 && a.Float(nil) <= 1) {
		return fmt.Errorf("share is not a literal from 0 to 1")
	}
	return nil
}

// sorted returns the first operand whose rows are in the order of experts.
func (in *Instr) sorted() View {
	for i := range in.Args {
		if in.isSorted(i) {
			return in.Args[i]
		}
	}
	panic("internal: " + in.Info().Name + " has no rows in the order of experts")
}

func (in *Instr) isSorted(i int) bool { return strings.HasPrefix(in.Info().Operands[i].Dims, "n,") }

// share returns the share of the rows in the order of experts that experts have.
func (in *Instr) share() float64 {
	if x := in.Attr("share").Float(nil); x > 0 {
		return x
	}
	return 1
}

// placedWork returns the work of an instruction that accesses only the rows of experts.
func placedWork(in *Instr) Work {
	w, unused := memoryWork(in), Bytes(0)
	for i := range in.Args {
		if !in.isSorted(i) {
			continue
		}
		rest := Bytes((1 - in.share()) * float64(in.Args[i].Bytes()))
		reads, writes := in.Access(i)
		if reads {
			unused += rest
		}
		if writes {
			unused += rest
		}
	}
	w.Bytes -= unused
	return w
}

// groupedWork returns the work of a grouped product, or of the gradient of its matrices. Every row is multiplied by one matrix.
func groupedWork(in *Instr) Work {
	w := placedWork(in)
	matrices, operand := in.groupedMatrices(), in.Args[in.Info().Written()] // a or dy
	if !matrices.Present() {                                                // only sums of rows
		return w
	}
	e, k, o := matrices.Shape[0], matrices.Shape[1], matrices.Shape[2]
	rows := int64(math.Ceil(in.share() * float64(operand.Rows())))
	w.Kind, w.DType = WorkMatmul, operand.DType
	w.Flops = 2 * Flops(rows) * Flops(k) * Flops(o)
	w.Rows = max(1, min(rows/max(1, e), k, o))
	return w
}

// groupedMatrices returns the operand with a matrix for each expert.
func (in *Instr) groupedMatrices() View {
	if in.Op == MatmulGrouped {
		return in.Arg("b")
	}
	return in.Args[0]
}

// checkGrouped checks the shapes of the matrices, and that the rows can be counted in the type of ends.
func checkGrouped(in *Instr) error {
	outer := in.Args[0]
	if in.Op == MatmulGroupedWeightGrad {
		outer = in.Arg("dy")
		switch db := in.Arg("db").Present(); {
		case db != in.Arg("a").Present():
			return fmt.Errorf("db and a need each other")
		case !db && !in.Arg("dbias").Present():
			return fmt.Errorf("there is neither db nor dbias")
		case !db:
			return checkShare(in)
		}
	}
	want := [MaxDims]int64{in.Arg("ends").Elements(), in.Arg("a").Cols(), outer.Cols()}
	if in.Attr("trans_b").Bits != 0 {
		want[1], want[2] = want[2], want[1]
		if in.Op == MatmulGrouped && (in.Arg("bias").Present() || outer.DType != in.Arg("a").DType) {
			return fmt.Errorf("with trans_b, c needs the type of a, and there is no bias")
		}
	}
	if m := in.groupedMatrices(); m.Shape != want {
		return fmt.Errorf("the matrices have the shape %v, not %v", m.Dims(), want[:3])
	}
	if in.Op == MatmulGrouped && in.Arg("bias").Present() && in.Attr("accumulate").Bits != 0 {
		return fmt.Errorf("bias and accumulate cannot be combined")
	}
	if n := in.Args[in.Info().Written()].Rows(); n > math.MaxInt32 {
		return fmt.Errorf("%d rows exceed the 32 bits of ends", n)
	}
	return checkShare(in)
}

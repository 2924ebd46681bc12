package train

import (
	"errors"
	"fmt"

	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// lossOrder gives, for each rank whose losses are read, the token that each element of the rank's ResultLosses
// belongs to, as sequence*Run.Sequence + position. Ranks of a ring hold their tokens in zigzag order.
type lossOrder map[int][]int64

// findLosses finds, in each replica, one rank that has the losses of individual tokens.
func (j *Job) findLosses() (lossOrder, error) {
	order, replicas := lossOrder{}, map[int32]bool{}
	for _, r := range j.ranks {
		replica := j.program.Ranks[r.index].DP
		view, ok := r.result(ir.ResultLosses)
		if !ok || replicas[replica] {
			continue
		}
		at, err := lossTokens(j.program, r.index, view)
		if err != nil {
			return nil, err
		}
		order[r.index], replicas[replica] = at, true
	}
	if len(order) == 0 {
		return nil, errors.New("the program does not compute the losses of individual tokens: compile it again, with a validation")
	}
	return order, nil
}

// lossTokens finds the tokens whose losses a rank computes in an eval section, by tracing the labels back to
// the instructions that load them.
func lossTokens(p *ir.Program, rank int, result ir.View) ([]int64, error) {
	code, consts := &p.Codes[p.Ranks[rank].Code], p.Ranks[rank].Consts
	out := make([]int64, result.Elements())
	for i := range out {
		out[i] = -1
	}
	place := func(v ir.View) ir.Bytes { return code.Buffers[v.Buffer].Offset }
	loads := map[ir.Bytes]*ir.Instr{} // the last load to each place, under whatever name
	var labels ir.View                // labels of the last CrossEntropyStats
	for i := range code.Sections[ir.SectionEval] {
		in := &code.Sections[ir.SectionEval][i]
		switch in.Op {
		case ir.LoadTokens:
			loads[place(in.Arg("tokens"))] = in
		case ir.CrossEntropyStats:
			labels = in.Arg("labels")
		case ir.CrossEntropy:
			losses, load := in.Arg("losses"), loads[place(labels)]
			if !losses.Present() || losses.Buffer != result.Buffer || load == nil {
				continue
			}
			tokens, err := loadedTokens(load, consts, p.Run.Sequence)
			if err != nil {
				return nil, err
			}
			first, to, n := int64(labels.Offset-load.Arg("tokens").Offset)/int64(ir.I32.Bytes()), int64(losses.Offset-result.Offset)/int64(ir.F32.Bytes()), losses.Elements()
			if first < 0 || first+n > int64(len(tokens)) || to < 0 || to+n > int64(len(out)) {
				return nil, fmt.Errorf("rank %d: %d labels of an instruction are not among the tokens that were loaded for it, or its losses not in %s", rank, n, ir.ResultLosses)
			}
			copy(out[to:], tokens[first:first+n])
		}
	}
	for i, at := range out {
		if at < 0 {
			return nil, fmt.Errorf("rank %d: no instruction produces element %d of %s", rank, i, ir.ResultLosses)
		}
	}
	return out, nil
}

// loadedTokens returns the tokens that precede the labels that an instruction loads.
func loadedTokens(load *ir.Instr, consts []int64, sequence int64) ([]int64, error) {
	value := func(name string) int64 { return load.Attr(name).Int(consts) }
	w := vm.Window{
		Batch: int(value("batch")), Chunks: int(value("chunks")), Sequence: value("replica") + value("first"), Position: value("position"),
	}
	out := make([]int64, load.Arg("tokens").Elements())
	return out, w.Each(len(out), func(s, position int64, first, stride, end int) error {
		for i := first; i < end; i += stride {
			out[i] = s*sequence + position - 1
			position++
		}
		return nil
	})
}

// TokenLosses returns the loss of every token of the last eval section: Run.Sequence values for each of its
// Run.EvalSequences sequences. After Eval, these are the losses of the last section that it ran.
func (j *Job) TokenLosses() ([]float32, error) {
	if j.order == nil {
		var err error
		if j.order, err = j.findLosses(); err != nil {
			return nil, err
		}
	}
	r := &j.program.Run
	out := make([]float32, int64(r.EvalSequences)*r.Sequence)
	for rank, tokens := range j.order {
		view, _ := j.ranks[rank].result(ir.ResultLosses)
		values := make([]float32, len(tokens))
		if err := j.read(j.ranks[rank], view, vm.BytesOf(values)); err != nil {
			return nil, fmt.Errorf("reading the losses of rank %d: %w", rank, err)
		}
		for i, at := range tokens {
			if at >= int64(len(out)) {
				return nil, fmt.Errorf("rank %d has the loss of token %d of %d", rank, at, len(out))
			}
			out[at] = values[i]
		}
	}
	return out, nil
}

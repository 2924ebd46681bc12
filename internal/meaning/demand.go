package meaning

import (
	"fmt"
	"slices"

	"sppo.dev/ir"
)

// newRank returns a rank before a section. Its memory has the states, unless the section initialises them, and the numbers that the VM
// fills in.
func (v *prover) newRank(i int) *rank {
	of := &v.p.Ranks[i]
	r := &rank{index: int32(i), code: &v.p.Codes[of.Code], consts: of.Consts, teams: make([]*team, len(of.Groups))}
	for a, size := range r.code.Arenas {
		r.arenas[a] = newMemory(size)
	}
	if v.section == ir.SectionInit {
		return r
	}
	for k := range r.code.States {
		s := &r.code.States[k]
		if s.Role != ir.RoleGrad {
			m, lo, hi := r.extent(&s.View)
			m.write(lo, hi, padded(&content{value: v.ref.states[s.Role][s.Tensor]}, r.held(s), s.End.Int(r.consts), int64(s.View.DType.Bytes())))
		}
	}
	for k := range r.code.Results {
		x := &r.code.Results[k]
		if c := (&content{value: leafKey("the " + x.Name)}); v.ref.names[c.value] != "" {
			m, lo, hi := r.extent(&x.View)
			m.write(lo, hi, []piece{{rectangle: scalars(x.View.Elements()), content: c, size: int32(x.View.DType.Bytes())}})
		}
	}
	return r
}

// held returns the rectangle of its tensor that a state holds. A vector is a column.
func (r *rank) held(s *ir.State) rectangle {
	row, col := s.Row0.Int(r.consts), s.Col0.Int(r.consts)
	if len(s.View.Dims()) == 1 {
		return matrix(interval{row, row + s.View.Cols()}, interval{col, col + 1})
	}
	return matrix(interval{row, row + s.View.Rows()}, interval{col, col + s.View.Cols()})
}

// demand checks what must hold after a section.
func (v *prover) demand() {
	for _, r := range v.ranks {
		for k := range r.code.States {
			if s := &r.code.States[k]; s.Role != ir.RoleGrad {
				v.demandState(r, s)
			}
		}
	}
	for _, waiting := range v.messages {
		if len(waiting) > 0 {
			panic(&Refusal{Rank: -1, Problem: "a message is never received", Unknown: true})
		}
	}
	switch v.section {
	case ir.SectionStep:
		v.demandResult(ir.ResultLoss, v.ref.loss)
		v.demandResult(ir.ResultGradNorm, v.ref.normed)
		v.demandLoads()
		v.proof.Frozen = len(v.p.Run.Frozen)
		v.proof.Trained = len(v.p.Tensors) - v.proof.Frozen
	case ir.SectionEval:
		if v.has(ir.SectionEval) {
			v.demandResult(ir.ResultEvalLoss, v.ref.loss)
			v.demandLosses()
		}
	}
}

// has reports whether any rank has instructions in a section.
func (v *prover) has(s ir.Section) bool {
	return slices.ContainsFunc(v.p.Codes, func(c ir.Code) bool { return len(c.Sections[s]) > 0 })
}

func (v *prover) refuseEnd(r *rank, p *piece, format string, args ...any) {
	refused := &Refusal{Rank: int(r.index), Section: v.section, Problem: fmt.Sprintf(format, args...)}
	if p.content != nil {
		refused.Operands = v.chain(p.made)
	}
	panic(refused)
}

// demandState checks a state at the end of a section.
func (v *prover) demandState(r *rank, s *ir.State) {
	t, want := &v.p.Tensors[s.Tensor], v.ref.after[s.Role][s.Tensor]
	if v.section == ir.SectionInit {
		if want = (value{}); s.Role == ir.RoleWeight || s.Role == ir.RoleMaster {
			want = v.ref.initial(t.Name, t.Shape, int64(s.Tensor))
		}
	}
	name := fmt.Sprintf("the %s of %s", s.Role, t.Name)
	list, err := r.pieces(&s.View)
	if err != nil {
		v.refuseEnd(r, &piece{}, "%s %v", name, err)
	}
	size := int64(s.View.DType.Bytes())
	held := padded(&content{value: want}, r.held(s), s.End.Int(r.consts), size)
	at := &call{prover: v, rank: r, in: &ir.Instr{}}
	for i := range list {
		if list[i].content == nil {
			v.refuseEnd(r, &list[i], "%s is not written", name)
		}
	}
	other := v.section == ir.SectionStep && !v.ref.other[s.Tensor].isZero() && (s.Role == ir.RoleWeight || s.Role == ir.RoleMaster)
	both := at.alignBy(elementsOf, list, held)
	for i := range both[0] {
		p, q := &both[0][i], &both[1][i]
		same := (p.content.value == q.content.value || other && p.content.value == v.ref.other[s.Tensor]) && len(p.parts) == 0
		switch {
		case q.anywhere, q.first >= t.Shape[0]:
			normal := v.section == ir.SectionInit && same && !p.anywhere && p.rectangle == q.rectangle // init_normal makes these rows 0
			same = normal || len(p.parts) == 0 && v.ref.padding(p)
		case v.section == ir.SectionInit && p.anywhere: // every element is the same
		default:
			same = same && p.rectangle == q.rectangle && p.anywhere == q.anywhere
		}
		if !same {
			v.refuseEnd(r, p, "%s should be %s, but is %s", name, v.ref.describe(q), v.ref.describe(p))
		}
	}
}

// demandResult checks a result that the VM reads.
func (v *prover) demandResult(name string, want value) {
	found := false
	for _, r := range v.ranks {
		for k := range r.code.Results {
			x := &r.code.Results[k]
			if x.Name != name {
				continue
			}
			found = true
			list, err := r.pieces(&x.View)
			if err != nil || len(list) != 1 || list[0].content == nil || len(list[0].parts) > 0 || list[0].content.value != want || list[0].rectangle != scalars(x.View.Elements()) {
				p := hole(0)
				if len(list) > 0 {
					p = list[0]
				}
				v.refuseEnd(r, &p, "the result %s should be %s, but is %s", name, v.ref.names[want], v.ref.describe(&p))
			}
		}
	}
	if !found && name != ir.ResultGradNorm {
		panic(&Refusal{Rank: -1, Problem: "no rank has the result " + name})
	}
}

// demandLoads checks the load of the experts of all layers.
func (v *prover) demandLoads() {
	var want []piece
	n := int64(v.ref.Experts)
	for i := range v.ref.Layers {
		if load := v.ref.loads[i]; load.isZero() {
			want = join(want, uniform(&content{}, n, 4))
		} else {
			want = made(want, matrix(interval{0, n}, full), &content{value: load})
		}
	}
	for _, r := range v.ranks {
		for k := range r.code.Results {
			x := &r.code.Results[k]
			if x.Name != ir.ResultExpertLoad {
				continue
			}
			list, err := r.pieces(&x.View)
			at := &call{prover: v, rank: r, in: &ir.Instr{}}
			if err != nil || x.View.Elements() != n*int64(v.ref.Layers) {
				v.refuseEnd(r, &piece{}, "the result %s is not that of %d experts in each layer: %v", x.Name, n, err)
			}
			both := at.alignBy(elementsOf, list, want)
			for i := range both[0] {
				if p, q := &both[0][i], &both[1][i]; p.content == nil || p.content.value != q.content.value || p.rectangle != q.rectangle || len(p.parts) > 0 {
					v.refuseEnd(r, p, "the result %s should be %s, but is %s", x.Name, v.ref.describe(q), v.ref.describe(p))
				}
			}
		}
	}
}

// demandLosses checks the losses of the tokens of a validation: on one rank of each replica, those of the replica's sequences, in the
// order of its labels.
func (v *prover) demandLosses() {
	var all cover
	replicas := map[int32]bool{}
	for i, r := range v.ranks {
		at := slices.IndexFunc(r.code.Results, func(x ir.Result) bool { return x.Name == ir.ResultLosses })
		if at < 0 || replicas[v.p.Ranks[i].DP] {
			continue
		}
		replicas[v.p.Ranks[i].DP] = true
		list, err := r.pieces(&r.code.Results[at].View)
		if err != nil {
			v.refuseEnd(r, &piece{}, "the result %s %v", ir.ResultLosses, err)
		}
		for k := range list {
			p := &list[k]
			if p.content == nil || p.content.value != v.ref.losses || p.cols != full || len(p.parts) > 0 {
				v.refuseEnd(r, p, "the result %s should be %s, but is %s", ir.ResultLosses, v.ref.names[v.ref.losses], v.ref.describe(p))
			}
			var ok bool
			if all, ok = all.with(p.tokens()); !ok {
				v.refuseEnd(r, p, "the result %s has the same tokens twice: %s", ir.ResultLosses, v.ref.describe(p))
			}
		}
	}
	need := box{{0, v.ref.batch}, {0, v.ref.sequence}, full, full}
	if len(replicas) > 0 && !all.has(need) {
		panic(&Refusal{Rank: -1, Section: v.section, Problem: fmt.Sprintf("the result %s has the losses of %s, not of %s",
			ir.ResultLosses, all.describe(indices[overTokens]), cover{need}.describe(indices[overTokens]))})
	}
}

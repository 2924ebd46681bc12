package ir

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strings"
)

// This file verifies the header: the run, the machine, the tensors, and how the tensors are
// distributed over ranks. A figure of the run that is 0 is unknown: hand-written programs may omit
// it.

// headerRule is a rule for a number or a name in the header.
type headerRule struct {
	ok   bool
	key  string
	got  any
	want string
}

// VerifyHeader checks only the header. The error is a *VerifyError.
func VerifyHeader(p *Program) error {
	all := findings{limit: findingLimit}
	if verifyHeader(p, &all); all.empty() {
		return nil
	}
	return &VerifyError{Findings: all.list, More: all.more}
}

// verifyHeader checks each figure of the header, by itself and in relation to others.
func verifyHeader(p *Program, all *findings) {
	r := &p.Run
	decays, decayTypes := r.LRSchedule == LRStableDecay, []string{""}
	if decays {
		decayTypes = []string{"cosine", "linear", "sqrt"}
	}
	rules := []headerRule{
		{r.Sequence >= 0 && r.Sequence < math.MaxInt64, "sequence", r.Sequence, "0 or more"},
		{counts(r.Vocab), "vocab", r.Vocab, "0 to 2147483647, because tokens have 32 bits"},
		{counts(r.Batch), "batch", r.Batch, "0 to 2147483647"},
		{counts(r.EvalSequences), "eval_sequences", r.EvalSequences, "0 to 2147483647"},
		{counts(r.EvalBatch), "eval_batch", r.EvalBatch, "0 to 2147483647"},
		{r.EvalBatch <= 0 || r.EvalSequences > 0, "eval_sequences", r.EvalSequences, "1 or more if eval_batch is not 0"},
		{r.EvalEvery >= 0, "eval_every", r.EvalEvery, "0 or more"},
		{r.Steps >= 0, "steps", r.Steps, "0 or more"},
		{r.Warmup >= 0, "warmup", r.Warmup, "0 or more"},
		{finite(r.LR) && r.LR >= 0, "lr", r.LR, "0 or more"},
		{finite(r.MinLR) && r.MinLR >= 0, "min_lr", r.MinLR, "0 or more"},
		{r.Beta1 >= 0 && r.Beta1 < 1, "beta1", r.Beta1, "at least 0 and below 1"},
		{r.Beta2 >= 0 && r.Beta2 < 1, "beta2", r.Beta2, "at least 0 and below 1"},
		{r.Holdout >= 0 && r.Holdout < 1, "holdout", r.Holdout, "at least 0 and below 1"},
		{r.LRSchedule == "" || slices.Contains(LRSchedules, r.LRSchedule), "lr_schedule", r.LRSchedule, "one of " + strings.Join(LRSchedules, ", ")},
		{decays || r.DecaySteps == 0, "decay_steps", r.DecaySteps, "0 unless lr_schedule is " + LRStableDecay},
		{!decays || r.DecaySteps > 0, "decay_steps", r.DecaySteps, "1 or more if lr_schedule is " + LRStableDecay},
		{slices.Contains(decayTypes, r.DecayType), "decay_type", r.DecayType, "cosine, linear or sqrt, and given for warmup_stable_decay only"},
		{slices.Contains([]string{"", "text", "tokens", "random"}, r.DataKind), "data_kind", r.DataKind, "text, tokens or random"},
		{(r.DataKind == "tokens") == (r.DataOptions != nil), "data_options", r.DataOptions, "given for tokens, and for them only"},
		{finite(p.FlopsModel) && p.FlopsModel >= 0, "flops_model", p.FlopsModel, "0 or more"},
	}
	for _, rule := range rules {
		if !rule.ok {
			all.add(headerFinding("run: %s is %v, but must be %s", rule.key, rule.got, rule.want))
		}
	}
	if p.Model.Vocab != 0 && r.Vocab != 0 && p.Model.Vocab != r.Vocab {
		all.add(headerFinding("the vocabulary is %d in the run and %d in the model; they must be equal", r.Vocab, p.Model.Vocab))
	}
	verifyMachine(&p.Machine, all)
	verifyTensors(p, all)
	verifyCoordinates(p, all)
}

func headerFinding(format string, args ...any) Finding {
	return Finding{Kind: FindHeader, At: Site{Rank: None, Index: None}, Msg: fmt.Sprintf(format, args...)}
}

func counts(n int) bool { return n >= 0 && n <= math.MaxInt32 }

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }

// verifyMachine checks that no figure of the machine is negative, and that copy_duplex is a known word.
func verifyMachine(m *Machine, all *findings) {
	if !slices.Contains([]string{"", "full", "half"}, m.CopyDuplex) {
		all.add(headerFinding("machine: copy_duplex is %q, which must be full or half", m.CopyDuplex))
	}
	v := reflect.ValueOf(*m)
	for i := range v.NumField() {
		key, f, ok := v.Type().Field(i).Tag.Get("json"), v.Field(i), true
		switch f.Kind() {
		case reflect.Int, reflect.Int64:
			ok = f.Int() >= 0
		case reflect.Float64:
			ok = finite(f.Float()) && f.Float() >= 0
		case reflect.Slice:
			for _, point := range f.Interface().([]CurvePoint) {
				ok = ok && finite(point[0]) && finite(point[1]) && point[0] >= 0 && point[1] > 0
			}
		}
		if !ok {
			all.add(headerFinding("machine: %s is %v, which must not be negative", key, f))
		}
	}
}

// verifyTensors checks that the numbers of elements and bytes of tensors do not overflow.
func verifyTensors(p *Program, all *findings) {
	for i := range p.Tensors {
		t := &p.Tensors[i]
		if t.Shape[0] < 1 || t.Shape[1] < 1 || Times(4, t.elements()) == math.MaxInt64 {
			all.add(headerFinding("tensor %s has shape %v: it must have 1 or more rows and columns, and fewer than 2^61 elements", t.Name, t.Shape))
		}
	}
}

// elements returns the number of elements of a tensor, saturated. Its dimensions are positive.
func (t *Tensor) elements() int64 { return Times(t.Shape[0], t.Shape[1]) }

// verifyCoordinates checks that there are ranks, and that no two ranks have the same coordinates,
// if any are given.
func verifyCoordinates(p *Program, all *findings) {
	if len(p.Ranks) == 0 {
		all.add(headerFinding("the program has no ranks: it needs at least one"))
	}
	places := map[[3]int32]int{}
	for i := range p.Ranks {
		r := &p.Ranks[i]
		at := [3]int32{r.DP, r.PP, r.SP}
		if r.DP < 0 || r.PP < 0 || r.SP < 0 {
			all.addOnce(rankFinding(FindHeader, i, "has coordinates dp=%d pp=%d sp=%d, which must be 0 or more", r.DP, r.PP, r.SP))
		}
		if other, ok := places[at]; ok && at != [3]int32{} {
			all.addOnce(rankFinding(FindHeader, i, "is at dp=%d pp=%d sp=%d, like rank %d; no two ranks can be at the same place",
				r.DP, r.PP, r.SP, other))
		}
		places[at] = i
	}
}

// verifyRoles checks what the VM needs for training: the results that it reads and fills must exist, and
// every tensor must be stored exactly once. A program without states, or without updates of weights, trains
// nothing and is exempt from these rules.
func verifyRoles(p *Program, all *findings) {
	if !trains(p) {
		return
	}
	has := map[string]bool{}
	for i := range p.Codes {
		c := &p.Codes[i]
		for j := range c.Results {
			has[c.Results[j].Name] = true
		}
	}
	for i := range p.Codes {
		c := &p.Codes[i]
		if c.updates() && !slices.ContainsFunc(c.Results, func(r Result) bool { return r.Name == ResultStep }) {
			all.add(Finding{Kind: FindHeader, At: Site{Rank: None, Code: c.Name, Index: None},
				Msg: fmt.Sprintf("updates weights without a result %s, which provides the learning rate", ResultStep)})
		}
	}
	if !has[ResultLoss] {
		all.add(headerFinding("no code has the result %s, which a step reports", ResultLoss))
	}
	if p.Run.EvalBatch > 0 && !has[ResultEvalLoss] {
		all.add(headerFinding("no code has the result %s, which the validation of eval_batch = %d reports", ResultEvalLoss, p.Run.EvalBatch))
	}
	verifyStates(p, all)
}

// trains reports whether a program has states and updates weights.
func trains(p *Program) bool {
	updates, holds := false, false
	for i := range p.Codes {
		updates, holds = updates || p.Codes[i].updates(), holds || len(p.Codes[i].States) > 0
	}
	return updates && holds
}

// updates reports whether a step of the code changes weights.
func (c *Code) updates() bool {
	return slices.ContainsFunc(c.Sections[SectionStep], func(in Instr) bool { return in.Info().Updates })
}

// rectangle is part of a tensor: rows row to endRow-1 and columns col to endCol-1.
type rectangle struct{ row, endRow, col, endCol int64 }

// held is the set of a tensor's rectangles that ranks hold in one role.
type held map[rectangle]bool

// verifyStates checks that the rectangles on all ranks cover each tensor exactly once in each role. Equal
// rectangles on several ranks are copies and count once. A rectangle inside another is a part that a rank keeps
// in addition to the whole.
func verifyStates(p *Program, all *findings) {
	type key struct {
		tensor int32
		role   Role
	}
	parts, twice := map[key]held{}, map[key]int{}
	type likeness struct{ code, consts string }
	seen := map[likeness]bool{}
	for r := range p.Ranks {
		rank := &p.Ranks[r]
		code := &p.Codes[rank.Code]
		like := likeness{code.Name, fmt.Sprint(rank.Consts)}
		if seen[like] {
			continue
		}
		seen[like] = true
		own := map[key]held{} // including padding, which may be all that distinguishes a slice from the whole
		for i := range code.States {
			s := &code.States[i]
			k := key{s.Tensor, s.Role}
			if own[k] == nil {
				own[k] = held{}
			}
			if x := s.padded(rank.Consts); own[k][x] {
				twice[k] = r
			} else {
				own[k][x] = true
			}
			if parts[k] == nil {
				parts[k] = held{}
			}
			parts[k][s.rectangle(rank.Consts, &p.Tensors[s.Tensor])] = true
		}
	}
	for t := range p.Tensors {
		for role := range NumRoles {
			rects := parts[key{int32(t), role}]
			if rects == nil && role != RoleWeight {
				continue
			}
			if r, ok := twice[key{int32(t), role}]; ok {
				all.add(rankFinding(FindHeader, r, "holds a part of %s of %s twice: one state is enough", role, p.Tensors[t].Name))
			}
			if why := rects.covers(&p.Tensors[t]); why != "" {
				all.add(headerFinding("states %s of tensor %s %v %s: all ranks together must hold each element, in rectangles that do not overlap",
					role, p.Tensors[t].Name, p.Tensors[t].Shape, why))
			}
		}
	}
}

// rectangle returns the part of the tensor that a rank's state holds, without padding; the zero value if
// the state is all padding.
func (s *State) rectangle(consts []int64, t *Tensor) rectangle {
	x := s.padded(consts)
	x.endRow, x.endCol = min(x.endRow, t.EndOf(s.End.Int(consts))), min(x.endCol, t.Shape[1])
	if x.row >= x.endRow || x.col >= x.endCol {
		return rectangle{}
	}
	return x
}

// padded returns the rectangle of a state with its padding: rows and columns beyond the tensor, which let ranks
// divide the tensor evenly.
func (s *State) padded(consts []int64) rectangle {
	rows, cols := s.extent()
	row, col := s.Row0.Int(consts), s.Col0.Int(consts)
	return rectangle{row, Plus(row, rows), col, Plus(col, cols)}
}

func (x rectangle) area() int64 { return Times(x.endRow-x.row, x.endCol-x.col) }

func (x rectangle) contains(y rectangle) bool {
	return x.row <= y.row && y.endRow <= x.endRow && x.col <= y.col && y.endCol <= x.endCol
}

func (x rectangle) overlaps(y rectangle) bool {
	return x.row < y.endRow && y.row < x.endRow && x.col < y.endCol && y.col < x.endCol
}

// outermost removes rectangles that lie inside others, such as the slice of a weight that a rank updates
// before the weight is gathered.
func (h held) outermost() []rectangle {
	all := slices.SortedFunc(maps.Keys(h), func(a, b rectangle) int { return cmp.Compare(b.area(), a.area()) })
	var out []rectangle
	for _, x := range all {
		if !slices.ContainsFunc(out, func(outer rectangle) bool { return outer.contains(x) }) {
			out = append(out, x)
		}
	}
	return out
}

// covers returns the reason why a role's rectangles do not cover a tensor exactly once, or "" if they do.
func (h held) covers(t *Tensor) string {
	if len(h) == 0 {
		return "are held by no rank"
	}
	if untiled(t, slices.Collect(maps.Keys(h))) == "" {
		return ""
	}
	return untiled(t, h.outermost())
}

// untiled returns the reason why rectangles do not tile a tensor, or "" if they do. They tile it if their areas
// add up to the tensor's area and every corner, except the tensor's own four, belongs to an even number of
// them.
func untiled(t *Tensor, rects []rectangle) string {
	area := int64(0)
	corners := map[[2]int64]bool{}
	for _, x := range rects {
		area = Plus(area, x.area())
		if x == (rectangle{}) {
			continue
		}
		for _, c := range [][2]int64{{x.row, x.col}, {x.row, x.endCol}, {x.endRow, x.col}, {x.endRow, x.endCol}} {
			if corners[c] {
				delete(corners, c)
			} else {
				corners[c] = true
			}
		}
	}
	tiles := len(corners) == 4 && corners[[2]int64{0, 0}] && corners[[2]int64{0, t.Shape[1]}] &&
		corners[[2]int64{t.Shape[0], 0}] && corners[t.Shape]
	switch {
	case area != t.elements():
		return fmt.Sprintf("cover %d of its %d elements", area, t.elements())
	case !tiles:
		return "leave elements out or hold them twice"
	}
	return ""
}

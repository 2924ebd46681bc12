package ir

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
)

// This file verifies the header: the run, the machine, and the tensors. A figure of the run that is 0 is unknown:
// hand-written programs may omit it.

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
		{finite(r.Momentum) && r.Momentum >= 0, "momentum", r.Momentum, "0 or more"},
		{finite(r.Eps) && r.Eps >= 0, "eps", r.Eps, "0 or more"},
		{finite(r.WeightDecay) && r.WeightDecay >= 0, "weight_decay", r.WeightDecay, "0 or more"},
		{finite(r.MaxNorm) && r.MaxNorm >= 0, "max_norm", r.MaxNorm, "0 or more"},
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
		if t.Shape[0] < 1 || t.Shape[1] < 1 || times(4, t.elements()) == math.MaxInt64 {
			all.add(headerFinding("tensor %s has shape %v: it must have 1 or more rows and columns, and fewer than 2^61 elements", t.Name, t.Shape))
		}
	}
}

// elements returns the number of elements of a tensor, saturated. Its dimensions are positive.
func (t *Tensor) elements() int64 { return times(t.Shape[0], t.Shape[1]) }

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

package lang

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// checker applies the rules that involve several keys. It expects a spec in which each value has the right type
// and range.
type checker struct {
	*Spec
	report func(*Diagnostic)
}

func check(s *Spec, report func(*Diagnostic)) {
	c := &checker{s, report}
	c.model()
	c.cluster()
	c.train()
	c.layers()
	c.sizes()
	c.subsequences()
	c.align()
	c.lists()
}

func (c *checker) fail(key string, code Code, hint, format string, args ...any) {
	c.report(c.Diagnose(key, code, format, args...).WithHint("%s", hint))
}

// culprit returns the key that diagnostics should point at: the first one to which the user gave a value, or
// else the first of all.
func (c *checker) culprit(keys ...string) string {
	for _, k := range keys {
		if c.Written(k) {
			return k
		}
	}
	return keys[0]
}

func (c *checker) model() {
	m := c.Model
	if !c.Written("model.head_dim") && m.HeadDim == m.Hidden/m.Heads && m.Hidden%m.Heads != 0 && m.RopeDim == 0 { // head_dim is neither given nor a default of the family
		c.fail("model.heads", Indivisible,
			fmt.Sprintf("heads = %s divides %d; or set head_dim", nearDivisors(m.Hidden, m.Heads), m.Hidden),
			"hidden = %[2]d is not divisible by %[1]d heads", m.Heads, m.Hidden)
	}
	var useless []string
	for _, k := range expertKeys {
		if m.Experts == 0 && c.Written("model."+k) {
			useless = append(useless, k)
		}
	}
	for _, p := range m.Problems() {
		if len(useless) == 0 || p.Keys[0] != "model.mlp_layer_types" { // which says the same
			c.fail(c.culprit(p.Keys...), p.Code, p.Hint, "%s", p.Message)
		}
	}
	if len(useless) > 0 {
		has := map[bool]string{true: "has", false: "have"}[len(useless) == 1]
		c.fail("model."+useless[0], Conflict, m.firstExperts(), "%s %s no effect without experts", strings.Join(useless, ", "), has)
	}
	if slices.Contains(m.Windows, noWindow) {
		c.fail("model.layer_types", Conflict, "window = 4K, for example", "sliding layers need a window: one number other than 0")
	}
	if c.Train.Data.Kind == "text" && m.Vocab < 256 {
		c.fail("model.vocab", SmallVocab, "vocab = 256", "text is read as bytes, but vocab = %d is less than 256", m.Vocab)
	}
}

func (c *checker) cluster() {
	for _, curve := range []struct {
		key    string
		points []CurvePoint
	}{
		{"cluster.matmul_efficiency", c.Cluster.MatmulEfficiency},
		{"cluster.attention_efficiency", c.Cluster.AttentionEfficiency},
		{"cluster.attention_grad_efficiency", c.Cluster.AttentionGradEff},
	} {
		for i, p := range curve.points {
			at := fmt.Sprintf("%s[%d]", curve.key, i)
			if p[1] > 1 {
				c.fail(at, OutOfRange, "write [rows, share], for example [1K, 0.5]", "a share is at most 1, not %g", p[1])
			}
			if i > 0 && p[0] <= curve.points[i-1][0] {
				c.fail(at, OutOfRange, "", "rows must increase from point to point: %g comes after %g", p[0], curve.points[i-1][0])
			}
		}
	}
}

// documents checks the boundaries between documents against the rest of the spec.
func (c *checker) documents(o *DataOptions) {
	if id, err := strconv.Atoi(o.Documents); err == nil && id >= c.Model.Vocab {
		c.fail("train.data.documents", OutOfRange, fmt.Sprintf("at most %d", c.Model.Vocab-1), "token %d is not in a vocabulary of %d", id, c.Model.Vocab)
	}
	if o.Pack == "whole" && o.Documents == "off" {
		c.fail("train.data.pack", Conflict, "add documents = index, or the ID of the token that ends a document",
			"pack = whole needs document boundaries, which documents = off does not read")
	}
	if m := c.Model; o.Packs() && m.Positions == PositionsRope && m.RopeScaling == ScalingLongRope && c.Train.Sequence > int64(m.RopeOriginal) && !slices.Equal(m.RopeShort, m.RopeLong) {
		c.fail("train.data.documents", Conflict, fmt.Sprintf("documents = off, sequence = %d, or rope_short = rope_long", m.RopeOriginal),
			"with rope_scaling = longrope, the frequencies for a document depend on its length, but a sequence of %d tokens, above rope_original = %d, uses rope_long for all its documents",
			c.Train.Sequence, m.RopeOriginal)
	}
}

func (c *checker) train() {
	c.tuning()
	t := c.Train
	if o := t.Data.Options; o != nil && len(o.Weights) > 0 && len(o.Weights) != len(t.Data.Files) {
		c.fail("train.data.weights", LengthOfList, fmt.Sprintf("write %d, one for each file pattern", len(t.Data.Files)),
			"%d weights for %d patterns of files", len(o.Weights), len(t.Data.Files))
	}
	if o := t.Data.Options; o != nil {
		c.documents(o)
	}
	if t.MinLR > t.Optimizer.LR && t.LRSchedule != "constant" {
		c.fail("train.min_lr", Conflict, fmt.Sprintf("at most %g", t.Optimizer.LR), "min_lr = %g is above lr = %g", t.MinLR, t.Optimizer.LR)
	}
	if t.Warmup > t.Steps {
		c.fail("train.warmup", Conflict, fmt.Sprintf("at most %d", t.Steps), "warmup = %d is longer than the run of %d steps", t.Warmup, t.Steps)
	}
	c.decay()
	if c.Model.Experts > 0 && t.Optimizer.Kind == "muon" {
		c.fail("train.optimizer", Conflict, "optimizer = adamw()", "muon does not update the matrices of experts")
	}
	if o := t.Optimizer; o.Moments == "bf16" && max(o.Beta1, o.Beta2, o.Momentum) > 0.99 {
		c.fail(c.culprit("train.optimizer.moments", "train.optimizer.betas", "train.optimizer.momentum"), Conflict, "moments = f32",
			"with a decay of %g, bf16 moments would not change; the limit with moments = bf16 is 0.99", max(o.Beta1, o.Beta2, o.Momentum))
	}
	if c.Written("train.eval_every") && t.EvalEvery > 0 && !c.Written("train.holdout") && t.Holdout == 0 {
		c.fail("train.eval_every", Conflict, "holdout = 0.01 reserves the last hundredth of the data",
			"there is no data to validate on: holdout is 0 for %s(...)", t.Data.Kind)
	}
	per := int64(max(1, c.Schedule.Microbatch))
	words := fmt.Sprintf("microbatch = %d", per)
	if c.Schedule.DP > 0 {
		per *= int64(c.Schedule.DP)
		words = fmt.Sprintf("dp * microbatch = %d", per)
	}
	if int64(t.Batch)%per != 0 {
		c.fail(c.culprit("train.batch", "schedule.dp", "schedule.microbatch"), Indivisible,
			"batch = "+nearMultiples(int64(t.Batch), per), "batch = %d is not a multiple of %s", t.Batch, words)
	}
}

// decay checks the keys of warmup_stable_decay.
func (c *checker) decay() {
	t := c.Train
	for _, key := range []string{"train.decay_steps", "train.decay_type"} {
		if t.LRSchedule != stableDecay && c.Written(key) {
			c.fail(key, Conflict, "lr_schedule = "+stableDecay, "lr_schedule = %s does not use %s", t.LRSchedule, strings.TrimPrefix(key, "train."))
		}
	}
	if left := t.Steps - t.Warmup; left >= 0 && t.DecaySteps > max(left, 1) {
		c.fail("train.decay_steps", Conflict, fmt.Sprintf("at most %d", left),
			"decay_steps = %d exceeds the %d steps after the warm-up", t.DecaySteps, left)
	}
}

// MostStages returns the largest number of virtual stages that a model can be divided into. If several of them are on
// each rank, the first may have only the embedding, and the last only the head.
func MostStages(layers, pp, virtualStages int) int {
	if pp > 1 && virtualStages > 1 {
		return layers + 2
	}
	return layers
}

// ends names the stages without layers.
func ends(n int64) string {
	if n > 0 {
		return ", one for the embedding, and one for the head"
	}
	return ""
}

// sizes checks sp, pp and dp against the model and the cluster. A size that is auto is treated as 1.
func (c *checker) sizes() {
	s, m := c.Schedule, c.Model
	sp, pp, dp := max(1, s.SP), max(1, s.PP), max(1, s.DP)
	heads := sp / max(1, s.Ring) // ranks that divide heads
	ranks, near := NearSP(m, c.Train.Sequence, heads, s.Ring, c.Cluster.GPUs()/pp/dp, 0)
	switch {
	case s.SPMode == "ring" && s.Ring > 0:
		c.fail("schedule.sp_mode", Conflict, fmt.Sprintf("sp_mode = megatron or ulysses, or sp = %d", sp),
			"sp = [%d, %d] says that groups of %d ranks divide heads, but with sp_mode = ring, no ranks do", heads, s.Ring, heads)
	case m.LinearKeyHeads > 0 && (s.SPMode == "ring" || s.Ring > 0):
		c.fail(c.culprit("schedule.sp_mode", "schedule.sp"), Conflict, "sp_mode = megatron or ulysses, without a ring", ScansInRing)
	case m.LinearKeyHeads%heads != 0:
		c.fail("schedule.sp", Indivisible, near, "%d heads of linear attention are not divisible by %s", m.LinearKeyHeads, ranks)
	case s.SPMode == "ring" || s.Ring == 0 && s.SPMode == "auto" && c.Train.Sequence%int64(2*sp) == 0: // in a ring, every rank has all heads
	case m.Heads%heads != 0:
		c.fail("schedule.sp", Indivisible, near, "%d heads are not divisible by %s", m.Heads, ranks)
	case m.Heads%m.KVHeads == 0 && m.KVHeads%heads != 0 && heads%m.KVHeads != 0:
		c.fail("schedule.sp", Indivisible, near, "%d key and value heads cannot be shared evenly by %s", m.KVHeads, ranks)
	}
	switch {
	case s.ExpertParallel != "on":
	case m.Experts == 0:
		c.fail("schedule.expert_parallel", Conflict, "expert_parallel = off", "the model has no experts")
	case s.SP == 1:
		_, near := NearSP(m, c.Train.Sequence, 1, 0, c.Cluster.GPUs()/pp/dp, m.Experts)
		c.fail("schedule.expert_parallel", Conflict, near, "with sp = 1, a single rank has all experts of a layer")
	}
	if s.LatentCache == "on" && !slices.Contains(m.Mixers, MixerLatent) {
		c.fail("schedule.latent_cache", Conflict, "latent_cache = off", "the model has no latent attention")
	}
	if stages, most := int64(pp)*int64(max(1, s.VirtualStages)), int64(MostStages(m.Layers, pp, s.VirtualStages)); stages > most {
		words := fmt.Sprintf("pp = %d", pp)
		if s.VirtualStages > 1 {
			words = fmt.Sprintf("pp * virtual_stages = %d", stages)
		}
		c.fail(c.culprit("schedule.pp", "schedule.virtual_stages"), TooFewLayers,
			fmt.Sprintf("at most %s, one stage per layer%s", strings.Replace(words, fmt.Sprint(stages), fmt.Sprint(most), 1), ends(most-int64(m.Layers))),
			"%s needs at least %d layers, but the model has %d", words, stages-most+int64(m.Layers), m.Layers)
	}
	gpus := int64(c.Cluster.Nodes) * int64(c.Cluster.GPUsPerNode)
	if ranks := int64(sp) * int64(pp) * int64(dp); ranks > gpus {
		var parts []string
		for _, p := range []struct {
			name string
			n    int
		}{{"sp", s.SP}, {"pp", s.PP}, {"dp", s.DP}} {
			if p.n > 0 {
				parts = append(parts, fmt.Sprintf("%s = %d", p.name, p.n))
			}
		}
		c.fail(c.culprit("schedule.dp", "schedule.pp", "schedule.sp"), TooManyRanks,
			fmt.Sprintf("the product of sp, pp and dp is at most %d", gpus),
			"more ranks than the cluster has: %s make %d, but %s has %d", strings.Join(parts, ", "), ranks, clusterWords(c.Cluster), gpus)
	}
	if m.Heads%heads == 0 && c.Train.Sequence%int64(sp) != 0 { // one diagnostic about sp is enough
		c.fail(c.culprit("train.sequence", "schedule.sp"), Indivisible, "sequence = "+nearMultiples(c.Train.Sequence, int64(sp)),
			"sequence = %d is not divisible by sp = %d", c.Train.Sequence, sp)
	}
}

// NearSP names the number of ranks that divide heads, which may be the groups of a ring, for a message that it does not
// divide them. near names the nearest values of sp which work with the heads and the sequence, of those up to a limit, and
// sp_mode = ring if it works with sp itself. If experts is not 0, sp must divide their number, and near also names the value of
// expert_parallel for which it need not.
func NearSP(m Model, seq int64, heads, ring, most, experts int) (words, near string) {
	groups := max(1, ring)
	near = nearDivisorsWith(m.Heads, heads, func(n int) bool {
		return (m.Heads%m.KVHeads != 0 || m.KVHeads%n == 0 || n%m.KVHeads == 0) && m.LinearKeyHeads%n == 0 && seq%int64(n*groups) == 0 && n*groups <= most && (ring == 0 && experts == 0 || n > 1) && experts%n == 0
	})
	var out []string
	if experts > 0 {
		out = append(out, "expert_parallel = off")
	}
	words = fmt.Sprintf("sp = %d", heads)
	if ring > 0 {
		words = fmt.Sprintf("%d, the first number of sp = [%d, %d]", heads, heads, ring)
	}
	switch {
	case near != "" && ring > 0:
		out = append(out, fmt.Sprintf("sp = [a, %d] with a = %s", ring, near))
	case near != "":
		out = append(out, "sp = "+near)
	}
	if experts == 0 && ring == 0 && heads <= most && seq%int64(2*heads) == 0 && m.LinearKeyHeads == 0 {
		out = append(out, "sp_mode = ring")
	}
	return words, strings.Join(out, "; or ")
}

func clusterWords(c Cluster) string {
	if c.Name == "" {
		return "it"
	}
	return "`" + c.Name + "`"
}

// layers checks the list of layers of each virtual stage. With pp, the list also determines the number of virtual stages.
func (c *checker) layers() {
	const key = "schedule.layers_per_stage"
	s, list := &c.Schedule, c.Schedule.LayersPerStage
	if len(list) == 0 {
		return
	}
	if s.PP == 0 {
		c.fail(key, Conflict, fmt.Sprintf("pp = %d", len(list)), "layers_per_stage lists %d stages, but pp is auto", len(list))
		return
	}
	if s.VirtualStages == 0 {
		s.VirtualStages = max(1, len(list)/s.PP)
	}
	if stages := s.PP * s.VirtualStages; stages != len(list) {
		c.fail(key, LengthOfList, fmt.Sprintf("list a multiple of pp = %d", s.PP),
			"layers_per_stage lists %d stages, but pp * virtual_stages = %d", len(list), stages)
		return
	}
	sum, last := 0, len(list)-1
	for i, n := range list {
		sum += n
		maybe := s.VirtualStages > 1 && s.PP > 1 && (i == last || i == 0 && c.Model.Adapter == "" && len(c.Train.Freeze) == 0)
		if n == 0 && !maybe {
			c.fail(fmt.Sprintf("%s[%d]", key, i), OutOfRange, "at least 1", "stage %d has no layers", i)
		}
	}
	if sum != c.Model.Layers {
		c.fail(key, LayersSum, tooMuch(int64(sum-c.Model.Layers)), "layers_per_stage adds up to %d, but the model has %d layers", sum, c.Model.Layers)
	}
}

func (c *checker) subsequences() {
	sub, seq, sp := c.Schedule.Subsequences, c.Train.Sequence, int64(max(1, c.Schedule.SP))
	if sub.Auto {
		return
	}
	if len(sub.Lengths) == 0 {
		if int64(sub.Count)*sp > seq {
			c.fail("schedule.subsequences", BadAlign, fmt.Sprintf("at most %d", seq/sp),
				"%d subsequences of %d tokens leave less than one token for each rank", sub.Count, seq)
		}
		return
	}
	var sum int64
	for i, n := range sub.Lengths {
		sum += n
		if n%sp != 0 {
			c.fail(fmt.Sprintf("schedule.subsequences[%d]", i), Indivisible, nearMultiples(n, sp),
				"a subsequence of %d tokens is not divisible by sp = %d", n, sp)
		}
	}
	if sum != seq {
		last := sub.Lengths[len(sub.Lengths)-1] + seq - sum
		hint := tooMuch(sum - seq)
		if last > 0 && last%sp == 0 {
			hint += fmt.Sprintf(": the last length would be %d", last)
		}
		c.fail("schedule.subsequences", LengthsSum, hint, "the lengths add up to %d, but sequence = %d", sum, seq)
	}
}

// tooMuch says by how much a sum is too large or, if the number is negative, too small.
func tooMuch(by int64) string {
	if by < 0 {
		return fmt.Sprintf("the sum is %d too small", -by)
	}
	return fmt.Sprintf("the sum is %d too large", by)
}

func (c *checker) align() {
	align, sub := int64(c.Schedule.Align), c.Schedule.Subsequences
	if align == 0 {
		return
	}
	if sp := int64(max(1, c.Schedule.SP)); align%sp != 0 {
		c.fail("schedule.align", BadAlign, "align = "+nearMultiples(align, sp), "align = %d is not a multiple of sp = %d", align, sp)
	}
	if len(sub.Lengths) == 0 {
		n := int64(max(1, sub.Count))
		if align*n > c.Train.Sequence {
			c.fail("schedule.align", BadAlign, fmt.Sprintf("at most %d", c.Train.Sequence/n),
				"align = %d is larger than a subsequence: %d tokens in %d parts are %d each", align, c.Train.Sequence, n, c.Train.Sequence/n)
		}
		return
	}
	for i, n := range sub.Lengths[:len(sub.Lengths)-1] {
		if n%align != 0 {
			c.fail(fmt.Sprintf("schedule.subsequences[%d]", i), BadAlign, nearMultiples(n, align),
				"a subsequence of %d tokens is not a multiple of align = %d", n, align)
		}
	}
}

func (c *checker) lists() {
	s := c.Schedule
	if n := s.Subsequences.Count; s.Offload.Policy == "list" && n > 0 && len(s.Offload.Alpha) != n {
		c.fail("schedule.offload", LengthOfList, fmt.Sprintf("write %d shares", n),
			"offload lists %d shares for %d subsequences", len(s.Offload.Alpha), n)
	}
	if len(s.Keep) == 2 && s.Keep[0] == s.Keep[1] {
		c.fail("schedule.keep", Duplicate, "", "keep names `%s` twice", s.Keep[0])
	}
	if s.Order == "layer" && s.PP > 1 {
		c.fail("schedule.order", Conflict, "pp = 1, or order = sequence", "order = layer needs a single stage, not pp = %d", s.PP)
	}
}

// nearDivisors returns the divisors of n that are nearest to x, below and above it.
func nearDivisors(n, x int) string {
	return nearDivisorsWith(n, x, func(int) bool { return true })
}

// nearDivisorsWith returns the nearest divisors of n that also satisfy a condition, or "".
func nearDivisorsWith(n, x int, ok func(int) bool) string {
	below, above := 0, 0
	for d := 1; d <= int(math.Sqrt(float64(n)))+1; d++ {
		if n%d != 0 {
			continue
		}
		for _, e := range []int{d, n / d} {
			if e < x && ok(e) {
				below = max(below, e)
			}
			if e > x && ok(e) && (above == 0 || e < above) {
				above = e
			}
		}
	}
	return twoOf(int64(below), int64(above))
}

// nearMultiples returns the multiples of step that are nearest to x, below and above it.
func nearMultiples(x, step int64) string {
	below := x / step * step
	return twoOf(below, below+step)
}

func twoOf(a, b int64) string {
	out := []string{}
	for _, n := range []int64{a, b} {
		if word := fmt.Sprint(n); n > 0 && !slices.Contains(out, word) {
			out = append(out, word)
		}
	}
	return strings.Join(out, " or ")
}

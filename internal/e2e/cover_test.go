package e2e

import (
	"fmt"
	"iter"
	"slices"
	"testing"

	"sppo.dev/internal/passes/strategy"
)

// setting is one dimension of the space: its number of values, and a function that gives a case one of them.
type setting struct {
	name string
	size int
	set  func(c *Case, value int)
}

func choice[V any](name string, set func(*Case, V), values ...V) setting {
	return setting{name, len(values), func(c *Case, i int) { set(c, values[i]) }}
}

// space lists the settings. The first value of each is the plainest.
var space = []setting{
	choice("family", func(c *Case, v string) { c.Family = v }, "gpt", "llama"),
	choice("kv_heads", func(c *Case, v int) { c.KVHeads = v }, 4, 2, 1),
	choice("dtype", func(c *Case, v string) { c.DType = v }, "f32", "bf16"),
	choice("pp", func(c *Case, v int) { c.PP = v }, 1, 2, 4),
	choice("sp", func(c *Case, v int) { c.SP = v }, 1, 2, 4),
	choice("sp_mode", func(c *Case, v string) { c.SPMode = v }, "megatron", "ulysses", "ring"),
	choice("dp", func(c *Case, v int) { c.DP = v }, 1, 2),
	choice("zero", func(c *Case, v string) { c.Zero = v }, "0", "1", "2", "3"),
	choice("subsequences", func(c *Case, v int) { c.N = v }, 1, 3, 8),
	choice("offload", func(c *Case, v string) { c.Offload = v }, "none", "full", "0.5", "list", "adaptive", "memory", "auto"),
	choice("recompute", func(c *Case, v string) { c.Recompute = v }, "none", "selective", "keep_attention", "full", "full_kv", "auto"),
	choice("batch", func(c *Case, v int) { c.Batch = v }, 1, 4),
	choice("tied", func(c *Case, v bool) { c.Tied = v }, false, true),
	choice("positions", func(c *Case, v string) { c.Positions = v }, "learned", "rope", "none"),
	choice("partition", func(c *Case, v string) { c.Partition = v }, "flops", "length", "list"),
	choice("microbatch", func(c *Case, v int) { c.Microbatch = v }, 1, 2),
	choice("strategy", func(c *Case, v string) { c.Strategy = v }, strategiesWith(func(s *strategy.Strategy) bool { return s.Same == "" || s.Stages.Least == 1 })...),
	choice("virtual_stages", func(c *Case, v int) { c.VirtualStages = v }, 1, 2),
	choice("keep", func(c *Case, v string) { c.Keep = v }, "[k, v]", "[]", "[k]"),
	choice("order", func(c *Case, v string) { c.Order = v }, "sequence", "layer"),
	choice("optimizer", func(c *Case, v string) { c.Optimizer = v }, "", "sgd", "muon"),
	choice("traits", func(c *Case, v string) { c.Traits = models[v] }, "", "qwen3", "olmo2", "gemma", "smollm", "mixed"),
}

// experts gives models with experts for some without.
var experts = map[string]string{models["mixed"]: models["glm"], models["smollm"]: models["ossmoe"]}

// strategiesWith returns the names of the strategies with a property.
func strategiesWith(has func(s *strategy.Strategy) bool) (names []string) {
	for i := range strategy.All {
		if s := &strategy.All[i]; has(s) {
			names = append(names, s.Name)
		}
	}
	return names
}

// strategyAt returns the strategy with the given index.
func strategyAt(index int) *strategy.Strategy {
	var c Case
	space[settingIndex("strategy")].set(&c, index)
	return strategy.Find(c.Strategy)
}

// needsFullPipeline reports whether the strategy with that index needs a microbatch for every virtual stage.
func needsFullPipeline(index int) bool { return strategyAt(index).Name == "dualpipe-v" }

// row holds, for every setting, the index of its value, or -1 if the setting is open.
type row []int

func (r row) toCase() Case {
	c := Case{Steps: steps, Layers: 4, Sequence: 48, Vocab: tinyVocab}
	for i, s := range space {
		s.set(&c, r[i])
	}
	sum := 0
	for _, value := range r {
		sum += value
	}
	if sum%2 == 0 { // half of these cases; values of the settings would need more cases
		if c.SP == 4 && c.SPMode != "ring" {
			c.SPMode += "-ring"
		}
		if with := experts[c.Traits]; with != "" && c.Optimizer != "muon" { // which does not update experts
			if c.Traits = with; sum%3 != 0 && c.SP > 1 { // the number of experts is divisible by those of ranks
				c.ExpertParallel = "on"
			}
		}
	}
	if c.DType == "bf16" && sum%4 < 2 { // in half of the cases that round, too
		c.GradReduce = "bf16"
	}
	if c.SPMode == "ring" || c.onRing() { // subsequences are multiples of twice sp
		c.Sequence *= 2
	}
	if sum%3 == 0 { // in a third of the cases; a separate setting would need more cases
		c.OptimizerOffload = "host"
	}
	return c
}

// forbidden lists pairs of choices that no spec can combine.
var forbidden = []struct {
	a, b   string
	clash  func(a, b int) bool // takes the indexes of both values
	reason string
}{
	{"batch", "dp", func(batch, dp int) bool { return batch == 0 && dp == 1 }, "a batch of one cannot be divided"},
	{"batch", "microbatch", func(batch, microbatch int) bool { return batch == 0 && microbatch == 1 }, "nor taken two at a time"},
	{"strategy", "subsequences", func(s, n int) bool { return strategyAt(s).Sliced != "" && n > 0 }, "some strategies take whole sequences"},
	{"strategy", "virtual_stages", func(s, v int) bool { return !strategyAt(s).Stages.Has(v + 1) }, "some want two virtual stages, some one"},
	{"pp", "order", func(pp, order int) bool { return pp > 0 && order == 1 }, "layer order is for one stage"},
	{"strategy", "order", func(strategy, order int) bool { return strategy > 0 && order == 1 }, "and takes sequences one by one"},
	{"recompute", "order", func(recompute, order int) bool { return recompute == 4 && order == 0 }, "K and V of a layer are together in layer order alone"},
	{"recompute", "keep", func(recompute, keep int) bool { return recompute == 4 && keep > 0 }, "and recomputed where they do not stream"},
	{"recompute", "pp", func(recompute, pp int) bool { return recompute == 4 && pp > 0 }, "so on one stage"},
	{"recompute", "strategy", func(recompute, strategy int) bool { return recompute == 4 && strategy > 0 }, "of one strategy"},
	{"pp", "virtual_stages", func(pp, v int) bool { return pp == 2 && v == 1 }, "four layers do not make eight stages"},
	{"strategy", "keep", func(s, keep int) bool { return strategyAt(s).Late && keep > 0 }, "nor do backwards in halves stream K and V"},
	{"pp", "strategy", func(pp, s int) bool { return pp == 2 && strategyAt(s).Stages.Least > 1 }, "nor do they for a strategy"},
	{"batch", "strategy", func(batch, s int) bool { return batch == 0 && needsFullPipeline(s) }, "a microbatch for each stage,"},
	{"traits", "kv_heads", func(traits, kv int) bool { return traits == 2 && kv > 0 }, "a norm of all key heads wants them on one rank or exchanged"},
	{"dp", "strategy", func(dp, s int) bool { return dp == 1 && needsFullPipeline(s) }, "of two ranks four,"},
	{"microbatch", "strategy", func(microbatch, s int) bool { return microbatch == 1 && needsFullPipeline(s) }, "is the whole batch"},
}

func settingIndex(name string) int {
	i := slices.IndexFunc(space, func(s setting) bool { return s.name == name })
	if i < 0 {
		panic("internal: no setting " + name)
	}
	return i
}

// allowed reports whether a row, which may have open settings, can become a spec.
func (r row) allowed() bool {
	for _, f := range forbidden {
		if a, b := r[settingIndex(f.a)], r[settingIndex(f.b)]; a >= 0 && b >= 0 && f.clash(a, b) {
			return false
		}
	}
	return true
}

// tuple is a combination of values of a few settings. It holds, for every setting, 1 + the index of the value,
// or 0 for any value.
type tuple [24]uint8

// tuples yields every combination of the given number of a row's values.
func (r row) tuples(strength int) iter.Seq[tuple] {
	return func(yield func(tuple) bool) { r.extend(tuple{}, 0, strength, yield) }
}

func (r row) extend(t tuple, from, left int, yield func(tuple) bool) bool {
	if left == 0 {
		return yield(t)
	}
	for i := from; i < len(r); i++ {
		if r[i] < 0 {
			continue
		}
		next := t
		next[i] = uint8(r[i] + 1)
		if !r.extend(next, i+1, left-1, yield) {
			return false
		}
	}
	return true
}

// coverage holds the tuples that some spec can have, and those of them that no row contains yet.
type coverage struct {
	strength int
	order    []tuple // all tuples, in order of settings and values
	open     map[tuple]bool
}

func newCoverage(strength int) *coverage {
	v := &coverage{strength: strength, open: map[tuple]bool{}}
	v.fill(openRow(), 0, strength)
	return v
}

// fill adds the tuples of all allowed rows that result from choosing values for the given number of further
// settings.
func (v *coverage) fill(r row, from, left int) {
	if left == 0 {
		if r.allowed() {
			for t := range r.tuples(v.strength) {
				v.order, v.open[t] = append(v.order, t), true
			}
		}
		return
	}
	for i := from; i < len(space); i++ {
		for value := range space[i].size {
			r[i] = value
			v.fill(r, i+1, left-1)
		}
		r[i] = -1
	}
}

func openRow() row {
	r := make(row, len(space))
	for i := range r {
		r[i] = -1
	}
	return r
}

func (v *coverage) covered() int { return len(v.order) - len(v.open) }

func (v *coverage) add(r row) {
	for t := range r.tuples(v.strength) {
		delete(v.open, t)
	}
}

// next returns a row that contains the first uncovered tuple. For the other settings, one after another, it
// chooses the value that covers the most other tuples.
func (v *coverage) next() row {
	r := openRow()
	for _, t := range v.order {
		if v.open[t] {
			for i := range r {
				r[i] = int(t[i]) - 1
			}
			break
		}
	}
	for i := range r {
		if r[i] < 0 {
			r[i] = v.best(r, i)
		}
	}
	return r
}

func (v *coverage) best(r row, i int) int {
	best, most := -1, -1
	for value := range space[i].size {
		r[i] = value
		if !r.allowed() {
			continue
		}
		gain := 0
		for t := range r.tuples(v.strength) {
			if v.open[t] {
				gain++
			}
		}
		if gain > most {
			best, most = value, gain
		}
	}
	r[i] = -1
	return best
}

// cover returns rows that contain every possible pair of values. Early rows contain the most: the first 20 contain every value,
// and the first 30 contain 88% of the pairs. It also returns which pairs and triples the rows contain.
func cover() (rows []row, pairs, triples *coverage) {
	pairs, triples = newCoverage(2), newCoverage(3)
	for len(pairs.open) > 0 {
		r := pairs.next()
		rows = append(rows, r)
		pairs.add(r)
		triples.add(r)
	}
	return rows, pairs, triples
}

// TestCover checks the covering set independently: every pair of values that a spec can combine occurs in a
// case, and there are at most 90 cases.
func TestCover(t *testing.T) {
	rows, pairs, triples := cover()
	t.Logf("%d cases cover %d of %d pairs and %d of %d triples", len(rows), pairs.covered(), len(pairs.order), triples.covered(), len(triples.order))
	if len(rows) > 90 {
		t.Errorf("%d cases, at most 90 are wanted", len(rows))
	}
	seen := map[string]bool{}
	for _, r := range rows {
		if !r.allowed() {
			t.Errorf("%v cannot be a spec", r.toCase())
		}
		for i := range r {
			for j := range i {
				seen[fmt.Sprint(i, r[i], j, r[j])] = true
			}
		}
	}
	for i := range space {
		for j := range i {
			for a := range space[i].size {
				for b := range space[j].size {
					r := openRow()
					r[i], r[j] = a, b
					if r.allowed() && !seen[fmt.Sprint(i, a, j, b)] {
						t.Errorf("no case has value %d of %s with value %d of %s", a, space[i].name, b, space[j].name)
					}
				}
			}
		}
	}
}

package e2e

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"

	"sppo.dev/internal/irtest"
	"sppo.dev/internal/train"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/field"
	"sppo.dev/ir"
)

// programKinds lists the kinds of programs that TestMutants breaks.
var programKinds = []struct {
	name string
	Case
}{
	{"one rank", Case{Family: "gpt", Positions: "learned", KVHeads: 4, Batch: 1, N: 1}},
	{"tied, bf16", Case{Family: "gpt", Positions: "learned", DType: "bf16", KVHeads: 4, Tied: true, Batch: 2, PP: 2, N: 2}},
	{"sp_mode = megatron", Case{Family: "gpt", Positions: "rope", KVHeads: 2, Batch: 1, PP: 2, SP: 2, N: 3}},
	{"sp_mode = ulysses", Case{Family: "llama", Positions: "rope", KVHeads: 1, Batch: 2, PP: 2, SP: 2, SPMode: "ulysses", N: 3}},
	{"sp_mode = ring", Case{Family: "llama", Positions: "rope", KVHeads: 2, Batch: 1, SP: 3, SPMode: "ring", N: 3}},
	{"sp = [2, 2], megatron", Case{Family: "llama", Positions: "rope", KVHeads: 2, Batch: 1, SP: 4, SPMode: "megatron-ring", N: 2}},
	{"sp = [2, 2], ulysses", Case{Family: "llama", Positions: "rope", KVHeads: 1, Batch: 1, SP: 4, SPMode: "ulysses-ring", N: 2}},
	{"keep = [], sp_mode = ring", Case{Family: "llama", Positions: "rope", KVHeads: 2, Batch: 1, SP: 2, SPMode: "ring", N: 3, Keep: "[]", Window: "[3, 0]"}},
	{"mux = left", Case{Family: "llama", Positions: "rope", KVHeads: 2, Batch: 1, PP: 3, N: 4, Mux: "left", Layers: 3}},
	{"mux = right", Case{Family: "llama", Positions: "rope", KVHeads: 2, Batch: 1, PP: 3, N: 4, Mux: "right", Layers: 3}},
	{"zero = 1", Case{Family: "llama", Positions: "rope", KVHeads: 4, Batch: 4, DP: 2, Zero: "1", N: 2}},
	{"zero = 2", Case{Family: "gpt", Positions: "learned", DType: "bf16", KVHeads: 4, Batch: 4, DP: 2, SP: 2, Zero: "2", N: 2}},
	{"zero = 3", Case{Family: "llama", Positions: "rope", DType: "bf16", KVHeads: 4, Batch: 4, DP: 2, Zero: "3", N: 2, Recompute: "full"}},
	{"zero = 0, grad_reduce = bf16", Case{Family: "llama", Positions: "rope", DType: "bf16", KVHeads: 4, Batch: 2, DP: 2, SP: 2, SPMode: "ulysses", N: 2, GradReduce: "bf16"}},
	{"zero = 3, grad_reduce = bf16", Case{Family: "gpt", Positions: "learned", DType: "bf16", KVHeads: 4, Batch: 4, DP: 2, SP: 2, SPMode: "ulysses", Zero: "3", N: 2, GradReduce: "bf16"}},
	{"strategy = zb-h1", Case{Family: "gpt", Positions: "rope", KVHeads: 4, Batch: 3, PP: 2, N: 1, Strategy: "zb-h1"}},
	{"strategy = zb-v", Case{Family: "gpt", Positions: "learned", KVHeads: 4, Batch: 4, PP: 2, N: 1, VirtualStages: 2, Strategy: "zb-v", Layers: 4}},
	{"strategy = seq1f1b", Case{Family: "llama", Positions: "rope", KVHeads: 4, Batch: 3, PP: 2, N: 3, Strategy: "seq1f1b", Recompute: "selective"}},
	{"strategy = interleaved-sppo", Case{Family: "gpt", Positions: "learned", KVHeads: 4, Batch: 1, PP: 2, N: 4, VirtualStages: 2, Strategy: "interleaved-sppo", Layers: 4}},
	{"keep = []", Case{Family: "llama", Positions: "rope", KVHeads: 4, Batch: 1, N: 3, Keep: "[]"}},
	{"keep = [k], sp = 2", Case{Family: "llama", Positions: "rope", KVHeads: 2, Batch: 2, SP: 2, N: 4, Keep: "[k]"}},
	{"recompute = full", Case{Family: "llama", Positions: "rope", KVHeads: 4, Batch: 1, N: 3, Recompute: "full"}},
	{"order = layer", Case{Family: "gpt", Positions: "rope", KVHeads: 4, Batch: 2, N: 3, Order: "layer"}},
	{"recompute = full_kv", Case{Family: "llama", Positions: "rope", KVHeads: 2, Batch: 2, N: 3, Order: "layer", VirtualStages: 2, Recompute: "full_kv"}},
	{"optimizer on the host", Case{Family: "llama", Positions: "rope", DType: "bf16", KVHeads: 4, Batch: 1, N: 2, OptimizerOffload: "host"}},
	{"muon", Case{Family: "llama", Positions: "rope", KVHeads: 4, Batch: 2, SP: 2, N: 2, Optimizer: "muon"}},
	{"sgd, windows", Case{Family: "gpt", Positions: "rope", KVHeads: 4, Batch: 2, N: 3, Optimizer: "sgd", Window: "[5, 0]"}},
	{"lora", Case{Family: "llama", Positions: "rope", DType: "bf16", KVHeads: 2, Batch: 2, PP: 2, N: 2, Tuning: "adapter = lora(rank = 3, alpha = 6, targets = all-linear, dropout = 0.2)"}},
	{"frozen layers", Case{Family: "gpt", Positions: "learned", KVHeads: 4, Batch: 2, N: 2, Tuning: `freeze = [embeddings, "layer.0"]`}},
	{"packed documents", Case{Family: "llama", Positions: "rope", KVHeads: 4, Batch: 2, N: 3}},
	{"sinks", Case{Family: "llama", Positions: "rope", KVHeads: 2, Batch: 1, SP: 2, SPMode: "ulysses", N: 2, Traits: models["gptoss"]}},
	{"gemma", Case{Family: "llama", Positions: "rope", KVHeads: 2, Batch: 1, PP: 2, N: 2, Traits: models["gemma"]}},
	{"layers of several forms", Case{Family: "llama", Positions: "rope", KVHeads: 2, Batch: 1, PP: 2, N: 3, Layers: 3, Traits: models["mixed"]}},
	{"experts", Case{Family: "llama", Positions: "rope", KVHeads: 2, Batch: 2, SP: 2, N: 2, Recompute: "full", Traits: models["glm"], Tuning: "moe_router_bias_update_rate = 0.1"}},
	{"experts, sp_mode = ulysses", Case{Family: "llama", Positions: "rope", KVHeads: 2, Batch: 1, PP: 2, SP: 2, SPMode: "ulysses", N: 2, Traits: models["qwenmoe"]}},
	{"experts, aux_loss = joint", Case{Family: "llama", Positions: "rope", KVHeads: 2, Batch: 2, PP: 2, SP: 2, SPMode: "ulysses", N: 2, Layers: 4, Traits: models["joint"]}},
	{"experts with biases", Case{Family: "gpt", Positions: "rope", KVHeads: 2, Batch: 2, DP: 2, SP: 2, Zero: "3", N: 2, Traits: models["ossmoe"]}},
	{"expert_parallel = on", Case{Family: "llama", Positions: "rope", KVHeads: 2, Batch: 1, SP: 4, ExpertParallel: "on", N: 2, Recompute: "full", Traits: models["glm"]}},
	{"expert_parallel = on, sp_mode = ulysses", Case{Family: "llama", Positions: "rope", KVHeads: 2, Batch: 1, PP: 2, SP: 2, SPMode: "ulysses", ExpertParallel: "on", N: 2, Traits: models["ossmoe"]}},
	{"linear attention", Case{Family: "llama", Positions: "rope", KVHeads: 2, Batch: 2, SP: 2, N: 3, Recompute: "full", Traits: models["hybrid"]}},
	{"linear attention, sp_mode = ulysses", Case{Family: "llama", Positions: "rope", KVHeads: 2, Batch: 1, PP: 2, SP: 2, SPMode: "ulysses", N: 3, Traits: models["hybrid"]}},
	{"mamba2, latent experts", Case{Family: "gpt", Positions: "none", KVHeads: 2, Batch: 2, SP: 2, N: 3, Layers: 4, Recompute: "full", Traits: models["nemotron"]}},
	{"mamba2, sp_mode = ulysses", Case{Family: "llama", Positions: "rope", KVHeads: 2, Batch: 1, PP: 2, SP: 2, SPMode: "ulysses", N: 3, Traits: models["mamba"]}},
	{"kimi_delta", Case{Family: "llama", Positions: "rope", KVHeads: 2, Batch: 2, SP: 2, N: 3, Recompute: "full", Traits: models["kimi"]}},
	{"kimi_delta, sp_mode = ulysses", Case{Family: "llama", Positions: "rope", KVHeads: 2, Batch: 1, PP: 2, SP: 2, SPMode: "ulysses", N: 3, Layers: 3, Traits: models["kimi"]}},
	{"latent attention", Case{Family: "llama", Positions: "rope", KVHeads: 4, Batch: 2, SP: 2, N: 3, Recompute: "full", Traits: models["deepseek"]}},
	{"latent attention, sp_mode = ulysses", Case{Family: "llama", Positions: "rope", KVHeads: 4, Batch: 1, PP: 2, SP: 2, SPMode: "ulysses", N: 2, Traits: models["latent"]}},
	{"latent_cache = on", Case{Family: "llama", Positions: "rope", KVHeads: 4, Batch: 2, SP: 2, N: 3, LatentCache: "on", Traits: models["deepseek"]}},
	{"latent_cache = on, keep = []", Case{Family: "llama", Positions: "rope", KVHeads: 4, Batch: 1, SP: 2, SPMode: "ulysses", N: 3, Keep: "[]", LatentCache: "on", Recompute: "full", Traits: models["latent"]}},
	{"attention sinks", Case{Family: "llama", Positions: "rope", KVHeads: 2, Batch: 2, SP: 2, N: 3, Recompute: "full", Traits: models["gptoss"]}},
	{"latent attention, keep = []", Case{Family: "llama", Positions: "rope", KVHeads: 4, Batch: 1, N: 3, Keep: "[]", Traits: models["deepseek"]}},
	{"latent attention, sp_mode = ring", Case{Family: "llama", Positions: "rope", KVHeads: 4, Batch: 2, SP: 2, SPMode: "ring", N: 2, Traits: models["latent"]}},
	{"latent attention, order = layer", Case{Family: "llama", Positions: "rope", KVHeads: 4, Batch: 2, N: 3, Order: "layer", VirtualStages: 2, Recompute: "full_kv", Traits: models["deepseek"]}},
	{"latent attention, lora", Case{Family: "llama", Positions: "rope", DType: "bf16", KVHeads: 4, Batch: 2, PP: 2, N: 2, Traits: models["deepseek"],
		Tuning: "adapter = lora(rank = 3, alpha = 6, targets = all-linear, dropout = 0.2)"}},
	{"kimi_delta and latent attention", Case{Family: "llama", Positions: "none", KVHeads: 4, Batch: 1, PP: 2, SP: 2, N: 3, Layers: 4, Traits: models["kimilin"]}},
	{"kimi_delta, lora", Case{Family: "llama", Positions: "none", KVHeads: 4, Batch: 2, SP: 2, SPMode: "ulysses", N: 2, Layers: 3, Traits: models["kimilin"],
		Tuning: "adapter = lora(rank = 3, alpha = 6, targets = all-linear, dropout = 0.2)"}},
	{"kimi_delta, zero = 3", Case{Family: "llama", Positions: "rope", KVHeads: 2, Batch: 2, DP: 2, Zero: "3", N: 3, Layers: 3, Offload: "full", Traits: models["kimi"]}},
	{"experts, topk_method = group_limited_greedy", Case{Family: "llama", Positions: "rope", KVHeads: 2, Batch: 2, PP: 2, SP: 2, ExpertParallel: "on", N: 2, Traits: models["limited"]}},
}

// programOf compiles the program of a kind.
func programOf(t *testing.T, kind int) *ir.Program {
	t.Helper()
	return smallProgram(t, programKinds[kind].Case, programKinds[kind].name == "packed documents")
}

// smallProgram compiles the program of a case, whose open fields get small values. Packed sequences have several documents, and labels
// that do not count.
func smallProgram(t *testing.T, c Case, packed bool) *ir.Program {
	t.Helper()
	c.DType, c.Partition, c.Offload = cmp.Or(c.DType, "f32"), "flops", cmp.Or(c.Offload, "full")
	c.PP, c.SP, c.DP, c.Microbatch = max(c.PP, 1), max(c.SP, 1), max(c.DP, 1), 1
	c.Steps, c.Layers, c.Sequence, c.Vocab = 2, max(c.Layers, 2), 48, tinyVocab
	text := c.Spec()
	if packed {
		tokens := drawCorpus(t, rand.New(rand.NewPCG(3, 0)), tinyVocab, c.Sequence, 12*c.Sequence, false, true)
		text = strings.Replace(text, "data = random()", fmt.Sprintf("holdout = 0.3\n  data = tokens(%q, documents = index, masks = on)", tokens.dir), 1)
	}
	_, p, err := compile(text)
	if err == nil {
		err = ir.Verify(p)
	}
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return p
}

// outcomeOver trains a program over finite fields and returns all numbers that a run has as its results: losses, norms of gradients,
// and states.
func outcomeOver(t testing.TB, p *ir.Program) (numbers []float64, err error) {
	t.Helper()
	return outcomeUnlike(t, p, nil)
}

// outcomeUnlike is like outcomeOver, but returns only the numbers of the first steps if they differ from those of another outcome.
func outcomeUnlike(t testing.TB, p *ir.Program, other []float64) (numbers []float64, err error) {
	t.Helper()
	machine := field.New(p)
	job, err := train.Open(p, func(int) (vm.Device, error) { return machine.Device(), nil }, train.Options{})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, job.Close()) }()
	if err := job.Init(t.Context()); err != nil {
		return nil, err
	}
	raiseAdapters(t, p, job)
	for range p.Run.Steps {
		step, err := job.Step(t.Context())
		if err != nil {
			return nil, err
		}
		if numbers = append(numbers, step.Loss, step.GradNorm); other != nil && !sameNumbers(numbers, other[:len(numbers)]) {
			return numbers, nil
		}
	}
	loss, err := job.Eval(t.Context())
	if err != nil {
		return nil, err
	}
	numbers = append(numbers, loss)
	losses, err := job.TokenLosses()
	if err != nil {
		return nil, err
	}
	for _, x := range losses {
		numbers = append(numbers, float64(x))
	}
	for _, tensor := range p.Tensors {
		for role := range ir.NumRoles {
			if role == ir.RoleGrad || !holds(p, tensor.Name, role) {
				continue
			}
			values, _, err := job.Tensor(tensor.Name, role)
			if err != nil {
				return nil, err
			}
			for _, x := range values {
				numbers = append(numbers, float64(x))
			}
		}
	}
	return numbers, nil
}

// count is a row of the table of mutants.
type count struct{ tried, accepted, changed int }

func (c *count) add(o count) {
	c.tried, c.accepted, c.changed = c.tried+o.tried, c.accepted+o.accepted, c.changed+o.changed
}

// counts counts mutants by name: of a mutation or of a kind of programs.
type counts map[string]*count

func (c counts) at(name string) *count {
	if c[name] == nil {
		c[name] = new(count)
	}
	return c[name]
}

// maxHarmful is the largest number of mutants in 10,000 that the verifier may accept although they change results.
const maxHarmful = 80

// TestMutants breaks programs of all kinds. The verifier must refuse every mutant that it promises to refuse. Every other mutant that
// it accepts is trained over finite fields: few may have other results than the program.
func TestMutants(t *testing.T) {
	each, seed := 1, irtest.Seed(t)
	if os.Getenv("SPPO_LONG") != "" {
		each = 18
	}
	var mu sync.Mutex
	byMutation, byProgram, all := counts{}, counts{}, count{}
	t.Run("kinds", func(t *testing.T) {
		for i, k := range programKinds {
			t.Run(k.name, func(t *testing.T) {
				t.Parallel()
				got, total := breakProgram(t, i, each, seed), count{}
				mu.Lock()
				defer mu.Unlock()
				for name, c := range got {
					byMutation.at(name).add(*c)
					total.add(*c)
				}
				byProgram.at(k.name).add(total)
				all.add(total)
			})
		}
	})
	var names []string
	for _, k := range mutations {
		names = append(names, k.name)
		if k.promised && byMutation.at(k.name).tried == 0 {
			t.Errorf("no mutants: %s", k.name)
		}
	}
	printCounts(t, "mutation", names, byMutation, all)
	names = nil
	for _, k := range programKinds {
		names = append(names, k.name)
	}
	printCounts(t, "program", names, byProgram, all)
	if most := max(1, maxHarmful*all.tried/10000); all.changed > most {
		t.Errorf("%d mutants change results and are accepted, more than %d", all.changed, most)
	}
}

func printCounts(t *testing.T, title string, names []string, rows counts, all count) {
	t.Helper()
	var b strings.Builder
	fmt.Fprintf(&b, "\n%-28s %6s %9s %16s\n", title, "tried", "accepted", "changed results")
	for _, name := range names {
		c := rows.at(name)
		fmt.Fprintf(&b, "%-28s %6d %9d %16d\n", name, c.tried, c.accepted, c.changed)
	}
	fmt.Fprintf(&b, "%-28s %6d %9d %16d", "all", all.tried, all.accepted, all.changed)
	t.Log(b.String())
}

// breakProgram applies each mutation to the program of a kind several times.
func breakProgram(t *testing.T, kind, each int, seed uint64) counts {
	t.Helper()
	p := programOf(t, kind)
	want, err := outcomeOver(t, p)
	if err != nil {
		t.Fatal(err)
	}
	table := counts{}
	for k, mutation := range mutations {
		for n := range each {
			m := newMutant(rand.New(rand.NewPCG(seed+uint64(kind), uint64(k<<16+n))), p)
			if !mutation.apply(m) {
				continue
			}
			row := table.at(mutation.name)
			row.tried++
			if ir.Verify(m.p) != nil {
				continue
			}
			row.accepted++
			got, err := outcomeUnlike(t, m.p, want)
			changed := err != nil || !sameNumbers(got, want)
			if changed {
				row.changed++
			}
			switch {
			case mutation.promised:
				t.Errorf("%s: accepted: %s", mutation.name, m.what)
			case changed:
				t.Logf("%s: changes results: %s", mutation.name, m.what)
			}
		}
	}
	return table
}

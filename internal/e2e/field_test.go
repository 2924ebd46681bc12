package e2e

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/irtest"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/field"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// trainField trains a program over finite fields, where sums are exact. In place of the validation's loss, for which the VM
// computes a mean in floating point, the result has the losses of all tokens of the validation's last section.
func trainField(t testing.TB, p *ir.Program) *Result {
	t.Helper()
	machine := field.New(p)
	job := openOn(t, p, func(int) vm.Device { return machine.Device() })
	result := trained(t, p, job, func() {})
	result.EvalLoss = 0
	losses, err := job.TokenLosses()
	if err != nil {
		t.Fatal(err)
	}
	result.TokenLosses = losses
	return result
}

// TestRandomSpecsOverField draws specs, as TestRandomSpecs does. Over finite fields, the drawn program and the plain one must
// agree in every loss, gradient, weight and moment, however different their sums are.
func TestRandomSpecsOverField(t *testing.T) {
	draws, seed := 4, irtest.Seed(t)
	if os.Getenv("SPPO_LONG") != "" {
		draws = 500
	}
	order := rand.New(rand.NewPCG(seed, 0)).Perm(len(traits))
	for i := range uint64(draws) {
		wanted := traits[order[i%uint64(len(order))]]
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(seed, 1+i))
			for range 20000 {
				d := drawSpec(r)
				if wanted.asked != nil && !wanted.asked(d) || !d.compile(t) || wanted.planned != nil && !wanted.planned(d) {
					continue
				}
				got, plain := d.runField(t, d.drawn()), d.runField(t, d.plain())
				checkSame(t, "over a finite field, against the plain program", got, plain)
				losses, want := got.TokenLosses, plain.TokenLosses
				if common := min(len(losses), len(want)); !slices.Equal(losses[len(losses)-common:], want[len(want)-common:]) {
					t.Error("the losses of tokens differ in the validation")
				}
				if t.Failed() {
					t.Logf("%s\n%s", strings.Join(d.drawn(), "\n"), d.text)
				}
				return
			}
			t.Errorf("no draw with %s can be scheduled", wanted.name)
		})
	}
}

func (d *drawn) runField(t *testing.T, set []string) *Result {
	t.Helper()
	_, p, err := compile(d.text, set...)
	if err != nil {
		t.Fatalf("%s: %v", strings.Join(set, " "), err)
	}
	return trainField(t, p)
}

// TestMuonOverField divides among ranks the matrices that Muon updates, of which several ranks may hold the same part: it multiplies
// sums over all of these ranks by a third, for example.
func TestMuonOverField(t *testing.T) {
	const latent = "layer_types = latent kv_lora_rank = 12 qk_nope_head_dim = 4 qk_rope_head_dim = 4 v_head_dim = 6"
	for _, x := range []struct{ model, schedule string }{
		{"kv_heads = 1", "sp=3 zero=1"}, // three ranks have the same K and V
		{"kv_heads = 1", "sp=[3,2] dp=2 zero=2"},
		{"kv_heads = 6", "sp=[2,3]"},
		{"kv_heads = 6 " + latent, "sp=[2,3] latent_cache=on subsequences=2"},
		{"kv_heads = 6 " + latent, "sp=[2,3] latent_cache=on subsequences=2 sp_mode=ulysses dp=2 zero=3"},
	} {
		t.Run(x.schedule, func(t *testing.T) {
			run := func(schedule string) *Result {
				var set []string
				for key := range strings.FieldsSeq(schedule) {
					set = append(set, "schedule."+key)
				}
				_, p, err := compile(fmt.Sprintf(`import "clusters/local.sppo"
model m { family = llama layers = 1 hidden = 24 heads = 6 ffn = 10 vocab = 11 dtype = f32 positions = none %s }
cluster all = local(ranks = 12)
train { sequence = 24 batch = 2 steps = 1 optimizer = muon(lr = 1e-2) data = random() eval_batch = 2 }
schedule s { pp = 1 sp = 1 sp_mode = megatron dp = 1 subsequences = 1 }
`, x.model), set...)
				if err != nil {
					t.Fatal(err)
				}
				return trainField(t, p)
			}
			checkSame(t, "against the plain program", run(x.schedule), run(""))
		})
	}
}

// runs reports whether a program can run, even if it computes something else: the verifier finds nothing wrong but its formulas.
func runs(p *ir.Program) bool {
	err := ir.VerifyOptions{AllowOverCapacity: true}.Verify(p)
	var found *ir.VerifyError
	return err == nil || errors.As(err, &found) && !slices.ContainsFunc(found.Findings, func(f ir.Finding) bool { return f.Kind != ir.FindFormula })
}

// noisy reports whether a model has a tensor whose gradient is zero in theory: see zeroGradient. On the cpu device the gradient is
// noise, of which AdamW makes steps that reach the other weights.
func noisy(model lang.Model) bool {
	rotated := true
	for layer := range model.Layers {
		rotated = rotated && model.Rotates(layer)
	}
	return model.HasBias(lang.BiasQKV) && !rotated && model.QKNorm == lang.QKNormNone && !model.AttnSinks
}

// TestFieldSeesErrors changes programs such that they still run. Where a change makes the weights on the cpu device
// differ by more than rounding, it must also make those over finite fields differ.
func TestFieldSeesErrors(t *testing.T) {
	specs, each, seed := 2, 2, irtest.Seed(t)
	if os.Getenv("SPPO_LONG") != "" {
		specs, each = 40, 6
	}
	harmful := 0
	for i, tried := uint64(0), 0; tried < specs; i++ {
		p := drawnProgram(t, rand.New(rand.NewPCG(seed, i)))
		if noisy(lang.Model(p.Model)) {
			continue
		}
		tried++
		cpuWants, fieldWants := trained(t, p, open(t, p, 1, nil), func() {}), trainField(t, p)
		for k, kind := range mutations {
			for n := range each {
				m := newMutant(rand.New(rand.NewPCG(seed+i, uint64(k*each+n))), p)
				if !kind.apply(m) || !runs(m.p) {
					continue
				}
				got, name := trained(t, m.p, open(t, m.p, 1, nil), func() {}), ""
				for tensor, want := range cpuWants.Weights {
					if difference, size := distance(got.Weights[tensor], want); !(difference <= 1e-3*size) {
						name = tensor
					}
				}
				if name == "" {
					continue
				}
				harmful++
				if over := trainField(t, m.p); len(differing(over.Weights, fieldWants.Weights, fieldWants.Names)) == 0 {
					t.Errorf("spec %d: %s: %s changes %s, but nothing over finite fields", i, kind.name, m.what, name)
				}
			}
		}
	}
	if t.Logf("%d changes of weights", harmful); harmful == 0 {
		t.Error("no program was changed so that its weights differ")
	}
}

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/irtest"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// This file compares families of models with the library transformers under schedules that cover all choices. Each run draws the same
// schedules, or others if SPPO_LONG is set.

// families lists those whose programs are compared with transformers under many schedules, each with its fixture FAMILY-deep.
var families = []string{
	"qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "minimax_m2", "deepseek_v2", "deepseek_v3", "mistral4",
	"olmo3", "seed_oss", "ministral3", "granite", "exaone4", "hunyuan_v1_dense", "ernie4_5", "nemotron_h", "kimi_linear", "qwen3_next", "qwen3_5",
	"deepseek_v2-groups",
}

// listed lists values of keys of a schedule, each of which every family has in some schedule. The key documents stands for sequences of
// several documents.
var listed = []struct {
	key    string
	values []string
}{
	{"order", []string{"sequence", "layer"}},
	{"recompute", []string{"none", "selective", "keep_attention", "full", "full_kv", "auto"}},
	{"keep", []string{"[k, v]", "[k]", "[]"}},
	{"pp", []string{"1", "2", "4"}},
	{"sp", []string{"1", "2", "4"}},
	{"sp_mode", []string{"megatron", "ulysses", "ring"}},
	{"expert_parallel", []string{"off", "on"}},
	{"zero", []string{"0", "1", "2", "3"}},
	{"offload", []string{"none", "full", "0.5", "adaptive", "carry", "memory", "auto"}},
	{"documents", []string{"off", "on"}},
	{"subsequences", []string{"1", "2", "5"}},
	{"dp", []string{"1", "2"}},
	{"mux", []string{"off", "left", "right", "on"}},
	{"latent_cache", []string{"off", "on"}},
}

// TestFamilies compares a model of each family with transformers under schedules that together have every listed value, and under one that
// is drawn, or 40 in the long form: the losses of all tokens, the gradients, and the losses after each of ten steps with AdamW.
func TestFamilies(t *testing.T) {
	if !numbers {
		t.Skip("too slow under the race detector")
	}
	further := 1
	if os.Getenv("SPPO_LONG") != "" {
		further = 40
	}
	for i, family := range families {
		t.Run(family, func(t *testing.T) {
			t.Parallel()
			want := readOracle(t, filepath.Join(oracleFolder, family+"-deep.json"))
			c := scheduleCover{rand: rand.New(rand.NewPCG(irtest.Seed(t), uint64(i))), open: map[string]bool{}}
			for _, k := range listed {
				for _, v := range k.values {
					c.open[k.key+" = "+v] = true
				}
			}
			if want.scans() {
				for _, refused := range []string{"sp_mode = ring", "mux = left", "mux = on"} {
					delete(c.open, refused)
				}
			}
			if want.Margin == 0 { // no experts
				delete(c.open, "expert_parallel = on")
			}
			if !strings.Contains(want.Keys, "kv_lora_rank") {
				delete(c.open, "latent_cache = on")
			}
			schedules := 0
			for ; len(c.open) > 0; schedules++ {
				want.checkDeep(t, &c, true)
			}
			for range further {
				want.checkDeep(t, &c, false)
			}
			t.Logf("%d schedules have all listed values; %d more are drawn", schedules, further)
			if want.Margin > 0 {
				t.Logf("the closest choice of experts is decided by %g", want.Margin)
			}
		})
	}
}

// scheduleCover draws schedules.
type scheduleCover struct {
	rand *rand.Rand
	open map[string]bool // listed values that no schedule has had
}

// draw returns a value for each listed key. If the schedule is to add to the cover, values that none has had are preferred, and one of
// them is certain.
func (c *scheduleCover) draw(adding bool) map[string]string {
	keys, certain := map[string]string{}, ""
	if adding {
		certain = pick(c.rand, slices.Sorted(maps.Keys(c.open))...)
	}
	for _, k := range listed {
		open := slices.DeleteFunc(slices.Clone(k.values), func(v string) bool { return !c.open[k.key+" = "+v] })
		if keys[k.key] = pick(c.rand, k.values...); adding && len(open) > 0 && c.rand.IntN(4) > 0 {
			keys[k.key] = pick(c.rand, open...)
		}
	}
	if key, value, ok := strings.Cut(certain, " = "); ok {
		keys[key] = value
	}
	return keys
}

// checkDeep draws schedules until one can be compiled, and compares its program with transformers.
func (o *oracle) checkDeep(t *testing.T, c *scheduleCover, adding bool) {
	t.Helper()
	for range 10000 {
		keys := c.draw(adding)
		text, documents := o.deepSpec(t, keys), keys["documents"] == "on"
		_, p, err := compile(text)
		var refused lang.Diagnostics
		switch {
		case errors.As(err, &refused):
			continue
		case err != nil:
			t.Fatalf("%v\n%s", err, text)
		}
		want, source := &o.expected, oracleSource(&drawnModel{p: p, name: o.Tokens})
		if documents {
			want, source = &o.Documents.expected, &drawnDocuments{drawnModel{p: p, name: o.Tokens}, o.Documents.Ends}
		}
		want.checkProgram(t, p, source)
		if t.Failed() {
			t.Fatal(text)
		}
		for key, value := range keys {
			delete(c.open, key+" = "+value)
		}
		return
	}
	t.Fatalf("no schedule has any of %v", c.open)
}

// deepSpec returns the spec of a model that is trained for ten steps and one more.
func (o *oracle) deepSpec(t *testing.T, keys map[string]string) string {
	t.Helper()
	data, schedule := "random()", ""
	for _, k := range listed {
		if k.key != "documents" {
			schedule += k.key + " = " + keys[k.key] + "\n  "
		} else if keys[k.key] == "on" { // the tokens themselves are those of drawnDocuments
			c := drawCorpus(t, rand.New(rand.NewPCG(1, 1)), 30, oracleSequence, 12*oracleSequence, false, false)
			data = fmt.Sprintf("tokens(%q, documents = index)", c.dir)
		}
	}
	return fmt.Sprintf(`import "clusters/local.sppo"
model deep { %s dtype = f32 }
cluster all = local(ranks = 32)
train {
  sequence = %d batch = %d steps = %d grad_clip = 0 eval_batch = 2 holdout = 0.5 warmup = 0 lr_schedule = constant
  optimizer = adamw(lr = 2e-3, betas = [0.9, 0.95], eps = 1e-4, weight_decay = 0)
  data = %s
}
schedule s {
  %s}
`, o.Keys, oracleSequence, oracleBatch, len(o.Steps)+1, data, o.schedule(schedule))
}

// drawnDocuments provides the sequences of drawnModel as several documents each.
type drawnDocuments struct {
	drawnModel
	ends [][]int
}

// Marks implements vm.Documents.
func (d *drawnDocuments) Marks(as int, section ir.Section, round, sequence, position int64, out []int32, stride int) error {
	if err := d.Tokens(section, round, sequence, position, out, stride); err != nil {
		return err
	}
	for i := 0; i < len(out); i += stride {
		at, begin := int(position)+i/stride, 0
		for _, end := range d.ends[sequence] {
			if at >= end {
				begin = end
			}
		}
		switch {
		case as == ir.AsPositions:
			out[i] = int32(at - begin)
		case as == ir.AsLabels && at == begin:
			out[i] = ir.NoLabel
		}
	}
	return nil
}

// Labels implements vm.Documents: all tokens count but the first of each document.
func (d *drawnDocuments) Labels(ir.Section, int64) (int64, error) {
	labels := oracleBatch * oracleSequence
	for _, ends := range d.ends {
		labels -= len(ends)
	}
	return int64(labels), nil
}

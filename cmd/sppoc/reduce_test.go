package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sppo.dev"
	"sppo.dev/internal/compile"
	"sppo.dev/internal/passes"
	"sppo.dev/ir"
)

// plantedSpec is a spec with everything that the planted bugs need, unless an override gives it.
const plantedSpec = `import "clusters/local.sppo"

model planted {
  family    = gpt
  layers    = 6
  hidden    = 64
  heads     = 8
  ffn       = 96
  vocab     = 101
  dtype     = f32
  tied      = true
  positions = learned
}

cluster all = local(ranks = 16)

train {
  sequence   = 96
  batch      = 8
  steps      = 5
  optimizer  = adamw(lr = 3e-4, betas = [0.9, 0.95], weight_decay = 0.1)
  grad_clip  = 1
  data       = random()
  eval_batch = 8
}

schedule planted {
  pp           = 2
  sp           = 2
  sp_mode      = megatron
  dp           = 2
  zero         = 1
  microbatch   = 1
  subsequences = 3
  offload      = full
  recompute    = none
}
`

// plantedBugs lists bugs of a compiler, each as an edit of the text of every program that it compiles.
var plantedBugs = []struct {
	name          string
	set           []string
	find, replace string // lines of the program, as a regular expression; without a replacement, they are left out
	stage         string
}{
	{"norms' gradients are not summed over sp", nil, `all_reduce .*gamma\.grad.*@sp`, "", failsVerify},
	{"biases' gradients are not summed over dp", nil, `all_reduce .*\.b1\.grad.*@dp`, "", failsVerify},
	{"tied gradients are not summed", nil, `all_reduce .*@tied`, "", failsVerify},
	{"the norm is summed over another group", nil, `(norm\.replicas.*)@dp`, "${1}@sp", failsMeaning},
	{"the norm is that of a stage", nil, `all_reduce +norm\.sums.*@pp`, "", failsMeaning},
	{"a validation has the loss of one replica", nil, `all_reduce +eval_loss.*@dp`, "", failsVerify},
	{"recomputation gathers from another group", []string{"schedule.recompute=full", "schedule.subsequences=1"}, `(gathered\.again:\S+ = .*)@sp`, "${1}@dp", failsVerify},
	{"replicas use the same sequences", nil, `(load_tokens .*)replica=\$replica`, "${1}replica=0", failsMeaning},
	{"a microbatch is used twice", nil, `load_tokens( .*)first=1 `, "load_tokens${1}first=0 ", failsMeaning},
	{"later subsequences replace a gradient", nil, `(matmul +layer\.\d+\.wq\.grad.*s0\..*) accumulate`, "$1", failsVerify},
	{"nothing is offloaded", nil, `d2h .*attn\.out`, "", failsVerify},
	{"copies are not waited for", nil, `compute +.* wait .*`, "", failsVerify},
	{"gradients are not sent", nil, `send_prev .* send .*`, "", failsVerify},
	{"keys are rotated as if they came first", []string{"model.positions=rope"}, `(rope .*\.k\b.*)position=[1-9]\d*`, "${1}position=0", failsMeaning},
	{"a tensor of the second layer is not updated", nil, `adamw .*layer\.1\.w2`, "", failsVerify},
	{"a tensor has its own weight decay", nil, `(adamw +layer\.1\.w1.*)weight_decay=0\.1`, "${1}weight_decay=0.2", failsVerify},
	{"the loss of shards is averaged twice", nil, `(cross_entropy.*scale=)\S+`, "${1}0.01", failsMeaning},
	{"a shard of the vocabulary begins at 0", nil, `(cross_entropy_stats .*)first=\$vocab_first`, "${1}first=0", failsVerify},
	{"weights are not gathered", []string{"schedule.zero=3", "schedule.sp=1"}, `all_gather +\S*w1\S* .*@dp`, "", failsVerify},
	{"a ring passes keys in place of values", []string{"schedule.sp_mode=ring"}, `(rotate .*v\.turn1:.* = \S+\.)v:`, "${1}k:", failsVerify},
	{"momentum differs", []string{"train.optimizer=muon(lr = 0.001)"}, `(nesterov .*layer\.1\..*momentum=)\S+`, "${1}0.5", failsVerify},
	{"initial values differ", nil, `(init_normal +layer\.0\.w1.*std=)\S+`, "${1}0.5", failsMeaning},
	{"an adapter's factor is doubled", []string{`train.adapter=lora(rank = 4, alpha = 8, targets = all-linear)`, "model.tied=false"}, `(axpby.*alpha=)\S+`, "${1}4", failsMeaning},
}

// TestReducePlanted plants bugs. For each, the spec must shrink to one with at most two layers.
func TestReducePlanted(t *testing.T) {
	long := os.Getenv("SPPO_LONG") != ""
	for i, bug := range plantedBugs {
		if !long && i%9 != 3 {
			continue
		}
		t.Run(bug.name, func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(t.TempDir(), "planted.sppo")
			if err := os.WriteFile(file, []byte(plantedSpec), 0o644); err != nil {
				t.Fatal(err)
			}
			r := &reducer{input: file, file: file}
			text, err := r.open(bug.set)
			if err != nil {
				t.Fatal(err)
			}
			edits := &reducer{file: "planted.sppir", program: true}
			failure := func(text string) *failure {
				spec, err := sppo.Parse(file, []byte(text))
				if err != nil {
					return nil
				}
				plan, err := compile.Plan(spec, passes.Options{})
				if err != nil {
					return nil
				}
				p, err := compile.Build(plan, nil)
				if err != nil {
					t.Error(err)
					return nil
				}
				var program bytes.Buffer
				if err := ir.Print(&program, p); err != nil {
					t.Error(err)
				}
				line := bug.find
				if bug.replace == "" {
					line = `(?m)^.*` + bug.find + `.*\n`
				}
				return edits.stages(regexp.MustCompile(line).ReplaceAllString(program.String(), bug.replace))
			}
			first := failure(text)
			if first == nil || first.stage != bug.stage {
				t.Fatalf("the spec fails with %+v", first)
			}
			s := &shrinker{lines: strings.Split(text, "\n"), left: 3000, stopped: func() bool { return false }}
			s.fails = func(text string) bool { f := failure(text); return f != nil && f.like(first) }
			s.shrink(true)
			small := strings.Join(s.lines, "\n")
			spec, err := sppo.Parse(file, []byte(small))
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("PLANTED| %s | %d | %d | %d |", bug.name, s.made, len(s.lines), spec.Model.Layers)
			if spec.Model.Layers > 2 || s.left == 0 {
				t.Errorf("%d layers after %d attempts:\n%s\nwith %v", spec.Model.Layers, s.made, small, first.err)
			}
		})
	}
}

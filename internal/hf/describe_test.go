package hf_test

import (
	"encoding/json"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"sppo.dev/internal/hf"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// described exports a model to a folder, with a new config, as if the model had not come from a folder.
func described(t *testing.T, program *ir.Program, values hf.Values, sequence int64, dtype string) string {
	t.Helper()
	model, config, err := hf.Describe(&program.Model, sequence)
	if err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(t.TempDir(), "described")
	if err := (&hf.Export{Values: values, Tensors: program.Tensors, From: model, Config: config, DType: dtype}).Write(t.Context(), out); err != nil {
		t.Fatal(err)
	}
	return out
}

// The model of every fixture gets a new config, and the folder with that config is read as the same model.
func TestDescribedIsTheSame(t *testing.T) {
	for _, dir := range fixtures(t) {
		t.Run(filepath.Base(dir), func(t *testing.T) {
			e := readExpected(t, dir)
			for _, dtype := range []string{"f32", "bf16"} {
				program := compile(t, dir, 1, e, "model.dtype="+dtype)
				out := described(t, program, constant(0.5), int64(len(e.Losses)), "")
				again := compile(t, out, 1, e, "model.dtype="+dtype)
				if a, b := again.Model.Difference(&program.Model); a != "" && math.Abs(again.Model.AttnScale-program.Model.AttnScale) > 1e-12 {
					t.Errorf("%s became %s", b, a)
				}
				openFolder(t, out, program.Tensors)
			}
		})
	}
}

// The config describes what distinguishes a family. If transformers cannot express a property of the model, the
// error names it.
func TestDescribe(t *testing.T) {
	const sizes = " layers = 3 hidden = 32 heads = 4 vocab = 64 dtype = f32 "
	const grouped = " q_lora_rank = 8 kv_lora_rank = 8 qk_nope_head_dim = 4 qk_rope_head_dim = 4 v_head_dim = 4 num_experts = 8 num_experts_per_tok = 2 moe_intermediate_size = 8 " +
		"shared_expert_intermediate_size = 8 n_group = 4 topk_group = 2 "
	for keys, want := range map[string]string{
		"family = llama3_1":                         `"model_type": "llama"`,
		"family = llama qk_norm = head":             `"model_type": "qwen3"`,
		"family = gpt2":                             `"n_positions": 32`,
		"family = mistral window = 8":               `"sliding_window": 8`,
		"family = gemma3":                           `"rope_theta": 10000.0`,
		"family = gemma2 attn_softcap = 0":          `"attn_logit_softcapping": null`,
		"family = smollm3 layers = 4":               `"no_rope_layers": [`,
		"family = llama norm = layernorm":           "transformers has no such model: the closest is LlamaForCausalLM, but it has norm = rmsnorm where this model has norm = layernorm",
		"family = mistral window = [8, 0]":          `"layer_types": [`, // as smollm3
		"family = qwen3 bias = [mlp]":               "has bias = [] where this model has bias = [mlp]",
		"family = llama rope_partial = 0.5":         `"partial_rotary_factor": 0.5`, // as phi3
		"family = llama positions = none":           `"no_rope_layers": [`,          // as smollm3
		"family = llama attn_softcap = 5":           "attn_softcap = 0",
		"family = gemma3 window = [8, 4, 0]":        "windows",
		"family = llama ffn = [64, 0]":              "it has ffns = [] where this model has ffns = [64 0]",
		"family = llama layer_types = [full, none]": "mixers = [attention none]",

		"family = deepseek_v2" + grouped + "topk_method = group_limited_greedy":                                 `"topk_method": "group_limited_greedy"`,
		"family = deepseek_v2" + grouped + "topk_method = noaux_tc":                                             "it has n_group = 0, topk_group = 0 where",
		"family = deepseek_v3 e_score_correction_bias = false" + grouped + "topk_method = group_limited_greedy": "where this model has e_score_correction_bias = false, topk_method = group_limited_greedy",
	} {
		text := strings.Replace(sizes, "layers = 3", map[bool]string{true: "", false: "layers = 3"}[strings.Contains(keys, "layers")], 1)
		l, err := lang.ParseModel(keys + text)
		if err != nil {
			t.Fatalf("%s: %v", keys, err)
		}
		m := ir.Model(l)
		_, config, err := hf.Describe(&m, 32)
		if got := string(config); err == nil && !strings.Contains(got, want) || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s gives %s%v, want %s", keys, got, err, want)
		}
	}
}

// transformers loads described models and computes the same loss as our next step, so each of its classes reads
// the config as we do.
func TestTransformersLoadsDescribed(t *testing.T) {
	python := os.Getenv("SPPO_PYTHON")
	if python == "" {
		t.Skip("SPPO_PYTHON names no Python with transformers")
	}
	command := exec.Command(python, filepath.Join("..", "..", "bench", "peers", "hub_models.py"), "--measure")
	var names []string
	var ours []float64
	for _, dir := range fixtures(t) {
		e := readExpected(t, dir)
		program := compile(t, dir, 1, e, "model.dtype=f32")
		job := open(t, dir, program, e)
		names, command.Args = append(names, filepath.Base(dir)), append(command.Args, described(t, program, saved(t, job), int64(len(e.Losses)), ""))
		result, err := job.Step(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		ours = append(ours, result.Loss)
	}
	var errs strings.Builder
	command.Stderr = &errs
	text, err := command.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, errs.String())
	}
	lines := json.NewDecoder(strings.NewReader(string(text)))
	for i, name := range names {
		var e expected
		if err := lines.Decode(&e); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
		if d := math.Abs(e.Loss - ours[i]); !(d <= 1e-4) {
			t.Errorf("%s: loss %.6f, transformers has %.6f", name, ours[i], e.Loss)
		}
	}
}

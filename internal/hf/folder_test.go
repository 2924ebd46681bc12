package hf_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/data/safetensors"
	"sppo.dev/internal/hf"
	"sppo.dev/internal/sample"
	"sppo.dev/ir"
)

// small returns the config of the llama fixture with changed members; nil removes a member.
func small(t *testing.T, changes map[string]any) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", "models", "llama", hf.ConfigFile))
	if err != nil {
		t.Fatal(err)
	}
	var members map[string]any
	if err := json.Unmarshal(text, &members); err != nil {
		t.Fatal(err)
	}
	for k, v := range changes {
		if members[k] = v; v == nil {
			delete(members, k)
		}
	}
	text, err = json.Marshal(members)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func configFolder(t *testing.T, text []byte) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "Model-1.5B")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, hf.ConfigFile), text, 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

type members = map[string]any

func TestRefusedConfigs(t *testing.T) {
	for want, text := range map[string][]byte{
		`model_type = "mamba" is not supported; supported are deepseek_v2,`: small(t, members{"model_type": "mamba"}),
		"model_type is missing":                                                    small(t, members{"model_type": nil}),
		"is not a JSON object":                                                     []byte("null"),
		"is not a JSON object: unexpected end":                                     []byte("{"),
		`hidden_size = "8", but transformers needs a value of type int`:            small(t, members{"hidden_size": "8"}),
		"hidden_size = 8.5, but transformers needs a value of type int":            small(t, members{"hidden_size": 8.5}),
		"num_hidden_layers = 0 is not positive":                                    small(t, members{"num_hidden_layers": 0}),
		"head_dim = -6 is not positive":                                            small(t, members{"head_dim": -6}),
		"is not a multiple of num_attention_heads":                                 small(t, members{"head_dim": nil, "num_attention_heads": 3}),
		"rms_norm_eps = 0, but transformers needs a value of type float":           small(t, members{"rms_norm_eps": 0}),
		"rms_norm_eps = 0 is not positive":                                         small(t, members{"rms_norm_eps": json.RawMessage("0.0")}),
		"sliding_window_pattern = 0 is not positive":                               small(t, members{"model_type": "gemma3_text", "sliding_window_pattern": 0}),
		`hidden_act = "mish" is not supported`:                                     small(t, members{"hidden_act": "mish"}),
		`dtype = "float64" is not supported`:                                       small(t, members{"dtype": "float64"}),
		"is_causal = false is not supported; only true is":                         small(t, members{"is_causal": false}),
		"num_key_value_heads is not supported: heads = 2 is not divisible":         small(t, members{"num_key_value_heads": 4}),
		"quantised gptq weights are not supported":                                 small(t, members{"quantization_config": members{"quant_method": "gptq", "bits": 4}}),
		"quantised weights are not supported":                                      small(t, members{"quantization_config": members{"bits": 4}}),
		`rope_parameters.rope_type = "dynamic" is not supported`:                   small(t, members{"rope_parameters": members{"rope_type": "dynamic", "factor": 2, "rope_theta": 1e4}}),
		`rope_scaling.type = "dynamic" is not supported`:                           small(t, members{"rope_parameters": nil, "rope_scaling": members{"type": "dynamic", "factor": 2}}),
		"rope_parameters.factor is missing":                                        small(t, members{"rope_parameters": members{"rope_type": "linear", "rope_theta": 1e4}}),
		"rope_parameters = 3, but transformers needs a value of type dict or null": small(t, members{"rope_parameters": 3}),
		"rope_scaling = 3 is not an object":                                        small(t, members{"rope_scaling": 3}),
		"= 8 is not a multiple of num_attention_heads = 32; num_attention_head is ignored, as by transformers; did you mean num_attention_heads?": small(t, members{"num_attention_heads": nil, "num_attention_head": 2}),
		"model_type is missing; modeltype is ignored, as by transformers; did you mean model_type?":                                               small(t, members{"model_type": nil, "modeltype": "llama"}),
	} {
		_, err := hf.ReadModel(configFolder(t, text))
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), hf.ConfigFile) || strings.Contains(err.Error(), "\n") {
			t.Errorf("got %v, want %s and %q", err, hf.ConfigFile, want)
		}
	}
	if _, err := hf.ReadModel(t.TempDir()); err == nil || !strings.Contains(err.Error(), "has no config.json") {
		t.Errorf("of an empty folder: %v", err)
	}
}

// Whichever version of transformers wrote the config of a model, reading it gives the same keys.
func TestFormsOfConfig(t *testing.T) {
	want := importText(t, small(t, members{"rope_parameters": members{"rope_type": "default", "rope_theta": 5e5}}))
	for name, changes := range map[string]members{
		"transformers 4":       {"rope_parameters": nil, "rope_theta": 5e5, "rope_scaling": nil, "torch_dtype": "bfloat16", "dtype": nil},
		"prefixed type":        {"rope_parameters": nil, "rope_theta": 500000, "dtype": "torch.bfloat16"},
		"scaling of no kind":   {"rope_parameters": nil, "rope_theta": 5e5, "rope_scaling": members{"type": "default"}},
		"settings of no model": {"rope_parameters": members{"rope_theta": 5e5}, "pretraining_tp": 1, "use_cache": false, "_name_or_path": "x", "sinks": false},
		"keys of others":       {"rope_parameters": members{"rope_theta": 5e5, "mscale": 2}, "sinks": true, "num_local_experts": 8, "hidden_activation": "gelu"},
	} {
		if got := importText(t, small(t, changes)); got != want {
			t.Errorf("%s:\n%s\nwant\n%s", name, got, want)
		}
	}
}

// The names of the kinds of layers of Nemotron-H have changed, and published configs have numbers that JSON lacks.
func TestFormsOfNemotron(t *testing.T) {
	text := func(blocks string) string {
		return importText(t, []byte(`{"model_type": "nemotron_h", "dtype": "float32", "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
			"vocab_size": 37, "pad_token_id": null, "intermediate_size": 12, "time_step_limit": [0.0, Infinity], `+blocks+"}"))
	}
	want := text(`"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]`)
	for _, other := range []string{`"layers_block_type": ["mamba", "moe", "attention", "mlp"]`, `"hybrid_override_pattern": "ME*-"`, `"hybrid_override_pattern": "ME*-", "num_hidden_layers": 4`} {
		if got := text(other); got != want {
			t.Errorf("%s:\n%s\nwant\n%s", other, got, want)
		}
	}
	_, err := hf.ReadModel(configFolder(t, []byte(`{"model_type": "nemotron_h", "hybrid_override_pattern": "MX*"}`)))
	if err == nil || !strings.Contains(err.Error(), `hybrid_override_pattern has "X", which is not supported`) {
		t.Error(err)
	}
}

// Keys that neither transformers nor the reader uses are named in one notice.
func TestIgnoredKeys(t *testing.T) {
	for want, changes := range map[string]members{
		"": {"use_cache": true, "architectures": []string{"x"}, "sinks": false, "transformers_version": "4.1"},
		"hidden_activation, rope_parameters.mscale, sinks: ignored, as by transformers": {
			"rope_parameters": members{"rope_theta": 5e5, "mscale": 2}, "sinks": true, "hidden_activation": "gelu"},
		"rope_parameters: ignored, as by transformers":                             {"rope_parameters": members{"rope_theta": 5e5}, "rope_scaling": members{"type": "linear", "factor": 2, "rope_theta": 5e5}},
		"attention_dropout: ignored, because the model is trained without dropout": {"attention_dropout": 0.5},
		"num_attention_heads = 32, num_hidden_layers = 32: not in config.json; these are the defaults of transformers for model_type = llama": {
			"num_hidden_layers": nil, "num_attention_heads": nil, "num_key_value_heads": 1, "hidden_size": 64, "head_dim": nil},
		"config.json: num_key_value_head is ignored, as by transformers; did you mean num_key_value_heads?": {
			"num_key_value_heads": nil, "num_key_value_head": 1},
		"hidden_sizes: ignored, as by transformers": {"hidden_sizes": 7}, // hidden_size is there, too
		"config.json: rope_parameters.rope_thet is ignored, as by transformers; did you mean rope_theta?": {
			"rope_parameters": members{"rope_thet": 5e5}, "rope_theta": 5e5},
	} {
		model, err := hf.ReadModel(configFolder(t, small(t, changes)))
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(model.Notices, "\n"); got != want {
			t.Errorf("%v: %q, want %q", changes, got, want)
		}
	}
}

// Absent keys that change shapes or results are named in one notice, with the defaults that replace them; those that the config has under another
// name, or that are of no use, are not.
func TestAssumedKeys(t *testing.T) {
	const common = `"dtype": "float32", "vocab_size": 37, "pad_token_id": null, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
		"rms_norm_eps": 1e-6, "hidden_act": "silu", "intermediate_size": 12, "tie_word_embeddings": false, `
	const latent = `"model_type": "deepseek_v3", ` + common + `"rope_theta": 1e4, "q_lora_rank": null, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 8,
		"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0, "norm_topk_prob": true`
	const next = `"model_type": "qwen3_next", ` + common + `"head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "decoder_sparse_step": 1,
		"norm_topk_prob": true, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "num_experts_per_tok": 2, "num_experts": 4, `
	for _, c := range []struct{ config, want string }{
		{latent + `, "kv_lora_rank": 8, "moe_intermediate_size": 8, "num_experts_per_tok": 2`, ""},
		{latent, "kv_lora_rank = 512, moe_intermediate_size = 2048, num_experts_per_tok = 8"},
		{next + `"linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"], "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}`, ""},
		{next + `"num_hidden_layers": 4, "rope_parameters": {}`, "full_attention_interval = 4, linear_conv_kernel_dim = 4, partial_rotary_factor = 0.25, rope_theta = 10000"},
		{`"model_type": "nemotron_h", "layer_norm_epsilon": 1e-5, ` + common + `"head_dim": 8, "layers_block_type": ["mamba", "attention", "mlp"], "mlp_hidden_act": "relu2", "mamba_num_heads": 4, "mamba_head_dim": 4,
			"n_groups": 2, "time_step_min": 0.001, "use_conv_bias": true`, "conv_kernel = 4, ssm_state_size = 128"},
	} {
		model, err := hf.ReadModel(configFolder(t, []byte("{"+c.config+"}")))
		if err != nil {
			t.Error(err)
			continue
		}
		got := ""
		for _, note := range model.Notices {
			if list, _, found := strings.Cut(note, ": not in config.json; these are the defaults of transformers for model_type = "); found {
				got = list
			}
		}
		if got != c.want {
			t.Errorf("%s:\nnotes %q\nwant  %q", c.config, got, c.want)
		}
	}
}

// importText returns the keys without their origins.
func importText(t *testing.T, config []byte) string {
	t.Helper()
	model, err := hf.ReadModel(configFolder(t, config))
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, k := range model.Keys {
		lines = append(lines, k.Name+" = "+k.Value)
	}
	return model.Name + "\n" + strings.Join(lines, "\n")
}

// folder returns a copy of a fixture with changed tensors, and the tensors of a program for that fixture.
func folder(t *testing.T, fixture string, change func(list []safetensors.Source) []safetensors.Source) (string, []ir.Tensor) {
	t.Helper()
	from := filepath.Join("testdata", "models", fixture)
	f, err := safetensors.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	var list []safetensors.Source
	for i := range f.Tensors() {
		x := &f.Tensors()[i]
		data := make([]byte, x.Bytes())
		if _, err := x.ReadAt(data, 0); err != nil {
			t.Fatal(err)
		}
		list = append(list, source(x.Info, data))
	}
	config, err := os.ReadFile(filepath.Join(from, hf.ConfigFile))
	if err != nil {
		t.Fatal(err)
	}
	dir := configFolder(t, config)
	if err := safetensors.Write(t.Context(), dir, change(list), nil, 1<<30); err != nil {
		t.Fatal(err)
	}
	e := readExpected(t, from)
	return dir, compile(t, from, 1, e).Tensors
}

func source(info safetensors.Info, data []byte) safetensors.Source {
	return safetensors.Source{Info: info, Write: func(w io.Writer) error { _, err := w.Write(data); return err }}
}

func named(list []safetensors.Source, name string) *safetensors.Source {
	for i := range list {
		if list[i].Name == name {
			return &list[i]
		}
	}
	return nil
}

type sources = []safetensors.Source

func TestRefusedWeights(t *testing.T) {
	const q = "model.layers.1.self_attn.q_proj.weight"
	for _, c := range []struct {
		name, fixture, want string // an empty want means that the folder is accepted
		change              func(sources) sources
	}{
		{"unchanged", "llama", "", func(l sources) sources { return l }},
		{"missing", "llama", `has no tensor "` + q + `"`, func(l sources) sources { named(l, q).Name = "model.rotary_emb.inv_freq"; return l }},
		{"unknown", "llama", `the model has no tensor "extra"`, func(l sources) sources {
			return append(l, source(safetensors.Info{Name: "extra", DType: "F32", Shape: []int64{1}}, make([]byte, 4)))
		}},
		{"bias", "llama", `has no tensor "model.layers.0.self_attn.q_proj.bias"`, func(l sources) sources {
			return append(l, source(safetensors.Info{Name: "model.layers.0.self_attn.q_proj.bias", DType: "F32", Shape: []int64{1}}, make([]byte, 4)))
		}},
		{"buffer", "llama", "", func(l sources) sources {
			return append(l, source(safetensors.Info{Name: "model.layers.0.self_attn.rotary_emb.inv_freq", DType: "F32", Shape: []int64{1}}, make([]byte, 4)))
		}},
		{"turned", "llama", "has shape [8 12], but the model needs [12 8]", func(l sources) sources {
			named(l, q).Shape = []int64{8, 12}
			return l
		}},
		{"whole numbers", "llama", "values of type I16", func(l sources) sources { named(l, q).DType = "I16"; return l }},
		{"quantised", "llama", "values of type F8_E4M3", func(l sources) sources {
			*named(l, q) = source(safetensors.Info{Name: q, DType: "F8_E4M3", Shape: []int64{12, 8}}, make([]byte, 96))
			return l
		}},
		{"tied twice", "llama-tied-f16", "", func(l sources) sources {
			head := *named(l, "model.embed_tokens.weight")
			head.Name = "lm_head.weight"
			return append(l, head)
		}},
		{"tied and other", "llama-tied-f16", "differ, although tie_word_embeddings = true", func(l sources) sources {
			info := named(l, "model.embed_tokens.weight").Info
			info.Name = "lm_head.weight"
			return append(l, source(info, make([]byte, info.Bytes())))
		}},
		{"without prefix", "llama-tied-f16", "", func(l sources) sources {
			for i := range l {
				l[i].Name = strings.TrimPrefix(l[i].Name, "model.")
			}
			return l
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir, list := folder(t, c.fixture, c.change)
			model, err := hf.ReadModel(dir)
			if err != nil {
				t.Fatal(err)
			}
			w, err := model.OpenWeights(list)
			if c.want == "" {
				if err != nil {
					t.Fatal(err)
				}
				w.Close()
			} else if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

// constant provides the same value for all elements of all tensors.
type constant float32

func (c constant) Read(_ string, _, _, _, _ int64, out []float32) error {
	for i := range out {
		out[i] = float32(c)
	}
	return nil
}

// An export that fails leaves no folder and no temporary files.
func TestExportIsWholeOrNothing(t *testing.T) {
	from, list := folder(t, "llama-tied-f16", func(l sources) sources { return l })
	model, err := hf.ReadModel(from)
	if err != nil {
		t.Fatal(err)
	}
	stopped, stop := context.WithCancel(t.Context())
	stop()
	for _, c := range []struct {
		name string
		ctx  context.Context
		from hf.Values
		want string
	}{
		{"stopped", stopped, constant(1), "context canceled"},
		{"beyond f16", t.Context(), constant(1e6), "the largest value of f16"},
		{"right", t.Context(), constant(1), ""},
	} {
		parent := t.TempDir()
		e := hf.Export{Values: c.from, Tensors: list, From: model}
		err := e.Write(c.ctx, filepath.Join(parent, "out"))
		entries, _ := os.ReadDir(parent)
		if c.want == "" {
			if err != nil || len(entries) != 1 {
				t.Errorf("%s: %d entries, %v", c.name, len(entries), err)
			}
		} else if err == nil || !strings.Contains(err.Error(), c.want) || len(entries) != 0 {
			t.Errorf("%s: %d entries, %v", c.name, len(entries), err)
		}
	}
}

// Exporting with another type changes only the weights and their type in the config.
func TestExportInAnotherType(t *testing.T) {
	from := filepath.Join("testdata", "models", "llama-f32-shards")
	e := readExpected(t, from)
	program := compile(t, from, 1, e, "model.dtype=f32")
	out := exported(t, open(t, from, program, e), "bf16")
	before, err := os.ReadFile(filepath.Join(from, hf.ConfigFile))
	if err != nil {
		t.Fatal(err)
	}
	after, err := os.ReadFile(filepath.Join(out, hf.ConfigFile))
	if want := bytes.Replace(before, []byte("float32"), []byte("bfloat16"), 1); err != nil || !bytes.Equal(after, want) {
		t.Errorf("config.json is\n%s", after)
	}
	was, is := floats(t, from), floats(t, out)
	for name, values := range was {
		for i, v := range values {
			if r := is[name][i]; math.Abs(float64(r-v)) > math.Abs(float64(v))/256 || math.Float32bits(r)&0xffff != 0 {
				t.Fatalf("%s: %g became %g", name, v, r)
			}
		}
	}
	again, err := hf.ReadModel(out)
	if err != nil || !strings.Contains(again.Text(), "bf16") {
		t.Errorf("%v: %s", err, again.Text())
	}
}

// Tensors that transformers keeps in f32 where other weights are bf16, or that published folders have so, stay in f32 if the folder has them in f32, or if there is
// no folder.
func TestExportKeepsF32(t *testing.T) {
	const router, correction = "gate.weight", "e_score_correction_bias"
	for fixture, want := range map[string][]string{
		"glm4-moe": {correction, router}, "deepseek-v2": {router}, "deepseek-v3": {correction, router}, "minimax-m2": {correction}, "minimax-m2-fused": {correction},
		"kimi-linear": {"A_log", "dt_bias", correction, router}, "kimi-linear-fused": {"A_log", "dt_bias", correction, router},
		"nemotron-h": {"A_log", "D", "dt_bias", correction, router}, "qwen3.5-moe": {"A_log", "norm.weight"}, "qwen3-next": nil, "mistral4": nil, "gpt-oss": nil, "llama": nil,
	} {
		first := filepath.Join("testdata", "models", fixture)
		program := compile(t, first, 1, readExpected(t, first), "model.dtype=f32")
		export := func(from, dtype string) (string, []string) {
			t.Helper()
			model, w := openFolder(t, from, program.Tensors)
			out := filepath.Join(t.TempDir(), "out")
			if err := (&hf.Export{Values: w, Tensors: program.Tensors, From: model, DType: dtype}).Write(t.Context(), out); err != nil {
				t.Fatal(err)
			}
			return out, keptF32(t, out)
		}
		wide, _ := export(first, "f32")
		narrow, got := export(wide, "bf16")
		if !slices.Equal(got, want) {
			t.Errorf("%s: %q are f32, want %q", fixture, got, want)
		}
		if _, again := export(narrow, "f16"); !slices.Equal(again, want) {
			t.Errorf("%s in f16: %q are f32, want %q", fixture, again, want)
		}
		if got := keptF32(t, described(t, program, constant(0.5), 16, "bf16")); !slices.Equal(got, want) {
			t.Errorf("%s, described: %q are f32, want %q", fixture, got, want)
		}
		was := tensors(t, wide)
		for name, value := range tensors(t, narrow) {
			if strings.HasPrefix(value, safetensors.F32) && value != was[name] {
				t.Errorf("%s: the values of %s have changed", fixture, name)
			}
		}
	}
}

// keptF32 lists the last parts of the names of tensors of a folder whose type is F32.
func keptF32(t *testing.T, dir string) (list []string) {
	t.Helper()
	for name, value := range tensors(t, dir) {
		parts := strings.Split(name, ".")
		last := strings.Join(parts[max(0, len(parts)-2):], ".")
		if parts[len(parts)-1] != "weight" {
			last = parts[len(parts)-1]
		}
		if strings.HasPrefix(value, safetensors.F32) && !slices.Contains(list, last) {
			list = append(list, last)
		}
	}
	slices.Sort(list)
	return list
}

func floats(t *testing.T, dir string) map[string][]float32 {
	t.Helper()
	f, err := safetensors.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	out := map[string][]float32{}
	for i := range f.Tensors() {
		x := &f.Tensors()[i]
		values := make([]float32, x.Elements())
		if _, err := x.Float32s(values, 0, nil); err != nil {
			t.Fatal(err)
		}
		out[x.Name] = values
	}
	return out
}

// FuzzConfig checks that reading a config with any contents gives either an error of one line or a model, which
// the language then accepts or refuses without a panic.
func FuzzConfig(f *testing.F) {
	files, err := filepath.Glob(filepath.Join("testdata", "models", "*", hf.ConfigFile))
	if err != nil || len(files) == 0 {
		f.Fatal(err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		model, err := hf.ReadModel(configFolder(t, text))
		if err != nil {
			if strings.Contains(err.Error(), "\n") && !bytes.ContainsRune(text, '\n') {
				t.Errorf("several lines: %q", err)
			}
			return
		}
		model.Text()
		_, _ = model.Lang(16, "")
	})
}

// If a folder has an output projection that differs from the embedding, the model is not tied, whatever the config says.
func TestUntiedByWeights(t *testing.T) {
	for _, differ := range []bool{true, false} {
		dir, _ := folder(t, "llama-tied-f16", func(l sources) sources {
			head := *named(l, "model.embed_tokens.weight")
			head.Name = "lm_head.weight"
			if differ {
				head = source(head.Info, make([]byte, head.Bytes()))
			}
			return append(l, head)
		})
		model, m, err := readDrawn(t, dir)
		if err != nil {
			t.Fatal(err)
		}
		w, err := model.OpenWeights(sample.Tensors(m, drawnTokens))
		if err != nil {
			t.Fatal(err)
		}
		w.Close()
		if m.Tied == differ || len(w.Ignored) == 0 != differ || strings.Contains(strings.Join(model.Notices, "\n"), "differs from the embedding") != differ {
			t.Errorf("differ %t: tied %t, ignored %q, notices %q", differ, m.Tied, w.Ignored, model.Notices)
		}
	}
}

// A limit that a family has by default does not apply if the config sets it to null.
func TestNoSoftCap(t *testing.T) {
	for ours, theirs := range map[string]string{"attn_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"} {
		for value, want := range map[string]string{"null": " = 0", "30.0": " = 30"} {
			text := small(t, members{"model_type": "gemma2", "sliding_window": 7, theirs: json.RawMessage(value)})
			if got := importText(t, text); !strings.Contains(got+"\n", "\n"+ours+want+"\n") {
				t.Errorf("%s = %s gives\n%s\nwant %s%s", theirs, value, got, ours, want)
			}
		}
	}
}

// For a vision model, only the language model is used, with a notice and a list of the parts left out.
func TestVisionParts(t *testing.T) {
	for _, name := range []string{"gemma3-vision", "mistral-small-vision", "qwen3.5-vision"} {
		dir := filepath.Join("testdata", "models", name)
		model, err := hf.ReadModel(dir)
		if err != nil {
			t.Fatal(err)
		}
		if len(model.Notices) != 1 || !strings.Contains(model.Notices[0], "only the language model, text_config, is trained") {
			t.Errorf("%s: notices %q", name, model.Notices)
		}
		w, err := model.OpenWeights(compile(t, dir, 1, readExpected(t, dir)).Tensors)
		if err != nil {
			t.Fatal(err)
		}
		w.Close()
		for _, tensor := range w.Ignored {
			if strings.Contains(tensor, "language_model.") || strings.Contains(tensor, "lm_head") {
				t.Errorf("%s: %s is ignored", name, tensor)
			}
		}
		if !slices.ContainsFunc(w.Ignored, func(s string) bool {
			return strings.HasPrefix(s, "vision_tower.") || strings.HasPrefix(s, "model.visual.")
		}) {
			t.Errorf("%s: ignored are %q, without those of the vision part", name, w.Ignored)
		}
	}
}

// Layers after the last, for multi-token prediction, are listed, kept and exported unchanged, with a notice.
func TestFurtherLayers(t *testing.T) {
	further := source(safetensors.Info{Name: "model.layers.2.eh_proj.weight", DType: safetensors.BF16, Shape: []int64{2, 3}}, []byte("further data"))
	dir, list := folder(t, "glm4-moe-mtp", func(l sources) sources { return append(l, further) })
	model, err := hf.ReadModel(dir)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(model.Notices, func(s string) bool { return strings.Contains(s, "multi-token prediction are not trained") }) {
		t.Errorf("notices %q", model.Notices)
	}
	w, err := model.OpenWeights(list)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if !slices.Equal(w.Ignored, []string{further.Name}) {
		t.Errorf("ignored are %q", w.Ignored)
	}
	out := filepath.Join(t.TempDir(), "out")
	if err := (&hf.Export{Values: w, Tensors: list, From: model}).Write(t.Context(), out); err != nil {
		t.Fatal(err)
	}
	sameFiles(t, dir, out)
}

// The windows in a config replace the default windows of a family.
func TestWindowsOfGemma(t *testing.T) {
	const full, sliding = "full_attention", "sliding_attention"
	for _, c := range []struct {
		family string
		types  []string // for the two layers
		want   []int64
		theta  float64
	}{
		{"gemma2", []string{sliding, full}, []int64{7, 0}, 0},
		{"gemma2", []string{full, full}, []int64{}, 0},
		{"gemma3_text", []string{sliding, sliding}, []int64{7}, 10000},
		{"gemma3_text", []string{full, sliding}, []int64{0, 7}, 10000},
		{"gemma3_text", []string{full, full}, []int64{}, 0},
		{"gemma3_text", nil, []int64{7}, 10000}, // only every sixth layer has no window
	} {
		changes := members{"model_type": c.family, "sliding_window": 7, "rope_parameters": nil, "layer_types": nil}
		if c.types != nil {
			changes["layer_types"] = c.types
		}
		model, err := hf.ReadModel(configFolder(t, small(t, changes)))
		if err != nil {
			t.Fatal(err)
		}
		l, err := model.Lang(64, "")
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(l.Windows, c.want) || l.RopeLocalTheta != c.theta {
			t.Errorf("%s %v: windows %v, local theta %v, want %v, %v", c.family, c.types, l.Windows, l.RopeLocalTheta, c.want, c.theta)
		}
	}
}

// A flipped bit in a header causes an error or changes no tensor.
func TestFlippedHeader(t *testing.T) {
	from := filepath.Join("testdata", "models", "llama")
	list := compile(t, from, 1, readExpected(t, from)).Tensors
	config, err := os.ReadFile(filepath.Join(from, hf.ConfigFile))
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.ReadFile(filepath.Join(from, safetensors.SingleFile))
	if err != nil {
		t.Fatal(err)
	}
	dir, want := configFolder(t, config), tensors(t, from)
	model, err := hf.ReadModel(dir)
	if err != nil {
		t.Fatal(err)
	}
	end := 8 + int(binary.LittleEndian.Uint64(file))
	accepted := 0
	for at := range end {
		file[at] ^= 1 << (at % 8)
		if err := os.WriteFile(filepath.Join(dir, safetensors.SingleFile), file, 0o644); err != nil {
			t.Fatal(err)
		}
		file[at] ^= 1 << (at % 8)
		w, err := model.OpenWeights(list)
		if err != nil {
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("byte %d: several lines: %q", at, err)
			}
			continue
		}
		w.Close()
		accepted++
		for name, value := range tensors(t, dir) {
			if want[name] != value {
				t.Errorf("byte %d: %s is another and nobody says so", at, name)
			}
		}
	}
	t.Logf("%d of %d flips changed nothing", accepted, end)
}

// TestNotAFolder checks what is said of paths that are not the folder of a model.
func TestNotAFolder(t *testing.T) {
	dir := configFolder(t, small(t, nil))
	for path, want := range map[string]string{
		filepath.Join(dir, "none"):        "there is no folder " + filepath.Join(dir, "none"),
		filepath.Join(dir, "config.json"): "config.json is a file: give its folder, " + dir,
		t.TempDir():                       "has no config.json: is it the folder of a model?",
	} {
		if _, err := hf.ReadModel(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", path, err, want)
		}
	}
}

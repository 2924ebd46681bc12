package hf_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/data/safetensors"
	"sppo.dev/internal/hf"
	"sppo.dev/internal/irtest"
	"sppo.dev/internal/sample"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// drawn is a config that bench/peers/hub_configs.py drew, with what transformers makes of it: the losses of the
// tokens after the first, or an error.
type drawn struct {
	Config json.RawMessage `json:"config"`
	Losses []float64       `json:"losses"`
	Error  string          `json:"error"`
	Head   bool            `json:"head"` // the weights contain an output projection

	Rounding float64 `json:"rounding"` // by how much a loss differs if transformers rounds to f64 instead of f32
}

// drawnTokens is the number of tokens with a loss.
const drawnTokens = 20

// peer runs bench/peers/hub_configs.py with the Python interpreter that SPPO_PYTHON names, and decodes the
// lines that it prints.
func peer[T any](t *testing.T, python string, args ...string) (list []T) {
	t.Helper()
	command := exec.Command(python, append([]string{filepath.Join("..", "..", "bench", "peers", "hub_configs.py")}, args...)...)
	var errs bytes.Buffer
	command.Stderr = &errs
	text, err := command.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, errs.String())
	}
	lines := json.NewDecoder(bytes.NewReader(text))
	for lines.More() {
		var x T
		if err := lines.Decode(&x); err != nil {
			t.Fatal(err)
		}
		list = append(list, x)
	}
	return list
}

// tokensBelow returns the tokens of hub_configs.py for a vocabulary.
func tokensBelow(vocab int) (list []int32) {
	r := vm.NewRandom(0, "tokens")
	for i := range uint64(drawnTokens + 1) {
		list = append(list, int32(r.Uint64(i)%uint64(vocab)))
	}
	return list
}

// weightOf returns value i of a tensor in hub_configs.py.
func weightOf(info safetensors.Info) func(i int64) float32 {
	r := vm.NewRandom(0, info.Name)
	return func(i int64) float32 {
		u := float64(r.Uint64(uint64(i))>>40)/(1<<23) - 1
		switch {
		case len(info.Shape) > 1:
			return float32(u * math.Sqrt(2/float64(info.Shape[len(info.Shape)-1])))
		case strings.HasSuffix(info.Name, "weight"):
			return float32(1 + 0.3*u)
		}
		return float32(0.5 * u)
	}
}

// readDrawn reads a folder. It also returns the model for sequences of drawnTokens.
func readDrawn(t *testing.T, dir string) (*hf.Model, lang.Model, error) {
	t.Helper()
	folder, err := hf.ReadModel(dir)
	if err != nil {
		return nil, lang.Model{}, err
	}
	m, err := folder.Lang(drawnTokens, "f32")
	if err != nil {
		t.Fatalf("the language refuses what was imported: %v", err)
	}
	return folder, m, nil
}

// lossesOf reads a folder and returns the losses of its tokens.
func lossesOf(t *testing.T, dir string) ([]float64, *hf.Model, error) {
	t.Helper()
	folder, m, err := readDrawn(t, dir)
	if err != nil {
		return nil, nil, err
	}
	list := sample.Tensors(m, drawnTokens)
	weights, err := folder.OpenWeights(list)
	if err != nil {
		return nil, folder, err
	}
	defer weights.Close()
	pool := simd.NewPool(1)
	defer pool.Close()
	model, err := sample.Open(m, sample.Size{Sequence: drawnTokens, Tokens: drawnTokens}, weights, pool)
	if err != nil {
		t.Fatal(err)
	}
	defer model.Close()
	tokens := tokensBelow(m.Vocab)
	var losses []float64
	for i, token := range tokens[:drawnTokens] {
		logits, err := model.Feed([]int32{token})
		if err != nil {
			return nil, folder, err
		}
		sum := 0.0
		for _, x := range logits {
			sum += math.Exp(float64(x))
		}
		losses = append(losses, math.Log(sum)-float64(logits[tokens[i+1]]))
	}
	return losses, folder, nil
}

// writeWeights writes the weights of a folder with a config, if the config is supported.
func writeWeights(t *testing.T, dir string, head bool) {
	t.Helper()
	folder, m, err := readDrawn(t, dir)
	if err != nil {
		return
	}
	infos, err := folder.Stored(sample.Tensors(m, drawnTokens))
	if err != nil {
		t.Fatal(err)
	}
	var list []safetensors.Source
	for _, info := range infos {
		if info.Name == "lm_head.weight" && !head {
			continue
		}
		n := int64(1)
		for _, x := range info.Shape {
			n *= x
		}
		values, at := make([]float32, n), weightOf(info)
		for i := range values {
			values[i] = at(int64(i))
		}
		raw, err := safetensors.Append(nil, values, info.DType)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, source(info, raw))
	}
	if err := safetensors.Write(t.Context(), dir, list, nil, 1<<30); err != nil {
		t.Fatal(err)
	}
}

// apart returns the largest difference between our losses and those of transformers, and whether it is within rounding:
// at most 1e-4 plus a few times the rounding of transformers itself, which some random weights amplify.
func (d *drawn) apart(losses []float64) (most float64, close bool) {
	for i := range losses {
		if x := math.Abs(losses[i] - d.Losses[i]); !(x <= most) {
			most = x
		}
	}
	return most, most <= 1e-4+8*d.Rounding
}

// Configs with random keys of all architectures are read as transformers reads them: the losses of all tokens are
// equal, or the error names a key of the config. A config that transformers refuses is refused. Without
// SPPO_PYTHON, the configs are those in testdata.
func TestDrawnConfigs(t *testing.T) {
	var list []drawn
	root, python := t.TempDir(), os.Getenv("SPPO_PYTHON")
	if python != "" {
		count := 200
		if os.Getenv("SPPO_LONG") != "" {
			count = 2000
		}
		list = peer[drawn](t, python, "--draw", fmt.Sprint(irtest.Seed(t)), fmt.Sprint(count), root)
	} else {
		text, err := os.ReadFile(filepath.Join("testdata", "drawn.jsonl"))
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			var d drawn
			if err := json.Unmarshal([]byte(line), &d); err != nil {
				t.Fatal(err)
			}
			list = append(list, d)
		}
	}
	compareDrawn(t, list, func(i int) string {
		if python != "" {
			return filepath.Join(root, fmt.Sprint(i))
		}
		dir := configFolder(t, list[i].Config)
		writeWeights(t, dir, list[i].Head || list[i].Error != "")
		return dir
	})
}

// compareDrawn compares what the reader makes of folders with what transformers does.
func compareDrawn(t *testing.T, list []drawn, folder func(i int) string) {
	t.Helper()
	equal, refused, both := 0, map[string]int{}, 0
	for i, d := range list {
		dir := folder(i)
		if _, err := os.Stat(filepath.Join(dir, safetensors.SingleFile)); err != nil {
			writeWeights(t, dir, true)
		}
		losses, model, err := lossesOf(t, dir)
		var notices []string
		if model != nil {
			notices = model.Notices
		}
		switch {
		case err == nil && d.Error != "":
			t.Errorf("%d: %s\ntransformers refuses it: %s\nnotices: %q", i, d.Config, d.Error, notices)
		case err == nil:
			if most, close := d.apart(losses); !close {
				t.Errorf("%d: %s\nlosses differ by %.2g; notices: %q", i, d.Config, most, notices)
			}
			equal++
		case d.Error != "":
			both++
		default:
			refused[refusedKey(t, d.Config, dir, err)]++
		}
	}
	t.Logf("of %d configs, %d have equal losses, %d are refused by both, and these are refused for a key:", len(list), equal, both)
	for _, key := range slices.Sorted(maps.Keys(refused)) {
		t.Logf("%5d %s", refused[key], key)
	}
}

// refusedKey returns the key of a config that an error names.
func refusedKey(t *testing.T, config []byte, dir string, err error) string {
	t.Helper()
	_, message, ok := strings.Cut(err.Error(), filepath.Join(dir, hf.ConfigFile)+": ")
	name, _, _ := strings.Cut(message, " ")
	name = strings.TrimSuffix(name, ":")
	if at := strings.LastIndex(name, "."); !ok || !strings.HasSuffix(message, " is missing") && !bytes.Contains(config, []byte(name[at+1:])) {
		t.Errorf("%s\nerror names no key of it: %v", config, err)
	}
	return name
}

// drawnModel draws the keys of a model: a family, sizes, and some traits that differ from those of the family.
func drawnModel(r *rand.Rand) string {
	pick := func(list ...any) any { return list[r.IntN(len(list))] }
	heads := 1 << r.IntN(3)
	head := 2 * (1 + r.IntN(4))
	var text strings.Builder
	give := func(name string, value any) { fmt.Fprintf(&text, "%s = %v\n", name, value) }
	family := lang.Families[r.IntN(len(lang.Families))].Name
	give("family", family)
	give("layers", 1+r.IntN(6))
	give("hidden", 4*heads*(1+r.IntN(2)))
	give("heads", heads)
	give("kv_heads", pick(1, heads))
	if family[:3] != "gpt" || r.IntN(8) == 0 {
		give("head_dim", head)
	}
	give("ffn", 5+r.IntN(12))
	give("vocab", 11+r.IntN(40))
	give("dtype", pick("f32", "bf16"))
	if strings.Contains(family, "moe") || family == "mixtral" || family == "minimax_m2" {
		experts := 4 * (1 + r.IntN(2))
		give("num_experts", experts)
		give("num_experts_per_tok", 1+r.IntN(3))
		give("moe_intermediate_size", 5+r.IntN(6))
		for _, trait := range []struct {
			name   string
			values []any
		}{
			{"norm_topk_prob", []any{true, false}}, {"first_k_dense_replace", []any{0, 1}}, {"mlp_only_layers", []any{"[]", "[1]"}}, {"decoder_sparse_step", []any{1, 2}},
			{"routed_scaling_factor", []any{1, 2.5}}, {"shared_expert_intermediate_size", []any{0, 5, 10}}, {"scoring_func", []any{"softmax", "sigmoid", "softmax_topk"}},
			{"e_score_correction_bias", []any{true, false}}, {"shared_expert_gate", []any{true, false}},
		} {
			if r.IntN(5) == 0 {
				give(trait.name, trait.values[r.IntN(len(trait.values))])
			}
		}
		if r.IntN(5) == 0 {
			give("n_group", experts/2)
			give("topk_group", 2)
		}
	}
	for _, trait := range []struct {
		name   string
		values []any
	}{
		{"norm_eps", []any{1e-6, 1e-3, 0.05}}, {"tied", []any{true, false}}, {"activation", []any{"silu", "gelu", "gelu_tanh", "relu2"}},
		{"bias", []any{"[]", "[qkv]", "[qkv, attn_out]", "[mlp]", "[qkv, attn_out, mlp]"}}, {"qk_norm", []any{"none", "head", "all", "rotated"}},
		{"norm_place", []any{"pre", "post", "pre_post"}}, {"norm_offset", []any{0, 1}}, {"norm", []any{"rmsnorm", "layernorm"}},
		{"embed_scale", []any{1, "sqrt_hidden"}}, {"attn_scale", []any{0.25, 0.5, 0.3, 1}}, {"attn_softcap", []any{0, 2, 5}}, {"logit_softcap", []any{0, 2, 5}},
		{"window", []any{0, 1, 3, 5, 4096, "[3, 0]", "[0, 0, 5]", "[5, 4, 0]"}}, {"rope_theta", []any{100, 1000, 10000}}, {"rope_local_theta", []any{50, 10000}},
		{"positions", []any{"rope", "none", "[rope, none]", "[rope, rope, rope, none]", "learned"}}, {"gated", []any{true, false}},
		{"rope_partial", []any{0.5, 0.75, 1}}, {"init_std", []any{0.02, 0.3}},
	} {
		if r.IntN(6) == 0 {
			give(trait.name, trait.values[r.IntN(len(trait.values))])
		}
	}
	if kind := pick("none", "none", "linear", "llama3", "yarn", "longrope"); kind != "none" {
		give("rope_scaling", kind)
		give("rope_factor", pick(1, 2, 4.5))
		if kind != "linear" {
			give("rope_original", pick(4, 8, 16, 64))
		}
		switch kind {
		case "llama3":
			give("rope_high", pick(3, 4))
		case "yarn":
			for name, value := range map[string]any{"rope_fast": 8, "rope_slow": 0.5, "rope_truncate": false, "rope_amplitude": 1.25, "rope_beta": 0.4} {
				if r.IntN(3) == 0 {
					give(name, value)
				}
			}
		case "longrope":
			for _, name := range []string{"rope_short", "rope_long"} {
				list := make([]string, head/2)
				for i := range list {
					list[i] = fmt.Sprint(1 + r.IntN(4))
				}
				give(name, "["+strings.Join(list, ", ")+"]")
			}
		}
	}
	return text.String()
}

// A model with random traits is exported with a config with which transformers computes the same losses, or the
// export is refused because of a trait.
func TestDrawnExports(t *testing.T) {
	python := os.Getenv("SPPO_PYTHON")
	if python == "" {
		t.Skip("SPPO_PYTHON names no Python with transformers")
	}
	count := 500
	if os.Getenv("SPPO_LONG") == "" {
		count = 100
	}
	r, root := rand.New(rand.NewPCG(irtest.Seed(t), 0)), t.TempDir()
	var texts []string
	var ours [][]float64
	refused, classes := 0, map[string]int{}
	for len(ours) < count {
		text := drawnModel(r)
		l, err := lang.ParseModel(text)
		if err != nil {
			continue
		}
		m := ir.Model(l)
		_, config, err := hf.Describe(&m, drawnTokens)
		if err != nil {
			if refused++; !strings.Contains(err.Error(), "transformers has no such model: the closest is ") {
				t.Errorf("%s\n%v", text, err)
			}
			continue
		}
		dir := filepath.Join(root, fmt.Sprint(len(ours)))
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, hf.ConfigFile), config, 0o644); err != nil {
			t.Fatal(err)
		}
		writeWeights(t, dir, true)
		losses, model, err := lossesOf(t, dir)
		if err != nil {
			t.Fatalf("%s\n%s\n%v", text, config, err)
		}
		classes[model.Architecture()]++
		texts, ours = append(texts, text), append(ours, losses)
	}
	t.Logf("%d models are exported, as %v; %d are refused", count, classes, refused)
	for i, d := range peer[drawn](t, python, "--measure", root) {
		if d.Error != "" {
			t.Errorf("%s\n%s", texts[i], d.Error)
			continue
		}
		if most, close := d.apart(ours[i]); !close {
			config, _ := os.ReadFile(filepath.Join(root, fmt.Sprint(i), hf.ConfigFile))
			t.Errorf("%s%s\nlosses differ by %.2g", texts[i], config, most)
		}
	}
}

// The tables of keys have a row for every key that the config classes of transformers declare, with the same types and
// default, and no row for any other.
func TestKeysOfTransformers(t *testing.T) {
	python := os.Getenv("SPPO_PYTHON")
	if python == "" {
		t.Skip("SPPO_PYTHON names no Python with transformers")
	}
	theirs, ours := peer[map[string]map[string][2]any](t, python, "--keys")[0], hf.DeclaredKeys()
	for class, keys := range theirs {
		for name, want := range keys {
			row, ok := ours[class][name]
			if row[1] == hf.Unread {
				want[1] = row[1]
			}
			if fmt.Sprint(row) != fmt.Sprint(want) {
				t.Errorf("%s: the row of %s has %v (%t), transformers has %v", class, name, row, ok, want)
			}
		}
		for name := range ours[class] {
			if _, ok := keys[name]; !ok && class != "" {
				t.Errorf("%s: transformers does not declare %s", class, name)
			}
		}
	}
	if len(theirs) != len(ours) {
		t.Errorf("%d classes, want %d", len(ours), len(theirs))
	}
}

// Small models with the keys of published configs have the same losses as in transformers.
func TestPublishedLosses(t *testing.T) {
	python := os.Getenv("SPPO_PYTHON")
	if python == "" {
		t.Skip("SPPO_PYTHON names no Python with transformers")
	}
	files, err := filepath.Glob(filepath.Join("testdata", "configs", "*.json"))
	if err != nil || len(files) == 0 {
		t.Fatal(err)
	}
	root := t.TempDir()
	list := peer[drawn](t, python, append([]string{"--shrink", root}, files...)...)
	for i, d := range list {
		if d.Error != "" {
			t.Errorf("%s: %s", files[i], d.Error)
		}
	}
	compareDrawn(t, list, func(i int) string { return filepath.Join(root, fmt.Sprint(i)) })
}

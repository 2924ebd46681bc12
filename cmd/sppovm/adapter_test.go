package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/hf"
	"sppo.dev/internal/sample"
	"sppo.dev/internal/train"
	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/lang"
)

// expectedAdapter is the output of bench/peers/hub_lora.py, which trains an adapter with PEFT.
type expectedAdapter struct {
	Sequence int       `json:"sequence"`
	Tokens   []int     `json:"tokens"`
	Losses   []float64 `json:"losses"`
	Last     float64   `json:"last"`
	AdamW    struct {
		LR          float64   `json:"lr"`
		Betas       []float64 `json:"betas"`
		Eps         float64   `json:"eps"`
		WeightDecay float64   `json:"weight_decay"`
	} `json:"adamw"`
}

// adapterJob writes a job that trains the adapter of a fixture. It returns the folders of the model and of the
// adapter, and the results that PEFT computed.
func adapterJob(t *testing.T, name string) (model, adapter string, want expectedAdapter) {
	t.Helper()
	here, err := filepath.Abs(".")
	if err != nil {
		t.Fatal(err)
	}
	model, adapter = filepath.Join(here, "../../internal/hf/testdata/models", strings.TrimSuffix(name, "-dropout")), filepath.Join(here, "testdata/adapters", name)
	text, err := os.ReadFile(filepath.Join(adapter, "expected.json"))
	if err == nil {
		err = json.Unmarshal(text, &want)
	}
	m, err2 := hf.ReadModel(model)
	if err != nil || err2 != nil {
		t.Fatal(err, err2)
	}
	var config struct {
		Rank    int      `json:"r"`
		Alpha   float64  `json:"lora_alpha"`
		Dropout float64  `json:"lora_dropout"`
		Targets []string `json:"target_modules"`
	}
	if text, err = os.ReadFile(filepath.Join(adapter, hf.AdapterConfig)); err == nil {
		err = json.Unmarshal(text, &config)
	}
	if err != nil {
		t.Fatal(err)
	}
	targets := strings.ReplaceAll(strings.Join(config.Targets, ", "), "attn.c_proj", "o_proj")
	t.Chdir(t.TempDir())
	a := want.AdamW
	spec := fmt.Sprintf(`import "clusters/local.sppo"
cluster here = local(ranks = 4)
%s
train {
  sequence = %d   steps = %d   lr_schedule = constant   grad_clip = 0   eval_batch = 0   seed = 5
  optimizer = adamw(lr = %g, betas = [%g, %g], eps = %g, weight_decay = %g)
  adapter = lora(rank = %d, alpha = %g, targets = [%s], dropout = %g)
  data = tokens("stream.bin", type = uint16, shuffle = off)
}
`, m.Text(), want.Sequence, len(want.Losses), a.LR, a.Betas[0], a.Betas[1], a.Eps, a.WeightDecay, config.Rank, config.Alpha, targets, config.Dropout)
	stream := make([]byte, 0, 2*len(want.Tokens))
	for _, token := range want.Tokens {
		stream = binary.LittleEndian.AppendUint16(stream, uint16(token))
	}
	for file, text := range map[string][]byte{"job.sppo": []byte(spec), "stream.bin": stream, "expected.json": mustRead(t, filepath.Join(adapter, "expected.json"))} {
		if err := os.WriteFile(file, text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return model, adapter, want
}

func mustRead(t *testing.T, path string) []byte {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

var adapterModels = []string{"llama", "qwen3", "phi3", "gpt2", "llama-dropout", "gemma3-vision", "mistral-small-vision"}

// TestAdaptersEqualPEFT trains the adapters that PEFT trained, each under a different schedule. The losses of eight
// steps equal those of PEFT. No bit of the model itself changes. The exported adapter has PEFT's format and can
// start another run. A merged model has the same loss as the model with its adapter.
func TestAdaptersEqualPEFT(t *testing.T) {
	for i, name := range adapterModels {
		schedule := []string{"pp = 2 sp = 2 subsequences = 2 align = 4", "sp = 2 sp_mode = ulysses dp = 1 subsequences = 2 align = 4 recompute = full zero = 1",
			"pp = 2 sp = 1 subsequences = 4 align = 4 offload = full", "pp = 1 sp = 2 sp_mode = ring subsequences = 2 align = 4",
			"pp = 2 sp = 2 sp_mode = ulysses subsequences = 2 align = 4 offload = full recompute = full",
			"pp = 3 sp = 1 subsequences = 2 align = 4", "pp = 1 sp = 2 subsequences = 2 align = 4"}[i]
		t.Run(name, func(t *testing.T) {
			model, adapter, want := adapterJob(t, name)
			keys := []string{"run", "job.sppo", "--set", "model.dtype=f32", "--weights", model, "--json", "-q"}
			for key, value := range pairsOf(schedule) {
				keys = append(keys, "--set", "schedule."+key+"="+value)
			}
			out, _ := sppovm(t, t.Context(), append(keys, "--adapter", adapter, "--save", "end.ckpt")...)
			for i, o := range objects(t, out)[:len(want.Losses)] {
				if got := o["loss"].(float64); !(math.Abs(got-want.Losses[i]) <= 1e-4*want.Losses[i]) {
					t.Errorf("step %d has loss %.7g, and PEFT's %.7g", i+1, got, want.Losses[i])
				}
			}
			sppovm(t, t.Context(), append(keys, "--steps", "0", "--adapter", adapter, "--save", "start.ckpt")...)
			checkFrozen(t)
			sppovm(t, t.Context(), "export", "end.ckpt", "-o", "adapter", "--adapter")
			sppovm(t, t.Context(), "export", "start.ckpt", "-o", "same", "--adapter")
			if !bytes.Equal(mustRead(t, "same/"+hf.AdapterWeights), mustRead(t, filepath.Join(adapter, hf.AdapterWeights))) {
				checkSameAdapter(t, filepath.Join(adapter, hf.AdapterWeights), "same/"+hf.AdapterWeights)
			}
			checkUse(t, model, adapter)
			again, _ := sppovm(t, t.Context(), append(keys, "--steps", "1", "--adapter", "adapter", "--set", "train.adapter.dropout=0")...)
			first := objects(t, again)[0]["loss"].(float64)
			if !(math.Abs(first-want.Last) <= 1e-4*want.Last) {
				t.Errorf("the exported adapter has, without dropout, loss %.7g, and PEFT's %.7g", first, want.Last)
			}
			sppovm(t, t.Context(), "export", "end.ckpt", "-o", "merged", "--merge", "--dtype", "f32")
			plain := append(slices.Clone(keys), "--set", "train.adapter=none", "--steps", "1")
			plain[slices.Index(plain, model)] = "merged"
			merged, _ := sppovm(t, t.Context(), plain...)
			if got := objects(t, merged)[0]["loss"].(float64); !(math.Abs(got-want.Last) <= 1e-4*want.Last) {
				t.Errorf("the merged model has loss %.7g, and PEFT's adapter %.7g", got, want.Last)
			}
			checkInPEFT(t, model, want.Last)
		})
	}
}

// pairsOf parses text such as "key = value key = value".
func pairsOf(text string) map[string]string {
	out, words := map[string]string{}, strings.Fields(text)
	for i := 0; i+2 < len(words); i += 3 {
		out[words[i]] = words[i+2]
	}
	return out
}

// checkUse compares a model with an adapter, in eval and in sample, with a checkpoint of the two at step 0.
func checkUse(t *testing.T, model, adapter string) {
	t.Helper()
	var losses [2]string
	for i, from := range [][]string{{"--resume", "start.ckpt"}, {"--weights", model, "--adapter", adapter}} {
		losses[i], _ = sppovm(t, t.Context(), append([]string{"eval", "job.sppo", "--set", "model.dtype=f32", "-q"}, from...)...)
	}
	if losses[0] != losses[1] || losses[0] == "" {
		t.Errorf("eval of the checkpoint:\n%s\nof model and adapter:\n%s", losses[0], losses[1])
	}
	var logits [3][]float32
	var trained lang.Model
	pool := simd.NewPool(1)
	defer pool.Close()
	for i, f := range []sampleFlags{{resume: "start.ckpt"}, {weights: model, adapter: adapter}, {weights: model}} {
		s, err := f.open()
		if err != nil {
			t.Fatal(err)
		}
		defer s.close()
		w, err := s.weights(8)
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			trained = s.model
		} else if i == 1 {
			if s.model.AdapterRank != trained.AdapterRank || !slices.Equal(s.model.AdapterTargets, trained.AdapterTargets) {
				t.Errorf("the adapter of rank %d has maps %v rather than %v", s.model.AdapterRank, s.model.AdapterTargets, trained.AdapterTargets)
			}
			s.model = trained // f32, and what Gemma rounds to the model's type
		}
		m, err := sample.Open(s.model, sample.Size{Sequence: 8, Tokens: 8}, w, pool)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		if logits[i], err = m.Feed([]int32{1, 2, 3}); err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(logits[0], logits[1]) || slices.Equal(logits[1], logits[2]) {
		t.Error("a sample of model and adapter has other logits than one of their checkpoint, or the same as one without the adapter")
	}
}

// checkFrozen checks that training has changed every tensor of the adapters and no other tensor.
func checkFrozen(t *testing.T) {
	t.Helper()
	values := func(path string) map[string][]float32 {
		c, err := train.OpenCheckpoint(path)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		out := map[string][]float32{}
		for _, tensor := range c.Weights() {
			v := make([]float32, tensor.Shape[0]*tensor.Shape[1])
			if err := c.Read(tensor.Name, 0, 0, tensor.Shape[0], tensor.Shape[1], v); err != nil {
				t.Fatal(err)
			}
			out[tensor.Name] = v
		}
		return out
	}
	before, after := values("start.ckpt"), values("end.ckpt")
	for name := range before {
		if same := slices.Equal(before[name], after[name]); same == hf.IsAdapter(name) {
			t.Errorf("%s: unchanged %v", name, same)
		}
	}
}

// checkSameAdapter compares the tensors of two adapter files, except those of a vision part in the first.
func checkSameAdapter(t *testing.T, a, b string) {
	t.Helper()
	values := func(path string) (names map[string]json.RawMessage, data []byte) {
		text := mustRead(t, path)
		n := binary.LittleEndian.Uint64(text)
		if err := json.Unmarshal(text[8:8+n], &names); err != nil {
			t.Fatal(err)
		}
		return names, text[8+n:]
	}
	at := func(m json.RawMessage, data []byte) []byte {
		var entry struct {
			At []int `json:"data_offsets"`
		}
		if err := json.Unmarshal(m, &entry); err != nil {
			t.Fatal(err)
		}
		return data[entry.At[0]:entry.At[1]]
	}
	x, xs := values(a)
	y, ys := values(b)
	delete(x, "__metadata__")
	delete(y, "__metadata__")
	for name := range x {
		if strings.Contains(name, "vision_tower.") {
			delete(x, name)
			continue
		}
		if y[name] == nil || !bytes.Equal(at(x[name], xs), at(y[name], ys)) {
			t.Errorf("%s of %s is not that of %s", name, b, a)
		}
	}
	if len(x) != len(y) {
		t.Errorf("%d tensors in %s, %d in %s", len(x), a, len(y), b)
	}
}

// checkInPEFT loads the exported adapter with PEFT and the merged model with transformers, if SPPO_PYTHON
// names a Python with both.
func checkInPEFT(t *testing.T, model string, want float64) {
	t.Helper()
	python := os.Getenv("SPPO_PYTHON")
	if python == "" {
		return
	}
	script := filepath.Join(filepath.Dir(model), "../../../../bench/peers/hub_lora.py")
	for _, pair := range [][2]string{{model, "adapter"}, {"merged", "-"}} {
		out, err := exec.Command(python, script, "--measure", pair[0], pair[1], "expected.json").Output()
		var got float64
		if err == nil {
			err = json.Unmarshal(out, &got)
		}
		if err != nil || !(math.Abs(got-want) <= 1e-4*want) {
			t.Errorf("PEFT has loss %.7g with %s, not %.7g: %v", got, pair[1], want, err)
		}
	}
}

// Wrong adapters cause one clear error each, and nothing is written.
func TestWrongAdapters(t *testing.T) {
	_, other, _ := adapterJob(t, "gpt2")
	t.Chdir(filepath.Join(other, "../../..")) // back to the folder of the job
	model, adapter, _ := adapterJob(t, "llama")
	if err := os.CopyFS("broken", os.DirFS(adapter)); err != nil {
		t.Fatal(err)
	}
	edit := func(from, to string) {
		text := strings.Replace(string(mustRead(t, filepath.Join(adapter, hf.AdapterConfig))), from, to, 1)
		if err := os.WriteFile("broken/"+hf.AdapterConfig, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, x := range []struct {
		from, to, want string
		args           []string
	}{
		{"", "", "contains no adapter", []string{"--weights", model, "--adapter", "."}},
		{"", "", "--adapter needs --weights", []string{"--adapter", adapter}},
		{"", "", "has r = 4, lora_alpha = 4, but the program has rank = 4, alpha = 8", []string{"--weights", model, "--adapter", other}},
		{"", "", "is an adapter of another model", []string{"--weights", model, "--adapter", other, "--set", "train.adapter.alpha=4"}},
		{"", "", "trains no adapter", []string{"--weights", model, "--adapter", adapter, "--set", "train.adapter=none"}},
		{"", "", "the program has no adapter", []string{"--weights", model, "--adapter", adapter, "--set", "train.adapter.targets=[q_proj]"}},
		{`"LORA"`, `"IA3"`, `peft_type = "IA3" is not supported`, []string{"--weights", model, "--adapter", "broken"}},
		{`"use_dora": false`, `"use_dora": true`, "use_dora = true is not supported", []string{"--weights", model, "--adapter", "broken"}},
		{`"use_rslora": false`, `"use_rslora": true`, "use_rslora = true is not supported", []string{"--weights", model, "--adapter", "broken"}},
		{`"init_lora_weights": true`, `"init_lora_weights": "pissa_niter_4"`, "also changes the model's own matrices", []string{"--weights", model, "--adapter", "broken"}},
		{`"modules_to_save": null`, `"modules_to_save": ["lm_head"]`, `modules_to_save = ["lm_head"] is not supported`, []string{"--weights", model, "--adapter", "broken"}},
	} {
		edit(x.from, x.to)
		var errs bytes.Buffer
		args := append([]string{"run", "job.sppo", "--set", "model.dtype=f32", "-q", "--save", "never.ckpt"}, x.args...)
		code := app.Main(&cli.Env{Context: t.Context(), Stdout: &bytes.Buffer{}, Stderr: &errs}, args)
		if text := errs.String(); code != 2 || !strings.Contains(text, x.want) || strings.Count(text, "\n") > 4 {
			t.Errorf("%v: exit %d\n%swant %s", x.args, code, text, x.want)
		}
		if _, err := os.Stat("never.ckpt"); err == nil {
			t.Fatalf("%v: a checkpoint was written", x.args)
		}
	}
}

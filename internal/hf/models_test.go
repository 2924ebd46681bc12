package hf_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sppo.dev"
	"sppo.dev/internal/data/safetensors"
	"sppo.dev/internal/hf"
	"sppo.dev/internal/train"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu"
	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// expected holds the results of transformers for a fixture.
type expected struct {
	Sequence   []int32   `json:"tokens"`
	Losses     []float64 `json:"losses"`
	Loss       float64   `json:"loss"`
	GradNorm   float64   `json:"grad_norm"`
	Parameters int64     `json:"parameters"`
	Steps      []float64 `json:"steps"` // losses at the start of the first steps with adamW
}

func readExpected(t *testing.T, dir string) expected {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, "expected.json"))
	if err != nil {
		t.Fatal(err)
	}
	var e expected
	if err := json.Unmarshal(text, &e); err != nil {
		t.Fatal(err)
	}
	return e
}

// Tokens gives every step the same sequence.
func (e expected) Tokens(_ ir.Section, _, _, position int64, out []int32, stride int) error {
	for i := 0; i < len(out); i += stride {
		out[i] = e.Sequence[position]
		position++
	}
	return nil
}

// fixtures returns the folders written by bench/peers/hub_models.py: those in testdata, or new ones if
// SPPO_PYTHON names a Python interpreter.
func fixtures(t *testing.T) []string {
	t.Helper()
	root := filepath.Join("testdata", "models")
	if python := os.Getenv("SPPO_PYTHON"); python != "" {
		root = t.TempDir()
		script := filepath.Join("..", "..", "bench", "peers", "hub_models.py")
		if out, err := exec.Command(python, script, root).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	list, err := filepath.Glob(filepath.Join(root, "*", "config.json"))
	if err != nil || len(list) == 0 {
		t.Fatalf("no models in %s: %v", root, err)
	}
	for i := range list {
		list[i] = filepath.Dir(list[i])
	}
	return list
}

// compile returns a program that trains the model in a folder on sequences of the length for which e has
// results.
func compile(t *testing.T, dir string, ranks int, e expected, set ...string) *ir.Program {
	t.Helper()
	model, err := hf.ReadModel(dir)
	if err != nil {
		t.Fatal(err)
	}
	text := model.Spec("local", fmt.Sprintf("ranks = %d", ranks), fmt.Sprint(len(e.Losses)))
	set = append([]string{"train.holdout=0", "train.grad_clip=0", "train.eval_batch=0", "schedule.align=2"}, set...)
	spec, err := sppo.Parse(filepath.Join(dir, "test.sppo"), []byte(text), set...)
	if err != nil {
		t.Fatal(err)
	}
	program, err := sppo.Compile(t.Context(), spec, sppo.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return program
}

// ofFolder has the weights of a folder, and adapters keep their initial values.
type ofFolder struct{ *hf.Weights }

func (ofFolder) Has(tensor string) bool { return !hf.IsAdapter(tensor) }

// open starts a job for a program and loads the weights of a folder into it.
func open(t *testing.T, dir string, program *ir.Program, tokens vm.Tokens) *train.Job {
	t.Helper()
	_, weights := openFolder(t, dir, hf.OfAdapter(program.Tensors, false))
	pool := simd.NewPool(2)
	t.Cleanup(pool.Close)
	job, err := train.Open(program, func(int) (vm.Device, error) { return cpu.New(pool), nil }, train.Options{Weights: ofFolder{weights}, Tokens: tokens})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { job.Close() })
	if err := job.Init(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := job.Load(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	return job
}

// adamW is the optimizer of hub_models.py.
const adamW = "train.optimizer=adamw(lr = 2e-3, betas = [0.9, 0.95], eps = 1e-4, weight_decay = 0)"

// linearFixtures lists the models with linear attention.
var linearFixtures = []string{"qwen3-next", "qwen3-next-types", "qwen3.5", "qwen3.5-moe", "qwen3.5-vision", "nemotron-h", "nemotron-h-groups", "nemotron-h-dense", "nemotron-h-fused",
	"kimi-linear", "kimi-linear-groups", "kimi-linear-odd", "kimi-linear-fused"}

var schedules = []struct {
	name   string
	ranks  int
	tokens bool // ranks divide the tokens of a subsequence, which linear attention does not allow
	set    []string
}{
	{"plain", 1, false, []string{"schedule.subsequences=1", "schedule.offload=none"}},
	{"pp2", 2, false, []string{"schedule.pp=2", "schedule.sp=1", "schedule.subsequences=3", "schedule.offload=full"}},
	{"sp2", 2, false, []string{"schedule.sp=2", "schedule.pp=1", "schedule.sp_mode=megatron"}},
	{"ulysses", 2, false, []string{"schedule.sp=2", "schedule.pp=1", "schedule.sp_mode=ulysses", "schedule.zero=3"}},
	{"ring", 2, true, []string{"schedule.sp=2", "schedule.pp=1", "schedule.sp_mode=ring", "schedule.align=4", "schedule.subsequences=2"}},
	{"sp2-pp2-mux", 4, true, []string{"schedule.sp=2", "schedule.pp=2", "schedule.mux=left", "schedule.subsequences=4"}},
}

// The loss and the norm of the gradient equal those of transformers, however the model is divided.
func TestModelsAgree(t *testing.T) {
	for _, dir := range fixtures(t) {
		t.Run(filepath.Base(dir), func(t *testing.T) {
			e := readExpected(t, dir)
			for _, s := range schedules {
				if s.tokens && slices.Contains(linearFixtures, filepath.Base(dir)) {
					continue
				}
				program := compile(t, dir, s.ranks, e, append(s.set, "model.dtype=f32", adamW, "train.lr_schedule=constant", "train.warmup=0", "train.steps=20")...)
				job := open(t, dir, program, e)
				result, err := job.Step(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if d := math.Abs(result.Loss - e.Loss); !(d <= 1e-4) {
					t.Errorf("%s: loss %.6f, transformers has %.6f", s.name, result.Loss, e.Loss)
				}
				if d := math.Abs(result.GradNorm-e.GradNorm) / e.GradNorm; !(d <= 1e-4) {
					t.Errorf("%s: gradient norm %.6f, transformers has %.6f", s.name, result.GradNorm, e.GradNorm)
				}
				for i, want := range e.Steps {
					if i > 0 {
						if result, err = job.Step(t.Context()); err != nil {
							t.Fatal(err)
						}
					}
					if d := math.Abs(result.Loss - want); !(d <= 1e-4) {
						t.Errorf("%s: loss %.6f after %d steps, transformers has %.6f", s.name, result.Loss, i, want)
					}
				}
			}
		})
	}
}

// parameters returns the number of parameters of a program. What is added to the scores of experts is a buffer in transformers.
func parameters(p *ir.Program) (n int64) {
	for _, t := range p.Tensors {
		if !strings.HasSuffix(t.Name, ".correction") {
			n += t.Shape[0] * t.Shape[1]
		}
	}
	return n
}

// Weights that were loaded and not trained are exported byte for byte, both by runs with f32 weights and by
// runs with bf16 weights and f32 masters.
func TestRoundTrip(t *testing.T) {
	for _, dir := range fixtures(t) {
		if filepath.Base(dir) == packedFixture {
			continue // an export has other tensors: see TestMXFP4
		}
		t.Run(filepath.Base(dir), func(t *testing.T) {
			e := readExpected(t, dir)
			for _, dtype := range []string{"f32", "bf16"} {
				program := compile(t, dir, 2, e, "model.dtype="+dtype, "schedule.sp=2", "schedule.pp=1", "schedule.subsequences=2")
				if n := parameters(program); n != e.Parameters && program.Model.Positions != lang.PositionsLearned {
					t.Errorf("%d parameters, transformers has %d", n, e.Parameters)
				}
				out := exported(t, open(t, dir, program, e), "")
				sameFiles(t, dir, out)
				if err := hf.CheckTarget(out); err == nil {
					t.Error("a folder that is full is no target")
				}
			}
		})
	}
}

// What is added to the scores of experts is f32 in programs with bf16 weights, too, so its values are not rounded.
func TestCorrectionInF32(t *testing.T) {
	const fixture, name = "glm4-moe-mtp", "model.layers.1.mlp.gate.e_score_correction_bias"
	want := []float32{1.0000001, -0.3, 0, 1e-3}
	dir, _ := folder(t, fixture, func(l sources) sources {
		info := named(l, name).Info
		info.DType = safetensors.F32
		data, err := safetensors.Append(nil, want, info.DType)
		if err != nil {
			t.Fatal(err)
		}
		*named(l, name) = source(info, data)
		return l
	})
	e := readExpected(t, filepath.Join("testdata", "models", fixture))
	program := compile(t, dir, 2, e, "model.dtype=bf16", "schedule.sp=2", "schedule.pp=1", "schedule.zero=3", "schedule.sp_mode=ulysses")
	job := open(t, dir, program, e)
	tensor := slices.IndexFunc(program.Tensors, func(x ir.Tensor) bool { return x.Name == "layer.1.router.correction" })
	if got := train.Precision(program, tensor); got != ir.F32 {
		t.Errorf("the program stores it as %v", got)
	}
	got := make([]float32, len(want))
	if err := saved(t, job).Read("layer.1.router.correction", 0, 0, int64(len(want)), 1, got); err != nil || !slices.Equal(got, want) {
		t.Errorf("the checkpoint has %v, %v", got, err)
	}
	sameFiles(t, dir, exported(t, job, ""))
}

// Steps that balance experts change what is added to their scores, and an export has the new values.
func TestBalancedExport(t *testing.T) {
	const fixture, name = "glm4-moe", "model.layers.1.mlp.gate.e_score_correction_bias"
	dir := filepath.Join("testdata", "models", fixture)
	e := readExpected(t, dir)
	program := compile(t, dir, 1, e, "model.dtype=f32", "train.moe_router_bias_update_rate=0.5", "train.steps=2")
	job := open(t, dir, program, e)
	if _, err := job.Step(t.Context()); err != nil {
		t.Fatal(err)
	}
	before, after := floats(t, dir)[name], floats(t, exported(t, job, ""))[name]
	changed := 0
	for i := range before {
		if d := math.Abs(float64(after[i] - before[i])); math.Abs(d-0.5) < 1e-6 {
			changed++
		}
	}
	if changed == 0 {
		t.Errorf("%v became %v", before, after)
	}
}

// With adapters merged into its matrices, a model has the losses that it has with adapters, whatever its linear maps are, and a file of
// adapters says which they are.
func TestMergedAdapters(t *testing.T) {
	for _, fixture := range []string{"deepseek-v3", "glm4-moe", "kimi-linear", "llama", "mistral4", "nemotron-h", "phi3", "qwen3-next", "qwen3.5-moe"} {
		dir := filepath.Join("testdata", "models", fixture)
		e := readExpected(t, dir)
		set := []string{"model.dtype=f32", "train.optimizer=adamw(lr = 0.05)", "train.steps=8"}
		program := compile(t, dir, 1, e, append(set, "train.adapter=lora(rank = 3)")...)
		job := open(t, dir, program, e)
		for range 4 {
			if _, err := job.Step(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		c := saved(t, job)
		adapted, err := job.Step(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		from, err := hf.ReadModel(dir)
		if err != nil {
			t.Fatal(err)
		}
		of, out := lang.Model(c.Model), filepath.Join(t.TempDir(), "out")
		export := hf.Export{Values: &hf.Merged{Values: c, Model: &of}, Tensors: hf.OfAdapter(c.Weights(), false), From: from, DType: "f32"}
		if err := export.Write(t.Context(), out); err != nil {
			t.Fatal(err)
		}
		adapters := filepath.Join(t.TempDir(), "adapters")
		if err := from.WriteAdapter(t.Context(), adapters, c, c.Weights(), &of); err != nil {
			t.Fatal(err)
		}
		if again, err := from.Adapted(adapters, of.Base()); err != nil || len(again.Maps()) != len(of.Maps()) {
			t.Errorf("%s: %d maps have adapters, not %d: %v", fixture, len(again.Maps()), len(of.Maps()), err)
		}
		merged, err := open(t, out, compile(t, out, 1, e, set...), e).Step(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if d := math.Abs(merged.Loss - adapted.Loss); !(d <= 1e-4) || math.Abs(adapted.Loss-e.Loss) < 0.01 {
			t.Errorf("%s: the loss is %.6f, with adapters %.6f, without %.6f", fixture, merged.Loss, adapted.Loss, e.Loss)
		}
	}
}

// saved returns a checkpoint of a job.
func saved(t *testing.T, job *train.Job) *train.Checkpoint {
	t.Helper()
	file := filepath.Join(t.TempDir(), "checkpoint")
	if err := job.Save(file); err != nil {
		t.Fatal(err)
	}
	c, err := train.OpenCheckpoint(file)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// exported saves a job and exports the checkpoint, based on the folder from which the job was loaded.
func exported(t *testing.T, job *train.Job, dtype string) string {
	t.Helper()
	c := saved(t, job)
	from, err := hf.ReadModel(c.Origin)
	if err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(t.TempDir(), "out")
	if err := (&hf.Export{Values: c, Tensors: c.Weights(), From: from, DType: dtype}).Write(t.Context(), out); err != nil {
		t.Fatal(err)
	}
	return out
}

// sameFiles checks that two folders have the same config and tensors.
func sameFiles(t *testing.T, want, got string) {
	t.Helper()
	a, err := os.ReadFile(filepath.Join(want, hf.ConfigFile))
	b, other := os.ReadFile(filepath.Join(got, hf.ConfigFile))
	if err != nil || other != nil || !bytes.Equal(a, b) {
		t.Errorf("config.json differs: %v, %v", err, other)
	}
	mine, theirs := tensors(t, got), tensors(t, want)
	for name, value := range theirs {
		if mine[name] != value {
			t.Errorf("%s differs", name)
		}
	}
	if len(mine) != len(theirs) {
		t.Errorf("%d tensors, want %d", len(mine), len(theirs))
	}
}

// tensors returns the types, shapes and values of all tensors in a folder.
func tensors(t *testing.T, dir string) map[string]string {
	t.Helper()
	f, err := safetensors.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	out := map[string]string{}
	for _, x := range f.Tensors() {
		data := make([]byte, x.Bytes())
		if _, err := x.ReadAt(data, 0); err != nil {
			t.Fatal(err)
		}
		out[x.Name] = fmt.Sprint(x.DType, x.Shape, data)
	}
	return out
}

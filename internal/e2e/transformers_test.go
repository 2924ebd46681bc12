package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/train"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu"
	"sppo.dev/internal/vm/vmtest/naive"
	"sppo.dev/ir"
)

// oracleFolder contains what the library transformers computes for tiny models, and the script that wrote it.
const oracleFolder = "testdata/transformers"

// Sizes of all these models.
const (
	oracleSequence = 40
	oracleBatch    = 2
	oracleClose    = 1e-4 // tolerance of a loss, and of a gradient relative to its norm
)

// oracle holds the results of transformers for the model that these keys of a spec describe.
type oracle struct {
	Keys   string `json:"keys"`
	Tokens string `json:"tokens"` // name of the draw of tokens; empty: tokens
	expected
	Documents *packed `json:"documents"` // nil: not computed

	Margin float64 `json:"margin"` // of the closest choice of experts; 0: there are none
}

// expected holds the results for the sequences of a step.
type expected struct {
	Losses    [][]float64          `json:"losses"`    // loss of every token, by sequence
	Gradients map[string][]float64 `json:"gradients"` // by tensor: its norm, then dot products with vectors of signs
	Steps     []float64            `json:"steps"`     // mean loss after each of the first steps with AdamW
}

// packed holds the results if every sequence consists of several documents.
type packed struct {
	Ends [][]int `json:"ends"` // of documents, other than the last, by sequence
	expected
}

// leastMargin is how far apart the scores of a chosen expert and of the next one are, at least, in all fixtures: closer ones could
// change places by rounding.
const leastMargin = 1e-4

// oracleSchedules lists the schedules under which a model must give the same results.
var oracleSchedules = map[string]string{
	"plain":    "",
	"pp":       "pp = 2 subsequences = 4 offload = full recompute = none",
	"megatron": "sp = 2 sp_mode = megatron subsequences = 2 zero = 0",
	"ulysses":  "sp = 2 sp_mode = ulysses subsequences = 2 zero = 1 recompute = selective",
	"ring":     "sp = 2 sp_mode = ring subsequences = 2",
	"long":     "pp = 2 subsequences = 5 recompute = full offload = 0.5",
	"mux":      "pp = 2 subsequences = 5 mux = on",
	"stream":   "subsequences = 5 keep = [] order = layer",
	"replicas": "dp = 2 zero = 3 strategy = 1f1b pp = 2",
}

// TestTransformers compares our programs with transformers, under every schedule: the losses of all tokens, and
// the gradient of every tensor.
func TestTransformers(t *testing.T) {
	if !numbers {
		t.Skip("too slow under the race detector")
	}
	files, err := filepath.Glob(oracleFolder + "/*.json")
	if err != nil || len(files) < 12 {
		t.Fatalf("%d files in %s, %v", len(files), oracleFolder, err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".json"), func(t *testing.T) {
			t.Parallel()
			want := readOracle(t, file)
			if want.Margin != 0 && want.Margin < leastMargin {
				t.Errorf("a choice of experts is decided by %g", want.Margin)
			}
			for name, schedule := range oracleSchedules {
				if want.scans() && (name == "ring" || name == "mux") {
					continue
				}
				if name == "mux" && strings.Contains(want.Keys, "aux_loss") {
					schedule = strings.Replace(schedule, "on", "right", 1) // stages do not divide what counts whole sequences
				}
				t.Run(name, func(t *testing.T) { want.check(t, schedule) })
			}
		})
	}
}

// scans reports whether the model has linear attention, which does not allow ranks to divide the tokens of a subsequence.
func (o *oracle) scans() bool { return strings.Contains(o.Keys, "linear_num_key_heads") }

func readOracle(t *testing.T, file string) *oracle {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	o := &oracle{}
	if err := json.Unmarshal(data, o); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	return o
}

// TestTransformersFiles runs the script with the Python interpreter in SPPO_PYTHON, and compares what it
// writes with the files.
func TestTransformersFiles(t *testing.T) {
	python := os.Getenv("SPPO_PYTHON")
	if python == "" {
		t.Skip("SPPO_PYTHON names no Python that has transformers")
	}
	folder := t.TempDir()
	if out, err := exec.Command(python, oracleFolder+"/make.py", folder).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	files, _ := filepath.Glob(oracleFolder + "/*.json")
	for _, file := range files {
		ours, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		theirs, err := os.ReadFile(filepath.Join(folder, filepath.Base(file)))
		if err != nil {
			t.Fatal(err)
		}
		var a, b oracle
		if err := json.Unmarshal(ours, &a); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(theirs, &b); err != nil {
			t.Fatal(err)
		}
		if a.Keys != b.Keys || a.Tokens != b.Tokens || len(a.Gradients) != len(b.Gradients) || len(a.Steps) != len(b.Steps) {
			t.Errorf("%s is of another model: %s", file, b.Keys)
		}
		for i := range b.Losses {
			compareLosses(t, file, a.Losses[i], b.Losses[i])
		}
	}
}

func (o *oracle) spec(schedule string) string {
	return fmt.Sprintf(`import "clusters/local.sppo"
model oracle { %s dtype = f32 }
cluster all = local(ranks = 8)
train {
  sequence = %d batch = %d steps = 1 grad_clip = 0 eval_batch = 2 holdout = 0.5
  data = random()
}
schedule s { %s }
`, o.Keys, oracleSequence, oracleBatch, o.schedule(schedule))
}

// schedule completes a schedule's keys with the plain choice for every other key.
func (o *oracle) schedule(keys string) string {
	for _, plain := range []string{"sp = 1", "pp = 1", "dp = 1", "microbatch = 1", "subsequences = 1", "offload = none", "recompute = none", "strategy = sppo",
		"mux = off", "zero = 0", "sp_mode = megatron", "virtual_stages = 1"} {
		key, _, _ := strings.Cut(plain, " ")
		if !slices.Contains(strings.Fields(keys), key) && !(key == "virtual_stages" && strings.Contains(keys, "order = layer")) {
			keys += "\n  " + plain
		}
	}
	return keys
}

func (o *oracle) check(t *testing.T, schedule string) {
	t.Helper()
	_, p, err := compile(o.spec(schedule))
	if err != nil {
		t.Fatalf("%v\n%s", err, o.spec(schedule))
	}
	source := &drawnModel{p: p, name: o.Tokens}
	o.checkProgram(t, p, source)
	if len(p.Ranks) == 1 { // also check the naive implementation, with which other tests compare our programs
		start := naive.Tensors{}
		for _, x := range p.Tensors {
			values := make([]float32, x.Shape[0]*x.Shape[1])
			source.Read(x.Name, 0, 0, x.Shape[0], x.Shape[1], values)
			start[x.Name] = make([]float64, len(values))
			for i, v := range values {
				start[x.Name][i] = float64(v)
			}
		}
		for i, row := range naive.TokenLosses(naiveModel(t, p), start, source.batch()) {
			compareLosses(t, fmt.Sprint("sequence ", i), row, o.Losses[i])
		}
	}
}

// oracleSource provides the weights and the tokens of a model.
type oracleSource interface {
	vm.Tokens
	train.Weights
}

// checkProgram compares what a program computes with the expected results.
func (e *expected) checkProgram(t *testing.T, p *ir.Program, source oracleSource) {
	t.Helper()
	job, err := train.Open(p, func(int) (vm.Device, error) { return cpu.New(nil), nil }, train.Options{Tokens: source, Weights: source})
	if err != nil {
		t.Fatal(err)
	}
	defer job.Close()
	for _, do := range []func() error{
		func() error { return job.Init(t.Context()) },
		func() error { return job.Load(context.Background(), "oracle") },
	} {
		if err := do(); err != nil {
			t.Fatal(err)
		}
	}
	e.checkTokens(t, job, p.Run.EvalSequences)
	step, err := job.Step(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	sum, labels := 0.0, 0.0
	for _, row := range e.Losses {
		for _, l := range row {
			if sum += l; l != 0 {
				labels++
			}
		}
	}
	if math.Abs(step.Loss-sum/labels) > oracleClose {
		t.Errorf("the loss is %.6f, transformers has %.6f", step.Loss, sum/labels)
	}
	e.checkGradients(t, tensors(t, p, job, ir.RoleGrad))
	for i, want := range e.Steps {
		if i+1 == p.Run.Steps {
			break
		}
		if step, err = job.Step(t.Context()); err != nil {
			t.Fatal(err)
		}
		if !(math.Abs(step.Loss-want) <= oracleClose) {
			t.Errorf("the loss after %d steps is %.6f, transformers has %.6f", i+1, step.Loss, want)
		}
	}
}

// checkTokens compares the loss of every token, as the eval section of our program computes it, with that of
// transformers.
func (e *expected) checkTokens(t *testing.T, job *train.Job, sequences int) {
	t.Helper()
	if _, err := job.Eval(t.Context()); err != nil {
		t.Fatal(err)
	}
	losses, err := job.TokenLosses()
	if err != nil {
		t.Fatal(err)
	}
	for s := range sequences {
		row := make([]float64, oracleSequence)
		for i := range row {
			row[i] = float64(losses[s*oracleSequence+i])
		}
		compareLosses(t, fmt.Sprint("program, sequence ", s), row, e.Losses[s])
	}
}

func compareLosses(t *testing.T, what string, got, want []float64) {
	t.Helper()
	for i := range want {
		if want[i] != 0 && !(math.Abs(got[i]-want[i]) <= oracleClose) { // the first tokens of documents have no loss
			t.Errorf("%s: the loss of token %d is %.6f, transformers has %.6f", what, i, got[i], want[i])
			return
		}
	}
}

// checkGradients estimates how far each tensor's gradient is from that of transformers. If d is the difference
// and s a random vector of signs, the mean of (d·s)² is the square of d's norm.
func (e *expected) checkGradients(t *testing.T, grads map[string][]float32) {
	t.Helper()
	if len(grads) != len(e.Gradients) {
		t.Errorf("%d tensors, transformers has %d", len(grads), len(e.Gradients))
	}
	for name, want := range e.Gradients {
		if strings.HasSuffix(name, ".bk") && want[0] < 1e-6 {
			continue // without rotation, a key bias has no gradient except rounding
		}
		square := 0.0
		for k, dot := range want[1:] {
			draw := newDraw(fmt.Sprintf("%s#%d", name, k))
			got := 0.0
			for i, g := range grads[name] {
				got += float64(g) * float64(int64(draw.at(i)&1)*2-1)
			}
			square += (got - dot) * (got - dot) / float64(len(want)-1)
		}
		if distance := math.Sqrt(square); !(distance <= oracleClose*want[0]+1e-9) {
			t.Errorf("the gradient of %s is off by %.2g of its norm %.3g", name, distance/want[0], want[0])
		}
	}
}

// drawnModel provides weights and tokens, which it draws in the same way as the script.
type drawnModel struct {
	p    *ir.Program
	name string // of the draw of tokens; empty: tokens
}

// oracleDraw is a SplitMix64 generator whose seed is the FNV-1a hash of a name.
type oracleDraw uint64

func newDraw(name string) oracleDraw {
	h := fnv.New64a()
	h.Write([]byte(name))
	return oracleDraw(h.Sum64())
}

// at returns the i-th draw, a 24-bit number.
func (d oracleDraw) at(i int) uint64 {
	z := uint64(d) + uint64(i+1)*0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return (z ^ z>>31) >> 40
}

// Describe implements vm.Weights.
func (m *drawnModel) Describe() string { return "drawn by name" }

// Read implements vm.Weights.
func (m *drawnModel) Read(tensor string, row, col, rows, cols int64, out []float32) error {
	width := int64(1)
	for _, t := range m.p.Tensors {
		if t.Name == tensor {
			width = t.Shape[1]
		}
	}
	shift := float32(0)
	if strings.HasSuffix(tensor, "gamma") { // stored without the offset that the model adds
		shift = 1 - float32(m.p.Model.NormOffset)
	}
	draw := newDraw(tensor)
	for i := range out {
		r, c := row+int64(i)/cols, col+int64(i)%cols
		out[i] = float32(draw.at(int(r*width+c)))/(1<<24) - 0.5 + shift
	}
	return nil
}

// Tokens implements vm.Tokens.
func (m *drawnModel) Tokens(_ ir.Section, _, sequence, position int64, out []int32, stride int) error {
	draw := newDraw(orElse(m.name, "tokens"))
	for i := 0; i < len(out); i += stride {
		out[i] = int32(draw.at(int(sequence*(oracleSequence+1)+position)) % uint64(m.p.Run.Vocab))
		position++
	}
	return nil
}

func (m *drawnModel) batch() [][]int32 {
	tokens := make([][]int32, oracleBatch)
	for s := range tokens {
		tokens[s] = make([]int32, oracleSequence+1)
		m.Tokens(ir.SectionStep, 1, int64(s), 0, tokens[s], 1)
	}
	return tokens
}

package train

import (
	"encoding/binary"
	"encoding/json"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/vmtest/naive"
	"sppo.dev/ir"
)

// write creates files in a temporary folder.
func write(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		full := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(full), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(full, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func textRun(files ...string) *ir.Run {
	return &ir.Run{DataKind: "text", DataFiles: files, Sequence: 3, Vocab: 256, Seed: 5}
}

// TestTokens checks that each sequence continues where the previous one ended, across steps and files and back
// to the start of the data. It also checks where validation windows begin.
func TestTokens(t *testing.T) {
	var a, b []byte
	for i := range 300 {
		if i < 100 {
			a = binary.LittleEndian.AppendUint16(a, uint16(i))
		} else {
			b = binary.LittleEndian.AppendUint16(b, uint16(i))
		}
	}
	dir := write(t, map[string]string{"b.bin": string(a), "a.bin": string(b)})
	run := &ir.Run{DataKind: "tokens", DataFiles: []string{"b.bin", "a.bin"}, Sequence: 7, Batch: 3, Vocab: 300, Seed: 1,
		Holdout: 0.1, EvalBatch: 2, EvalSequences: 1, DataOptions: &ir.DataOptions{Type: "auto", Header: "auto"}}
	d, err := OpenData(run, dir)
	if err != nil {
		t.Fatal(err)
	}
	next := int32(0)
	for step := int64(1); step <= 40; step++ {
		for s := range int64(3) {
			out := make([]int32, 8)
			if err := d.Tokens(ir.SectionStep, step, s, 0, out, 1); err != nil {
				t.Fatal(err)
			}
			for i, id := range out {
				if want := (next + int32(i)) % 270; id != want {
					t.Fatalf("step %d, sequence %d: token %d is %d, want %d", step, s, i, id, want)
				}
			}
			next = (next + 7) % 270
		}
	}
	for round, want := range []int32{270, 292} {
		out := make([]int32, 8)
		if err := d.Tokens(ir.SectionEval, int64(round), 0, 0, out, 1); err != nil || out[0] != want {
			t.Errorf("validation window %d begins with %d, %v, want %d", round, out[0], err, want)
		}
	}
	if err := d.Tokens(ir.SectionStep, 1, 0, 7, make([]int32, 2), 1); err == nil {
		t.Error("token 8 of a sequence of 7 and a label")
	}
}

func TestPatterns(t *testing.T) {
	dir := write(t, map[string]string{
		"a.md": "A", "b.txt": "B", "sub/c.md": "C", "sub/deep/d.md": "D", "sub/deep/e.go": "E", "other/f.md": "F",
	})
	for _, c := range []struct{ patterns, want string }{
		{"a.md", "A"},
		{"*.md", "A"},
		{"**/*.md", "A C D F"},
		{"sub/**", "C D E"},
		{"sub/**/*.md", "C D"},
		{"**/deep/*", "D E"},
		{"[ab].*", "A B"},
		{"b.txt,a.md", "A B"},
		{"**/*.md,sub/**", "A C D E F"},
		{"./sub/../a.md", "A"},
	} {
		files, err := expand(strings.Split(c.patterns, ","), dir)
		if err != nil {
			t.Errorf("%s: %v", c.patterns, err)
			continue
		}
		text, err := concatenate(files)
		if err != nil {
			t.Fatal(err)
		}
		got := strings.Split(string(text), "\n")
		slices.Sort(got) // because expand sorts files by path
		if strings.Join(got, " ") != c.want {
			t.Errorf("%s finds %q, want %q", c.patterns, got, c.want)
		}
	}
	absolute, err := expand([]string{filepath.Join(dir, "*.md")}, "elsewhere")
	if err != nil || len(absolute) != 1 {
		t.Errorf("an absolute pattern finds %v, %v", absolute, err)
	}
}

func TestDataErrors(t *testing.T) {
	dir := write(t, map[string]string{"short": "ab", "long": strings.Repeat("x", 100), "numbers": strings.Repeat("\x01\x00", 50), "high": "\xff\xff\xff\xff\xff", "empty": ""})
	for name, c := range map[string]struct {
		run  *ir.Run
		want string
	}{
		"missing":   {textRun("nowhere"), "there is no file"},
		"no match":  {textRun("*.sppo"), "no file matches"},
		"no folder": {textRun("nowhere/**"), "there is no folder"},
		"folder":    {textRun("."), "is a folder: append /**"},
		"none":      {textRun(), "without files"},
		"pattern":   {textRun("[a"), "syntax error in pattern"},
		"empty":     {textRun("empty"), "empty"},
		"short":     {textRun("short"), "2 bytes of training data (0 held out) are fewer than the 4 of one sequence"},
		"vocab":     {&ir.Run{DataKind: "text", DataFiles: []string{"high"}, Sequence: 3, Vocab: 128}, "contains byte 255"},
		"held out": {&ir.Run{DataKind: "text", DataFiles: []string{"long"}, Sequence: 3, Vocab: 256, Holdout: 0.02, EvalBatch: 1, EvalSequences: 1},
			"2 of 100 bytes are held out for validation, fewer than the 4 of one sequence and its last label; set holdout to 0.0405 or more"},
		"tokens": {&ir.Run{DataKind: "tokens", DataFiles: []string{"numbers"}, Sequence: 50, Vocab: 9, DataOptions: &ir.DataOptions{Type: "uint16", Header: "auto"}},
			"50 tokens to train on (0 held out) are fewer than the 51"},
		"options": {&ir.Run{DataKind: "tokens"}, "without options"},
		"kind":    {&ir.Run{DataKind: "images"}, "images"},
	} {
		_, err := OpenData(c.run, dir)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

// TestText checks that samples are windows of the training part, and that validation windows are spread over
// the held-out part.
func TestText(t *testing.T) {
	var text []byte
	for i := range 200 {
		text = append(text, byte(i))
	}
	run := &ir.Run{Sequence: 9, Vocab: 256, Seed: 3, Holdout: 0.25, EvalBatch: 5, EvalSequences: 2}
	d, err := newTextData(run, text)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[int32]bool{}
	for step := range int64(400) {
		sample := make([]int32, 10)
		if err := d.Tokens(ir.SectionStep, step, step%3, 0, sample, 1); err != nil {
			t.Fatal(err)
		}
		part := []int32{-1, -1, -1, -1}
		if err := d.Tokens(ir.SectionStep, step, step%3, 4, part, 2); err != nil {
			t.Fatal(err)
		}
		if part[0] != sample[4] || part[2] != sample[5] || part[1] != -1 {
			t.Fatalf("a part %v differs from the whole %v", part, sample)
		}
		for i, token := range sample {
			if token != sample[0]+int32(i) || token >= 150 {
				t.Fatalf("sample %v is no window of the training part", sample)
			}
		}
		seen[sample[0]] = true
	}
	if len(seen) < 120 || !seen[0] || !seen[140] {
		t.Errorf("%d of 141 offsets seen in 400 samples; first %v, last %v", len(seen), seen[0], seen[140])
	}
	for window, want := range []int32{150, 158, 166, 174, 182, 190} {
		first := []int32{0}
		if err := d.Tokens(ir.SectionEval, int64(window/2), int64(window%2), 0, first, 1); err != nil || first[0] != want {
			t.Errorf("window %d starts at %d, want %d (%v)", window, first[0], want, err)
		}
	}
	if err := d.Tokens(ir.SectionEval, 3, 0, 0, make([]int32, 1), 1); err == nil {
		t.Error("a validation of six windows has a seventh")
	}
	if err := d.Tokens(ir.SectionStep, 1, 0, 8, make([]int32, 3), 1); err == nil {
		t.Error("a sequence of ten tokens has an eleventh")
	}
}

func TestRandomData(t *testing.T) {
	d, err := OpenData(&ir.Run{DataKind: "random", Sequence: 1000, Vocab: 7, Seed: 1}, "")
	if err != nil {
		t.Fatal(err)
	}
	whole, part, other := make([]int32, 1000), make([]int32, 10), make([]int32, 1000)
	for _, err := range []error{
		d.Tokens(ir.SectionStep, 1, 2, 0, whole, 1), d.Tokens(ir.SectionStep, 1, 2, 500, part, 1), d.Tokens(ir.SectionEval, 1, 2, 0, other, 1),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(whole[500:510], part) {
		t.Error("a part differs from the whole")
	}
	if slices.Equal(whole, other) {
		t.Error("validation and training are the same")
	}
	if slices.Min(whole) != 0 || slices.Max(whole) != 6 {
		t.Errorf("tokens of %d..%d, want 0..6", slices.Min(whole), slices.Max(whole))
	}
}

func TestNormals(t *testing.T) {
	r := vm.NewRandom(1, "w")
	const n = 200000
	x := make([]float32, n)
	r.Normals(0, x, 2)
	var mean, square, fourth float64
	for _, v := range x {
		mean += float64(v) / n
		square += float64(v) * float64(v) / n
		fourth += math.Pow(float64(v), 4) / n
	}
	if math.Abs(mean) > 0.02 || math.Abs(square-4) > 0.05 || math.Abs(fourth-48) > 2 {
		t.Errorf("mean %v, second moment %v, fourth %v; want 0, 4, 48", mean, square, fourth)
	}
	for _, first := range []uint64{1, 2, 77} { // any part equals the same part of the whole
		part := make([]float32, 5)
		r.Normals(first, part, 2)
		if !slices.Equal(part, x[first:first+5]) {
			t.Errorf("elements from %d on: %v, want %v", first, part, x[first:first+5])
		}
	}
	for _, other := range []vm.Random{vm.NewRandom(2, "w"), vm.NewRandom(1, "v"), vm.NewRandom(1, "w", 0)} {
		y := make([]float32, 10)
		other.Normals(0, y, 2)
		if y[0] == x[0] {
			t.Error("different streams agree")
		}
	}
	// Initial values determine every published result and must not change unnoticed.
	got := [3]float32{}
	vm.InitialValues(42, "layer.0.wq").Normals(1000, got[:], 0.02)
	if want := goldenNormals; got != want {
		t.Errorf("initial values are %v, were %v", got, want)
	}
}

var goldenNormals = [3]float32{-0.009824541, 0.008813948, -0.026399814}

// lrSchedules returns the rates that bench/peers/lr_schedules.py takes from the transformers library: those
// stored in testdata, or, if SPPO_PYTHON names a Python interpreter, those from a new run of the script.
func lrSchedules(t *testing.T) (list []struct {
	Run   ir.Run
	Rates []float64
}) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", "lr_schedules.json"))
	if python := os.Getenv("SPPO_PYTHON"); python != "" {
		text, err = exec.Command(python, filepath.Join("..", "..", "bench", "peers", "lr_schedules.py")).Output()
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &list); err != nil {
		t.Fatal(err)
	}
	return list
}

func TestLearningRateIsThatOfTransformers(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range lrSchedules(t) {
		seen[c.Run.LRSchedule] = true
		for i, want := range c.Rates {
			if got := learningRate(&c.Run, int64(i+1)); math.Abs(got-want) > 1e-12*c.Run.LR {
				t.Errorf("%s, warm-up %d, min_lr %g, decay %d %s, step %d: %v, want %v",
					c.Run.LRSchedule, c.Run.Warmup, c.Run.MinLR, c.Run.DecaySteps, c.Run.DecayType, i+1, got, want)
			}
		}
	}
	for _, name := range ir.LRSchedules {
		if !seen[name] {
			t.Errorf("no rates of %s", name)
		}
	}
}

func TestLearningRateIsTheNaiveOne(t *testing.T) {
	for _, decay := range []string{"constant", "cosine"} {
		for _, warmup := range []int{0, 1, 10} {
			run := &ir.Run{LR: 3e-3, MinLR: 1e-4, Warmup: warmup, Steps: 50, LRSchedule: decay, Beta1: 0.9, Beta2: 0.95}
			for step := 1; step < 70; step++ {
				got, want := learningRate(run, int64(step)), naive.LearningRate(step, warmup, 50, decay, 3e-3, 1e-4)
				if math.Abs(got-want) > 1e-15 {
					t.Errorf("%s, warm-up %d, step %d: %v, want %v", decay, warmup, step, got, want)
				}
			}
		}
	}
	if p := stepParameters(&ir.Run{LR: 1, Steps: 9, Beta1: 0.5, Beta2: 0.75}, 5, 2); p != [3]float32{1, 1 / 0.75, 1 / 0.4375} {
		t.Errorf("step parameters %v", p)
	}
}

func TestBF16(t *testing.T) {
	for _, c := range []struct {
		in   float32
		want uint16
	}{
		{1, 0x3f80}, {-2, 0xc000}, {1 + 1.0/256, 0x3f80}, {1 + 3.0/256, 0x3f82}, {1 + 1.001/256, 0x3f81},
		{float32(math.Inf(1)), 0x7f80}, {math.MaxFloat32, 0x7f80}, {0, 0},
	} {
		if got := vm.BF16(c.in); got != c.want {
			t.Errorf("%v becomes %04x, want %04x", c.in, got, c.want)
		}
	}
	for _, bits := range []uint32{0x7f800001, 0xffffffff, 0x7fffffff} {
		if v := vm.FromBF16(vm.BF16(math.Float32frombits(bits))); v == v {
			t.Errorf("not-a-number %08x becomes %v", bits, v)
		}
	}
}

package passes

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"sppo.dev/internal/irtest"
	"sppo.dev/internal/passes/estimate"
	"sppo.dev/internal/passes/partition"
	"sppo.dev/internal/passes/pass"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/plantest"
	"sppo.dev/internal/passes/report"
	"sppo.dev/internal/passes/words"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// TestPlansOfSpecs compares the report and the JSON of every spec in testdata/plan with the expected ones.
func TestPlansOfSpecs(t *testing.T) {
	specs, _ := filepath.Glob("testdata/plan/*.sppo")
	for _, file := range specs {
		sp, err := lang.Load(file, lang.Options{})
		if err != nil {
			t.Fatal(err)
		}
		p := plan.New(sp)
		if err := Run(sp, p, pass.Options{}); err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		if err := report.Write(&b, p); err != nil {
			t.Fatal(err)
		}
		base := strings.TrimSuffix(file, ".sppo")
		irtest.Golden(t, base+".want", b.Bytes())
		irtest.Golden(t, base+".json", plantest.JSON(t, p))
	}
	files, _ := filepath.Glob("testdata/plan/*")
	for _, file := range files {
		if _, err := os.Stat(strings.TrimSuffix(file, filepath.Ext(file)) + ".sppo"); err != nil {
			t.Errorf("%s belongs to no spec", file)
		}
	}
}

// TestPlansOfThePaper checks the sizes, lengths and bubbles of plans for the jobs in the paper's evaluation
// table.
func TestPlansOfThePaper(t *testing.T) {
	files, _ := filepath.Glob("../../examples/paper/gpt-*-*.sppo")
	if len(files) != 15 {
		t.Errorf("%d specs, want 15", len(files))
	}
	var b bytes.Buffer
	for _, file := range files {
		p := plantest.Plan(t, "paper/"+filepath.Base(file))
		par, sub := p.Parallel, p.Subsequences
		fmt.Fprintf(&b, "%s: sp %d pp %d n %d align %d imbalance %.4f\n", filepath.Base(file), par.SP, par.PP, sub.N, sub.Align, sub.Imbalance)
		fmt.Fprintf(&b, "  %s\n", words.List(sub.Lengths))
		want := partition.ByFlops(estimate.FlopsOfLayer(p.Model), p.Train.Sequence, sub.N, 128)
		if diff := cmp.Diff(partition.Lengths(want), sub.Lengths); diff != "" {
			t.Errorf("%s: not the partition on a grid of 128:\n%s", file, diff)
		}
		if bubble := float64(par.PP-1) / float64(sub.N); p.Time.BubbleRatio < bubble || p.Time.BubbleRatio > 1.35*bubble {
			t.Errorf("%s: bubble %.4f, and (PP-1)/N is %.4f", file, p.Time.BubbleRatio, bubble)
		}
	}
	irtest.Golden(t, "testdata/paper/lengths.want", b.Bytes())
}

// TestReferenceTime compares a prediction with a figure computed by hand under the same assumptions. The figure
// omits memory-bound kernels and the head.
func TestReferenceTime(t *testing.T) {
	p := plantest.Plan(t, "paper/gpt-7b-512k.sppo")
	if got := float64(p.Time.StepS); math.Abs(got-59.8) > 0.02*59.8 {
		t.Errorf("7B, 512K tokens on 8 x 4: %.2f s, want 59.8 within 2%%", got)
	}
}

func TestJSONRoundTrip(t *testing.T) {
	for _, file := range []string{"tiny.sppo", "llama-docs.sppo", "paper/gpt-65b-1m.sppo"} {
		p := plantest.Plan(t, file)
		text := plantest.JSON(t, p)
		back, err := plan.ReadJSON(bytes.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(p, back); diff != "" {
			t.Errorf("%s changed on its way through JSON:\n%s", file, diff)
		}
		if !bytes.Equal(text, plantest.JSON(t, back)) {
			t.Errorf("%s is written differently the second time", file)
		}
		if err := Verify(back); err != nil {
			t.Error(err)
		}
	}
}

func TestTwiceTheSame(t *testing.T) {
	a, b := plantest.JSON(t, plantest.Plan(t, "gpt-docs.sppo")), plantest.JSON(t, plantest.Plan(t, "gpt-docs.sppo"))
	if !bytes.Equal(a, b) {
		t.Error("planning twice gives two plans")
	}
}

func TestJSONThatIsNoPlan(t *testing.T) {
	good := string(plantest.JSON(t, plantest.Plan(t, "tiny.sppo")))
	for _, c := range []struct{ old, new, want string }{
		{`"parallel"`, `"paralel"`, "there is no key \"paralel\" here [unknown-key]\n      \"paralel\": {\n      ^"},
		{`"F0.0@0"`, `"G0.0@0"`, "is not a task"},
		{`"sp": 2,`, `"sp": two,`, "invalid character 'w' in literal true (expecting 'r') [syntax]\n        \"sp\": two,\n               ^"},
		{`"sp": 2,`, `"sp": "2",`, "schedule.sp needs a whole number, found string [wrong-type]\n        \"sp\": \"2\",\n              ^"},
		{`"tasks": [`, `"tasks": 3, "x": [`, "tasks needs a list, found number [wrong-type]"},
		{"\n}\n", "\n}\n{}", "there is text after the end of the plan [syntax]\n    {}\n    ^"},
		{"\n}\n", "\n", "the plan is incomplete [syntax]"},
		{good, "null", "plan:1:1: error: a plan is an object, found null"},
		{good, "[]", "plan:1:1: error: a plan is an object, found array"},
	} {
		text := strings.Replace(good, c.old, c.new, 1)
		if _, err := plan.ReadJSON(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s for %.20s: %v, want %q", c.new, c.old, err, c.want)
		}
	}
}

// TestJoinLists checks that brackets and quotes inside strings do not affect how lists are joined.
func TestJoinLists(t *testing.T) {
	p := plantest.Plan(t, "tiny.sppo")
	p.Lines = map[string]string{"a": "x = [1, # open", "b": `"quoted" ] [`, "c": "]", "d": `back\slash"[`}
	p.Decisions = nil
	back, err := plan.ReadJSON(bytes.NewReader(plantest.JSON(t, p)))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(p, back); diff != "" {
		t.Errorf("changed:\n%s", diff)
	}
	for _, line := range strings.Split(string(plantest.JSON(t, p)), "\n") {
		if strings.Contains(line, "F0.0@0") && !strings.Contains(line, "B0.0") {
			t.Errorf("tasks are not joined: %s", line)
		}
	}
}

// TestBrokenSizes edits plans as a person would edit JSON, and expects Verify to report the error.
func TestBrokenSizes(t *testing.T) {
	for _, c := range []struct {
		want string
		edit func(p *plan.Plan)
	}{
		{"layers_per_stage adds up to 3", func(p *plan.Plan) { p.LayersPerStage[1] = 2 }},
		{"layers_per_stage has 1 entries", func(p *plan.Plan) { p.LayersPerStage = []int{2} }},
		{"stage 0 has 0 layers", func(p *plan.Plan) { p.LayersPerStage = []int{0, 2} }},
		{"make 8 ranks", func(p *plan.Plan) { p.Parallel.DP = 2 }},
		{"microbatches is 1", func(p *plan.Plan) { p.Parallel.Microbatches = 1 }},
		{"4 lengths for 5", func(p *plan.Plan) { p.Subsequences.N = 5 }},
		{"not a positive multiple of sp", func(p *plan.Plan) { p.Subsequences.Lengths[0] = 17 }},
		{"lengths add up to 66", func(p *plan.Plan) { p.Subsequences.Lengths[0] = 20 }},
		{"units", func(p *plan.Plan) { p.Units = p.Units[1:] }},
		{"units", func(p *plan.Plan) { p.Units[0].Name = "x" }},
		{"mux of stage 0 covers", func(p *plan.Plan) { p.Mux.Stages[0].Left++ }},
		{"mux of stage 0: applied is true", func(p *plan.Plan) { p.Mux.Stages[0].Applied = true }},
		{"schedule.recompute", func(p *plan.Plan) { p.Recompute = "some" }},
		{"model.kv_heads", func(p *plan.Plan) { p.Model.KVHeads = 3 }},
		{"model.heads: it is 0", func(p *plan.Plan) { p.Model.Heads = 0 }},
		{"model.family", func(p *plan.Plan) { p.Model.Family = "rnn" }},
		{"sizes must be at least 1", func(p *plan.Plan) { p.Parallel.SP = 0 }},
	} {
		p := plantest.Plan(t, "tiny.sppo")
		c.edit(p)
		if err := Verify(p); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want it to say %q", err, c.want)
		}
	}
}

// TestEditedNumbers replaces each number in a plan, one at a time, with unusual values. Reading, verifying and
// predicting may reject the plan, but must never panic.
func TestEditedNumbers(t *testing.T) {
	text := string(plantest.JSON(t, plantest.Plan(t, "tiny.sppo")))
	numbers := regexp.MustCompile(`[ \[]-?[0-9][0-9.e+-]*`).FindAllStringIndex(text, -1)
	refused := 0
	for _, at := range numbers {
		for _, n := range []string{"0", "-1", "3", "9007199254740993", "1e300"} {
			p, err := plan.ReadJSON(strings.NewReader(text[:at[0]+1] + n + text[at[1]:]))
			if err == nil {
				err = Verify(p)
			}
			if err != nil {
				refused++
				continue
			}
			estimate.Predict(p)
			_ = report.Write(io.Discard, p)
		}
	}
	if refused < len(numbers) {
		t.Errorf("of %d strange numbers %d were refused: what is edited?", 5*len(numbers), refused)
	}
}

// TestSizes checks the sizes that solve derives from the given ones.
func TestSizes(t *testing.T) {
	for _, c := range []struct {
		set          []string
		align        int64
		layers       []int
		microbatches int
	}{
		{[]string{"schedule.sp=1", "schedule.pp=3"}, 2, []int{1, 2, 1}, 8}, // the embedding costs a little
		{[]string{"schedule.sp=1", "schedule.pp=4", "schedule.subsequences=4", "schedule.align=auto"}, 8, []int{1, 1, 1, 1}, 8},
		{[]string{"schedule.subsequences=100", "schedule.align=auto"}, 2, []int{2, 2}, 8},
		{[]string{"schedule.dp=2", "schedule.sp=1"}, 2, []int{2, 2}, 4},
		{[]string{"schedule.sp=1", "schedule.pp=3", "model.vocab=64K"}, 2, []int{2, 1, 1}, 8}, // the loss costs a lot
	} {
		p := plantest.Plan(t, "gpt-docs.sppo", append(c.set, "train.batch=8")...)
		if p.Subsequences.Align != c.align || p.Parallel.Microbatches != c.microbatches || !cmp.Equal(p.LayersPerStage, c.layers) {
			t.Errorf("%v: align %d, microbatches %d, layers %v; want %d, %d, %v", c.set, p.Subsequences.Align, p.Parallel.Microbatches, p.LayersPerStage, c.align, c.microbatches, c.layers)
		}
	}
}

func TestMuxSets(t *testing.T) {
	p := plantest.Plan(t, "paper/gpt-7b-512k.sppo")
	want := []plan.MuxStage{
		{Left: 3, Steady: 29, Right: 0, LeftRange: []int{0, 1, 2, 3}, RightRange: []int{}},
		{Left: 2, Steady: 29, Right: 1, LeftRange: []int{1, 2, 3}, RightRange: []int{0, 1}},
		{Left: 1, Steady: 29, Right: 2, LeftRange: []int{2, 3}, RightRange: []int{0, 1, 2}},
		{Left: 0, Steady: 29, Right: 3, LeftRange: []int{}, RightRange: []int{0, 1, 2, 3}},
	}
	if diff := cmp.Diff(want, p.Mux.Stages); diff != "" {
		t.Error(diff)
	}
}

// TestReportOfWhatDoesNotFit checks the report of a plan that does not fit. It sets the memory figures that
// codegen would fill in.
func TestReportOfWhatDoesNotFit(t *testing.T) {
	sp, err := lang.Load("testdata/plan/gpt.sppo", lang.Options{})
	if err != nil {
		t.Fatal(err)
	}
	p := plan.New(sp)
	if err := Run(sp, p, pass.Options{}); err != nil {
		t.Fatal(err)
	}
	p.Memory.Placed = true
	p.Memory.DevicePeakBytes = []ir.Bytes{3 << 29, 1 << 29}
	p.Memory.HostPeakBytes = []ir.Bytes{1 << 20, 5 << 30}
	var b bytes.Buffer
	if err := report.Write(&b, p); err != nil {
		t.Fatal(err)
	}
	irtest.Golden(t, "testdata/report/over.want", b.Bytes())
	p.Memory.Fits = true
	b.Reset()
	if err := report.Write(&b, p); err != nil {
		t.Fatal(err)
	}
	if text := b.String(); !strings.Contains(text, "It fits.") || strings.Contains(text, "does not fit") {
		t.Errorf("a plan that fits:\n%s", text)
	}
}

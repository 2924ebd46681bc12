package passes

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/irtest"
	"sppo.dev/internal/passes/pass"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/plantest"
	"sppo.dev/internal/passes/report"
	"sppo.dev/lang"
)

// TestPassesDocument checks that PASSES.md agrees with the list of passes.
func TestPassesDocument(t *testing.T) {
	var b bytes.Buffer
	b.WriteString("# Passes\n\nThe list in `passes.go`, in their order; written by its test.\n")
	for _, name := range Names() {
		fmt.Fprintf(&b, "\n## %s\n", name)
		_, body, _ := strings.Cut(Explain(name), "\n")
		b.WriteString(strings.ReplaceAll(strings.ReplaceAll(body, "\nRuns after\n", "\nRuns after\n\n"), "\n  ", "\n- "))
	}
	irtest.Golden(t, "PASSES.md", b.Bytes())
}

func TestDefaultOrderKeepsItsConstraints(t *testing.T) {
	names := Names()
	for i := range Passes {
		for _, o := range Passes[i].After {
			if at := slices.Index(names, o.Name); at < 0 || at >= i {
				t.Errorf("%s stands before %s, which it needs: %s", names[i], o.Name, o.Reason)
			}
		}
	}
}

func TestExplainKnowsEveryPass(t *testing.T) {
	for _, name := range Names() {
		if !strings.Contains(Explain(name), name) {
			t.Errorf("no entry for %s", name)
		}
	}
	if Explain("nothing") != "" {
		t.Error("an entry for a pass that is none")
	}
}

func TestOptionsThatCannotBe(t *testing.T) {
	for _, c := range []struct {
		want string
		o    pass.Options
	}{
		{`there is no pass "solv"`, pass.Options{StopAfter: "solv"}},
		{"cannot be switched off", pass.Options{Disable: []string{"partition"}}},
		{"cannot be switched off", pass.Options{Disable: []string{"all"}}},
	} {
		sp := plantest.Load(t, "tiny.sppo")
		if err := Run(sp, plan.New(sp), c.o); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v, want %q", c.o, err, c.want)
		}
	}
}

func TestStopAfter(t *testing.T) {
	sp := plantest.Load(t, "tiny.sppo")
	p := plan.New(sp)
	var b bytes.Buffer
	if err := Run(sp, p, pass.Options{StopAfter: "partition", PrintAfter: []string{"solve"}, Print: &b}); err != nil {
		t.Fatal(err)
	}
	if len(p.Subsequences.Lengths) == 0 || len(p.Tasks) > 0 || p.Time.StepS > 0 {
		t.Errorf("stopped after partition with %d lengths, %d stages of tasks, step %s", len(p.Subsequences.Lengths), len(p.Tasks), p.Time.StepS)
	}
	if !strings.HasPrefix(b.String(), "# plan after solve\n{") || !strings.Contains(b.String(), `"lengths": null`) {
		t.Errorf("printed after solve:\n%s", b.String())
	}
	if err := report.Write(&b, p); err != nil {
		t.Error(err)
	}
}

func TestDisable(t *testing.T) {
	sp := plantest.Load(t, "tiny.sppo")
	p := plan.New(sp)
	if err := Run(sp, p, pass.Options{Disable: []string{"offload", "mux"}}); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(p.Offload.Placement[0][0], string(plan.PlacementOffload)) || p.Offload.Policy != "none" {
		t.Errorf("without the pass, %s: %s", p.Offload.Policy, p.Offload.Placement[0][0])
	}
	if err := Verify(p); err != nil {
		t.Error(err)
	}
}

// TestRunnerNamesThePass replaces a pass with one that breaks the plan. The error must name the pass.
func TestRunnerNamesThePass(t *testing.T) {
	good := Passes[1].Run
	defer func() { Passes[1].Run = good }()
	Passes[1].Run = func(c *pass.Context, p *plan.Plan) error {
		err := good(c, p)
		p.Subsequences.Lengths[0] += 2
		return err
	}
	sp := plantest.Load(t, "tiny.sppo")
	err := Run(sp, plan.New(sp), pass.Options{})
	if err == nil || !strings.Contains(err.Error(), "after pass partition: lengths add up to 66") {
		t.Errorf("%v", err)
	}
}

// TestLeftToThePasses leaves mux, recompute and offload to the passes.
func TestLeftToThePasses(t *testing.T) {
	sp := plantest.Load(t, "gpt-docs.sppo", "schedule.mux=auto", "schedule.recompute=auto", "schedule.offload=auto")
	if err := Run(sp, plan.New(sp), pass.Options{}); err != nil {
		t.Errorf("what is left to the passes: %v", err)
	}
}

// strategyOf returns an edit that requests a strategy with undivided sequences, one per microbatch.
func strategyOf(name string, virtualStages, batch int) func(*lang.Spec) {
	return func(s *lang.Spec) {
		s.Schedule.Strategy, s.Schedule.VirtualStages, s.Schedule.Subsequences = name, virtualStages, lang.Subsequences{Count: 1}
		s.Train.Batch, s.Schedule.DP, s.Schedule.Microbatch = batch, 1, 1
	}
}

// TestBadRequests edits checked specs so that they contain errors that the language cannot detect.
func TestBadRequests(t *testing.T) {
	for _, c := range []struct {
		code       lang.Code
		words, key string
		edit       func(*lang.Spec)
	}{
		{lang.TooFewLayers, "8 stages need at least 8 layers, but the model has 4", "schedule.pp", func(s *lang.Spec) { s.Schedule.PP, s.Schedule.SP, s.Cluster.GPUsPerNode = 8, 1, 8 }},
		{lang.TooManyRanks, "make 8 ranks, but the cluster has 4", "schedule.pp", func(s *lang.Spec) { s.Schedule.SP = 4 }},
		{lang.Indivisible, "4 heads are not divisible by sp = 3", "schedule.sp", func(s *lang.Spec) { s.Schedule.SP, s.Schedule.PP, s.Schedule.Align, s.Train.Sequence = 3, 1, 3, 255 }},
		{lang.Indivisible, "2 key and value heads", "schedule.sp", func(s *lang.Spec) {
			s.Schedule.SP, s.Schedule.PP, s.Schedule.Align, s.Train.Sequence, s.Model.KVHeads, s.Model.Heads = 3, 1, 3, 258, 2, 6
		}},
		{lang.Indivisible, "batch = 8 is not a multiple of dp * microbatch = 3", "train.batch", func(s *lang.Spec) { s.Train.Batch = 8; s.Schedule.Microbatch = 3 }},
		{lang.Indivisible, "sequence = 255 is not divisible by sp = 2", "train.sequence", func(s *lang.Spec) { s.Train.Sequence = 255 }},
		{lang.BadAlign, "align = 3 is not a multiple of sp = 2", "schedule.align", func(s *lang.Spec) { s.Schedule.Align = 3 }},
		{lang.BadAlign, "too short for 8 subsequences", "schedule.subsequences", func(s *lang.Spec) { s.Schedule.Align = 64 }},
		{lang.Infeasible, "more than 20 million instructions", "schedule.subsequences", func(s *lang.Spec) { s.Schedule.Subsequences = lang.Subsequences{Count: 100_000} }},
		{lang.LengthsSum, "add up to 254", "schedule.subsequences", func(s *lang.Spec) { s.Schedule.Subsequences = lang.Subsequences{Count: 2, Lengths: []int64{128, 126}} }},
		{lang.Indivisible, "127 tokens is not divisible", "schedule.subsequences[0]", func(s *lang.Spec) { s.Schedule.Subsequences = lang.Subsequences{Count: 2, Lengths: []int64{127, 129}} }},
		{lang.BadAlign, "130 tokens is not a multiple of align = 4", "schedule.subsequences[0]", func(s *lang.Spec) {
			s.Schedule.Align, s.Schedule.Subsequences = 4, lang.Subsequences{Count: 2, Lengths: []int64{130, 126}}
		}},
		{lang.Conflict, "order = layer needs a single stage, not pp = 2", "schedule.order", func(s *lang.Spec) { s.Schedule.Order = "layer" }},
		{lang.Conflict, "order = layer processes them one by one", "schedule.strategy", func(s *lang.Spec) { s.Schedule.PP, s.Schedule.Order, s.Schedule.Strategy = 1, "layer", "seq1f1b" }},
		{lang.Conflict, "interleaved-1f1b does not support virtual_stages = 1", "schedule.virtual_stages", strategyOf("interleaved-1f1b", 1, 4)},
		{lang.Conflict, "zb-h2 does not support virtual_stages = 2", "schedule.virtual_stages", strategyOf("zb-h2", 2, 4)},
		{lang.Conflict, "zb-v needs whole sequences, not 8 subsequences", "schedule.subsequences", func(s *lang.Spec) { s.Schedule.Strategy, s.Schedule.VirtualStages = "zb-v", 0 }},
		{lang.Indivisible, "5 microbatches cannot be divided into 2 equal rounds", "train.batch", strategyOf("interleaved-1f1b", 2, 5)},
		{lang.Indivisible, "5 microbatches cannot be divided into 2 equal rounds", "train.batch", strategyOf("zb-h1", 2, 5)},
		{lang.Conflict, "2 * pp = 4 virtual stages, but there are 2", "train.batch", strategyOf("dualpipe-v", 0, 2)},
		{lang.Conflict, "but strategy = zb-h1 splits them", "schedule.keep", func(s *lang.Spec) { s.Schedule.Keep, s.Schedule.Strategy = []string{}, "zb-h1" }},
		{lang.Conflict, "as mux = left requires", "schedule.keep", func(s *lang.Spec) { s.Schedule.Keep, s.Schedule.Mux = []string{"k"}, "left" }},
		{lang.LengthOfList, "lists 2 shares for 8", "schedule.offload", func(s *lang.Spec) { s.Schedule.Offload = lang.Offload{Policy: "list", Alpha: []float64{1, 0}} }},
	} {
		sp := plantest.Load(t, "gpt-docs.sppo")
		c.edit(sp)
		plantest.Expect(t, sp, c.code, c.words, c.key, c.words)
	}
}

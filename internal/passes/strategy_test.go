package passes

import (
	"crypto/sha256"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/passes/order"
	"sppo.dev/internal/passes/pass"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/strategy"
	"sppo.dev/internal/passes/walk"
	"sppo.dev/internal/shipped"
	"sppo.dev/lang"
)

// ordered returns a plan that has only the tasks of a strategy, and checks their order.
func ordered(t *testing.T, name string, pp, v, n, m int) *plan.Plan {
	t.Helper()
	s := strategy.Find(name)
	p := &plan.Plan{
		Parallel:       plan.Parallel{PP: pp, SP: 1, DP: 1, VirtualStages: v, Placement: s.Placed, Microbatches: m},
		Subsequences:   plan.Subsequences{N: n},
		LayersPerStage: slices.Repeat([]int{1}, pp*v),
	}
	p.Schedule.Strategy = name
	strategy.Order(p)
	if err := order.Check(nil, p); err != nil {
		t.Fatalf("%s, pp %d, v %d, n %d, m %d: %v", name, pp, v, n, m, err)
	}
	return p
}

// unitCosts are the durations of tasks. A backward that is not split takes b + w.
type unitCosts struct{ f, b, w int }

// clock is the result of running a schedule with messages that take no time.
type clock struct {
	makespan int
	span     []int // by rank: time from its first task to its last
	busy     []int
	kept     []int // by rank: maximum number of forwards whose backward has not run
	held     []int // by rank: maximum number of forwards whose weight gradients have not been computed
}

func (u unitCosts) run(t *testing.T, p *plan.Plan) clock {
	t.Helper()
	ranks := len(p.Tasks)
	c := clock{span: make([]int, ranks), busy: make([]int, ranks), kept: make([]int, ranks), held: make([]int, ranks)}
	now, begun, kept, held := make([]int, ranks), make([]int, ranks), make([]int, ranks), make([]int, ranks)
	ends, split := map[plan.Task]int{}, make([]map[plan.Task]bool, ranks)
	for r := range split {
		split[r], begun[r] = p.Splits(r), -1
	}
	err := walk.Visit(p, func(r int, task plan.Task) {
		if _, source, fed := p.Source(task); fed {
			now[r] = max(now[r], ends[source])
		}
		if begun[r] < 0 {
			begun[r] = now[r]
		}
		cost := u.f
		switch {
		case task.Kind == plan.Forward:
			kept[r]++
			held[r]++
		case task.Kind == plan.WeightGrad:
			cost = u.w
			held[r]--
		case split[r][task]:
			cost = u.b
			kept[r]--
		default:
			cost = u.b + u.w
			kept[r]--
			held[r]--
		}
		now[r], c.busy[r] = now[r]+cost, c.busy[r]+cost
		ends[task] = now[r]
		c.span[r], c.makespan = now[r]-begun[r], max(c.makespan, now[r])
		c.kept[r], c.held[r] = max(c.kept[r], kept[r]), max(c.held[r], held[r])
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// bubble returns the longest idle time of a rank between its first task and its last, as the papers on zero
// bubbles define it.
func (c clock) bubble() int {
	most := 0
	for r := range c.span {
		most = max(most, c.span[r]-c.busy[r])
	}
	return most
}

// TestPublishedFigures compares every strategy with its paper's bubble and activation memory. Tasks take one
// unit each; a backward that is not split takes two.
func TestPublishedFigures(t *testing.T) {
	type figures struct {
		bubble int // of the whole pipeline, in units of a task on one virtual stage
		kept   func(rank int) int
	}
	for _, c := range []struct {
		name   string
		v      int
		source string
		of     func(p, m, v int) figures
	}{
		{"gpipe", 1, "Huang et al. 2019, section 2.3: (p-1)/m of the busy time; all activations", func(p, m, v int) figures {
			return figures{3 * (p - 1), func(int) int { return m }}
		}},
		{"looped-bfs", 2, "Lamy-Poirier 2022, table 4.1, breadth-first: (p-1)/(v*m)", func(p, m, v int) figures {
			return figures{3 * (p - 1), func(int) int { return v * m }}
		}},
		{"1f1b", 1, "Narayanan et al. 2021, section 2.2.1: (p-1)/m; at most p activations", func(p, m, v int) figures {
			return figures{3 * (p - 1), func(r int) int { return min(m, p-r) }}
		}},
		{"interleaved-1f1b", 2, "Narayanan et al. 2021, section 2.2.2: (p-1)/(v*m); Korthikanti et al. 2022, section 4.2.3: 1 + (p-1)/(p*v) times the activations on the first rank", func(p, m, v int) figures {
			return figures{3 * (p - 1), func(r int) int { return min(v*m, p*v+p-1-2*r) }}
		}},
		{"interleaved-1f1b", 4, "the same", func(p, m, v int) figures {
			return figures{3 * (p - 1), func(r int) int { return min(v*m, p*v+p-1-2*r) }}
		}},
		{"zb-h1", 1, "Qi et al. 2023, table 2: (p-1)(f+b-w), p activations", func(p, m, v int) figures {
			return figures{p - 1, func(int) int { return min(m, p) }}
		}},
		{"zb-h2", 1, "Qi et al. 2023, table 2: (p-1)(f+b-2w), 2p-1 activations", func(p, m, v int) figures {
			return figures{0, func(int) int { return min(m, 2*p-1) }}
		}},
		{"zb-v", 2, "Qi et al. 2023, section 6: none, p activations, which are 2p of half as many layers", func(p, m, v int) figures {
			return figures{0, func(int) int { return 2 * p }}
		}},
	} {
		for _, p := range []int{2, 3, 4, 8} {
			for _, rounds := range []int{2, 3, 5} {
				m := rounds * p
				got := unitCosts{1, 1, 1}.run(t, ordered(t, c.name, p, c.v, 1, m))
				want := c.of(p, m, c.v)
				if got.bubble() != want.bubble {
					t.Errorf("%s, p %d, v %d, m %d: a bubble of %d, want %d (%s)", c.name, p, c.v, m, got.bubble(), want.bubble, c.source)
				}
				if want.bubble > 0 && got.makespan-3*c.v*m != want.bubble {
					t.Errorf("%s, p %d, v %d, m %d: makespan %d, want %d (%s)", c.name, p, c.v, m, got.makespan, 3*c.v*m+want.bubble, c.source)
				}
				for r := range p {
					if got.held[r] != want.kept(r) {
						t.Errorf("%s, p %d, v %d, m %d: rank %d holds %d activations, want %d (%s)", c.name, p, c.v, m, r, got.held[r], want.kept(r), c.source)
					}
				}
			}
		}
	}
}

// TestFiguresOverSubsequences is like TestPublishedFigures, but for divided sequences. The bubble of the
// sequence pipeline is (PP-1)/N, or 1/v of that with v virtual stages. TeraPipe (Li et al. 2021) has one such
// bubble for all sequences together.
func TestFiguresOverSubsequences(t *testing.T) {
	for _, c := range []struct {
		name        string
		pp, v, n, m int
		bubble      int
		kept        []int
	}{
		{"sppo", 4, 1, 8, 1, 3 * 3, []int{8, 8, 8, 8}},
		{"sppo", 4, 1, 8, 3, 3 * 3 * 3, []int{8, 8, 8, 8}},
		{"interleaved-sppo", 4, 2, 16, 1, 3 * 3, []int{32, 32, 32, 32}},
		{"overlapped-sppo", 4, 1, 16, 3, 3 * 3, []int{28, 24, 20, 16}},
		{"overlapped-sppo", 2, 1, 4, 5, 3, []int{8, 4}},
		{"overlapped-sppo", 1, 1, 3, 2, 0, []int{3}},
		{"terapipe", 4, 1, 2, 3, 3 * 3, []int{6, 6, 6, 6}},
		{"terapipe", 4, 2, 4, 3, 3 * 3, []int{24, 24, 24, 24}},
		{"seq1f1b", 4, 1, 4, 4, 3 * 3, []int{7, 6, 5, 4}},
		{"zb-h1", 4, 1, 4, 4, 3, []int{7, 7, 7, 7}},
		{"zb-h2", 4, 1, 4, 4, 0, []int{10, 10, 10, 10}},
	} {
		got := unitCosts{1, 1, 1}.run(t, ordered(t, c.name, c.pp, c.v, c.n, c.m))
		if got.bubble() != c.bubble || !slices.Equal(got.held, c.kept) {
			t.Errorf("%s, pp %d, v %d, n %d, m %d: a bubble of %d with %v activations, want %d with %v",
				c.name, c.pp, c.v, c.n, c.m, got.bubble(), got.held, c.bubble, c.kept)
		}
	}
}

// TestZeroBubbleOfOtherCosts checks that the formulas of ZB-H1 and ZB-H2 hold if W takes no longer than F or B,
// and that stages keep the activations that the paper states: those of p-r or 2(p-r)-1 microbatches, plus the
// part that W reads for r or 2r more.
func TestZeroBubbleOfOtherCosts(t *testing.T) {
	const p, m = 4, 16
	for _, u := range []unitCosts{{1, 1, 1}, {2, 2, 1}, {3, 3, 2}, {5, 5, 5}} {
		for hops, name := range []string{1: "zb-h1", 2: "zb-h2"} {
			if name == "" {
				continue
			}
			got := u.run(t, ordered(t, name, p, 1, 1, m))
			if want := (p - 1) * (u.f + u.b - hops*u.w); got.bubble() != want {
				t.Errorf("%s with %+v: a bubble of %d, want %d", name, u, got.bubble(), want)
			}
			for r := range p {
				if want := hops*(p-1-r) + 1; got.kept[r] != want || got.held[r] != want+hops*r {
					t.Errorf("%s: rank %d keeps %d and holds %d, want %d and %d", name, r, got.kept[r], got.held[r], want, want+hops*r)
				}
			}
		}
	}
}

// TestDualPipeV checks that a rank keeps 2p+1 activations, each for half of its layers, as DualPipe's README
// states. The README gives the bubble only for forwards and backwards that overlap; these do not overlap.
func TestDualPipeV(t *testing.T) {
	for _, c := range [][2]int{{2, 4}, {4, 8}, {4, 10}, {8, 20}} {
		p, m := c[0], c[1]
		got := unitCosts{1, 1, 1}.run(t, ordered(t, "dualpipe-v", p, 2, 1, m))
		for r := range p {
			if got.held[r] != min(2*m, 2*p+1) {
				t.Errorf("p %d, m %d: rank %d holds %d activations, want %d", p, m, r, got.held[r], 2*p+1)
			}
		}
		if got.bubble() != p-1 {
			t.Errorf("p %d, m %d: a bubble of %d, want %d", p, m, got.bubble(), p-1)
		}
	}
}

// TestOrdersOfPyTorch compares the order of every rank with PyTorch's, for the sizes in PyTorch's own tests
// (test/distributed/pipelining/test_schedule.py). The files hold the output of PyTorch 2.11.0
// (torch/distributed/pipelining/schedules.py, run with stand-ins for stages and for the rest of torch): the
// list of actions of a schedule or, for GPipe and 1F1B, the calls in a step.
func TestOrdersOfPyTorch(t *testing.T) {
	files, err := filepath.Glob("testdata/pytorch/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal("there are no files to compare with", err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimSuffix(filepath.Base(file), ".txt")
		for _, part := range strings.Split(string(text), "size ")[1:] {
			size, want, _ := strings.Cut(strings.TrimSpace(part), "\n")
			var v, m, pp int
			if _, err := fmt.Sscan(size, &v, &m, &pp); err != nil {
				t.Fatalf("%s: %q: %v", file, size, err)
			}
			got := actions(ordered(t, name, pp, v, 1, m))
			if hash, ok := strings.CutPrefix(want, "sha256 "); ok {
				got, want = fmt.Sprintf("%x", sha256.Sum256([]byte(got))), hash
			}
			if strings.TrimSpace(got) != want {
				t.Errorf("%s, v %d, m %d, pp %d:\n%s\nwant\n%s", name, v, m, pp, got, want)
			}
		}
	}
}

// actions writes tasks as PyTorch does: virtual stage, kind, microbatch. In PyTorch, B is the whole backward,
// and I is the part of it that is not W.
func actions(p *plan.Plan) string {
	var b strings.Builder
	for r, tasks := range p.Tasks {
		split := p.Splits(r)
		fmt.Fprintf(&b, "%d:", r)
		for _, t := range tasks {
			kind := t.Kind.String()
			if split[t] {
				kind = "I"
			}
			fmt.Fprintf(&b, " %d%s%d", t.Stage, kind, t.Microbatch)
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// TestStrategyNames checks that the language has the names of all strategies and no others.
func TestStrategyNames(t *testing.T) {
	k := lang.FindKey("schedule.strategy")
	known := k.Words()
	if names := append([]string{"auto"}, strategy.Names()...); !slices.Equal(known, names) {
		t.Errorf("the language has %v, the passes have %v", known, names)
	}
}

// TestEverySizeHasAnOrder checks all small sizes that a strategy supports. The tasks must fit together, and weight
// gradients must be summed in the order of microbatches or in the reverse order, for any number of stages.
func TestEverySizeHasAnOrder(t *testing.T) {
	for _, s := range strategy.All {
		for pp := 1; pp <= 5; pp++ {
			for v := s.Stages.Least; v <= 3 && (s.Stages.Most == 0 || v <= s.Stages.Most); v++ {
				for n := 1; n <= 4 && (n == 1 || s.Sliced == ""); n++ {
					for m := 1; m <= 12; m++ {
						p := &plan.Plan{Parallel: plan.Parallel{PP: pp, DP: 1, VirtualStages: v, Microbatch: 1, Microbatches: m}}
						p.Schedule.Strategy = s.Name
						if strategy.BatchProblems(p) == nil {
							checkSums(t, ordered(t, s.Name, pp, v, n, m), s.Reversed)
						}
					}
				}
			}
		}
	}
}

// checkSums checks that, on each virtual stage, contributions to weight gradients are added in the order of
// microbatches, or in the reverse order if reversed is set, and within a microbatch from the last subsequence
// to the first.
func checkSums(t *testing.T, p *plan.Plan, reversed bool) {
	t.Helper()
	for r, tasks := range p.Tasks {
		split, last := p.Splits(r), map[int]plan.Task{}
		for _, task := range tasks {
			if task.Kind == plan.Forward || split[task] {
				continue
			}
			before, known := last[task.Stage]
			first, second := before.Microbatch, task.Microbatch
			if reversed {
				first, second = second, first
			}
			if known && (first > second || before.Microbatch == task.Microbatch && before.Subsequence < task.Subsequence) {
				t.Fatalf("%s: %s comes behind %s", p.Schedule.Strategy, task, before)
			}
			last[task.Stage] = task
		}
	}
}

// TestRenamesAreSearched checks that every strategy that solve does not try gives the same plan as the strategy
// that solve tries instead, for the same values of the other keys.
func TestRenamesAreSearched(t *testing.T) {
	for i := range strategy.All {
		s := &strategy.All[i]
		if s.Same == "" {
			continue
		}
		if same := strategy.Find(s.Same); same == nil || same.Same != "" {
			t.Errorf("%s is to be searched as %q", s.Name, s.Same)
		}
		for _, v := range []string{"1", "2", "4"} {
			set := []string{"model.layers=8", "cluster.nodes=4", "train.batch=4", "schedule.dp=1", "schedule.virtual_stages=" + v}
			if s.Sliced != "" {
				set = append(set, "schedule.subsequences=1")
			}
			find := func(name string) *plan.Plan {
				sp, err := lang.Load("../../examples/tiny.sppo", lang.Options{Shipped: shipped.Files, Set: append(slices.Clone(set), "schedule.pp=2", "schedule.strategy="+name)})
				if err != nil {
					t.Fatal(err)
				}
				p := plan.New(sp)
				if Run(sp, p, pass.Options{}) != nil {
					return nil
				}
				return p
			}
			p, same := find(s.Name), find(s.Same)
			switch {
			case p == nil:
			case same == nil, !s.Reversed && !reflect.DeepEqual(p.Tasks, same.Tasks), math.Abs(float64(p.Time.StepS/same.Time.StepS-1)) > tolerance(s):
				t.Errorf("%s with %s virtual stages is not %s", s.Name, v, s.Same)
			}
		}
	}
}

// tolerance returns the relative difference allowed between the step times of a strategy and of the one that
// the search tries instead: 0 if the tasks are the same.
func tolerance(s *strategy.Strategy) float64 {
	if s.Reversed {
		return 0.01
	}
	return 0
}

// TestReasonForVirtualStages checks that the reason given for virtual stages is true for the sizes at hand.
func TestReasonForVirtualStages(t *testing.T) {
	for set, want := range map[string]string{
		"schedule.pp=1 schedule.subsequences=1": "no bubble",
		"schedule.pp=2 schedule.subsequences=2": "groups of at most 2 subsequences",
		"schedule.pp=2 schedule.subsequences=4": "the bubble is 1/2",
	} {
		flags := append(strings.Fields(set), "model.layers=4", "schedule.virtual_stages=2", "schedule.strategy=sppo")
		sp, err := lang.Load("../../examples/tiny.sppo", lang.Options{Shipped: shipped.Files, Set: flags})
		if err != nil {
			t.Fatal(err)
		}
		p := plan.New(sp)
		if err := Run(sp, p, pass.Options{}); err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(p.Decisions, func(d plan.Decision) bool { return d.Pass == "schedule" && d.What == "virtual_stages" })
		if i < 0 || !strings.Contains(p.Decisions[i].Why, want) {
			t.Errorf("%s: %v has no %q", set, p.Decisions, want)
		}
	}
}

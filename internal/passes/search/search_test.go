package search

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/irtest"
	"sppo.dev/internal/passes/memory"
	"sppo.dev/internal/passes/pass"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/plantest"
	"sppo.dev/internal/passes/report"
	"sppo.dev/internal/shipped"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// parse reads a spec from text.
func parse(t testing.TB, text string, set ...string) *lang.Spec {
	t.Helper()
	sp, err := lang.Parse("test.sppo", []byte(text), lang.Options{Shipped: shipped.Files, Set: set})
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return sp
}

// smallSpec draws a job with a small search space: few GPUs, few layers, short sequences, often little
// memory.
func smallSpec(r *rand.Rand) string {
	pick := func(words ...string) string { return words[r.IntN(len(words))] }
	return fmt.Sprintf(`import "clusters/local.sppo"

model small {
  family   = %s
  layers   = %d
  hidden   = %s
  heads    = 4
  kv_heads = %s
  vocab    = 256
  tied     = %s
  dtype    = %s
  window   = %s
}

cluster few = local(ranks = %s)

train {
  sequence = %s
  batch    = %s
  data     = random()
}
`, pick("gpt", "llama"), 1+r.IntN(5), pick("32", "64", "128"), pick("1", "2", "4"), pick("true", "false"), pick("f32", "bf16"),
		pick("0", "0", "[8, 100, 0]", "[40, 1]"), pick("1", "2", "4"), pick("64", "256", "1K", "4K"), pick("1", "1", "2", "3"))
}

// smallSettings returns random overrides that make the search space smaller, or the machine smaller or slower.
func smallSettings(r *rand.Rand) []string {
	set := []string{fmt.Sprintf("cluster.device_memory=%dKiB", []int{1 << 20, 64 << 10, 4 << 10, 2 << 10, 1 << 10, 512, 100}[r.IntN(7)])}
	if r.IntN(2) == 0 {
		set = append(set, "cluster.d2h_bandwidth=100MB/s", "cluster.h2d_bandwidth=200MB/s")
	}
	for _, pins := range []struct {
		oneIn int
		set   []string
	}{
		{6, []string{"schedule.subsequences=4", "schedule.strategy=seq1f1b", "schedule.pp=1", "schedule.recompute=selective", "schedule.offload=none",
			"schedule.offload=carry", "schedule.partition=length", "schedule.sp_mode=ulysses", "schedule.align=8", "schedule.strategy=sppo", "schedule.strategy=zb-h1",
			"schedule.partition=time", "schedule.partition=auto", "schedule.keep=auto", "schedule.keep=[]", "schedule.order=auto", "schedule.mux=off", "schedule.mux=on"}},
		{12, []string{"schedule.sp_mode=ring", "schedule.zero=2", "schedule.zero=3", "schedule.mux=left", "schedule.mux=right", "schedule.keep=[k]",
			"cluster.parallelism=0", "cluster.node_copy_bandwidth=300MB/s", "cluster.gpus_per_node=1", "cluster.gpus_per_node=2",
			"schedule.optimizer_offload=host", "schedule.recompute=full"}},
	} {
		for _, pin := range pins.set {
			if r.IntN(pins.oneIn) == 0 {
				set = append(set, pin)
			}
		}
	}
	return set
}

// streamSettings returns random overrides that favor streamed K and V, and layer order.
func streamSettings(r *rand.Rand) []string {
	pick := func(words ...string) string { return words[r.IntN(len(words))] }
	return []string{"schedule.keep=" + pick("[]", "[]", "[k]", "auto"), "schedule.order=" + pick("auto", "auto", "layer"), "schedule.zero=" + pick("3", "2", "auto"), "schedule.sp_mode=" + pick("auto", "ulysses"),
		"schedule.offload=" + pick("carry", "full"), "schedule.recompute=" + pick("none", "selective", "full"), "schedule.partition=" + pick("flops", "time", "auto"),
		"cluster.device_memory=" + pick("1GiB", "4MiB", "1MiB"), "cluster.h2d_bandwidth=" + pick("10GB/s", "300MB/s"), "schedule.pp=" + pick("1", "auto")}
}

// complete visits every complete candidate of a request, with the chain of partial candidates that leads to it.
// It sets short in candidates that are tried only if memory is scarce.
func (s *search) complete(chain []node, visit func(chain []node)) {
	last := chain[len(chain)-1]
	for last.level < len(dimensions) && dimensions[last.level].text(&last.schedule) != "" {
		last.level++
	}
	chain[len(chain)-1] = last
	if last.level == len(dimensions) {
		visit(chain)
		return
	}
	d := &dimensions[last.level]
	goOn := func(values []value, short bool) {
		for _, v := range values {
			next := node{schedule: last.schedule, level: last.level + 1, short: short}
			v.set(&next.schedule)
			s.complete(append(chain, next), visit)
		}
	}
	goOn(d.values(&s.space, &last.schedule), last.short)
	if d.scarce != "" {
		goOn(d.others(s.bounds, last.schedule), true)
	}
}

// TestSearchAgreesWithBruteForce checks that the winner of a small space is as fast as the best of all
// candidates that fit, to within the slack of the search, and that every bound on the path to a candidate holds
// for it.
func TestSearchAgreesWithBruteForce(t *testing.T) {
	r, jobs, most := plantest.Random(t), 4, 400
	if os.Getenv("SPPO_LONG") != "" {
		jobs, most = 200, 10_000
	}
	for draw := 0; jobs > 0; draw++ {
		if checkSearch(t, draw, smallSpec(r), smallSettings(r), most) >= 0 {
			jobs--
		}
	}
}

// TestSearchOfStreams makes the same check as TestSearchAgreesWithBruteForce for streamed K and V, and for
// layer order, both of which random requests rarely have.
func TestSearchOfStreams(t *testing.T) {
	r, jobs, most := plantest.Random(t), 4, 100
	if os.Getenv("SPPO_LONG") != "" {
		jobs, most = 100, 10_000
	}
	for draw := 0; jobs > 0; draw++ {
		if checkSearch(t, draw, smallSpec(r), streamSettings(r), most) > 0 {
			jobs--
		}
	}
}

// A list of layers pins the division of the model, whatever the search chooses otherwise.
func TestSearchOfLists(t *testing.T) {
	r, jobs := plantest.Random(t), 3
	for draw := 0; jobs > 0; draw++ {
		layers := 2 + r.IntN(4)
		first := 1 + r.IntN(layers-1)
		list := []int{first, layers - first}
		set := append(smallSettings(r), fmt.Sprint("model.layers=", layers), "schedule.pp=2", "schedule.virtual_stages=auto", "cluster.gpus_per_node=4",
			fmt.Sprintf("schedule.layers_per_stage=[%d, %d]", list[0], list[1]))
		text := smallSpec(r)
		if checkSearch(t, draw, text, set, 400) < 1 {
			continue
		}
		jobs--
		p := plan.New(parse(t, text, set...))
		if err := Run(ContextOf(nil, pass.Options{}), p); err == nil && !slices.Equal(p.LayersPerStage, list) {
			t.Errorf("draw %d: %v, want %v", draw, p.LayersPerStage, list)
		}
	}
}

// checkSearch compares the result of a search with all candidates of its request, in a separate subtest. It
// returns the number of candidates that are valid plans, or -1 if there are too many candidates.
func checkSearch(t *testing.T, draw int, text string, set []string, most int) int {
	t.Helper()
	request := plan.New(parse(t, text, set...))
	brute, candidates := newSearch(ContextOf(nil, pass.Options{}), request), 0
	if brute.complete([]node{{schedule: request.Schedule}}, func([]node) { candidates++ }); candidates > most {
		return -1
	}
	plans := candidates // if the subtest is not run
	t.Run(fmt.Sprint(draw), func(t *testing.T) { plans = compareSearch(t, fmt.Sprint(text, set), brute, request) })
	return plans
}

// compareSearch makes the comparison for checkSearch, and returns the number of candidates that are valid
// plans.
func compareSearch(t *testing.T, job string, brute *search, request *plan.Plan) int {
	t.Helper()
	any := newSearch(ContextOf(nil, pass.Options{Fitting: true}), request)
	var best, tight *node // the fastest that fit: of the usual candidates, and of those tried only if memory is scarce
	plans := 0
	brute.complete([]node{{schedule: request.Schedule}}, func(chain []node) {
		leaf := chain[len(chain)-1]
		if !brute.evaluate(&leaf) {
			return
		}
		plans++
		shortfall := leaf.need.Shortfall(leaf.plan.Memory)
		if err := any.untimedNeedsMore(&leaf); err != nil {
			t.Errorf("%s\n%v: %v", job, inWords(leaf.plan), err)
		}
		for _, n := range chain {
			if leaf.short && !n.short { // n represents only plans on the usual grid
				continue
			}
			bound, held := brute.of(n.schedule, n.level)
			least := brute.lackOf(held)
			if _, held := any.of(n.schedule, n.level); held.device > fullest(leaf.need) {
				t.Errorf("%s\n%v: at level %d rank %d holds %v at least, and really %v", job, inWords(leaf.plan), n.level, held.rank, held.device, fullest(leaf.need))
			}
			if bound > leaf.time()*(1+1e-9) {
				t.Errorf("%s\n%v: at level %d the bound is %v, and the step takes %v", job, inWords(leaf.plan), n.level, bound, leaf.time())
			}
			if least != nil && (shortfall == nil || shortfall.Bytes < least.Bytes) {
				t.Errorf("%s\n%v: at level %d it %v at least, and really %v", job, inWords(leaf.plan), n.level, least, shortfall)
			}
		}
		fastest := &best
		if leaf.short {
			fastest = &tight
		}
		if shortfall == nil && (*fastest == nil || leaf.time() < (*fastest).time()) {
			*fastest = &leaf
		}
	})
	s := newSearch(ContextOf(nil, pass.Options{}), request)
	winner, _ := s.run()
	switch {
	case plans == 0:
		if winner != nil {
			t.Errorf("%s\nthere is no candidate, and it found one", job)
		}
	case best == nil:
		if winner == nil || tight == nil && winner.need.Shortfall(winner.plan.Memory) == nil {
			t.Errorf("%s\nnothing fits, and it found %v", job, winner)
		}
	case winner == nil || winner.need.Shortfall(winner.plan.Memory) != nil:
		t.Errorf("%s\nit found nothing that fits, and there is %v", job, inWords(best.plan))
	case winner.time() > best.time()*(1+searchGap)*(1+searchHandicap):
		t.Errorf("%s\nit found %v with %v, and the best is %v with %v", job, inWords(winner.plan), winner.time(), inWords(best.plan), best.time())
	}
	fitting, _ := any.run()
	if does := fitting != nil && fitting.need.Shortfall(fitting.plan.Memory) == nil; does != (best != nil || winner != nil && winner.need.Shortfall(winner.plan.Memory) == nil) {
		t.Errorf("%s\nasked whether anything fits it says %t, and the best is %v", job, does, best)
	}
	t.Logf("%d candidates, %d evaluated", plans, s.exact)
	return plans
}

// fullest returns the device memory of the fullest stage.
func fullest(f *memory.Footprint) ir.Bytes {
	device, _ := f.Peaks()
	return device
}

// untimedNeedsMore returns an error if the untimed plan of a candidate needs so much more memory than the candidate that it
// would be refused although the candidate fits. Normally an untimed plan needs no more. If it does, because the
// packing margin depends on the peak, it is compared with the placed plan.
func (s *search) untimedNeedsMore(n *node) error {
	if n.weighs() {
		return nil
	}
	p, e := s.passed(n.schedule, true)
	if p == nil {
		return fmt.Errorf("it is no plan when copies are not timed")
	}
	need := e.Memory().Footprint()
	for i := range need.Device {
		if need.Device[i].Bytes <= n.need.Device[i].Bytes && need.Host[i] <= n.need.Host[i]+earlier(e) {
			continue
		}
		placed := *n.plan
		placed.Memory.DeviceCapacityBytes, placed.Memory.HostCapacityBytes = math.MaxInt64, math.MaxInt64
		if _, err := Place(&placed); err != nil {
			return err
		}
		placed.Memory.DeviceCapacityBytes, placed.Memory.HostCapacityBytes = placed.Memory.DevicePeakBytes[i], placed.Memory.HostPeakBytes[i]
		if limit := mayFit(e, placed.Memory); need.Device[i].Bytes > limit.DeviceCapacityBytes || need.Host[i] > limit.HostCapacityBytes {
			return fmt.Errorf("stage %d holds %v and %v on the host when copies are not timed, and placed %v and %v", i, need.Device[i].Bytes, need.Host[i],
				placed.Memory.DevicePeakBytes[i], placed.Memory.HostPeakBytes[i])
		}
	}
	return nil
}

// allOpen returns overrides that leave every dimension to the search.
func allOpen() []string {
	var set []string
	for i := range dimensions {
		set = append(set, dimensions[i].key+"=auto")
	}
	return set
}

// unwritten returns overrides that set every searched key to its default, as if the spec did not contain it.
func unwritten() []string {
	var set []string
	for i := range dimensions {
		set = append(set, dimensions[i].key+"="+lang.FindKey(dimensions[i].key).Default)
	}
	return set
}

// paperSpecs returns the specs of the paper's evaluation.
func paperSpecs(t *testing.T) []string {
	files, err := filepath.Glob(plantest.FolderOfExamples() + "paper/*-*-*.sppo")
	if err != nil || len(files) == 0 {
		t.Fatal(err, files)
	}
	var out []string
	for _, file := range files {
		out = append(out, strings.TrimPrefix(file, plantest.FolderOfExamples()))
	}
	return out
}

// TestSearchReports checks what plans report about the search.
func TestSearchReports(t *testing.T) {
	for name, c := range map[string]struct {
		file string
		set  []string
	}{
		"open":    {"paper/gpt-7b-512k.sppo", unwritten()},
		"pinned":  {"paper/gpt-7b-512k.sppo", []string{"schedule.virtual_stages=auto"}},
		"nothing": {"paper/gpt-65b-1m.sppo", append(unwritten(), "cluster.nodes=2", "schedule.optimizer_offload=none")},
	} {
		p := plantest.Plan(t, c.file, c.set...)
		var b bytes.Buffer
		if err := report.Write(&b, p); err != nil {
			t.Fatal(err)
		}
		irtest.Golden(t, "testdata/search/"+name+".want", b.Bytes())
	}
}

// benchmarkSolve searches all dimensions for a model and a cluster of the given size.
func benchmarkSolve(b *testing.B, file string, nodes int, set ...string) {
	request := plan.New(plantest.Load(b, file, slices.Concat(unwritten(), []string{fmt.Sprintf("cluster.nodes=%d", nodes)}, set)...))
	for b.Loop() {
		s := newSearch(ContextOf(nil, pass.Options{}), request)
		winner, _ := s.run()
		if winner == nil {
			b.Fatal("nothing found")
		}
		b.ReportMetric(float64(s.made), "candidates")
		b.ReportMetric(float64(s.exact), "evaluated")
	}
}

func BenchmarkSolve128(b *testing.B) { benchmarkSolve(b, "paper/gpt-65b-1m.sppo", 16) }

func BenchmarkSolve4096(b *testing.B) {
	benchmarkSolve(b, "paper/gpt-65b-1m.sppo", 512, "train.batch=64")
}

// TestClosestSharesTasks checks that, if nothing fits and the request asks for shared tasks, the plan shown
// shares tasks, although a single stage would have a smaller shortfall.
func TestClosestSharesTasks(t *testing.T) {
	for _, mux := range []string{"left", "right", "on"} {
		set := append(unwritten(), "cluster.nodes=2", "cluster.device_memory=1GiB", "train.sequence=32K", "schedule.mux="+mux)
		s := newSearch(ContextOf(nil, pass.Options{}), plan.New(plantest.Load(t, "paper/gpt-7b-512k.sppo", set...)))
		switch n, _ := s.run(); {
		case n == nil:
			t.Errorf("mux = %s: nothing is shown", mux)
		case n.plan.Parallel.PP < 2 || n.plan.Mux.Left != (mux != "right") || n.plan.Mux.Right != (mux != "left"):
			t.Errorf("mux = %s: %v is shown", mux, class(n))
		case n.need.Shortfall(n.plan.Memory) == nil:
			t.Errorf("mux = %s: %v fits", mux, class(n))
		}
	}
}

// TestNoneWasFound checks that the report of a search that stopped says that none of its candidates fits only if the
// winner does not fit once it is placed. Its memory bound may exceed the device although it fits.
func TestNoneWasFound(t *testing.T) {
	for _, fits := range []bool{true, false} {
		winner := &node{plan: &plan.Plan{Memory: plan.Memory{Placed: true, Fits: fits}}, need: &memory.Footprint{Device: []memory.Peak{{Bytes: 1}}, Host: []ir.Bytes{0}}}
		if winner.need.Shortfall(winner.plan.Memory) == nil {
			t.Fatal("the bound fits")
		}
		p, s := &plan.Plan{}, &search{ended: true, context: &pass.Context{}}
		s.choose(p, winner, nil)
		said := slices.ContainsFunc(p.Decisions, func(d plan.Decision) bool { return strings.Contains(d.Why, "was found to fit") })
		if said == fits {
			t.Errorf("the plan fits: %t; the search says that none was found to fit: %t", fits, said)
		}
	}
}

// TestNearTies checks that a plan in which the offload pass decides about each activation lists a policy of recomputation that
// takes hardly longer and needs less memory.
func TestNearTies(t *testing.T) {
	sp := parse(t, `import "clusters/h200.sppo"

model m {
  family   = llama
  layers   = 8
  hidden   = 4096
  heads    = 32
  kv_heads = 8
  ffn      = 14336
  vocab    = 32000
  dtype    = bf16
}

cluster one = h200(gpus_per_node = 1)

train {
  sequence = 640K
  data     = random()
}
`)
	p := plan.New(sp)
	if err := RunWith(sp, p, pass.Options{}); err != nil {
		t.Fatal(err)
	}
	need := memory.FootprintOf(p)
	device, host := need.Peaks()
	i := slices.IndexFunc(p.Alternatives, func(a plan.Alternative) bool {
		return slices.Equal(a.Set, []string{"schedule.recompute=keep_attention"})
	})
	if i < 0 {
		t.Fatalf("the alternatives are %v", p.Alternatives)
	}
	if a := p.Alternatives[i]; a.StepS > p.Search.StepS*1.01 || a.DevicePeakBytes+a.HostPeakBytes > (device+host)*3/4 {
		t.Errorf("%v is no near tie of %s with %s and %s", a, p.Search.StepS, device, host)
	}
}

package e2e

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"sppo/ir"
	"sppo/lang"
	"sppo/vm"
)

// TestRandomSpecs draws models and schedules at random, odd sizes and all, where the covering set has a tiny model and
// few values of each setting. A draw is refused with a diagnostic, or it is held to all that any spec is held to: it
// verifies, both forms of the program give it back, it touches what the plan says in the order that the program says,
// on the cpu device and in virtual time, moving only bytes it equals itself to the last bit (E1, E2), and it equals the plain
// program within rounding (E3). SPPO_SEED repeats a run; without it `make test` always draws the same.
func TestRandomSpecs(t *testing.T) {
	draws, seed := randomDraws, uint64(1)
	if os.Getenv("SPPO_LONG") != "" {
		draws, seed = 500, uint64(time.Now().UnixNano())
	}
	if s, err := strconv.ParseUint(os.Getenv("SPPO_SEED"), 10, 64); err == nil {
		seed = s
	}
	t.Logf("%d specs, SPPO_SEED=%d", draws, seed)
	for i := range uint64(draws) {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			checkDrawn(t, rand.New(rand.NewPCG(seed, i)))
		})
	}
}

// drawn is a spec at random: a model, and what its schedule asks for.
type drawn struct {
	model    Case // what tolerances depend on
	text     string
	schedule []request
	lengths  []int64 // of the subsequences, once it has run
	align    int64   // their grid, and that of blocks
}

// request is a key of the schedule: as drawn, as it is where only bytes move, and as it is in the plain program.
type request struct{ key, value, neutral, plain string }

// set are the flags that give the schedule's keys one of their three values.
func (d *drawn) set(which func(request) string) []string {
	var flags []string
	for _, r := range d.schedule {
		flags = append(flags, "schedule."+r.key+"="+which(r))
	}
	return flags
}

func (d *drawn) drawn() []string   { return d.set(func(r request) string { return r.value }) }
func (d *drawn) neutral() []string { return d.set(func(r request) string { return r.neutral }) }
func (d *drawn) plain() []string   { return d.set(func(r request) string { return r.plain }) }

func pick[V any](r *rand.Rand, values ...V) V { return values[r.IntN(len(values))] }

func between(r *rand.Rand, least, most int) int { return least + r.IntN(most-least+1) }

// drawSpec draws. Most draws can be scheduled; the rest are for diagnostics to refuse.
func drawSpec(r *rand.Rand) *drawn {
	d := &drawn{model: Case{Family: pick(r, "gpt", "llama"), Positions: pick(r, "learned", "rope", "none"), DType: pick(r, "f32", "f32", "bf16")}}
	heads := pick(r, 1, 2, 3, 4, 6, 8)
	hidden := max(heads*pick(r, 4, 6, 8, 16), 8)
	if hidden < 32 {
		d.model.DType = "f32" // bf16's tolerance is for rounding that averages out over a row
	}
	kv := pick(r, divisors(heads)...)
	layers, sequence := between(r, 1, 7), 8*between(r, 3, 16)
	pp, sp, dp := between(r, 1, min(layers, 4)), pick(r, divisors(heads)...), pick(r, 1, 1, 2)
	sp = min(sp, 4)
	microbatch := pick(r, 1, 1, 2)
	batch := dp * microbatch * between(r, 1, 4)
	d.text = fmt.Sprintf(`import "clusters/local.sppo"
model drawn {
  family = %s
  layers = %d
  hidden = %d
  heads = %d
  kv_heads = %d
  ffn = %d
  vocab = %d
  dtype = %s
  tied = %t
  positions = %s
  rope_theta = 100
  init_std = %.3f  # as strong in every width
}
cluster all = local(ranks = 32)
train {
  sequence = %d
  batch = %d
  steps = 3
  seed = %d
  optimizer = adamw(lr = %g, betas = [%g, %g], eps = %g, weight_decay = %g)
  grad_clip = 1
  data = random()
  eval_batch = %d
}
schedule drawn { pp = 1 sp = 1 dp = 1 }
`, d.model.Family, layers, hidden, heads, kv, between(r, 17, 90), between(r, 11, 70), d.model.DType, pick(r, true, false),
		d.model.Positions, 0.8/math.Sqrt(float64(hidden)), sequence, batch, between(r, 1, 1000), lr, beta1, beta2, eps, weightDecay, dp*microbatch)
	d.schedule = drawSchedule(r, pp, sp, dp, microbatch)
	return d
}

func drawSchedule(r *rand.Rand, pp, sp, dp, microbatch int) []request {
	n := max(1, between(r, -3, 9))
	same := func(key string, value any, plain string) request { // decides arithmetic
		return request{key, fmt.Sprint(value), fmt.Sprint(value), plain}
	}
	keep := pick(r, "[k, v]", "[k, v]", "[k, v]", "[k]", "[]")
	moves := func(key string, value any, plain string) request { // moves bytes alone
		return request{key, fmt.Sprint(value), plain, plain}
	}
	mux := pick(r, "off", "off", "off", "left", "right", "on")
	if keep != "[k, v]" { // where blocks of K and V end follows from all the rest, and rounds
		moves = same
	}
	stages := moves
	if mux != "off" { // which rank runs a piece decides what it adds up
		stages = same
	}
	zero := pick(r, "0", "1", "0", "1", "2", "3")
	divided, order := moves, moves
	if zero > "1" { // gradients are completed turn by turn
		divided, order = same, same
	}
	return []request{
		stages("pp", pp, "1"),
		same("sp", sp, "1"),
		same("dp", dp, "1"),
		same("subsequences", n, "1"),
		same("microbatch", microbatch, "1"),
		same("sp_mode", pick(r, "megatron", "ulysses", "ring"), "megatron"),
		same("partition", pick(r, "flops", "length", "time"), "flops"),
		divided("zero", zero, "0"),
		moves("virtual_stages", pick(r, "auto", "auto", "1", "2", "3"), "1"),
		drawStrategy(r, n),
		moves("offload", pick(r, "none", "full", "adaptive", "carry", "memory", "auto", "0.3", drawShares(r, n)), "none"),
		moves("recompute", pick(r, "none", "none", "selective", "keep_attention", "full", "auto"), "none"),
		same("mux", mux, "off"),
		same("mux_shares", pick(r, "fluid", "fluid", "even"), "fluid"),
		same("keep", keep, "[k, v]"),
		order("order", pick(r, "sequence", "sequence", "sequence", "layer"), "sequence"),
	}
}

// drawStrategy: what alternates forwards and backwards sums in one order.
func drawStrategy(r *rand.Rand, n int) request {
	names := []string{"sppo", "sppo", "interleaved-sppo", "overlapped-sppo", "terapipe", "seq1f1b", "zb-h1", "zb-h2"}
	if n == 1 {
		names = append(names, "gpipe", "1f1b", "interleaved-1f1b", "zb-v", "zb-v", "dualpipe-v")
	}
	drawn := request{"strategy", pick(r, names...), "seq1f1b", "sppo"}
	if strings.HasSuffix(drawn.value, "sppo") {
		drawn.neutral = "sppo"
	}
	return drawn
}

func drawShares(r *rand.Rand, n int) string {
	shares := make([]float64, n)
	for i := range shares {
		shares[i] = pick(r, 0, 0.2, 0.5, 1)
	}
	return listOf(shares)
}

func divisors(n int) []int {
	var list []int
	for d := 1; d <= n; d++ {
		if n%d == 0 {
			list = append(list, d)
		}
	}
	return list
}

// checkDrawn draws until a spec can be scheduled, and holds that to its promises.
func checkDrawn(t *testing.T, r *rand.Rand) {
	t.Helper()
	for range 50 {
		d := drawSpec(r)
		got := d.run(t, d.drawn())
		if t.Failed() {
			t.Fatalf("%s\n%s", strings.Join(d.drawn(), "\n"), d.text)
		}
		if got == nil {
			continue // refused
		}
		same := d.run(t, append(d.neutral(), "schedule.subsequences="+listOf(d.lengths), fmt.Sprint("schedule.align=", d.align))) // partition = time gives others
		if same == nil {
			t.Fatalf("the same on one stage is refused: %s\n%s", strings.Join(d.neutral(), "\n"), d.text)
		}
		checkSame(t, "E1 and E2: against one stage without offload", got, same)
		checkClose(t, d.model, "E3: against the plain program", got, d.run(t, d.plain()))
		if t.Failed() {
			t.Logf("%s\n%s", strings.Join(d.drawn(), "\n"), d.text)
		}
		return
	}
	t.Error("50 draws have been refused")
}

// run compiles and trains; nil: a diagnostic refuses the spec.
func (d *drawn) run(t *testing.T, set []string) *Result {
	t.Helper()
	plan, p, err := compile(d.text, set...)
	var refused lang.Diagnostics
	if errors.As(err, &refused) {
		if i := slices.IndexFunc(refused, func(x *lang.Diagnostic) bool { return x.Message == "" || x.Pos.File == "" }); i >= 0 {
			t.Errorf("a refusal without a place or a reason: %v", err)
		}
		return nil
	}
	if err != nil {
		t.Error(err)
		return nil
	}
	if err := ir.Verify(p); err != nil {
		t.Errorf("the verifier refuses it: %v", err)
		return nil
	}
	checkForms(t, d.model, p)
	var traces []*vm.Trace
	job := open(t, p, 1, &traces)
	result := train(t, p, job, func() { checkOrder(t, d.model, p, traces) })
	checkPeaks(t, d.model, plan, p, job)
	checkSimulated(t, d.model, p)
	d.lengths, d.align = plan.Subsequences.Lengths, plan.Subsequences.Align
	return result
}

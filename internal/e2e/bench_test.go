package e2e

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"sppo.dev/internal/shipped"
	"sppo.dev/internal/train"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// gpt is a model for the training benchmark.
type gpt struct {
	name                                          string
	layers, hidden, heads, sequence, batch, vocab int
	tied                                          bool
	goal                                          float64 // wanted share of the matmul peak
}

var gpts = []gpt{
	{name: "4x128", layers: 4, hidden: 128, heads: 4, sequence: 256, batch: 4, vocab: 256, goal: 0.25},
	{name: "6x384", layers: 6, hidden: 384, heads: 6, sequence: 256, batch: 4, vocab: 256, goal: 0.45},
	{name: "12x768", layers: 12, hidden: 768, heads: 12, sequence: 64, batch: 4, vocab: 50257, tied: true, goal: 0.40},
}

func (g gpt) spec() string {
	return fmt.Sprintf(`import "clusters/local.sppo"

model gpt {
  family = gpt
  layers = %d
  hidden = %d
  heads = %d
  vocab = %d
  tied = %t
  dtype = f32
}

cluster one = local(ranks = 1)

train {
  sequence = %d
  batch = %d
  steps = 1000000
  data = random()
}

schedule whole {
  sp = 1
  pp = 1
  dp = 1
  microbatch = %d
  subsequences = 1
  offload = none
  mux = off
}
`, g.layers, g.hidden, g.heads, g.vocab, g.tied, g.sequence, g.batch, g.batch)
}

// flops returns the FLOPs of a step: 6 for each token and each multiplying weight (2 forward, 4 backward;
// including the head's matrix, excluding the embedding's look-up), and for attention 6*T*h for each token and
// layer (2*T*h forward, since a token sees half of the others on average, and twice that backward, without
// recomputation).
func (g gpt) flops() float64 {
	h, tokens := float64(g.hidden), float64(g.sequence*g.batch)
	weights := float64(g.layers)*12*h*h + float64(g.vocab)*h
	return tokens * (6*weights + 6*float64(g.layers)*float64(g.sequence)*h)
}

// BenchmarkTrain measures steps (forward, backward, AdamW) of three GPTs in f32 on one rank with a thread for
// each processor: tokens/s, and the FLOP/s relative to those of a large matrix product. The product is measured
// right before and after each step, so that other programs affect both alike, and medians are reported. One
// iteration is two seconds of steps. With -v the benchmark also shows which opcodes take the time.
func BenchmarkTrain(b *testing.B) {
	for _, g := range gpts {
		b.Run(g.name, func(b *testing.B) {
			_, p, err := compile(g.spec())
			if err != nil {
				b.Fatal(err)
			}
			var traces []*vm.Trace
			job := open(b, p, runtime.GOMAXPROCS(0), &traces)
			if err := job.Init(b.Context()); err != nil {
				b.Fatal(err)
			}
			doSteps(b, job, 1) // touches all memory
			traces[0].Timelines = nil

			product, work := newProduct(), newOpTable(p)
			defer product.pool.Close()
			var seconds, shares []float64
			best, before := 0.0, product.rate()
			for b.Loop() {
				for began := time.Now(); time.Since(began) < 2*time.Second; {
					spent := doSteps(b, job, 1).Seconds
					after := product.rate()
					seconds, shares = append(seconds, spent), append(shares, g.flops()/spent/max(before, after))
					best, before = max(best, before, after), after
					work.add(traces)
				}
			}
			b.ReportMetric(float64(g.sequence*g.batch)/median(seconds), "tokens/s")
			b.ReportMetric(best/1e9, "peak-GFLOP/s")
			b.ReportMetric(100*median(shares), "%peak")
			b.ReportMetric(100*g.goal, "%goal")
			b.ReportMetric(0, "ns/op")
			b.Logf("%s, %.0f million model FLOPs by the program, %.0f by the benchmark\n%s", simd.ISA(), p.FlopsModel/1e6, g.flops()/1e6, work)
		})
	}
}

func median(values []float64) float64 {
	slices.Sort(values)
	return values[len(values)/2]
}

// product is a product of two 1024 by 1024 matrices.
type product struct {
	pool    *simd.Pool
	a, b, c []float32
}

const productSize = 1024

func newProduct() *product {
	p := &product{pool: simd.NewPool(runtime.GOMAXPROCS(0))}
	p.a, p.b, p.c = simd.Alloc(productSize*productSize), simd.Alloc(productSize*productSize), simd.Alloc(productSize*productSize)
	random := rand.New(rand.NewPCG(1, 1))
	for i := range p.a {
		p.a[i], p.b[i] = random.Float32(), random.Float32()
	}
	return p
}

// rate returns the best rate of several runs, in FLOP/s.
func (p *product) rate() float64 {
	const n = productSize
	best := 0.0
	for range 5 {
		began := time.Now()
		simd.Gemm(p.pool, false, false, n, n, n, p.a, n, p.b, n, false, nil, p.c, n)
		best = max(best, 2*n*n*n/time.Since(began).Seconds())
	}
	return best
}

// opTable holds the time that the first rank's instructions take, by opcode, and for matrix products also by
// shape and transposition.
type opTable struct {
	program *ir.Program
	spent   map[string]time.Duration
	flops   map[string]ir.Flops
	total   time.Duration
}

func newOpTable(p *ir.Program) *opTable {
	return &opTable{program: p, spent: map[string]time.Duration{}, flops: map[string]ir.Flops{}}
}

func opTitle(in *ir.Instr) string {
	if in.Op != ir.Matmul {
		return in.Info().Name
	}
	title := fmt.Sprintf("matmul %v %v", in.Arg("c").Dims(), in.Arg("a").Dims())
	if in.Attr("trans_a").Bits != 0 {
		title += " a'"
	}
	if in.Attr("trans_b").Bits != 0 {
		title += " b'"
	}
	return title
}

func (o *opTable) add(traces []*vm.Trace) {
	code := &o.program.Codes[0]
	for _, timeline := range traces[0].Timelines {
		for _, spans := range timeline.Streams {
			for _, s := range spans {
				in := &code.Sections[timeline.Section][s.PC]
				o.spent[opTitle(in)] += s.End - s.Begin
				o.flops[opTitle(in)] += in.Work().Flops
				o.total += s.End - s.Begin
			}
		}
	}
	traces[0].Timelines = traces[0].Timelines[:0]
}

func (o *opTable) String() string {
	var titles []string
	for title := range o.spent {
		titles = append(titles, title)
	}
	slices.SortFunc(titles, func(a, b string) int { return cmp.Compare(o.spent[b], o.spent[a]) })
	var s strings.Builder
	for _, title := range titles {
		share := float64(o.spent[title]) / float64(o.total)
		if share < 0.002 {
			break
		}
		fmt.Fprintf(&s, "%6.1f%% %8.1f GFLOP/s  %s\n", 100*share, float64(o.flops[title])/o.spent[title].Seconds()/1e9, title)
	}
	return s.String()
}

// BenchmarkCompile shows that compile time is linear in the number of instructions. Each case has twice as many
// subsequences as the one before it, and thus twice as many instructions, and reports the best time per
// instruction of each phase.
func BenchmarkCompile(b *testing.B) {
	for n := 32; n <= 512; n *= 2 {
		b.Run(fmt.Sprintf("subsequences=%d", n), func(b *testing.B) {
			c := Case{Family: "gpt", Positions: "learned", DType: "bf16", KVHeads: 4, Batch: 1, PP: 4, SP: 2, DP: 1, N: n,
				Microbatch: 1, Partition: "flops", Offload: "full", Steps: 20, Layers: 8, Sequence: 16 * n, Vocab: tinyVocab}
			instructions, build, verify := 0, time.Duration(math.MaxInt64), time.Duration(math.MaxInt64)
			once := func() {
				began := time.Now()
				_, p, err := compile(c.Spec())
				if err != nil {
					b.Fatal(err)
				}
				built := time.Now()
				if err := ir.Verify(p); err != nil {
					b.Fatal(err)
				}
				build, verify = min(build, built.Sub(began)), min(verify, time.Since(built))
				instructions = countInstructions(p)
			}
			for b.Loop() {
				for range 3 {
					once()
				}
			}
			b.ReportMetric(float64(instructions), "instructions")
			b.ReportMetric(float64(build.Nanoseconds())/float64(instructions), "build-ns/instr")
			b.ReportMetric(float64(verify.Nanoseconds())/float64(instructions), "verify-ns/instr")
			b.ReportMetric(0, "ns/op")
		})
	}
}

func countInstructions(p *ir.Program) int {
	n := 0
	for i := range p.Codes {
		for _, section := range p.Codes[i].Sections {
			n += len(section)
		}
	}
	return n
}

// jobs are the largest jobs: 65B parameters and a million tokens, on 128 GPUs and on 4,096.
var jobs = []struct {
	name string
	set  []string
}{
	{"128ranks", nil},
	{"4096ranks", []string{"cluster.nodes=512", "train.batch=64", "schedule.sp=8", "schedule.pp=16", "schedule.dp=32", "schedule.offload=full"}},
}

// BenchmarkJobs measures the time from a job's spec to the end of its first simulated step, and the memory that
// Go takes from the system.
func BenchmarkJobs(b *testing.B) {
	for _, job := range jobs {
		b.Run(job.name, func(b *testing.B) {
			var instructions int64
			for b.Loop() {
				spec, err := lang.Load("../../examples/paper/gpt-65b-1m.sppo", lang.Options{Shipped: shipped.Files, Set: job.set})
				if err != nil {
					b.Fatal(err)
				}
				_, p, err := build(spec)
				if err != nil {
					b.Fatal(err)
				}
				timeline, err := sim.Run(p, ir.SectionStep, sim.Options{})
				if err != nil {
					b.Fatal(err)
				}
				instructions = timeline.Instructions
			}
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			b.ReportMetric(b.Elapsed().Seconds()/float64(b.N), "s")
			b.ReportMetric(float64(instructions), "instructions")
			b.ReportMetric(float64(m.Sys)/(1<<20), "MiB")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// BenchmarkSave measures what a checkpoint during training costs: the time for which steps wait, the processor
// time of copying and writing, and the share of the wall time that is lost if the interval between checkpoints
// is ten times as long as a write. The benchmark measures this once with steps that use every core, and once
// with one core left free, as on the host of a GPU. Steps with and without a write alternate.
func BenchmarkSave(b *testing.B) {
	b.Run("free=0", func(b *testing.B) { benchmarkSave(b, runtime.GOMAXPROCS(0)) })
	b.Run("free=1", func(b *testing.B) { benchmarkSave(b, runtime.GOMAXPROCS(0)-1) })
}

func benchmarkSave(b *testing.B, threads int) {
	const checkpoints, quietSteps, periods = 6, 4, 10
	g := gpt{layers: 6, hidden: 384, heads: 6, sequence: 64, batch: 4, vocab: 50257, tied: true}
	_, p, err := compile(g.spec())
	if err != nil {
		b.Fatal(err)
	}
	job := open(b, p, threads, nil)
	if err := job.Init(b.Context()); err != nil {
		b.Fatal(err)
	}
	saver, err := job.NewSaver(b.TempDir(), 1, true)
	if err != nil {
		b.Fatal(err)
	}
	defer saver.Close()
	var quiet, quietWall, waits, extra, extraWall, writing []float64
	var bytes int64
	for b.Loop() {
		for range checkpoints {
			for range quietSteps {
				before, start := processorTime(b), time.Now()
				doSteps(b, job, 1)
				quiet, quietWall = append(quiet, (processorTime(b)-before).Seconds()), append(quietWall, time.Since(start).Seconds())
			}
			before, start, steps := processorTime(b), time.Now(), 0
			if err := saver.Begin(b.Context(), false); err != nil {
				b.Fatal(err)
			}
			var saved *train.Saved
			for ; saved == nil; steps++ {
				doSteps(b, job, 1)
				if saved, err = saver.Poll(false); err != nil {
					b.Fatal(err)
				}
			}
			spent, took := (processorTime(b) - before).Seconds(), time.Since(start).Seconds()
			extraWall = append(extraWall, took-float64(steps)*median(quietWall))
			waits, extra, bytes = append(waits, saved.Waited.Seconds()), append(extra, spent-float64(steps)*median(quiet)), saved.Bytes
			writing = append(writing, saved.Took.Seconds())
		}
	}
	b.ReportMetric(float64(bytes)/1e6, "MB")
	b.ReportMetric(median(waits), "s-waiting")
	b.ReportMetric(slices.Min(waits), "s-waiting-least")
	b.ReportMetric(median(extra), "s-of-processors")
	b.ReportMetric(median(writing), "s-writing")
	b.ReportMetric(100*median(extraWall)/(periods*median(writing)), "%-of-wall")
}

// processorTime returns the processor time of this process so far.
func processorTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

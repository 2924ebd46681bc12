package cuda

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"sppo.dev/internal/cuda/emu"
	"sppo.dev/internal/train"
	"sppo.dev/internal/train/probe"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// figure is a line of the output of TestGPUFigures, from which bench/gpu makes its report.
type figure struct {
	Kind    string  `json:"kind"` // matmul, attention, memory, copy, issue
	Name    string  `json:"name"`
	By      string  `json:"by,omitempty"`
	Seconds float64 `json:"seconds"`
	Spread  float64 `json:"spread"`
	TFLOPS  float64 `json:"tflops,omitempty"`
	GBps    float64 `json:"gb_per_s,omitempty"`
	Share   float64 `json:"share,omitempty"` // of the best algorithm, of the copy bandwidth, or of the step
}

// sizes holds the sizes of the measured instructions: on a GPU those of models, otherwise tiny ones to test the test.
type sizes struct {
	span      time.Duration
	tokens    int64              // of products
	models    map[string][]int64 // hidden and ffn
	sequences []int64            // of attention
	heads     probe.Heads
	bytes     int64
	cols      int64
	plain     int64  // bytes of copies from memory that is not pinned
	layers    string // model and training of the job whose issuing time is measured
}

var gpuSizes = sizes{
	span: 100 * time.Millisecond, tokens: 8192, models: map[string][]int64{"7B": {4096, 11008}, "65B": {8192, 22016}},
	sequences: []int64{32 << 10, 128 << 10}, heads: probe.Heads{Heads: 16, KVHeads: 16, Dim: 128}, bytes: 512 << 20, cols: 4096, plain: 256 << 20,
	layers: "model x { family = gpt layers = 4 hidden = 4096 heads = 32 vocab = 32000 dtype = bf16 } train { sequence = 64K batch = 1 steps = 1 data = random() }",
}

var smallSizes = sizes{
	tokens: 8, models: map[string][]int64{"7B": {16, 24}}, sequences: []int64{16}, heads: probe.Heads{Heads: 2, KVHeads: 1, Dim: 64},
	bytes: 4096, cols: 64, plain: 4096,
	layers: "model x { family = gpt layers = 1 hidden = 32 heads = 4 vocab = 64 dtype = f32 } train { sequence = 64 batch = 1 steps = 1 data = random() }",
}

// figures takes measurements and writes figures. Each figure is a subtest, so that one failure does not prevent
// the others.
type figures struct {
	ctx  context.Context
	out  *json.Encoder
	open func(Options) (*Machine, error)
	size sizes
}

// bench returns a bench with one rank, on a machine with the given options.
func (f *figures) bench(o Options) (*probe.Bench, error) {
	m, err := f.open(o)
	if err != nil {
		return nil, err
	}
	return &probe.Bench{Span: f.size.span, Open: func(*ir.Program) (func(int) vm.Device, vm.Transport, error) {
		again, err := m.Again()
		return again.New, again, err
	}}, nil
}

// all writes all figures, in subtests by kind.
func (f *figures) all(t *testing.T) {
	t.Run("attention", f.attention)
	t.Run("products", f.products)
	t.Run("memory", f.memory)
	t.Run("issue", f.issues)
}

// each runs the subtest of a figure.
func (f *figures) each(t *testing.T, name string, measure func() error) {
	t.Run(name, func(t *testing.T) {
		if err := measure(); err != nil {
			t.Fatal(err)
		}
	})
}

func (f *figures) put(kind, by string, t probe.Timing, share float64) error {
	x := figure{Kind: kind, Name: t.Item.Name, By: by, Seconds: t.Seconds, Spread: t.Spread, Share: share}
	if t.Work().Flops > 0 {
		x.TFLOPS = t.Flops(0) / 1e12
	} else {
		x.GBps = t.Bytes(0) / 1e9
	}
	return f.out.Encode(x)
}

// products measures products in the shapes of layers: those of the forward pass, of the input's gradient and of
// the weight's gradient. Each is computed by cuBLASLt's first algorithm, by its fastest, and by our own kernel.
// The share is relative to the rate of the fastest algorithm.
func (f *figures) products(t *testing.T) {
	ways := []struct {
		by      string
		options Options
	}{{"cuBLASLt, the fastest", Options{Tune: true}}, {"cuBLASLt", Options{}}, {"own", Options{OwnProducts: true}}}
	var benches []*probe.Bench
	for _, way := range ways {
		bench, err := f.bench(way.options)
		if err != nil {
			t.Fatal(err)
		}
		benches = append(benches, bench)
	}
	for _, item := range f.layerProducts() {
		f.each(t, item.Name, func() error {
			best := 0.0
			for i, way := range ways {
				t, err := benches[i].Measure(f.ctx, item, 1)
				if err != nil {
					return fmt.Errorf("by %s: %w", way.by, err)
				}
				if way.options.Tune {
					best = t.Seconds
				}
				if err := f.put("matmul", way.by, t, best/t.Seconds); err != nil {
					return err
				}
			}
			return nil
		})
	}
}

// layerProducts returns the products of the linear parts of layers.
func (f *figures) layerProducts() (out []probe.Item) {
	n := f.size.tokens
	names := []string{}
	for name := range f.size.models {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		h, ffn := f.size.models[name][0], f.size.models[name][1]
		for _, weight := range [][2]int64{{h, 3 * h}, {h, h}, {h, ffn}, {ffn, h}} {
			in, wide := weight[0], weight[1]
			forward := probe.Matmul(n, wide, in, ir.BF16)
			backward := probe.Matmul(n, in, wide, ir.BF16) // dx = dy w'
			backward.Args[2].Shape, backward.Attrs = []int64{in, wide}, map[string]float64{"trans_b": 1}
			gradient := probe.Matmul(in, wide, n, ir.BF16) // dw += x' dy
			gradient.Args[0].Type, gradient.Args[1].Shape = ir.F32, []int64{n, in}
			gradient.Attrs = map[string]float64{"trans_a": 1, "accumulate": 1}
			for i, item := range []probe.Item{forward, backward, gradient} {
				item.Name = fmt.Sprintf("%s %s: %s", name, []string{"y", "dx", "dw"}[i], item.Name)
				out = append(out, item)
			}
		}
	}
	return out
}

// attention measures whole sequences, in each of the ways to run attention.
func (f *figures) attention(t *testing.T) {
	for _, o := range ways {
		bench, err := f.bench(o)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(attentionOf(o), func(t *testing.T) {
			sequences := f.size.sequences
			if o.Portable { // several times slower
				sequences = sequences[:1]
			}
			for _, n := range sequences {
				for _, item := range []probe.Item{probe.Attention(n, 0, f.size.heads, ir.BF16), probe.AttentionGrad(n, 0, f.size.heads, ir.BF16)} {
					f.each(t, item.Name, func() error {
						t, err := bench.Measure(f.ctx, item, 1)
						if err != nil {
							return err
						}
						return f.put("attention", attentionOf(o), t, 0)
					})
				}
			}
		})
	}
}

// memory measures the copy bandwidth, the share of it that kernels reach, and copies to and from both pinned
// and unpinned host memory.
func (f *figures) memory(t *testing.T) {
	bench, err := f.bench(Options{})
	if err != nil {
		t.Fatal(err)
	}
	copied := 0.0 // bytes per second; measured anew in each process
	measure := func(kind string, item probe.Item) {
		f.each(t, item.Name, func() error {
			t, err := bench.Measure(f.ctx, item, 1)
			if err != nil {
				return err
			}
			share := 0.0
			if kind == "memory" && copied > 0 {
				share = t.Bytes(0) / copied
			}
			return f.put(kind, "", t, share)
		})
	}
	of := probe.Copy(ir.CopyD2D, f.size.bytes)
	copying, err := bench.Measure(f.ctx, of, 1)
	if err != nil {
		t.Fatal(err)
	}
	copied = copying.Bytes(0)
	measure("copy", of)
	for _, dtype := range []ir.DType{ir.BF16, ir.F32} {
		for _, item := range append(probe.MemoryBound(f.size.bytes, f.size.cols, dtype), f.memoryBound(dtype)...) {
			measure("memory", item)
		}
		f.joined(t, dtype, copied)
	}
	for _, op := range []ir.Op{ir.CopyD2H, ir.CopyH2D} {
		measure("copy", probe.Copy(op, f.size.bytes))
	}
	f.each(t, "plain copies", f.plainCopies)
}

// plainCopies measures copies from and to host memory that is not pinned.
func (f *figures) plainCopies() error {
	m, err := f.open(Options{})
	if err != nil {
		return err
	}
	b := &builder{}
	v := b.buffer(ir.Device, ir.U8, int64(f.size.plain))
	b.put(ir.CopyD2D, ir.Compute, []ir.View{v, v})
	b.code.Sections[ir.SectionStep] = nil
	p := &ir.Program{Name: "plain copies", Codes: []ir.Code{b.code}, Ranks: []ir.Rank{{}}, Lines: []string{""}}
	d := m.New(0)
	if err := d.Load(p, 0, &vm.Env{Transport: m}); err != nil {
		return err
	}
	memory := make([]byte, f.size.plain)
	for _, c := range []struct {
		name string
		copy func(ir.View, []byte) error
	}{{"h2d from plain memory", d.Write}, {"d2h to plain memory", d.Read}} {
		var took []float64
		for range 6 {
			began := time.Now()
			if err := c.copy(v, memory); err != nil {
				return err
			}
			took = append(took, time.Since(began).Seconds())
		}
		took = took[1:]
		slices.Sort(took)
		median := took[len(took)/2]
		x := figure{Kind: "copy", Name: c.name, Seconds: median, Spread: (took[len(took)-1] - took[0]) / median, GBps: float64(f.size.plain) / median / 1e9}
		if err := f.out.Encode(x); err != nil {
			return err
		}
	}
	return d.Close()
}

// issuing is a device that measures the time of a section, and the part of it that its goroutine spends issuing
// instructions.
type issuing struct {
	*Device
	began          time.Time
	issued, joined time.Duration
}

func (i *issuing) Begin(s ir.Section, round int64) error {
	i.began = time.Now()
	return i.Device.Begin(s, round)
}

func (i *issuing) Join() error {
	i.issued += time.Since(i.began)
	err := i.Device.Join()
	i.joined += time.Since(i.began)
	return err
}

// issues measures how long it takes to issue a model's layers in eight subsequences with full offload, call by
// call and as graphs.
func (f *figures) issues(t *testing.T) {
	const one = `
import "clusters/h200.sppo"
cluster here = h200(nodes = 1)
schedule x { pp = 1 sp = 1 dp = 1 subsequences = 8 offload = full }
`
	p, err := compiled(one + f.size.layers)
	if err != nil {
		t.Fatal(err)
	}
	for _, way := range []struct {
		by      string
		options Options
	}{{"calls", Options{}}, {"graphs", Options{Graphs: true}}} {
		f.each(t, way.by, func() error { return f.issue(way.by, p, way.options) })
	}
}

// issue writes the time of a step of a program, and the largest share of it that a rank spends issuing.
func (f *figures) issue(by string, p *ir.Program, o Options) error {
	m, err := f.open(o)
	if err != nil {
		return err
	}
	ranks := make([]*issuing, len(p.Ranks))
	job, err := train.Open(p, func(r int) (vm.Device, error) {
		ranks[r] = &issuing{Device: m.New(r).(*Device)}
		return ranks[r], nil
	}, train.Options{Transport: m})
	if err != nil {
		return err
	}
	if err := job.Init(f.ctx); err != nil {
		return err
	}
	const steps, before = 4, 2 // graphs are captured in the second step
	for i := range steps + before {
		if i == before {
			for _, r := range ranks {
				r.issued, r.joined = 0, 0
			}
		}
		if _, err := job.Step(f.ctx); err != nil {
			return err
		}
	}
	x := figure{Kind: "issue", Name: "layers", By: by}
	for _, r := range ranks {
		x.Seconds = r.joined.Seconds() / steps
		x.Share = max(x.Share, r.issued.Seconds()/r.joined.Seconds())
	}
	if err := f.out.Encode(x); err != nil {
		return err
	}
	return job.Close()
}

// figuresVariable is the environment variable that requests figures: gpu, or small for a rehearsal without a
// GPU.
const figuresVariable = "SPPO_GPU_FIGURES"

// rehearsed reports whether GPU tests run on stand-ins, which are slow.
func rehearsed() bool { return os.Getenv(figuresVariable) == "small" }

// TestGPUFigures measures the rates that a GPU achieves, and writes a line of JSON for each figure to standard
// output, for bench/gpu. It takes minutes, so it runs only on request.
func TestGPUFigures(t *testing.T) {
	size, ok := map[string]sizes{"gpu": gpuSizes, "small": smallSizes}[os.Getenv(figuresVariable)]
	if !ok {
		t.Skip("speeds are for make gpu-check: " + figuresVariable + " is neither gpu nor small")
	}
	needGPU(t, Options{})
	newFigures(t, os.Stdout, Open, size).all(t)
}

func newFigures(t *testing.T, w io.Writer, open func(Options) (*Machine, error), s sizes) *figures {
	return &figures{ctx: t.Context(), out: json.NewEncoder(w), open: open, size: s}
}

// The output on the stand-in driver has every kind of figure, with finite rates and shares.
func TestFigures(t *testing.T) {
	if testing.Short() {
		t.Skip("left out of -short: kernels on the processor take their time")
	}
	fake, kernels := useFake(t), emu.Need(t)
	var text strings.Builder
	dir := t.TempDir()
	x := newFigures(t, &text, func(o Options) (*Machine, error) {
		o.CacheDir = dir
		m, err := open(o, fixedCode(kernels.Path))
		if err == nil {
			m.tried = smallTrial
		}
		return m, err
	}, smallSizes)
	x.all(t)
	kinds := map[string]int{}
	for line := range strings.Lines(text.String()) {
		var got figure
		if err := json.Unmarshal([]byte(line), &got); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		kinds[got.Kind]++
		wants := got.TFLOPS > 0 || got.GBps > 0 || got.Kind == "issue" && got.Share > 0 && got.Share <= 1
		if !wants || got.Seconds <= 0 || got.Name == "" || (got.Kind == "matmul" || got.Kind == "memory") && got.Share <= 0 {
			t.Errorf("%s", line)
		}
	}
	want := map[string]int{"matmul": 3 * 4 * 3, "attention": 6, "memory": 2*(8+5) + 4 + 5, "copy": 5, "issue": 2}
	for kind, n := range want {
		if kinds[kind] != n {
			t.Errorf("%d lines of %s, want %d", kinds[kind], kind, n)
		}
	}
	if n, b := fake.live(), fake.products(); n != 0 || b != 0 {
		t.Errorf("%d things and %d of products were not given back", n, b)
	}
}

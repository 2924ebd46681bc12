package cuda

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"sppo.dev/internal/train"
	"sppo.dev/internal/train/probe"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// memoryBound returns memory-bound kernels other than those that probe measures on every device.
func (f *figures) memoryBound(t ir.DType) []probe.Item {
	cols := f.size.cols
	rows := max(f.size.bytes/int64(t.Bytes())/cols, 1)
	x, row := probe.Arg{Type: t, Shape: []int64{rows, cols}}, probe.Arg{Type: t, Shape: []int64{cols}}
	stats, sum := probe.Arg{Type: ir.F32, Shape: []int64{rows, 2}, Value: 1}, probe.Arg{Type: ir.F32, Shape: []int64{cols}}
	logits, labels := probe.Arg{Type: ir.F32, Shape: x.Shape}, probe.Arg{Type: ir.I32, Shape: []int64{rows}}
	item := func(op ir.Op, attrs map[string]float64, args ...probe.Arg) probe.Item {
		return probe.Item{Name: fmt.Sprintf("%s %s [%d,%d]", ir.Ops[op].Name, t, rows, cols), Op: op, Args: args, Attrs: attrs}
	}
	heads := map[string]float64{"heads": float64(cols / 64), "head_dim": 64, "batch": 1, "theta": 1e4}
	vocabulary := map[string]float64{"valid": float64(cols), "scale": 1}
	return []probe.Item{
		item(ir.Rope, heads, x, x),
		item(ir.LayerNorm, map[string]float64{"eps": 1e-5}, x, stats, x, row, row),
		item(ir.LayerNormGrad, nil, x, sum, sum, x, x, stats, row, x),
		item(ir.CrossEntropyStats, vocabulary, probe.Arg{Type: ir.F32, Shape: []int64{rows, 3}}, logits, labels),
		item(ir.CrossEntropyGrad, vocabulary, x, logits, probe.Arg{Type: ir.F32, Shape: []int64{1, rows, 3}, Value: 1}, labels),
	}
}

// group is a list of instructions launched as one kernel.
type group struct {
	name string
	put  func(b *builder)
}

// groups returns the groups of instructions for which there are joined kernels.
func (f *figures) groups(t ir.DType) []group {
	cols := f.size.cols
	rows, eps := max(f.size.bytes/int64(t.Bytes())/f.size.cols, 1), ir.Float(1e-5)
	norm := func(op ir.Op, statistics int64, vectors int) func(*builder) {
		return func(b *builder) {
			view := func(rows, cols int64) ir.View { return b.buffer(ir.Device, t, rows, cols) }
			sum := view(rows, cols)
			b.put(ir.Add, ir.Compute, []ir.View{sum, view(rows, cols), view(rows, cols), ir.Absent()})
			args := []ir.View{view(rows, cols), b.buffer(ir.Device, ir.F32, rows, statistics), sum}
			for range vectors {
				args = append(args, b.buffer(ir.Device, t, cols))
			}
			b.put(op, ir.Compute, args, eps, ir.Float(0))
		}
	}
	loss := func(b *builder) {
		vocabulary := []ir.Attr{ir.Int(0), ir.Int(cols), ir.Float(0)}
		logits, labels := b.buffer(ir.Device, ir.F32, rows, cols), b.buffer(ir.Device, ir.I32, rows)
		all := b.buffer(ir.Device, ir.F32, 1, rows, 3)
		stats := all
		stats.Shape = [ir.MaxDims]int64{rows, 3}
		b.put(ir.CrossEntropyStats, ir.Compute, []ir.View{stats, logits, labels}, vocabulary...)
		b.put(ir.CrossEntropy, ir.Compute, []ir.View{b.buffer(ir.Device, ir.F32, 1), ir.Absent(), all}, ir.Float(1))
		b.put(ir.CrossEntropyGrad, ir.Compute, []ir.View{b.buffer(ir.Device, t, rows, cols), logits, all, labels}, append([]ir.Attr{ir.Float(1)}, vocabulary...)...)
	}
	const tensors = 64
	n := max(f.size.bytes/4/tensors, 1)
	update := func(b *builder) {
		step, norm := b.buffer(ir.Device, ir.F32, 3), b.buffer(ir.Device, ir.F32, 2)
		for range tensors {
			w := func() ir.View { return b.buffer(ir.Device, ir.F32, n) }
			b.put(ir.AdamW, ir.Compute, []ir.View{w(), w(), w(), b.buffer(ir.Device, ir.BF16, n), w(), step, norm}, ir.Float(0.9), ir.Float(0.95), ir.Float(1e-8), ir.Float(0.1))
		}
	}
	squares := func(b *builder) {
		for range tensors {
			b.put(ir.SumSq, ir.Compute, []ir.View{b.buffer(ir.Device, ir.F32, 1), b.buffer(ir.Device, t, n)}, ir.Float(1))
		}
	}
	out := []group{
		{"add and layernorm", norm(ir.LayerNorm, 2, 2)}, {"add and rmsnorm", norm(ir.RMSNorm, 1, 1)},
		{"cross entropy", loss}, {fmt.Sprintf("sums of squares of %d tensors", tensors), squares},
	}
	if t == ir.F32 {
		out = append(out, group{fmt.Sprintf("adamw of %d tensors", tensors), update})
	}
	for i := range out {
		out[i].name += fmt.Sprintf(" %s [%d,%d]", t, rows, cols)
	}
	return out
}

// joined measures the memory bandwidth of joined kernels. Only bytes that must be moved are counted: a group's
// outputs, and the inputs that it does not compute itself.
func (f *figures) joined(t *testing.T, dtype ir.DType, copied float64) {
	for _, g := range f.groups(dtype) {
		f.each(t, g.name, func() error { return f.join(g, copied) })
	}
}

func (f *figures) join(g group, copied float64) error {
	b := &builder{}
	g.put(b)
	code := &b.code.Sections[ir.SectionStep]
	bytes := traffic(*code)
	one := *code
	const copies = 10
	for range copies - 1 {
		*code = append(*code, one...)
	}
	took, err := f.steps(&ir.Program{Name: g.name, Codes: []ir.Code{b.code}, Ranks: []ir.Rank{{}}, Lines: []string{""}})
	if err != nil {
		return err
	}
	x := figure{Kind: "memory", Name: g.name, By: "joined", Seconds: took[len(took)/2] / copies, Spread: (took[len(took)-1] - took[0]) / took[len(took)/2]}
	x.GBps = float64(bytes) / x.Seconds / 1e9
	x.Share = x.GBps * 1e9 / copied
	return f.out.Encode(x)
}

// steps runs a program and returns the durations of five steps, shortest first.
func (f *figures) steps(p *ir.Program) (took []float64, err error) {
	m, err := f.open(Options{})
	if err != nil {
		return nil, err
	}
	job, err := train.Open(p, func(r int) (vm.Device, error) { return m.New(r), nil }, train.Options{Transport: m})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, job.Close()) }()
	for i := range 6 {
		r, err := job.Step(f.ctx)
		if err != nil {
			return nil, err
		}
		if i > 0 { // the first step is a warm-up
			took = append(took, r.Seconds)
		}
	}
	slices.Sort(took)
	return took, nil
}

// traffic returns the bytes that a list of instructions must read and write.
func traffic(code []ir.Instr) (bytes ir.Bytes) {
	made, taken := map[uint32]bool{}, map[uint32]bool{}
	for i := range code {
		for k, v := range code[i].Args {
			reads, writes := code[i].Access(k)
			if reads && !made[v.Buffer] && !taken[v.Buffer] {
				taken[v.Buffer] = true
				bytes += v.Bytes()
			}
			if writes && !made[v.Buffer] {
				made[v.Buffer] = true
				bytes += v.Bytes()
			}
		}
	}
	return bytes
}

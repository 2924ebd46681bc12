package kernels_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"sppo.dev/internal/cuda/emu"
	"sppo.dev/internal/cuda/kernels"
	"sppo.dev/internal/irtest"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// listing is a program of several instructions on the compute stream.
type listing struct {
	code ir.Code
	end  ir.Bytes
}

// tensor returns a tensor at the given offset or, if that is negative, after all others.
func (l *listing) tensor(at ir.Bytes, t ir.DType, shape ...int64) ir.View {
	v := ir.View{Buffer: uint32(len(l.code.Buffers)), DType: t}
	for i, n := range shape {
		v.Shape[i] = int64(n)
	}
	if at < 0 {
		at = (l.end + 15) &^ 15
	}
	l.code.Buffers = append(l.code.Buffers, ir.Buffer{Name: fmt.Sprint("b", v.Buffer), Offset: at, Size: v.Bytes()})
	l.end = max(l.end, at+v.Bytes())
	l.code.Arenas[ir.Device] = l.end
	return v
}

func (l *listing) put(op ir.Op, attrs map[string]any, args ...ir.View) {
	for len(args) < len(ir.Ops[op].Operands) {
		args = append(args, ir.Absent())
	}
	in := ir.Instr{Op: op, Args: args}
	for _, a := range ir.Ops[op].Attrs {
		switch v := attrs[a.Name].(type) {
		case float64:
			in.Attrs = append(in.Attrs, ir.Float(v))
		case int:
			in.Attrs = append(in.Attrs, ir.Int(int64(v)))
		default:
			in.Attrs = append(in.Attrs, ir.Int(0))
		}
	}
	l.code.Sections[ir.SectionStep] = append(l.code.Sections[ir.SectionStep], in)
}

func (l *listing) program() *ir.Program {
	return &ir.Program{Name: "joined", Codes: []ir.Code{l.code}, Ranks: []ir.Rank{{}}, Lines: []string{""}}
}

const anywhere = ir.Bytes(-1)

// addNorm returns a listing of a sum and its norm, with the given instructions between them. The norm's result
// begins the given number of bytes after the start of the second summand, or anywhere if that is negative.
func addNorm(op ir.Op, t ir.DType, rows, cols int64, bias ir.DType, between []ir.Op, over ir.Bytes) *listing {
	l := &listing{}
	a, b := l.tensor(anywhere, t, rows, cols), l.tensor(anywhere, t, rows, cols)
	sum, row := l.tensor(anywhere, t, rows, cols), ir.Absent()
	if bias == ir.F32 || bias == ir.BF16 {
		row = l.tensor(anywhere, bias, cols)
	}
	at := anywhere
	if over >= 0 {
		at = l.code.Buffers[b.Buffer].Offset + over
	}
	args := []ir.View{l.tensor(at, t, rows, cols), l.tensor(anywhere, ir.F32, rows, 2), sum, l.tensor(anywhere, t, cols)}
	if op == ir.LayerNorm {
		args = append(args, l.tensor(anywhere, t, cols))
	} else {
		args[1].Shape[1] = 1
	}
	l.put(ir.Add, nil, sum, a, b, row)
	for _, o := range between {
		l.put(o, nil)
	}
	l.put(op, map[string]any{"eps": 1e-5}, args...)
	return l
}

// crossEntropy returns a listing of the cross-entropy of a whole vocabulary. If it is weighted, negative labels
// do not count and the loss has a weight; otherwise all labels count.
func crossEntropy(logits, gradient ir.DType, rows, cols, valid int64, parts int64, weighted bool, between []ir.Op) *listing {
	l := &listing{}
	x, labels, loss := l.tensor(anywhere, logits, rows, cols), l.tensor(anywhere, ir.I32, rows), l.tensor(anywhere, ir.F32, 1)
	all := l.tensor(anywhere, ir.F32, parts, rows, 3)
	stats := all
	stats.Shape = [ir.MaxDims]int64{int64(rows), 3}
	negative, weight := ir.Absent(), ir.Absent()
	if weighted {
		negative, weight = labels, l.tensor(anywhere, ir.F32, 1)
	}
	l.put(ir.CrossEntropyStats, map[string]any{"first": 3, "valid": int(valid)}, stats, x, labels)
	l.put(ir.CrossEntropy, map[string]any{"scale": 0.25}, loss, ir.Absent(), all, negative, weight)
	for _, o := range between {
		l.put(o, nil)
	}
	l.put(ir.CrossEntropyGrad, map[string]any{"scale": 0.25, "first": 3, "valid": int(valid)}, l.tensor(anywhere, gradient, rows, cols), x, all, labels, weight)
	return l
}

// updates returns a listing of AdamW steps for tensors of the given sizes, followed by the sums of squares of
// their gradients, with the given instructions in between.
func updates(between []ir.Op, sizes ...int64) *listing {
	l := &listing{}
	step, norm := l.tensor(anywhere, ir.F32, 3), l.tensor(anywhere, ir.F32, 2)
	var grads []ir.View
	for i, n := range sizes {
		f := func() ir.View { return l.tensor(anywhere, ir.F32, n) }
		w, m, v, grad, copied := f(), f(), f(), f(), ir.Absent()
		if i%3 != 1 {
			copied = l.tensor(anywhere, ir.BF16, n)
		}
		grads = append(grads, grad)
		l.put(ir.AdamW, map[string]any{"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1 * float64(i%2)}, w, m, v, copied, grad, step, norm)
	}
	for _, o := range between {
		l.put(o, nil)
	}
	for i, grad := range grads {
		l.put(ir.SumSq, map[string]any{"weight": float64(i % 3)}, l.tensor(anywhere, ir.F32, 1), grad)
	}
	return l
}

// TestJoin checks which instructions are joined, by counting those that launch something.
func TestJoin(t *testing.T) {
	w, r := []ir.Op{ir.Wait}, []ir.Op{ir.Record}
	both := []ir.Op{ir.Wait, ir.Record}
	for _, c := range []struct {
		name string
		code *listing
		want int
	}{
		{"sum and norm", addNorm(ir.LayerNorm, ir.BF16, 3, 40, ir.U8, nil, anywhere), 1},
		{"sum, record, norm", addNorm(ir.RMSNorm, ir.F32, 3, 40, ir.BF16, r, anywhere), 1},
		{"sum, wait, norm", addNorm(ir.RMSNorm, ir.BF16, 3, 40, ir.F32, w, anywhere), 1},
		{"sum, wait, record, norm", addNorm(ir.RMSNorm, ir.BF16, 3, 40, ir.F32, both, anywhere), 2},
		{"the norm in the place of a summand", addNorm(ir.LayerNorm, ir.BF16, 3, 40, ir.U8, nil, 0), 1},
		{"the norm a row behind it", addNorm(ir.LayerNorm, ir.BF16, 3, 40, ir.U8, nil, 80), 2},
		{"a whole vocabulary", crossEntropy(ir.F32, ir.BF16, 4, 50, 47, 1, false, nil), 1},
		{"a part of one", crossEntropy(ir.F32, ir.BF16, 4, 50, 47, 2, true, nil), 3},
		{"a whole vocabulary, wait", crossEntropy(ir.BF16, ir.BF16, 4, 50, 50, 1, true, w), 1},
		{"a whole vocabulary, wait and record", crossEntropy(ir.BF16, ir.BF16, 4, 50, 50, 1, false, both), 3},
		{"updates and sums", updates(r, 5, 6, 7000), 2},
		{"one update", updates(nil, 5), 2},
	} {
		plans := bindStep(t, c.code.program())
		launching := 0
		for _, plan := range plans {
			launching += min(len(plan.Launches), 1)
		}
		if launching != c.want {
			t.Errorf("%s: %d instructions launch something, want %d", c.name, launching, c.want)
		}
	}
	runs := updates(nil, 5, 6, 7, 8)
	code := runs.code.Sections[ir.SectionStep]
	code[2].Attrs[0] = ir.Float(0.8)            // another beta1
	code[6].Args[1] = runs.tensor(0, ir.F32, 5) // reads the result of the previous one
	code[5].Args[0] = runs.tensor(0, ir.F32, 1)
	launching := ""
	for pc, plan := range bindStep(t, runs.program()) {
		if len(plan.Launches) > 0 {
			launching += fmt.Sprint(pc, " ")
		}
	}
	if launching != "0 2 3 4 6 " {
		t.Errorf("runs begin at %s", launching)
	}
}

func bindStep(t *testing.T, p *ir.Program) []kernels.Plan {
	t.Helper()
	code := p.Codes[0].Sections[ir.SectionStep]
	plans := make([]kernels.Plan, len(code))
	for pc := range code {
		var err error
		if code[pc].Info().Class != ir.ClassKernel {
			continue
		}
		if plans[pc], err = kernels.Bind(kernels.Card{}, p, 0, &code[pc]); err != nil {
			t.Fatal(err)
		}
	}
	if err := kernels.Join(kernels.Card{}, p, 0, &p.Codes[0], ir.SectionStep, plans); err != nil {
		t.Fatal(err)
	}
	return plans
}

// TestJoinedIsAlone checks that joined instructions give the same bytes as separate ones.
func TestJoinedIsAlone(t *testing.T) {
	library := emu.Need(t)
	seed := irtest.Seed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	types := []ir.DType{ir.F32, ir.BF16}
	var programs []*listing
	for i := range 16 {
		between := [][]ir.Op{nil, {ir.Record}, {ir.Wait}}[rng.IntN(3)]
		op, dtype, bias := []ir.Op{ir.LayerNorm, ir.RMSNorm}[i%2], types[i/2%2], []ir.DType{ir.U8, ir.F32, ir.BF16}[i%3]
		cols := []int64{1 + rng.Int64N(30), 8 * (1 + rng.Int64N(40)), 1000 + rng.Int64N(3000), 8192, 8200, 9001}[i%6]
		over := []ir.Bytes{anywhere, 0}[rng.IntN(2)]
		programs = append(programs, addNorm(op, dtype, 1+rng.Int64N(4), cols, bias, between, over))
		cols = []int64{1 + rng.Int64N(30), 8 * (1 + rng.Int64N(400)), 26000, 50001}[i%4]
		programs = append(programs, crossEntropy(types[i/4%2], types[i%2], 1+rng.Int64N(3), cols, 1+rng.Int64N(cols), 1, i%3 == 0, between))
	}
	programs = append(programs, updates(nil, 1, 2048, 2049, 17, 5000), updates([]ir.Op{ir.Record}, 300, 100))
	for _, l := range programs {
		alone := runListing(t, l, &device{library: library, alone: true})
		joined := runListing(t, l, &device{library: library, seed: rng.Uint64()})
		if !bytes.Equal(alone, joined) {
			p := l.program()
			t.Errorf("%s and what follows it: other bytes", describe(p, &p.Codes[0].Sections[ir.SectionStep][0]))
		}
	}
}

// runListing runs a listing, always on the same inputs, and returns the contents of the device arena.
func runListing(t *testing.T, l *listing, d *device) []byte {
	t.Helper()
	must := func(err error) {
		if err != nil {
			t.Helper()
			t.Fatal(err)
		}
	}
	p := l.program()
	must(d.Load(p, 0, &vm.Env{Transport: vm.NewLocal()}))
	code := p.Codes[0].Sections[ir.SectionStep]
	rng := rand.New(rand.NewPCG(3, 4))
	for i := range code {
		for k, v := range code[i].Args {
			if v.Present() {
				must(d.Write(v, values(rng, &code[i], k)))
			}
		}
	}
	must(d.Begin(ir.SectionStep, 1))
	for pc := range code {
		if code[pc].Info().Class == ir.ClassKernel {
			d.Launch(pc)
		}
	}
	must(d.Join())
	out := bytes.Clone(d.arenas[ir.Device])
	must(d.Close())
	return out
}

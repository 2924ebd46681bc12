package cuda

import (
	"fmt"
	"math"
	"time"

	"sppo.dev/cuda/kernels"
	"sppo.dev/ir"
	"sppo.dev/vm"
)

// Kernels for one architecture are tried before use. The results of attention on a small shape, forward and
// backward, must agree with those of the portable kernels on the same card. If they do not, nothing runs until
// the user selects the portable kernels.

// PortableVariable sets Options.Portable.
const PortableVariable = "SPPO_CUDA_PORTABLE"

// trialTolerance is the largest relative distance allowed between results. Both kernels round probabilities to
// bf16, but at different points in the sum.
const trialTolerance = 2e-2

// trialLimit is the time limit of a trial, which is needed because a thread may wait forever at a broken
// barrier. If waits are limited, even such a trial ends by itself. The limit is then checkedLimit, which guards
// only against other hangs.
const (
	trialLimit   = 3 * time.Minute
	checkedLimit = 15 * time.Second
)

func (m *Machine) trialLimit() time.Duration {
	if m.options.Check {
		return checkedLimit
	}
	return trialLimit
}

// trial runs once for each variant of the kernels, and its result holds for all cards with the same name.
type trial = once[string, struct{}]

// trusted returns an error if the kernels for a GPU's architecture, in the variant to which a source belongs,
// disagree with the portable ones.
func (m *Machine) trusted(g *gpu, source string) error {
	if m.trying {
		return nil
	}
	shape := m.tried
	capped, packed := kernels.Variant(source)
	if capped {
		shape.softcap = triedSoftcap
	}
	shape.documents = packed
	name := fmt.Sprint(g.name, ", capped: ", capped, ", packed: ", packed)
	_, err := m.trials.get(name, func() (struct{}, error) { return struct{}{}, m.try(g, shape) })
	if err != nil {
		return fmt.Errorf("the kernels for the architecture of GPU %d (%s) failed their trial: %w; set %s=1 to use the portable ones",
			g.index, g.name, err, PortableVariable)
	}
	return nil
}

// try compares the two kinds of kernels, for each head dimension that has its own kernels.
func (m *Machine) try(g *gpu, shape attentionShape) error {
	for _, dim := range kernels.HopperDims {
		shape.dim = dim
		var results [2][][]float32
		for i := range results {
			again := m.alone(g)
			again.options.Portable = i == 1
			if err := m.aside(func() (err error) {
				results[i], err = attempt(again, shape)
				return err
			}); err != nil {
				return err
			}
		}
		for i, want := range results[1] {
			if d := apart(results[0][i], want); !(d <= trialTolerance) { // also true for NaN
				return fmt.Errorf("result %d of attention and its gradient%s is off by %.2g", i, shape.variant(), d)
			}
		}
	}
	return nil
}

// alone returns a machine with one GPU, for one rank that tries or times kernels.
func (m *Machine) alone(g *gpu) *Machine {
	again := *m
	again.gpus, again.meeting, again.collect, again.trying = []*gpu{g}, newMeetings(), nil, true
	again.options.Graphs = false
	return &again
}

// aside runs a function in a separate goroutine, because the caller's thread has a context of its own, and
// waits until the function ends or the time limit has passed.
func (m *Machine) aside(do func() error) error {
	failed := make(chan error, 1)
	go func() { failed <- do() }()
	select {
	case err := <-failed:
		return err
	case <-time.After(m.trialLimit()):
		return fmt.Errorf("attention of a few tokens did not end within %s", m.trialLimit())
	}
}

// triedSoftcap is small enough to change the scores of random operands noticeably.
const triedSoftcap = 1

// triedPrefix is the position of a trial's first token in its document. No trial with documents has a shorter
// prefix.
const triedPrefix = 10

// triedShape has full and partial tiles of queries and keys, and heads that share keys.
var triedShape = attentionShape{n: 150, prefix: 70, heads: 2, kvHeads: 1}

// attempt runs attention and its gradient and returns their results.
func attempt(m *Machine, shape attentionShape) (results [][]float32, err error) {
	p, inputs, outputs := attentionProgram(shape)
	err = m.runAlone(p, inputs, func(d *Device) error {
		if err := d.Begin(ir.SectionStep, 1); err != nil {
			return err
		}
		d.Launch(0)
		d.Launch(1)
		if err := d.Join(); err != nil {
			return err
		}
		for _, v := range outputs {
			values := make([]float32, v.Elements())
			if err := d.Read(v, vm.BytesOf(values)); err != nil {
				return err
			}
			results = append(results, values)
		}
		return nil
	})
	return results, err
}

// runAlone loads a program of one rank, initialises its inputs, and calls a function with its device.
func (m *Machine) runAlone(p *ir.Program, inputs []ir.View, do func(d *Device) error) (err error) {
	d := m.New(0).(*Device)
	defer func() {
		if closed := d.Close(); err == nil {
			err = closed
		}
	}()
	if err := d.Load(p, 0, &vm.Env{Transport: m}); err != nil {
		return err
	}
	state := uint32(1)
	for _, v := range inputs {
		bytes := make([]byte, v.Bytes())
		values := vm.Uint16s(bytes)
		if v.DType == ir.I32 {
			values = nil
			for i := range vm.Int32s(bytes) { // documents of 64 tokens, the first of which began earlier
				vm.Int32s(bytes)[i] = int32(i+triedPrefix) % 64
			}
		}
		for i := range values { // sums of four numbers are distributed almost normally
			x := float32(0)
			for range 4 {
				state = state*1664525 + 1013904223
				x += float32(state>>8)/(1<<24) - 0.5
			}
			values[i] = vm.BF16(x)
		}
		if err := d.Write(v, bytes); err != nil {
			return err
		}
	}
	return do(d)
}

// attentionShape is the shape of attention that is tried or timed.
type attentionShape struct {
	n, prefix, heads, kvHeads, dim int64
	softcap                        float64 // 0: none
	documents                      bool
}

// variant names the features of a shape beyond plain attention.
func (s *attentionShape) variant() string {
	text := ""
	if s.softcap != 0 {
		text += " with a softcap"
	}
	if s.documents {
		text += " with documents"
	}
	return text
}

// attentionProgram returns a program that computes attention after a prefix and its gradient, with all results in f32.
func attentionProgram(s attentionShape) (p *ir.Program, inputs, outputs []ir.View) {
	n, prefix, heads, kvHeads, dim := s.n, s.prefix, s.heads, s.kvHeads, s.dim
	code := ir.Code{Name: "trial"}
	buffer := func(t ir.DType, rows, cols int64) ir.View {
		v := ir.View{Buffer: uint32(len(code.Buffers)), DType: t, Shape: [ir.MaxDims]int64{rows, cols}}
		start := (code.Arenas[ir.Device] + 255) &^ 255
		code.Buffers = append(code.Buffers, ir.Buffer{Name: fmt.Sprint("b", v.Buffer), Offset: start, Size: v.Bytes()})
		code.Arenas[ir.Device] = start + v.Bytes()
		return v
	}
	q, dout, half := buffer(ir.BF16, n, heads*dim), buffer(ir.BF16, n, heads*dim), buffer(ir.BF16, n, heads*dim)
	k, v := buffer(ir.BF16, prefix+n, kvHeads*dim), buffer(ir.BF16, prefix+n, kvHeads*dim)
	o, lse := buffer(ir.F32, n, heads*dim), buffer(ir.F32, n, heads)
	dq, dk, dv := buffer(ir.F32, n, heads*dim), buffer(ir.F32, prefix+n, kvHeads*dim), buffer(ir.F32, prefix+n, kvHeads*dim)
	put := func(op ir.Op, operands map[string]ir.View) {
		in := ir.Instr{Op: op, Stream: ir.Compute}
		attrs := map[string]int64{"heads": heads, "kv_heads": kvHeads, "head_dim": dim, "batch": 1, "prefix": prefix}
		for _, operand := range in.Info().Operands {
			view, ok := operands[operand.Name]
			if !ok {
				view = ir.Absent()
			}
			in.Args = append(in.Args, view)
		}
		for _, a := range in.Info().Attrs {
			value := ir.Int(attrs[a.Name])
			if a.Name == "softcap" {
				value = ir.Float(s.softcap)
			}
			in.Attrs = append(in.Attrs, value)
		}
		code.Sections[ir.SectionStep] = append(code.Sections[ir.SectionStep], in)
	}
	positions := ir.Absent()
	inputs = []ir.View{q, dout, half, k, v}
	if s.documents {
		positions = buffer(ir.I32, n, 1)
		inputs = append(inputs, positions)
	}
	put(ir.Attention, map[string]ir.View{"o": o, "lse": lse, "q": q, "k": k, "v": v, "positions": positions})
	put(ir.AttentionGrad, map[string]ir.View{"dq": dq, "dk": dk, "dv": dv, "do": dout, "q": q, "k": k, "v": v, "o": half, "lse": lse,
		"positions": positions})
	p = &ir.Program{Name: "trial", Codes: []ir.Code{code}, Ranks: []ir.Rank{{}}, Lines: []string{""}}
	return p, inputs, []ir.View{o, lse, dq, dk, dv}
}

// apart returns the norm of the difference between two results, divided by the norm of the second.
func apart(got, want []float32) float64 {
	difference, size := 0.0, 0.0
	for i := range want {
		d := float64(got[i]) - float64(want[i])
		difference, size = difference+d*d, size+float64(want[i])*float64(want[i])
	}
	return math.Sqrt(difference / size)
}

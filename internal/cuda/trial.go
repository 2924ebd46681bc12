package cuda

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"sppo.dev/internal/cuda/kernels"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// Kernels for one architecture are tried before use. The results of attention on a small shape, or of its gradient,
// must agree with those of the portable kernels on the same card. If they do not, the portable kernels replace
// those that failed, and a note describes the errors.

// PortableVariable sets Options.Portable if it is 1. Otherwise, it lists the head dimensions of Options.PortableHeads.
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

// trial runs once for each operation, head dimension, variant of the kernels and way to load tiles. Its result, ""
// or a description of the errors, holds for all cards with the same name.
type trial = once[string, string]

// trusted reports whether the kernels of an attention instruction that are for a GPU's architecture agree with the
// portable ones.
func (m *Machine) trusted(g *gpu, card kernels.Card, op ir.Op, dim int64, launches []kernels.Launch) (bool, error) {
	at := slices.IndexFunc(launches, func(l kernels.Launch) bool { return kernels.Target(l.Source) != "" })
	if m.trying || at < 0 {
		return true, nil
	}
	shape := m.tried
	shape.dim = dim
	capped, packed := kernels.Variant(launches[at].Source)
	if capped {
		shape.softcap = triedSoftcap
	}
	shape.documents = packed
	way := byThreads
	if card.CopyEngine {
		way = byEngine
	}
	name := fmt.Sprintf("%s of heads of %d%s", ir.Ops[op].Name, dim, shape.variant())
	errors, err := m.trials.get(fmt.Sprintf("%s, %s, %s", g.name, name, way), func() (string, error) {
		return m.try(g, card, op, shape)
	})
	if err != nil {
		return false, fmt.Errorf("the trial of %s on GPU %d (%s) failed: %w; set %s=1 to use the portable kernels",
			name, g.index, g.name, err, PortableVariable)
	}
	if errors != "" {
		m.notes.add("portable kernels compute %s, because those for the architecture of the %s failed their trial: %s", name, g.name, errors)
	}
	return errors == "", nil
}

// try runs an operation with both kinds of kernels and describes the first result that differs, or returns "". The
// kernels for the card get operands that portable kernels computed.
func (m *Machine) try(g *gpu, card kernels.Card, op ir.Op, shape attentionShape) (string, error) {
	var results [2][]result
	for i := range results {
		again := m.alone(g)
		again.only, again.options.Portable, again.options.ThreadsCopy = op, i == 1, !card.CopyEngine
		if err := m.aside(func() (err error) {
			results[i], err = attempt(again, op, shape)
			return err
		}); err != nil {
			return "", err
		}
	}
	for i, want := range results[1] {
		got := results[0][i]
		if text := differs(got.values, want.values, want.cols, shape.dim, trialTolerance); text != "" {
			return fmt.Sprintf("%s of %s %s", want.name, got.kernel, text), nil
		}
	}
	return "", nil
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

// triedShape has full and partial tiles of queries and keys, heads that share keys, and enough tiles to reuse every
// slot in shared memory at least twice: nine of 128 keys forward in two slots; eighteen of 64 keys for dq and ten of 64
// queries for dk and dv in three. Wide heads have smaller tiles of keys, thus more of them.
var triedShape = attentionShape{n: 300, prefix: 800, heads: 2, kvHeads: 1}

// triedDocument is the number of tokens of a trial's documents. The first began with the prefix.
const triedDocument = 900

// result is a result of an attempt, [rows, cols].
type result struct {
	name, kernel string // the operand, and the kernel that computes it
	cols         int64
	values       []float32
}

// attempt runs attention, and its gradient if op is that, and returns the results of op.
func attempt(m *Machine, op ir.Op, shape attentionShape) (results []result, err error) {
	p, inputs := attentionProgram(shape)
	code := p.Codes[0].Sections[ir.SectionStep]
	code = slices.DeleteFunc(code, func(in ir.Instr) bool { return op == ir.Attention && in.Op != op })
	p.Codes[0].Sections[ir.SectionStep] = code
	err = m.runAlone(p, inputs, shape.prefix, func(d *Device) error {
		if err := d.Begin(ir.SectionStep, 1); err != nil {
			return err
		}
		for pc := range code {
			d.Launch(pc)
		}
		if err := d.Join(); err != nil {
			return err
		}
		last := &code[len(code)-1]
		plan, err := d.plan(last)
		if err != nil {
			return err
		}
		for i, v := range last.Args {
			if _, writes := last.Access(i); !writes || !v.Present() {
				continue
			}
			name := last.Info().Operands[i].Name
			r := result{name, kernelOf(plan.Launches, name), v.Cols(), make([]float32, v.Elements())}
			if err := d.Read(v, vm.BytesOf(r.values)); err != nil {
				return err
			}
			results = append(results, r)
		}
		return nil
	})
	return results, err
}

// kernelOf returns the name of the kernel of attention or its gradient that computes an operand.
func kernelOf(launches []kernels.Launch, operand string) string {
	of := map[string]string{"dq": "_dq_", "dk": "_dkv_", "dv": "_dkv_"}[operand]
	for _, l := range launches {
		if strings.Contains(l.Kernel, of) && l.Kernel != "fill" {
			return l.Kernel
		}
	}
	return "?"
}

// runAlone loads a program of one rank, initialises its inputs, and calls a function with its device. The prefix is
// the position of the first token in its document.
func (m *Machine) runAlone(p *ir.Program, inputs []ir.View, prefix int64, do func(d *Device) error) (err error) {
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
			for i := range vm.Int32s(bytes) {
				vm.Int32s(bytes)[i] = int32((int64(i) + prefix) % triedDocument)
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
func attentionProgram(s attentionShape) (p *ir.Program, inputs []ir.View) {
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
	return p, inputs
}

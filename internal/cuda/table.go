package cuda

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"sppo.dev/internal/cuda/cublas"
	"sppo.dev/internal/cuda/driver"
	"sppo.dev/internal/cuda/kernels"
	"sppo.dev/internal/cuda/nvrtc"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// sumSource is the source of the communication kernels, which no opcode's table entry names.
const sumSource = "meet.cu"

// sourceOf returns a source of package kernels as the compiler expects it, with the headers that it includes.
// Headers do not include other headers.
func sourceOf(name string) nvrtc.Source {
	s := nvrtc.Source{Name: name, Text: kernels.Text(name), Headers: kernels.Headers()}
	maps.DeleteFunc(s.Headers, func(header, _ string) bool { return !strings.Contains(s.Text, `#include "`+header+`"`) })
	return s
}

// plansOf returns the launches of every kernel of the code, and allocates for each stream the largest workspace
// that any of its instructions needs.
func (d *Device) plansOf() (plans [ir.NumSections][]kernels.Plan, err error) {
	var need [ir.NumStreams]int64
	for s := range ir.NumSections {
		code := d.code.Sections[s]
		plans[s] = make([]kernels.Plan, len(code))
		for pc := range code {
			in := &code[pc]
			if d.machine.collect != nil {
				bytes, err := d.machine.collect.workspaceOf(d, in)
				if err != nil {
					return plans, fmt.Errorf("%s: %w", vm.At(d.program, s, pc, in), err)
				}
				need[in.Stream] = max(need[in.Stream], bytes)
			}
			if in.Info().Class != ir.ClassKernel {
				continue
			}
			if plans[s][pc], err = d.plan(in); err != nil {
				return plans, fmt.Errorf("%s: %w", vm.At(d.program, s, pc, in), err)
			}
			if in.Op == ir.Matmul && d.blas != nil {
				need[in.Stream] = max(need[in.Stream], productWorkspaceBytes)
			}
		}
		if err := kernels.Join(d.machine.card(d.gpu), d.program, d.rank, d.code, s, plans[s]); err != nil {
			return plans, err
		}
		for pc := range code {
			need[code[pc].Stream] = max(need[code[pc].Stream], plans[s][pc].WorkspaceBytes)
		}
	}
	for s := range need {
		if d.scratch[s], err = d.alloc(need[s]); err != nil {
			return plans, fmt.Errorf("allocating a workspace of %s: %w", ir.Bytes(need[s]), err)
		}
		d.scratchBytes[s] = need[s]
	}
	return plans, nil
}

func (d *Device) plan(in *ir.Instr) (plan kernels.Plan, err error) {
	defer func() { // an unverified program can cause a panic, such as a division by its batch of 0
		if r := recover(); r != nil {
			err = fmt.Errorf("invalid instruction: %v", r)
		}
	}()
	m, card := d.machine, d.machine.card(d.gpu)
	if in.Op != ir.Attention && in.Op != ir.AttentionGrad || !card.Hopper {
		return kernels.Bind(card, d.program, d.rank, in)
	}
	dim := in.Attr("head_dim").Int(nil)
	if slices.Contains(m.options.PortableHeads, dim) || m.only != 0 && m.only != in.Op {
		return kernels.Bind(kernels.Card{}, d.program, d.rank, in)
	}
	if card.CopyEngine {
		if card.CopyEngine, err = m.engine(d.gpu, in.Op, dim); err != nil {
			return plan, err
		}
	}
	if plan, err = kernels.Bind(card, d.program, d.rank, in); err != nil {
		return plan, err
	}
	trusted, err := m.trusted(d.gpu, card, in.Op, dim, plan.Launches)
	if err == nil && !trusted {
		return kernels.Bind(kernels.Card{}, d.program, d.rank, in)
	}
	return plan, err
}

// plainShared is the default limit on a kernel's dynamic shared memory.
const plainShared = 48 << 10

// kernel prepares the launches of a kernel opcode.
func (b *binder) kernel(plan *kernels.Plan) error {
	d := b.device
	if b.in.Op == ir.Matmul && d.blas != nil && len(plan.Launches) > 0 {
		if done, err := b.product(); done || err != nil {
			return err
		}
	}
	for i := range plan.Launches {
		l := &plan.Launches[i]
		f, err := d.kernel(l.Source, l.Kernel)
		if err != nil {
			return err
		}
		if err := d.allowShared(f, l.SharedBytes); err != nil {
			return fmt.Errorf("%s: %w", l.Kernel, err)
		}
		table, err := b.table(l)
		if err != nil {
			return err
		}
		arguments := make([][]byte, len(l.Args))
		for i, a := range l.Args {
			value, err := b.value(a, table)
			if err != nil {
				return fmt.Errorf("%s: %w", l.Kernel, err)
			}
			arguments[i] = binary.LittleEndian.AppendUint64(nil, value)
		}
		b.add(d.api.Launch(driver.Launch{
			Func: f, Grid: [3]int{int(l.Grid[0]), int(l.Grid[1]), int(l.Grid[2])}, Block: [3]int{int(l.Block), 1, 1},
			Shared: int(l.SharedBytes), Stream: b.stream,
		}, arguments...))
	}
	return nil
}

// allowShared raises a kernel's limit on dynamic shared memory to the largest request so far.
func (d *Device) allowShared(f driver.Func, bytes int64) error {
	if bytes <= max(plainShared, d.allowed[f]) {
		return nil
	}
	d.allowed[f] = bytes
	return d.api.AllowShared(f, int(bytes))
}

// value returns the value of a launch's argument; table is the address of the launch's table.
func (b *binder) value(a kernels.Arg, table driver.Ptr) (uint64, error) {
	switch a.Kind {
	case kernels.Operand:
		if a.Apart == 0 {
			return from(b.places[a.Value], a), nil
		}
		v := b.device.code.Sections[b.section][b.pc+int(a.Apart)].Args[a.Value]
		if !v.Present() {
			return 0, nil
		}
		p, err := b.device.place(v)
		return from(p, a), err
	case kernels.Workspace:
		return uint64(b.device.scratch[b.in.Stream]) + a.Value, nil
	case kernels.Table:
		return uint64(table), nil
	}
	return a.Value, nil
}

// from returns the address that an argument refers to in the operand at p, or 0 if the operand is absent.
func from(p driver.Ptr, a kernels.Arg) uint64 {
	if p == 0 {
		return 0
	}
	return uint64(p) + a.Offset
}

// table puts the table of a launch, tensor maps first, into device memory, where it stays. Equal tables are
// shared.
func (b *binder) table(l *kernels.Launch) (driver.Ptr, error) {
	var words []byte
	for _, x := range l.Boxes {
		at, err := b.value(x.Tensor, 0)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", l.Kernel, err)
		}
		tensorMap, err := b.device.api.TensorMap(driver.Ptr(at), x.Extent, x.Box)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", l.Kernel, err)
		}
		words = append(words, tensorMap...)
	}
	for _, a := range l.Table {
		value, err := b.value(a, 0)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", l.Kernel, err)
		}
		words = binary.LittleEndian.AppendUint64(words, value)
	}
	if at, ok := b.device.tables[string(words)]; ok {
		return at, nil
	}
	at, err := b.device.alloc(int64(len(words)))
	if err != nil || len(words) == 0 {
		return at, err
	}
	if err := b.device.api.ToDevice(at, words); err != nil {
		return 0, err
	}
	b.device.tables[string(words)] = at
	return at, b.device.api.Synchronize(0) // as in Write
}

// productWorkspaceBytes is the workspace that cuBLASLt's fastest algorithms need on Hopper.
const productWorkspaceBytes = 32 << 20

// product hands a matmul to cuBLASLt. It returns false if cuBLASLt has no algorithm for it.
func (b *binder) product() (bool, error) {
	d := b.device
	a, c := b.in.Arg("a"), b.in.Arg("c")
	s := cublas.Shape{
		M: c.Rows(), N: c.Cols(), K: a.Cols(), TransA: b.int("trans_a") != 0, TransB: b.int("trans_b") != 0,
		In: blasType(a.DType), Out: blasType(c.DType), Accumulate: b.int("accumulate") != 0, Bias: b.in.Arg("bias").Present(),
	}
	if s.TransA {
		s.K = a.Rows()
	}
	if s.K == 0 {
		return false, nil
	}
	p, err := d.blas.Prepare(s, cublas.Operands{
		C: uintptr(b.places[0]), A: uintptr(b.places[1]), B: uintptr(b.places[2]), Bias: uintptr(b.places[3]),
		Workspace: uintptr(d.scratch[b.in.Stream]), WorkspaceBytes: d.scratchBytes[b.in.Stream], Stream: uintptr(b.stream),
	}, d.gpu.choices, d.timer(b.stream))
	if e := (*cublas.Error)(nil); errors.As(err, &e) && e.Unsupported() {
		d.machine.notes.add("our own kernel computes products that cuBLASLt does not support: %v", err)
		return false, nil
	}
	if err != nil {
		return false, err
	}
	d.later(p.Close)
	b.out.actions = append(b.out.actions, p)
	return true, nil
}

// timer returns a function that times products on a stream with events, or nil if products are not to be timed.
// Timing runs them on their real operands, which no section has written yet.
func (d *Device) timer(stream driver.Stream) cublas.Timer {
	if !d.machine.options.Tune {
		return nil
	}
	const runs = 5
	return func(product func() error) (seconds float64, err error) {
		var steps []func() error
		var events [2]driver.Event
		for i := range events {
			if events[i], err = d.api.NewEvent(true); err != nil {
				return 0, err
			}
			defer func() { err = errors.Join(err, d.api.DestroyEvent(events[i])) }()
			record := d.api.Record(events[i], stream)
			steps = append(steps, product, record.Make) // the first product is a warm-up
			for range (1 - i) * (runs - 1) {
				steps = append(steps, product)
			}
		}
		for _, step := range steps {
			if err := step(); err != nil {
				return 0, err
			}
		}
		if err := d.api.Synchronize(stream); err != nil {
			return 0, err
		}
		ms, err := d.api.ElapsedMillis(events[0], events[1])
		return float64(ms) / 1e3 / runs, err
	}
}

func blasType(t ir.DType) cublas.DType {
	if t == ir.BF16 {
		return cublas.BF16
	}
	return cublas.F32
}

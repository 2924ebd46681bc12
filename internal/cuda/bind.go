package cuda

import (
	"errors"
	"fmt"

	"sppo.dev/internal/cuda/driver"
	"sppo.dev/internal/cuda/kernels"
	"sppo.dev/internal/cuda/nccl"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// place returns the address of a view, in device or pinned host memory.
func (d *Device) place(v ir.View) (driver.Ptr, error) {
	start, _, err := d.code.Locate(&v)
	if err != nil {
		return 0, err
	}
	return d.address(d.code.Buffers[v.Buffer].Arena, start), nil
}

// address returns the address of a byte in an arena.
func (d *Device) address(a ir.Arena, at ir.Bytes) driver.Ptr {
	if a == ir.Host {
		return d.host.at(int64(at))
	}
	return d.device + driver.Ptr(at)
}

// hostBytes returns the bytes of a view in the host arena. The view must have been accepted by place.
func (d *Device) hostBytes(v ir.View) []byte {
	start := d.code.Buffers[v.Buffer].Offset + v.Offset
	return d.host.memory[start : start+v.Bytes()]
}

// bindAll prepares every instruction of every section.
func (d *Device) bindAll() error {
	if d.env.Spans != nil {
		d.spans = &spanEvents{}
	}
	plans, err := d.plansOf()
	if err != nil {
		return err
	}
	staged := int64(d.code.Arenas[ir.Host])
	for s := range ir.NumSections {
		code := d.code.Sections[s]
		d.bound[s] = make([]bound, len(code))
		group, groupEnds := []func(*nccl.Comm) error(nil), vm.GroupEnds(code)
		for pc := range code {
			b := &binder{device: d, in: &code[pc], pc: pc, section: s, stream: d.streams[code[pc].Stream], staged: &staged, plan: &plans[s][pc],
				group: &group, ends: groupEnds[pc]}
			if err := b.bind(&d.bound[s][pc]); err != nil {
				return fmt.Errorf("%s: %w", vm.At(d.program, s, pc, &code[pc]), err)
			}
		}
	}
	if d.spans != nil {
		return d.spans.make(d)
	}
	return nil
}

// binder prepares one instruction.
type binder struct {
	device  *Device
	in      *ir.Instr
	pc      int
	section ir.Section
	stream  driver.Stream
	places  []driver.Ptr // addresses of the operands, 0 if absent
	plan    *kernels.Plan
	group   *[]func(*nccl.Comm) error // the collectives of a group that have been bound
	ends    bool                      // a collective is the last of its group
	staged  *int64                    // offset of the next staged tokens in host memory; they follow the arena
	out     *bound
}

func (b *binder) bind(out *bound) (err error) {
	defer func() { // an unverified program can panic, for example by dividing by a batch of 0
		if r := recover(); r != nil {
			err = fmt.Errorf("invalid instruction: %v", r)
		}
	}()
	b.out, out.stream = out, b.in.Stream
	if err := b.operands(); err != nil {
		return err
	}
	switch b.in.Info().Class {
	case ir.ClassKernel:
		return b.kernel(b.plan)
	case ir.ClassData:
		return b.tokens()
	case ir.ClassMove:
		return b.move()
	case ir.ClassComm:
		return b.device.machine.comm(b)
	}
	event := b.int("event")
	if event < 0 || event >= len(b.device.events) {
		return fmt.Errorf("event %d of %d", event, len(b.device.events))
	}
	if b.in.Op == ir.Record {
		b.add(b.device.api.Record(b.device.events[event], b.stream))
	} else {
		b.add(b.device.api.Wait(b.stream, b.device.events[event]))
	}
	return nil
}

// operands determines the addresses of the operands, and the highest byte that the instruction touches in each
// arena.
func (b *binder) operands() error {
	b.places = make([]driver.Ptr, len(b.in.Args))
	for i, v := range b.in.Args {
		o := &b.in.Info().Operands[i]
		if !v.Present() {
			if !o.Optional {
				return fmt.Errorf("%s is missing", o.Name)
			}
			continue
		}
		start, end, err := b.device.code.Locate(&v)
		if err != nil {
			return fmt.Errorf("%s: %w", o.Name, err)
		}
		arena := b.device.code.Buffers[v.Buffer].Arena
		if b.in.Info().Class != ir.ClassMove && arena != o.Arena {
			return fmt.Errorf("%s lies in the %s arena", o.Name, arena)
		}
		b.places[i] = b.device.address(arena, start)
		b.out.top[arena] = max(b.out.top[arena], end)
	}
	return nil
}

// add appends a prepared call.
func (b *binder) add(c driver.Call) { b.out.actions = append(b.out.actions, &c) }

func (b *binder) consts() []int64     { return b.device.program.Ranks[b.device.rank].Consts }
func (b *binder) int(name string) int { return int(b.in.Attr(name).Int(b.consts())) }

// operand returns the address and size of the instruction's operand i.
func (b *binder) operand(i int) span { return span{b.places[i], int64(b.in.Args[i].Bytes())} }

// span is a range of memory.
type span struct {
	at    driver.Ptr
	bytes int64
}

func (b *binder) move() error {
	y, x := b.operand(0), b.operand(1)
	if y.bytes != x.bytes {
		return errors.New("y and x differ in size")
	}
	for _, c := range b.copies(y.at, x.at, y.bytes) {
		b.add(c)
	}
	return nil
}

// copies prepares a copy: one call for each piece of pinned memory involved, because the driver rejects copies
// across the boundary between two pieces.
func (b *binder) copies(to, from driver.Ptr, bytes int64) (calls []driver.Call) {
	host := b.device.host
	for bytes > 0 {
		n := host.run(to, host.run(from, bytes))
		calls = append(calls, b.device.api.Copy(to, from, n, b.stream))
		to, from, bytes = to+driver.Ptr(n), from+driver.Ptr(n), bytes-n
	}
	return calls
}

// tokenLoad copies tokens from the data set to pinned memory while the instruction is issued. The stream then
// copies them to the device. Each load has its own staging area, so no load waits for another. A run of a
// section ends before the next run refills the staging areas.
type tokenLoad struct {
	d      *Device
	out    []int32
	window vm.Window
	copies []driver.Call
}

// tokenBytes returns the total size of the staging areas.
func (d *Device) tokenBytes() int64 {
	n := int64(0)
	for s := range ir.NumSections {
		for i := range d.code.Sections[s] {
			in := &d.code.Sections[s][i]
			if in.Op != ir.LoadTokens || len(in.Args) != 1 {
				continue
			}
			if _, _, err := d.code.Locate(&in.Args[0]); err == nil { // if it fails, bindAll reports it
				n = ir.Plus(n, stagedBytes(in))
			}
		}
	}
	return n
}

// stagedBytes returns the size of a load's staging area: whole cache lines, plus one for alignment.
func stagedBytes(in *ir.Instr) int64 { return ir.Plus(int64(in.Args[0].Bytes()), 63+64) &^ 63 }

func (b *binder) tokens() error {
	v, d := b.in.Args[0], b.device
	if v.DType != ir.I32 {
		return fmt.Errorf("tokens is %s instead of %s", v.DType, ir.I32)
	}
	start := (*b.staged + 63) &^ 63
	*b.staged += stagedBytes(b.in)
	t := &tokenLoad{d: d}
	t.window = vm.Window{Batch: b.int("batch"), Chunks: b.int("chunks"), As: b.int("as"), Sequence: int64(b.int("replica") + b.int("first")), Position: int64(b.int("position"))}
	if t.window.Batch < 1 {
		return fmt.Errorf("a batch of %d", t.window.Batch)
	}
	if v.Bytes() == 0 {
		return nil
	}
	t.out = vm.Int32s(d.host.memory[start : start+int64(v.Bytes())])
	t.copies = b.copies(b.places[0], d.host.at(start), int64(v.Bytes()))
	b.out.actions, b.out.tokens = append(b.out.actions, t), t
	return nil
}

// Make implements action.
func (t *tokenLoad) Make() error {
	if err := t.fill(); err != nil {
		return err
	}
	for i := range t.copies {
		if err := t.copies[i].Make(); err != nil {
			return err
		}
	}
	return nil
}

// fill copies the tokens to pinned memory.
func (t *tokenLoad) fill() error {
	return t.window.Load(t.d.env.Tokens, t.d.section, t.d.round, t.out)
}

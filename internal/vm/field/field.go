// Package field implements a device that computes over finite fields instead of floating-point numbers. Sums, products and
// matrix products are exact, so the order in which a job's work is divided and added cannot matter: any two divisions of a job
// give equal results, element by element. A program whose meaning differs gives different ones, except with a probability of
// about 2^-32 for each element.
//
//	element.go    numbers: residues, powers, hashes
//	field.go      Machine and Device: arenas, load, begin, join
//	meet.go       messages and collectives between the ranks of a machine
//	operands.go   operands and attributes of an instruction; the table of opcodes
//	linear.go     embeddings, products, sums, rotations, dropout
//	nonlinear.go  norms, activations, loss, optimizers
//	attention.go  attention over blocks of keys
//
// An element has two residues: its value modulo a prime p, and an exponent modulo the prime (p-1)/2, as in Mirage (Wu et al.
// 2024, arXiv 2405.05751). A power of a generator takes exponents to values, so that softmax over blocks of keys, and its
// merging, are exact: where floating-point code keeps the logarithm of a sum, this device keeps the sum. Rotations are linear,
// with hashed coefficients. Norms, activations, the loss and the optimizer's step are hashes of their complete operands: the
// hash of a partial sum is another number. Gradients are linear in the incoming gradient, with hashed coefficients, and thus
// are not derivatives of anything; only their structure is that of real ones.
package field

import (
	"errors"
	"fmt"
	"unsafe"

	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// Machine connects the devices of all ranks of a program, which run in one process.
type Machine struct{ meetings meetings }

// New returns a machine for a program. Each rank needs one device.
func New(p *ir.Program) *Machine {
	m := &Machine{}
	m.meetings.init(len(p.Ranks))
	return m
}

// Device returns a new device of the machine. An instruction runs when it is issued, so a device has no concurrency: races and
// deadlocks are what the verifier excludes.
func (m *Machine) Device() vm.Device { return &Device{machine: m} }

// Device implements vm.Device for one rank.
type Device struct {
	machine *Machine
	program *ir.Program
	code    *ir.Code
	rank    int
	env     *vm.Env
	arenas  [ir.NumArenas][]element // one element for every two bytes
	peaks   [ir.NumArenas]ir.Bytes

	section ir.Section
	round   int64
	err     error
}

// Memory returns the memory that this device needs for the values of an arena.
func Memory(arena ir.Bytes) ir.Bytes { return (arena + 1) / 2 * ir.Bytes(unsafe.Sizeof(element{})) }

// Load implements vm.Device. Elements that nothing has written differ from one another and from those of other ranks.
func (d *Device) Load(p *ir.Program, rank int, env *vm.Env) error {
	d.program, d.rank, d.env, d.code = p, rank, env, &p.Codes[p.Ranks[rank].Code]
	for a := range d.arenas {
		d.arenas[a] = make([]element, (d.code.Arenas[a]+1)/2)
		unwritten := named("unwritten").with(uint64(rank)).with(uint64(a))
		for i := range d.arenas[a] {
			d.arenas[a][i] = unwritten.with(uint64(i)).element()
		}
	}
	return nil
}

// Begin implements vm.Device.
func (d *Device) Begin(section ir.Section, round int64) error {
	d.section, d.round = section, round
	return d.err
}

// Launch implements vm.Device.
func (d *Device) Launch(pc int) { d.run(pc) }

// Copy implements vm.Device.
func (d *Device) Copy(pc int) { d.run(pc) }

// Comm implements vm.Device.
func (d *Device) Comm(pc int) { d.run(pc) }

// Record implements vm.Device. Instructions run in the order of their issue, so events have no effect.
func (d *Device) Record(int) {}

// Wait implements vm.Device.
func (d *Device) Wait(int) {}

// run executes an instruction, unless the device has failed.
func (d *Device) run(pc int) {
	if d.err != nil {
		return
	}
	in := &d.code.Sections[d.section][pc]
	if err := d.execute(in); err != nil {
		if !errors.Is(err, vm.ErrAborted) {
			err = fmt.Errorf("%s: %w", vm.At(d.program, d.section, pc, in), err)
		}
		d.err = err
		d.machine.meetings.fail(err)
		d.env.Transport.Abort(fmt.Errorf("rank %d: %w", d.rank, err))
	}
}

// execute executes an instruction. A panic is that of an unverified program, such as an index outside an operand.
func (d *Device) execute(in *ir.Instr) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("invalid instruction: %v", r)
		}
	}()
	do := opcodes[in.Op]
	if do == nil && in.Op.Collective() != nil {
		do = collective
	}
	if do == nil {
		return errors.New("has no meaning over a finite field")
	}
	call := &call{Device: d, in: in, consts: d.program.Ranks[d.rank].Consts}
	if err := call.locate(); err != nil {
		return err
	}
	do(call)
	return call.err
}

// Join implements vm.Device.
func (d *Device) Join() error {
	if err := d.machine.meetings.rest(); d.err == nil {
		d.err = err
	}
	return d.err
}

// Read implements vm.Device. A floating-point element is returned as a number in [0, 1) with the upper 24 bits of its value, of
// which bf16 keeps eight.
func (d *Device) Read(v ir.View, out []byte) error {
	x, err := d.vector(v)
	if err != nil {
		return err
	}
	switch v.DType {
	case ir.F32:
		for i := range vm.Float32s(out) {
			vm.Float32s(out)[i] = x.at(i).float()
		}
	case ir.BF16:
		for i := range vm.Uint16s(out) {
			vm.Uint16s(out)[i] = vm.BF16(x.at(i).float())
		}
	case ir.I32:
		for i := range vm.Int32s(out) {
			vm.Int32s(out)[i] = int32(x.at(i).value)
		}
	default:
		return fmt.Errorf("%s cannot be read from this device", v.DType)
	}
	return nil
}

// Write implements vm.Device. Numbers become elements exactly.
func (d *Device) Write(v ir.View, in []byte) error {
	y, err := d.vector(v)
	if err != nil {
		return err
	}
	switch v.DType {
	case ir.F32:
		for i, x := range vm.Float32s(in) {
			y.set(i, constant(float64(x)))
		}
	case ir.BF16:
		for i, x := range vm.Uint16s(in) {
			y.set(i, constant(float64(vm.FromBF16(x))))
		}
	case ir.I32:
		for i, x := range vm.Int32s(in) {
			y.set(i, element{value: uint32(x)})
		}
	default:
		return fmt.Errorf("%s cannot be written to this device", v.DType)
	}
	return nil
}

// Peak implements vm.Device.
func (d *Device) Peak(a ir.Arena) ir.Bytes { return d.peaks[a] }

// Close implements vm.Device.
func (d *Device) Close() error {
	d.arenas = [ir.NumArenas][]element{}
	return nil
}

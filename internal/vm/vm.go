// Package vm runs the sections of programs: it issues every instruction of a rank to a Device, and connects the
// ranks through a Transport.
//
//	vm.go       the interpreter loop, the same for every device
//	device.go   Device, and how the cpu, the simulator and CUDA implement it
//	link.go     Transport, which connects ranks; local.go implements it, with wire.go between processes
//	tokens.go   Tokens, the source of what a section reads, and which of them an instruction loads
//	random.go   random numbers: initial values, dropout, random data
//	trace.go    timelines on any device
//	elements.go bytes viewed as numbers
//	memory.go   the memory that is free on this computer
//
// The package does not depend on specs, plans, kernels or training runs (package train). The program determines
// what to execute, and the device executes it.
package vm

import (
	"fmt"

	"sppo.dev/ir"
)

// RunSection issues one section of a rank's code and waits for it to end. It only decides which method to call; the
// stream, operands and dependencies of an instruction were fixed when the device loaded the program.
func RunSection(d Device, code *ir.Code, section ir.Section, round int64) error {
	if err := d.Begin(section, round); err != nil {
		return err
	}
	instrs := code.Sections[section]
	for pc := range instrs {
		op := instrs[pc].Op
		switch ir.Ops[op].Class {
		case ir.ClassKernel, ir.ClassData:
			d.Launch(pc)
		case ir.ClassMove:
			d.Copy(pc)
		case ir.ClassComm:
			d.Comm(pc)
		case ir.ClassSync:
			if op == ir.Record {
				d.Record(pc)
			} else {
				d.Wait(pc)
			}
		}
	}
	return d.Join()
}

// CheckProgram rejects programs that would hang or index out of range on any device. It checks only the
// properties that the VM itself relies on. The verifier proves much more.
func CheckProgram(p *ir.Program) error {
	if len(p.Ranks) == 0 {
		return fmt.Errorf("program %q has no ranks", p.Name)
	}
	for r := range p.Ranks {
		rank := &p.Ranks[r]
		if int(rank.Code) < 0 || int(rank.Code) >= len(p.Codes) {
			return fmt.Errorf("rank %d: no code %d", r, rank.Code)
		}
		if len(rank.Consts) != len(p.Consts) || len(rank.Groups) != len(p.Groups) {
			return fmt.Errorf("rank %d: %d constants and %d groups, but the program names %d and %d",
				r, len(rank.Consts), len(rank.Groups), len(p.Consts), len(p.Groups))
		}
	}
	for c := range p.Codes {
		if err := checkViews(p, &p.Codes[c]); err != nil {
			return err
		}
		for s := range ir.NumSections {
			if err := checkSection(p, &p.Codes[c], s); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkViews checks that results and states, which the job itself reads and writes, lie inside the arenas.
// Devices check the operands of instructions.
func checkViews(p *ir.Program, code *ir.Code) error {
	for a, n := range code.Arenas {
		if n < 0 {
			return fmt.Errorf("code %q: %s arena of %d bytes", code.Name, ir.Arena(a), int64(n))
		}
	}
	for i := range code.Results {
		if _, _, err := code.Locate(&code.Results[i].View); err != nil {
			return fmt.Errorf("code %q, result %s: %w", code.Name, code.Results[i].Name, err)
		}
	}
	for i := range code.States {
		s := &code.States[i]
		if s.Tensor < 0 || int(s.Tensor) >= len(p.Tensors) || int(s.Row0.Const) > len(p.Consts) || int(s.Col0.Const) > len(p.Consts) || int(s.End.Const) > len(p.Consts) {
			return fmt.Errorf("code %q, state %d: tensor or constant does not exist", code.Name, i)
		}
		if _, _, err := code.Locate(&s.View); err != nil {
			return fmt.Errorf("code %q, state %d of %s: %w", code.Name, i, p.Tensors[s.Tensor].Name, err)
		}
	}
	return nil
}

// checkSection checks instructions against the opcode table, and checks that the event of every wait has
// already been recorded.
func checkSection(p *ir.Program, code *ir.Code, section ir.Section) error {
	if n := code.Events[section]; n < 0 || int(n) > len(code.Sections[section]) {
		return fmt.Errorf("code %q, section %s: %d events in %d instructions", code.Name, section, n, len(code.Sections[section]))
	}
	recorded := make([]bool, code.Events[section])
	for pc := range code.Sections[section] {
		in := &code.Sections[section][pc]
		wrong := func(format string, args ...any) error {
			return fmt.Errorf("code %q, %s: %s", code.Name, At(p, section, pc, in), fmt.Sprintf(format, args...))
		}
		if in.Op >= ir.NumOps || in.Stream >= ir.NumStreams {
			return wrong("opcode %d on stream %d does not exist", in.Op, in.Stream)
		}
		if info := in.Info(); len(in.Args) != len(info.Operands) || len(in.Attrs) != len(info.Attrs) {
			return wrong("it has %d operands and %d attributes, but its opcode has %d and %d",
				len(in.Args), len(in.Attrs), len(info.Operands), len(info.Attrs))
		}
		for _, a := range in.Attrs {
			if a.Const < 0 || int(a.Const) > len(p.Consts) {
				return wrong("constant %d does not exist", a.Const-1)
			}
		}
		if in.Info().Class != ir.ClassSync {
			continue
		}
		event := in.Attr("event").Int(nil)
		switch {
		case event < 0 || event >= int64(len(recorded)):
			return wrong("event %d of %d", event, len(recorded))
		case in.Op == ir.Record && recorded[event]:
			return wrong("event %d is recorded twice", event)
		case in.Op == ir.Wait && !recorded[event]:
			return wrong("event %d was not recorded before", event)
		}
		recorded[event] = true
	}
	return nil
}

// At describes an instruction for an error message: section, pc, mnemonic and spec line.
func At(p *ir.Program, section ir.Section, pc int, in *ir.Instr) string {
	name := fmt.Sprintf("opcode %d", in.Op)
	if in.Op < ir.NumOps {
		name = in.Info().Name
	}
	at := fmt.Sprintf("section %s, pc %d (%s)", section, pc, name)
	if line := int(in.Prov.Line); line < len(p.Lines) && p.Lines[line] != "" {
		at += ", from " + p.Lines[line]
	}
	return at
}

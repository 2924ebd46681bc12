package probe

import (
	"fmt"
	"math"

	"sppo.dev/ir"
)

// Item is an instruction to measure. Its operands are in the order given by the opcode's row in ir.Ops.
type Item struct {
	Name  string // description with size
	Op    ir.Op
	Args  []Arg
	Attrs map[string]float64 // attributes that are not 0
	Then  []Item             // instructions that follow it in each repetition
}

// Arg is an operand with its own buffer. An operand without a shape is absent.
type Arg struct {
	Type  ir.DType
	Shape []int64
	Value float64 // initial contents; 0: random numbers, because arithmetic on zeros may be faster than on data
	Fresh bool    // in training, it has just been written or read, so all repetitions share the buffer
	Key   string  // operands of an item and its Then that have the same key share a buffer; they are fresh
}

// builder builds the program of an item.
type builder struct {
	p    *ir.Program
	code *ir.Code
	keys map[string]ir.View
}

// program returns a program whose step section repeats the item on the given number of ranks; its init section
// initialises the operands. If the item is a message, the first rank sends and the second receives.
func (it *Item) program(ranks, copies int) (*ir.Program, error) {
	p := &ir.Program{Name: it.Name, Lines: []string{""}, Passes: []string{"probe"}, Groups: []string{"all"}, Run: ir.Run{Seed: 1}}
	members := make([]int32, ranks)
	for r := range members {
		members[r] = int32(r)
	}
	codes := []Item{*it}
	if it.Op == ir.Send {
		codes = append(codes, Item{Name: it.Name, Op: ir.Recv, Args: it.Args})
	}
	for i := range codes {
		b := builder{p: p, code: &ir.Code{Name: fmt.Sprint("code", i)}, keys: map[string]ir.View{}}
		if err := b.fill(&codes[i], 1-i, copies); err != nil {
			return nil, err
		}
		p.Codes = append(p.Codes, *b.code)
	}
	for r := range members {
		p.Ranks = append(p.Ranks, ir.Rank{Code: int32(r % len(codes)), Groups: [][]int32{members}, SP: int32(r)})
	}
	return p, nil
}

// works returns the work of the item and of the instructions that follow it in a program.
func (it *Item) works(p *ir.Program) (works []ir.Work) {
	for _, in := range p.Codes[0].Sections[ir.SectionStep] {
		if in.Info().Class != ir.ClassSync && len(works) <= len(it.Then) {
			works = append(works, in.Work())
		}
	}
	return works
}

// Repetitions cycle through several sets of operands. The constants limit the total size of these sets and their
// number. In training, operands that are not fresh are in memory, not in a cache that the previous repetition has
// just filled.
const (
	coldBytes = 64 << 20
	mostSets  = 64
)

// sets returns the number of sets of operands for the given number of repetitions.
func (it *Item) sets(copies int) int {
	var bytes int64
	for _, a := range it.Args {
		n := int64(a.Type.Bytes())
		for _, extent := range a.Shape {
			n *= extent
		}
		if a.Shape != nil && !a.Fresh {
			bytes += n
		}
	}
	return int(min(int64(copies), max(1, coldBytes/max(1, bytes)), mostSets))
}

// fill writes the init and step sections of a code.
func (b *builder) fill(it *Item, peer, copies int) error {
	turns := make([][]ir.Instr, it.sets(copies))
	chain := append([]Item{*it}, it.Then...)
	for t := range turns {
		for l := range chain {
			var first []ir.View
			if t > 0 {
				first = turns[0][l].Args
			}
			in, err := b.instruction(&chain[l], peer, first)
			if err != nil {
				return err
			}
			turns[t] = append(turns[t], in)
		}
	}
	last := turns[0][0].Stream
	for i := range copies {
		for _, in := range turns[i%len(turns)] {
			if b.then(ir.SectionStep, last, in.Stream); in.Op.Collective() != nil { // no group with the one before
				b.record(ir.SectionStep, in.Stream)
			}
			b.put(ir.SectionStep, in)
			last = in.Stream
		}
	}
	return nil
}

// then makes one stream wait for another.
func (b *builder) then(s ir.Section, first, next ir.Stream) {
	if first == next {
		return
	}
	b.put(s, ir.Instr{Op: ir.Wait, Stream: next, Attrs: []ir.Attr{b.record(s, first)}})
}

// record adds an event after what the stream has done so far.
func (b *builder) record(s ir.Section, stream ir.Stream) ir.Attr {
	event := ir.Int(int64(b.code.Events[s]))
	b.code.Events[s]++
	b.put(s, ir.Instr{Op: ir.Record, Stream: stream, Attrs: []ir.Attr{event}})
	return event
}

// instruction turns an item into an instruction with its own operands, except for those that it shares with the
// first repetition or, through a key, with other items. Operands that are read before anything writes them are
// initialised.
func (b *builder) instruction(it *Item, peer int, first []ir.View) (ir.Instr, error) {
	info := &ir.Ops[it.Op]
	in := ir.Instr{Op: it.Op, Stream: info.Streams[0]}
	var own []bool
	for i := range info.Operands {
		var a Arg
		if i < len(it.Args) {
			a = it.Args[i]
		}
		v, is, err := b.operand(&info.Operands[i], a, first, i)
		if err != nil {
			return in, err
		}
		in.Args, own = append(in.Args, v), append(own, is)
	}
	for _, a := range info.Attrs {
		switch a.Kind {
		case ir.KindFloat, ir.KindFactor:
			in.Attrs = append(in.Attrs, ir.Float(it.Attrs[a.Name]))
		case ir.KindRank:
			in.Attrs = append(in.Attrs, ir.Int(int64(peer)))
		default:
			in.Attrs = append(in.Attrs, ir.Int(int64(it.Attrs[a.Name])))
		}
	}
	for i, a := range it.Args {
		if reads, _ := in.Access(i); reads && own[i] {
			from := in.Args[i]
			if first != nil {
				from = first[i]
			}
			b.again(in.Args[i], from, a, first != nil)
		}
	}
	return in, in.CheckRule()
}

// operand returns the view of an operand, and whether its buffer is new.
func (b *builder) operand(info *ir.Operand, a Arg, first []ir.View, i int) (v ir.View, own bool, err error) {
	if a.Shape == nil {
		return ir.Absent(), false, nil
	}
	if a.Fresh && first != nil {
		return first[i], false, nil
	}
	if v, ok := b.keys[a.Key]; ok {
		return v, false, nil
	}
	v, err = b.buffer(info.Name, info.Arena, a)
	if a.Key != "" {
		b.keys[a.Key] = v
	}
	return v, true, err
}

// buffer places an operand after the last one in its arena.
func (b *builder) buffer(name string, arena ir.Arena, a Arg) (ir.View, error) {
	v := ir.View{Buffer: uint32(len(b.code.Buffers)), DType: a.Type}
	for i, n := range a.Shape {
		if n < 1 || n > math.MaxInt32 {
			return v, fmt.Errorf("operand %s has a dimension of %d", name, n)
		}
		v.Shape[i] = n
	}
	start := (b.code.Arenas[arena] + 255) &^ 255
	name = fmt.Sprintf("%s.%d", name, len(b.code.Buffers))
	b.code.Buffers = append(b.code.Buffers, ir.Buffer{Name: name, Arena: arena, Offset: start, Size: v.Bytes()})
	b.code.Arenas[arena] = start + v.Bytes()
	return v, nil
}

func (b *builder) put(s ir.Section, in ir.Instr) {
	in.Prov = ir.Provenance{Microbatch: ir.None, Subsequence: ir.None, Layer: ir.None, Phase: ir.PhaseInit}
	if s == ir.SectionStep {
		in.Prov.Phase = ir.PhaseForward
	}
	b.code.Sections[s] = append(b.code.Sections[s], in)
}

// again initialises an operand. In every set of operands after the first, an operand on the device is copied from
// its counterpart in the first set: copying is faster than drawing new values.
func (b *builder) again(v, first ir.View, a Arg, later bool) {
	if !later || b.code.Buffers[v.Buffer].Arena == ir.Host {
		b.initial(v, a)
		return
	}
	b.copy(v, first, int64(v.Bytes()))
}

// initial initialises an operand; one on the host is copied from the device.
func (b *builder) initial(v ir.View, a Arg) {
	if b.code.Buffers[v.Buffer].Arena == ir.Host {
		there, err := b.buffer("source", ir.Device, a)
		if err != nil {
			panic("internal: probe: " + err.Error())
		}
		b.initial(there, a)
		b.then(ir.SectionInit, ir.Compute, ir.D2H)
		b.put(ir.SectionInit, ir.Instr{Op: ir.CopyD2H, Stream: ir.D2H, Args: []ir.View{v, there}})
		return
	}
	if v.DType == ir.I32 || a.Value != 0 {
		b.put(ir.SectionInit, ir.Instr{Op: ir.Fill, Stream: ir.Compute, Args: []ir.View{v}, Attrs: []ir.Attr{ir.Float(a.Value)}})
		return
	}
	b.draw(v, a)
}

// drawn is the maximum number of random values drawn for an operand. The rest of the operand repeats them, which
// is faster than drawing more.
const drawn = 1 << 18

func (b *builder) draw(v ir.View, a Arg) {
	whole, rows, cols := int64(v.Bytes()), int64(1), v.Elements()
	if v.DType == ir.U8 { // bytes of copies
		v.DType, cols = ir.F32, cols/4
	}
	if n := a.Shape[len(a.Shape)-1]; n > 1 && cols%n == 0 {
		rows, cols = cols/n, n
	}
	cols = min(cols, drawn)
	rows = max(1, min(rows, drawn/cols))
	v.Shape = [ir.MaxDims]int64{rows, cols}
	tensor := ir.Int(int64(len(b.p.Tensors)))
	b.p.Tensors = append(b.p.Tensors, ir.Tensor{Name: fmt.Sprint("operand", len(b.p.Tensors)), Shape: [2]int64{rows, cols}})
	b.put(ir.SectionInit, ir.Instr{Op: ir.InitNormal, Stream: ir.Compute, Args: []ir.View{v},
		Attrs: []ir.Attr{tensor, ir.Int(0), ir.Int(0), ir.Float(0.5), ir.Int(0)}})
	for done := int64(v.Bytes()); done < whole; {
		n := min(done, whole-done)
		b.copy(ir.View{Buffer: v.Buffer, Offset: v.Offset + ir.Bytes(done)}, v, n)
		done += n
	}
}

// copy copies n bytes from x to y on the device.
func (b *builder) copy(y, x ir.View, n int64) {
	for _, v := range []*ir.View{&y, &x} {
		v.DType, v.Shape = ir.U8, [ir.MaxDims]int64{n}
	}
	b.put(ir.SectionInit, ir.Instr{Op: ir.CopyD2D, Stream: ir.Compute, Args: []ir.View{y, x}})
}

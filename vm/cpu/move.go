package cpu

import (
	"errors"

	"sppo.dev/ir"
	"sppo.dev/vm"
)

// Opcodes that compute nothing: tokens, copies, messages, collectives.

func loadTokens(b *binder) func() error {
	d, tokens := b.device, b.ints("tokens")
	batch, position := b.int("batch"), int64(b.int("position"))
	sequence := int64(b.int("replica") + b.int("first"))
	w := vm.Window{Batch: batch, Chunks: b.int("chunks"), Sequence: sequence, Position: position}
	return func() error { return w.Load(d.env.Tokens, d.section, d.round, tokens) }
}

func copyBytes(b *binder) func() error {
	y, x := b.bytes("y"), b.bytes("x")
	if len(y) != len(x) {
		b.fail("y", errors.New("and x differ in size"))
	}
	return func() error {
		copy(y, x)
		return nil
	}
}

func send(b *binder) func() error {
	x := b.bytes("x")
	link := b.device.env.Transport.Link(b.device.rank, b.int("peer"), vm.ChannelOf(b.in.Stream))
	return func() error { return link.Send(x) }
}

func recv(b *binder) func() error {
	y := b.bytes("y")
	link := b.device.env.Transport.Link(b.int("peer"), b.device.rank, vm.ChannelOf(b.in.Stream))
	return func() error { return link.Recv(y) }
}

// team returns the instruction's team.
func (b *binder) team() vm.Team {
	group := b.device.program.Ranks[b.device.rank].Groups[b.int("group")]
	team, err := b.device.env.Transport.Team(b.device.rank, group, b.in.Stream)
	if err != nil {
		b.fail("group", err)
	}
	return team
}

func allGather(b *binder) func() error {
	team, y, x := b.team(), b.bytes("y"), b.bytes("x")
	return func() error { return team.AllGather(y, x) }
}

// sumType refuses types that cannot be summed.
func (b *binder) sumType(name string) ir.DType {
	t := b.in.Arg(name).DType
	if t != ir.F32 && t != ir.BF16 {
		b.fail(name, errors.New("has a type that cannot be summed"))
	}
	return t
}

func reduceScatter(b *binder) func() error {
	team, y, x, t := b.team(), b.bytes("y"), b.bytes("x"), b.sumType("x")
	return func() error { return team.ReduceScatter(y, x, t) }
}

func allReduce(b *binder) func() error {
	team, x, t := b.team(), b.bytes("x"), b.sumType("x")
	return func() error { return team.AllReduce(x, t) }
}

func rotate(b *binder) func() error {
	team, y, x := b.team(), b.bytes("y"), b.bytes("x")
	return func() error { return team.Rotate(y, x) }
}

func allToAll(b *binder) func() error {
	team, y, x := b.team(), b.bytes("y"), b.bytes("x")
	e := vm.Exchange{Copies: b.int("copies"), Inverse: b.bool("inverse"), DType: b.sumType("x")}
	tall, wide := "y", "x"
	if e.Inverse {
		tall, wide = wide, tall
	}
	e.Rows, _ = b.shape(wide)
	_, e.Cols = b.shape(tall)
	return func() error { return team.AllToAll(y, x, e) }
}

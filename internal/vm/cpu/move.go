package cpu

import (
	"errors"

	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// actions binds the opcodes that move bytes, exchange messages or read the data set. The function collective binds
// the collectives.
var actions = [ir.NumOps]func(*binder) func() error{
	ir.LoadTokens: loadTokens,
	ir.CopyD2H:    copyBytes,
	ir.CopyH2D:    copyBytes,
	ir.CopyD2D:    copyBytes,
	ir.Send:       send,
	ir.Recv:       recv,
}

// Opcodes that compute nothing: tokens, copies, messages, collectives.

func loadTokens(b *binder) func() error {
	d, tokens := b.device, b.ints("tokens")
	batch, position := b.int("batch"), int64(b.int("position"))
	sequence := int64(b.int("replica") + b.int("first"))
	w := vm.Window{Batch: batch, Chunks: b.int("chunks"), As: b.int("as"), Sequence: sequence, Position: position}
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

func collective(b *binder) func() error {
	group := b.device.program.Ranks[b.device.rank].Groups[b.int("group")]
	row := b.in.Info()
	y, x := b.bytes(row.Operands[0].Name), b.bytes(row.Operands[len(row.Operands)-1].Name)
	run, err := b.device.env.Transport.Collective(b.device.rank, group, b.in, y, x)
	if err != nil {
		b.fail("group", err)
	}
	return run
}

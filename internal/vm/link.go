package vm

import (
	"errors"

	"sppo.dev/ir"
)

// Transport connects the ranks of a job. It has the semantics of NCCL: an operation blocks its stream until its
// peers arrive. Links and collectives are bound when a program is loaded; operations on them do not allocate
// memory.
//
// A link carries messages in one direction between two ranks on one channel, in order.
type Transport interface {
	Link(from, to int, channel Channel) Link
	// Collective binds a member's side of a collective to operands in memory, and returns the function that
	// runs it. Collectives of one group on one stream match in the order in which they run. Sums are taken in
	// f32 in the order of the members and rounded once, so they do not depend on the order of arrival.
	Collective(rank int, members []int32, in *ir.Instr, y, x []byte) (func() error, error)
	// Abort makes every current and future operation on every rank fail with an error that wraps ErrAborted
	// and names the reason. Only the first reason is kept.
	Abort(reason error)
}

// ErrAborted is wrapped by the errors of operations that failed because another rank failed.
var ErrAborted = errors.New("aborted")

// Link moves messages from one rank to another. Send returns when the bytes may be overwritten.
type Link interface {
	Send(x []byte) error
	Recv(y []byte) error
}

// Channel distinguishes messages in flight between two ranks in one direction.
type Channel uint8

// Channels: activations forward, gradients backward, shared work.
const (
	ChannelNext Channel = iota
	ChannelPrev
	ChannelMux
)

// ChannelOf returns the channel of a stream's messages: messages sent on send_next are received on recv_prev.
func ChannelOf(s ir.Stream) Channel {
	switch s {
	case ir.SendNext, ir.RecvPrev:
		return ChannelNext
	case ir.SendPrev, ir.RecvNext:
		return ChannelPrev
	}
	return ChannelMux
}

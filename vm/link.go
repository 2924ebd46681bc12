package vm

import (
	"errors"

	"sppo.dev/ir"
)

// Transport connects the ranks of a job with NCCL's semantics: an operation blocks its stream until its peers
// arrive. Links and teams are created when a program is loaded; their operations allocate nothing.
//
// A link carries messages in one direction between two ranks on one channel, in order. A team is a member's
// handle to the collectives of a group on a stream; its operations match in order.
type Transport interface {
	Link(from, to int, channel Channel) Link
	Team(rank int, members []int32, stream ir.Stream) (Team, error)
	// Abort makes every current and future operation on every rank fail with an error that wraps ErrAborted
	// and names the reason. Only the first reason counts.
	Abort(reason error)
}

// ErrAborted is wrapped by errors of operations that failed because another rank did.
var ErrAborted = errors.New("aborted")

// Link moves messages from one rank to another. Send returns when the peer has received.
type Link interface {
	Send(x []byte) error
	Recv(y []byte) error
}

// Team is one member's side of collectives. Sums are taken in f32 in the order of the members and rounded
// once, so they do not depend on the order of arrival.
type Team interface {
	AllGather(y, x []byte) error
	ReduceScatter(y, x []byte, t ir.DType) error
	AllReduce(x []byte, t ir.DType) error
	AllToAll(y, x []byte, e Exchange) error
	Rotate(y, x []byte) error
}

// Exchange is the layout of an all_to_all; its fields are explained at the opcode's row.
type Exchange struct {
	Rows, Cols int // r and c
	Copies     int
	Inverse    bool
	DType      ir.DType
}

// wide returns the number of columns of all members of a group of n together.
func (e Exchange) wide(n int) int { return n / e.Copies * e.Cols }

// Channel distinguishes messages in flight between two ranks in one direction.
type Channel uint8

// Channels: activations forward, gradients backward, borrowed work.
const (
	ChannelNext Channel = iota
	ChannelPrev
	ChannelMux
)

// ChannelOf returns the channel of a stream's messages: what is sent on send_next is received on recv_prev.
func ChannelOf(s ir.Stream) Channel {
	switch s {
	case ir.SendNext, ir.RecvPrev:
		return ChannelNext
	case ir.SendPrev, ir.RecvNext:
		return ChannelPrev
	}
	return ChannelMux
}

// Package graph expresses a model as dataflow: the computation of one rank for one subsequence in the
// embedding, in a layer and in the head, forward and backward. The backward half is derived from the forward
// half by one rule for each opcode (gradient.go). The saved values are derived from the dataflow as well.
//
// model.go builds the layer and its variants, and block.go turns nodes into instructions of a given
// size. The package does not depend on stages, offload or addresses.
package graph

import (
	"slices"

	"sppo.dev/ir"
)

// Rows defines how the first dimension of a value depends on the subsequence.
type Rows uint8

// Kinds of first dimensions. n is the number of tokens in the subsequence, S the number of tokens in the
// whole sequence, b the number of sequences in the microbatch, t the SP size, and r
// the size of a ring, or 1.
const (
	Fixed       Rows = iota // Value.Count, the same for all subsequences
	Local                   // n*b/t: this rank's rows
	Full                    // n*b: the rows of the whole SP group
	Held                    // n*b/r: the rows of the ranks that divide heads
	LocalTokens             // n/t: one row per token, for any number of sequences
	Whole                   // S*b: the rows of the whole sequence, for K, V and their gradients
	WholeTokens             // S/t: the rank's rows of the position table
	WholeLocal              // S*b/r: in a ring, the rows of the rank's K, V and their gradients
	SeenLocal               // in a ring, the rows of one rank's K or V up to the end of the subsequence, as passed around
	PerSequence             // b: a row for each sequence of the microbatch
	ChunkRows               // rows of the current chunk of the head's loop
	Piece                   // the rows of a piece of the keys, in a loop over pieces
	Each                    // Value.Count*b: so many for each sequence
)

// Kind is the role of a value.
type Kind uint8

// Kinds of values.
const (
	Activation Kind = iota // computed from the subsequence
	Input                  // the block's input x and, in the backward pass, the gradient of its output
	Cache                  // K or V of the whole sequence, or of the subsequence if it is streamed: Type-0
	CacheGrad              // gradient of a cache, accumulated over subsequences
	Tally                  // a sum over the subsequences of a sequence, made by forward passes and read by backward passes
	Load                   // how often each expert was chosen in a step: all passes of the layer add to it
	Weight                 // a parameter
	WeightGrad             // gradient of a parameter, accumulated over the step
	Carry                  // passes from the end of a subsequence to the start of the next, which replaces it
	CarryGrad              // gradient of a carry, which passes back
	Loss                   // the sum to which the head adds losses, or the losses of individual tokens
	Given                  // a value of the step, the same for all layers: see ValuePositions
)

// Value is one tensor of a block.
type Value struct {
	Name    string // unique in the block
	Kind    Kind
	Rows    Rows
	Planes  int64 // a dimension before the rows, if not 0
	Count   int64 // first dimension if Rows is Fixed, or its share of each sequence if it is Each; with planes, each sequence has all of them
	Cols    int64 // 0: a vector
	DType   ir.DType
	Param   int   // index into Block.Params for Weight and WeightGrad
	Padding int64 // rows of storage after those of the value, which only a collective of equal slices writes
}

// Span selects rows of a value that is larger than the subsequence.
type Span uint8

// Spans.
const (
	All       Span = iota
	Tail           // the rows of this subsequence; all rows if the value belongs to one subsequence
	Seen           // the rows up to the end of this subsequence; all rows if the value belongs to one subsequence
	Flat           // all rows, without the dimension of planes, which has size 1
	Chunk          // the rows of the current chunk of the head's loop, in a value that outlives the chunk
	FrontHalf      // the first half of the rows of this subsequence
	BackHalf       // the second half
	Elements       // all elements, as a vector
)

// Arg is an operand: a value, or part of it. Value is Missing for an absent optional operand.
type Arg struct {
	Value int
	Span  Span
	Heads int64 // each row is split into this many rows, one for each head; 0: not split
}

// Missing is the value of an absent operand.
const Missing = -1

// AttrSource is the source of an attribute's number.
type AttrSource uint8

// Sources of attributes.
const (
	Literal         AttrSource = iota
	FromBatch                  // sequences of the microbatch
	FromPrefix                 // tokens before the subsequence
	FromLocalPrefix            // tokens before the subsequence whose K and V each rank of a ring holds
	FromWindow                 // the attention window of the layer
	FromFirst                  // index of the microbatch's first sequence
	FromConst                  // the rank's constant that Attr.Const names
	FromLossScale              // 1 / number of tokens in the batch (or in the validation)
	PerToken                   // Attr.Value / number of tokens in the batch
	FromLayer                  // the layer's rotation of queries or keys: see Model.Rotation
	FromTensor                 // the tensor of the layer's parameter that Attr.Const names
	NotFirst                   // false if this step has not written the accumulated rows yet, otherwise true
)

// Attr is an attribute of a node.
type Attr struct {
	Name   string
	Source AttrSource
	Value  ir.Attr // for Literal: the value; for FromPrefix: an integer to add; for PerToken: a factor
	Const  string  // for FromConst or FromTensor: a name; for FromLayer: RotationQ or RotationK
}

// Node is one operation. Args are in the order of the operands in the opcode's table entry.
type Node struct {
	Op      ir.Op
	Args    []Arg
	Attrs   []Attr
	Chunked bool // part of the head's loop over rows
	Loop    int  // number of the loop over pieces of the keys that the node is part of, one of whose nodes is attention; 0: none
	Weights bool // in the backward pass: contributes only to weight gradients, which are not needed before the optimizer
}

// Group returns the group of ranks among which a collective communicates.
func (n *Node) Group() int {
	if i := slices.IndexFunc(n.Attrs, func(a Attr) bool { return a.Name == "group" }); i >= 0 {
		return int(n.Attrs[i].Value.Bits)
	}
	return GroupSP
}

// OfLoads reports whether a node takes as long as the rank's experts have rows.
func (n *Node) OfLoads() bool {
	return slices.ContainsFunc(n.Attrs, func(a Attr) bool { return a.Name == "share" && a.Value.Bits != 0 })
}

// Reads returns the values that a node reads and does not change.
func (n *Node) Reads() []int { return n.values(true) }

// Writes returns the values that a node changes.
func (n *Node) Writes() []int { return n.values(false) }

func (n *Node) values(read bool) (values []int) {
	for k, a := range n.Args {
		if a.Value != Missing && (ir.Ops[n.Op].Operands[k].Dir == ir.Read) == read {
			values = append(values, a.Value)
		}
	}
	return values
}

// Shard is the part of a parameter that a rank holds.
type Shard uint8

// Kinds of shards. In the divided dimension, the rank's part starts at the constant that Param.Start names.
const (
	Replicated Shard = iota
	ByRows
	ByCols
	ByTokens // rows of the position table for the rank's own tokens, subsequence by subsequence
)

// Param is a parameter of a block.
type Param struct {
	Name     string   // within the block, such as "wq"; the full name of the tensor is "layer.3.wq"
	Shape    [2]int64 // of the whole tensor; vectors are {n, 1}
	Vector   bool     // its views have one dimension
	Small    bool     // ranks never divide it, like a vector: the first half of a split backward pass computes its gradient
	Planes   int64    // if not 0, the rows are those of this many matrices, one for each expert
	Local    [2]int64 // on one rank, padded
	Shard    Shard
	Start    string  // constant with the first row or column; empty if Replicated
	Std      float64 // standard deviation of the initial values; 0: filled with Fill
	Fill     float64
	Constant bool   // no gradient trains it
	Adapter  bool   // belongs to an adapter, not to the model itself
	Frozen   bool   // not trained: it has no gradient and no optimizer state
	Reduce   string // group over which its gradients must still be summed: "sp", "ring" or "kv"; empty: none
	Once     string // constant: 1 on the rank whose copy counts towards the gradient norm; empty: all copies count
	Tied     bool   // the head's copy of the embedding
}

// SliceRows returns the number of rows of each of several equal slices that together contain the local rows. Rows of
// the slices after the last local row are padding.
func (p *Param) SliceRows(slices int64) int64 { return (p.Local[0] + slices - 1) / slices }

// Unit is the smallest group of saved values that is kept, offloaded or recomputed as one: the
// values that one forward node saves for the backward pass.
type Unit struct {
	Name     string
	Number   int // index in Model.UnitNames
	Values   []int
	Producer int // forward node, or -1 for the block's input
	Reader   int // first backward node that reads one of its values
}

// Block is a part of the model on one rank.
type Block struct {
	Name     string // embedding, layer, head
	Values   []Value
	Params   []Param
	Forward  []Node
	Backward []Node
	Halves   [2][]Node // Backward in two parts, for schedules that run the second part later: see halve
	Between  []int     // values that the second half reads but does not compute, except weights and given ones
	KVNodes  []Node    // nodes of Forward that compute K and V from the input; empty if K, V are not caches
	Input    int       // value x; Missing for the embedding
	Output   int       // forward result; Missing for the head
	DOutput  int       // gradient of Output, an input of the backward pass; Missing for the head
	DInput   int       // gradient of Input; Missing for the embedding
	Units    []Unit
	Loss     int  // value of kind Loss, or Missing
	Losses   int  // losses of individual tokens, which the forward pass of the head writes; or Missing
	Attends  bool // the backward pass computes gradients of K and V
}

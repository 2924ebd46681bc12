// Package graph states a model as dataflow: what one rank computes for one subsequence in the embedding, in a layer
// and in the head, forward and backward. The backward half is derived from the forward half by one rule for each
// opcode (gradient.go), so what must be kept between them follows from the dataflow and is listed nowhere by hand.
//
// Read model.go for the layer and its traits, block.go for how nodes become instructions of a given size. The package knows
// nothing of stages, offload or addresses.
package graph

import "sppo.dev/ir"

// Rows says how the first dimension of a value follows from the subsequence.
type Rows uint8

// Kinds of first dimensions. n is the subsequence's tokens, b the microbatch's sequences, t the SP size.
const (
	Fixed       Rows = iota // Value.Count, whatever the subsequence
	Local                   // n*b/t: this rank's rows
	Full                    // n*b: the rows of the whole SP group
	LocalTokens             // n/t: one row a token, not one a token and sequence
	Whole                   // rows of the whole sequence, S*b: K, V and their gradients
	WholeTokens             // S/t: the rank's rows of the position table
	WholeLocal              // S*b/t: the rank's rows of the whole sequence, of K, V and their gradients in a ring
	SeenLocal               // a rank's rows up to the end of the subsequence, as they go round
	ChunkRows               // rows of the current chunk of the head's loop
)

// Kind says what a value is.
type Kind uint8

// Kinds of values.
const (
	Activation Kind = iota // computed from the subsequence
	Input                  // the block's input x, and in backward its output's gradient
	Cache                  // K or V of the whole sequence, or of the subsequence where it streams: Type-0
	CacheGrad              // gradient of a cache, accumulated over subsequences
	Weight                 // a parameter
	WeightGrad             // its gradient, accumulated over the step
	Loss                   // the sum that the head adds to
	Given                  // of the step, the same for all layers: see ValuePositions and ValueWeight
)

// Value is one tensor of a block.
type Value struct {
	Name   string // unique in the block
	Kind   Kind
	Rows   Rows
	Planes int64 // a dimension before the rows, where not 0
	Count  int64 // first dimension where Rows is Fixed
	Cols   int64 // 0: a vector
	DType  ir.DType
	Param  int // index into Block.Params for Weight and WeightGrad
}

// Span selects rows of a value that is larger than the subsequence.
type Span uint8

// Spans.
const (
	All       Span = iota
	Tail           // the rows of this subsequence; all rows of what has no others
	Seen           // the rows up to the end of this subsequence; the same
	Flat           // without the leading dimension of planes, which is 1
	Chunk          // the rows of the current chunk of the head's loop; also for values of Rows Full
	FrontHalf      // the first half of the rows of this subsequence
	BackHalf       // the second half
)

// Arg is an operand: a value, or part of it. Value is Missing for an absent optional operand.
type Arg struct {
	Value int
	Span  Span
	Heads int64 // each row is seen as so many rows, one for each head; 0: as it is
}

// Missing is the value of an absent operand.
const Missing = -1

// AttrSource says where an attribute's number comes from.
type AttrSource uint8

// Sources of attributes that are not literals.
const (
	Literal         AttrSource = iota
	FromBatch                  // sequences side by side
	FromPrefix                 // tokens before the subsequence
	FromLocalPrefix            // those of them that each rank of a ring holds
	FromWindow                 // tokens that attention of the layer sees
	FromFirst                  // index of the microbatch's first sequence
	FromConst                  // the rank's constant of that name
	FromLossScale              // 1 / tokens of the batch (or of the validation)
	FromLayer                  // the layer's rotation of queries or keys: see Model.Rotation
	NotFirst                   // false where this step has not written the accumulated rows yet, then true
)

// Attr is an attribute of a node.
type Attr struct {
	Name   string
	Source AttrSource
	Value  ir.Attr // Literal; FromPrefix adds its integer
	Const  string  // FromConst; FromLayer: RotationQ or RotationK
}

// Node is one operation. Args stand in the order of the opcode's row.
type Node struct {
	Op      ir.Op
	Args    []Arg
	Attrs   []Attr
	Chunked bool // part of the head's loop over rows
	Weights bool // of the backward pass: leads to gradients of weights alone, which nothing waits for before the optimizer
}

// Shard says which part of a parameter a rank holds.
type Shard uint8

// Shards. The rank's rectangle starts at the constant that Param.Start names, in the sharded dimension.
const (
	Replicated Shard = iota
	ByRows
	ByCols
	ByTokens // rows of the position table: those of the rank's own tokens, subsequence by subsequence
)

// Param is a parameter of a block.
type Param struct {
	Name    string   // within the block: "wq"; the tensor's full name adds "layer.3."
	Shape   [2]int64 // whole; vectors are {n, 1}
	Vector  bool     // its views have one dimension
	Local   [2]int64 // on one rank, padded
	Shard   Shard
	Start   string  // constant that holds the first row or column; empty where Replicated
	Std     float64 // of the initial normal; 0: filled with Fill
	Fill    float64
	Adapter bool   // of an adapter: the model itself does not have it
	Frozen  bool   // it is not trained: it has no gradient and no optimizer state
	Reduce  string // group over which gradients of this parameter must still be added: "sp", "kv" or none
	Once    string // constant that is 1 on the rank whose copy counts in the gradient norm; empty: every rank counts
	Tied    bool   // the head's copy of the embedding
}

// Unit is the smallest group of saved values that is offloaded or kept as one: what one forward node leaves for
// the backward pass.
type Unit struct {
	Name     string
	Number   int // among the units of the layer that makes none again
	Values   []int
	Producer int // forward node, or -1 for the block's input
	Reader   int // first backward node that reads it
}

// Block is a part of the model on one rank.
type Block struct {
	Name     string // embedding, layer, head
	Values   []Value
	Params   []Param
	Forward  []Node
	Backward []Node
	Halves   [2][]Node // Backward in two, for schedules that run the second half later: see halve
	Between  []int     // values that the second half reads and does not make, weights apart
	Caching  []Node    // of Forward what computes K and V from the input; none where they do not outlive a task
	Input    int       // value x; Missing for the embedding
	Output   int       // forward result; Missing for the head
	DOutput  int       // gradient of Output, an input of the backward pass; Missing for the head
	DInput   int       // gradient of Input; Missing for the embedding
	Units    []Unit
	Loss     int  // value of kind Loss, or Missing
	Losses   int  // those of single tokens, which the forward pass of the head writes; or Missing
	Attends  bool // the backward pass computes gradients of K and V
}

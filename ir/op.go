package ir

import "strings"

// Op is the number of an opcode: its index in Ops. Numbers are append-only.
type Op uint8

// Opcodes. Each has one constant and one row of Ops; the row describes everything else.
const (
	LoadTokens Op = iota
	InitNormal
	Fill
	Embed
	EmbedGrad
	PositionEmbed
	PositionEmbedGrad
	LayerNorm
	LayerNormGrad
	RMSNorm
	RMSNormGrad
	Matmul
	BiasGrad
	Rope
	Attention
	AttentionGrad
	Activation
	ActivationGrad
	GLU
	GLUGrad
	Add
	Cast
	CrossEntropyStats
	CrossEntropy
	CrossEntropyGrad
	SumSq
	GradNorm
	AdamW
	CopyD2H
	CopyH2D
	CopyD2D
	Send
	Recv
	AllGather
	ReduceScatter
	AllReduce
	Record
	Wait
	AllToAll
	AttentionMerge
	AttentionDelta
	Rotate
	SGD
	Nesterov
	Axpby
	Normalize
	Dropout
	AttentionSink
	AttentionSinkGrad
	Route
	RouteGrad
	Permute
	PermuteGrad
	Unpermute
	UnpermuteGrad
	MatmulGrouped
	MatmulGroupedWeightGrad
	Scan
	ScanGrad
	Conv
	ConvGrad
	Decay
	DecayGrad
	ExpertCounts
	RouterLossGrad
	ScaleColumns
	ScaleColumnsGrad
	ExpertLoad
	ExpertBias
	ConcatHeads
	ConcatHeadsGrad
	NumOps
)

// Class is the way in which the interpreter handles an opcode.
type Class uint8

// Classes.
const (
	ClassKernel Class = iota // computes on device memory
	ClassData                // loads tokens of the data set onto the device
	ClassMove                // copies between or inside arenas
	ClassComm                // communicates with other ranks
	ClassSync                // records or waits for an event
)

func (c Class) String() string { return [...]string{"kernel", "data", "move", "comm", "sync"}[c] }

// Dir is how an operand is accessed.
type Dir uint8

// Directions.
const (
	Read       Dir = iota
	Write          // every byte is written and none is read
	ReadWrite      // updated in place
	WriteOrAdd     // written, or added to if the attribute that the operand names is set
)

func (d Dir) String() string { return [...]string{"in", "out", "inout", "acc"}[d] }

// Operand is one operand of an opcode.
//
// Dims is the shape rule: comma-separated dimensions, each a product of names and integers. The name of an
// attribute stands for its value. Every other name is bound by its first use, and must have the same value
// everywhere else in the instruction. An empty Dims accepts any shape.
//
// Types: "f32", "bf16", "i32"; "T" is f32 or bf16, the same for every T operand of the instruction; "F" is
// f32 or bf16, independently of the other operands; "any" is any type.
type Operand struct {
	Name     string
	Dir      Dir
	Types    string
	Dims     string
	Arena    Arena
	Adds     string // the attribute that makes a WriteOrAdd operand add; "accumulate" if empty
	Optional bool
	Spare    bool // a by-product: it may remain unread if another result is read
	Doc      string
}

// AttrKind is the meaning of an attribute's number.
type AttrKind uint8

// Kinds of attributes.
const (
	KindInt      AttrKind = iota
	KindFloat             // IEEE 754 double
	KindBool              // 0 or 1
	KindTensor            // index into Program.Tensors
	KindGroup             // index into Program.Groups
	KindRank              // a rank of the job
	KindEvent             // an event of the section
	KindOption            // an integer that is 0 if it is not given
	KindFactor            // a float that is 0 if it is not given
	KindFunction          // an index into Functions, written by its name
)

func (k AttrKind) String() string {
	return [...]string{"int", "float", "bool", "tensor", "group", "rank", "event", "option", "factor", "function"}[k]
}

// IsFloat reports whether the attribute's bits are those of a float.
func (k AttrKind) IsFloat() bool { return k == KindFloat || k == KindFactor }

// MayBeLeftOut reports whether the attribute may be omitted, in which case its value is 0.
func (k AttrKind) MayBeLeftOut() bool { return k == KindBool || k == KindOption || k == KindFactor }

// Functions lists the elementwise functions of the opcodes activation and glu, indexed by the value of the
// attribute named function.
var Functions = []string{"gelu_tanh", "gelu", "silu", "relu2", "sigmoid", "clamped_silu"}

// Values of the attribute `as` of load_tokens.
const (
	AsTokens    = 0
	AsLabels    = 1 // a token, or NoLabel if it is excluded from the loss
	AsPositions = 2 // number of earlier tokens in the same document
)

// NoLabel is the label of a token that is excluded from the loss. All other negative numbers have the same meaning.
const NoLabel = -1

// Values of attributes of KindFunction.
const (
	GeluTanh    int64 = iota // x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))
	Gelu                     // x/2 * (1 + erf(x/sqrt(2)))
	Silu                     // x / (1 + exp(-x))
	Relu2                    // max(x, 0)^2
	Sigmoid                  // 1 / (1 + exp(-x))
	ClampedSilu              // x' / (1 + exp(-1.702 x')) with x' = min(x, 7); glu multiplies by min(max(up, -7), 7) + 1
)

// AttrInfo is one attribute of an opcode.
type AttrInfo struct {
	Name string
	Kind AttrKind
	Doc  string

	Scope Scope
}

// Scope says which instructions have the same value of an attribute. The verifier uses it to tell whether instructions compute
// corresponding values (verifyformula.go).
type Scope uint8

// Scopes.
const (
	ScopeFormula   Scope = iota // those that compute corresponding values, and the gradients of these
	ScopePlace                  // none: it says which tokens, rows, heads or copies an instruction works on
	ScopeJob                    // all instructions of a section with the attribute
	ScopeJobOrNone              // all of these in which it is not 0
)

// WorkKind selects the efficiency that applies to an amount of work.
type WorkKind uint8

// Kinds of work.
const (
	WorkNone WorkKind = iota
	WorkMatmul
	WorkAttention
	WorkAttentionGrad
	WorkScan
	WorkScanGrad
	WorkMemory // bound by device memory bandwidth
	WorkD2H
	WorkH2D
	WorkP2P
	WorkCollective
)

// Rule names a shape rule that Dims cannot express; CheckRule applies it.
type Rule uint8

// Rules.
const (
	RuleNone Rule = iota
	RuleMatmul
	RuleAttention
	RuleUpdate
	RuleCollective // each collective has its own, in collective.go
	RuleZigzag
	RuleRoute
	RuleRouterLoss
	RulePlaced
	RuleGrouped
	RuleSorted
	RuleScan
	RuleConcat
)

// Work is the amount of work in an instruction, independent of the machine.
type Work struct {
	Kind  WorkKind
	Op    Op // of a collective, whose row in collectives gives the path of the bytes
	Flops Flops
	Bytes Bytes // device memory traffic, or bytes on the link for moves and messages
	Rows  int64 // number of rows, which determines the efficiency
	DType DType // element type of the factors of a matmul, which selects the peak rate

	HeadDim, ValueDim int64 // of attention, which select its kernel
	Grouped           bool  // a collective that begins together with the one before it: see vm.Groups
}

// OpInfo is the row of an opcode and the only place that describes it.
type OpInfo struct {
	Name     string
	Doc      string // first sentence: what it computes
	Class    Class
	Streams  []Stream // legal streams
	Operands []Operand
	Attrs    []AttrInfo
	InPlace  bool     // a written operand may be the same view as one that is read
	Updates  bool     // changes a weight, which is operand w
	Rule     Rule     // rule that Dims and Types cannot express
	Work     WorkKind // how to count its work
	Source   string   // source of the formula
}

var (
	onCompute = []Stream{Compute, Mux}
	onArrival = []Stream{Compute, Mux, MuxIn} // also the stream on which shared work arrives
	onColl    = []Stream{Coll, Mux, Params, Compute}
)

// Attributes shared by several rows.
var (
	attrBatch       = AttrInfo{"batch", KindInt, "number of adjacent sequences; token t of sequence b is in row t*batch+b", ScopePlace}
	attrHeads       = AttrInfo{"heads", KindInt, "number of heads on this rank: query heads, or KV heads if K is rotated", ScopePlace}
	attrKVHeads     = AttrInfo{"kv_heads", KindInt, "number of key and value heads on this rank; heads is a multiple of it", ScopePlace}
	attrHeadDim     = AttrInfo{"head_dim", KindInt, "width of a head", ScopeFormula}
	attrPrefix      = AttrInfo{"prefix", KindInt, "number of tokens from the first key to the first query", ScopePlace}
	attrEps         = AttrInfo{"eps", KindFloat, "added to the variance or mean square", ScopeFormula}
	attrScale       = AttrInfo{"scale", KindFloat, "1 / number of tokens in the batch; 1 if weight is given", ScopeJob}
	attrAccumulate  = AttrInfo{"accumulate", KindBool, "add to the accumulated operands instead of overwriting them", ScopePlace}
	attrFirst       = AttrInfo{"first", KindInt, "first vocabulary entry, or position, on this rank", ScopeFormula}
	attrValid       = AttrInfo{"valid", KindInt, "number of vocabulary entries on this rank, without padding", ScopeFormula}
	attrGroup       = AttrInfo{"group", KindGroup, "the ranks that take part", ScopePlace}
	attrOneGroup    = AttrInfo{"group", KindGroup, "the ranks that take part", ScopeJob}
	attrWeightDecay = AttrInfo{"weight_decay", KindFloat, "", ScopeJobOrNone}
	attrEvent       = AttrInfo{"event", KindEvent, "event of this section", ScopeFormula}
	attrOffset      = AttrInfo{"offset", KindFactor, "added to gamma before the multiplication", ScopeFormula}
	attrFunction    = AttrInfo{"function", KindFunction, "one of " + strings.Join(Functions, ", "), ScopeFormula}
	attrSoftcap     = AttrInfo{"softcap", KindFactor, "logits become softcap * tanh(logits / softcap); 0: no cap", ScopeFormula}
	attrScoreCap    = AttrInfo{"softcap", KindFactor, "scores become softcap * tanh(scores / softcap) before masking; 0: no cap", ScopeFormula}
	attrEmbedScale  = AttrInfo{"scale", KindFactor, "factor by which the table rows are multiplied; 0 means 1", ScopeFormula}
	attrChunks      = AttrInfo{"chunks", KindOption, "the tokens are cut into this many chunks, an even number, in zigzag order: the first, the last, the second, the second to last, and so on; 0: they are in order", ScopePlace}
	attrWindow      = AttrInfo{"window", KindOption, "query r sees only keys from prefix+r-window+1 onwards; 0: no window", ScopeFormula}
	attrZigzag      = AttrInfo{"zigzag", KindOption, "0: as described above. Otherwise, the queries are the two chunks of a ring member in zigzag order, and the keys after the prefix are the two chunks of another member. 1: the other member comes before; all queries see its first chunk, and none sees its second. 2: the other member comes after; the second half of the queries sees both of its chunks, and the first half sees neither", ScopePlace}
)

// Operands shared by several rows.
var (
	operandPositions = Operand{Name: "positions", Types: "i32", Optional: true, Doc: "position of each token in its document, from load_tokens: one row for each token, before chunks and member select a subset"}
	operandWeight    = Operand{Name: "weight", Types: "f32", Dims: "1", Optional: true, Doc: "multiplies scale; 1 / number of labels in the batch that count"}
)

// Attributes and operands of experts. Rows are in the order of experts if all rows of an expert are adjacent, in the order of
// their tokens.
var (
	attrTop      = AttrInfo{"top", KindInt, "number of experts that process a token", ScopeFormula}
	attrScores   = AttrInfo{"scores", KindOption, "0: softmax of the logits of all experts; 1: their sigmoids; 2: softmax of the logits of the chosen experts", ScopeFormula}
	attrRenormal = AttrInfo{"renormalize", KindBool, "divide the scores of the chosen experts by their sum", ScopeFormula}
	attrSumEps   = AttrInfo{"eps", KindFactor, "added to this sum", ScopeFormula}
	attrWeighted = AttrInfo{"scale", KindFactor, "factor of the weights; 0 means 1", ScopeFormula}
	attrShare    = AttrInfo{"share", KindFactor, "share of the n rows that the experts have if all experts have equally many; for estimates of time; 0 means 1", ScopePlace}

	operandPlaces  = Operand{Name: "places", Types: "i32", Dims: "r,top", Doc: "from route"}
	operandEnds    = Operand{Name: "ends", Types: "i32", Dims: "e", Doc: "from route; never less than the one before it, and the last is at most n, which is checked when the instruction runs"}
	operandLast    = Operand{Name: "ends", Types: "i32", Dims: "e", Optional: true, Doc: "from route: rows from the last of these on remain as they are; it is at most n, which is checked when the instruction runs"}
	operandWeights = Operand{Name: "weights", Types: "f32", Dims: "r,top"}
)

// Attributes and operands of scans and of the convolutions before them.
var (
	attrScanHeads  = AttrInfo{"heads", KindInt, "number of heads of q and k on this rank", ScopePlace}
	attrDecayHeads = AttrInfo{"heads", KindInt, "number of heads of v on this rank", ScopePlace}
	attrShared     = AttrInfo{"shared", KindInt, "number of heads of v for each head of q and k, which are adjacent; each has its own state", ScopeFormula}
	attrKeyDim     = AttrInfo{"key_dim", KindInt, "width of a head of q and k", ScopeFormula}
	attrValueDim   = AttrInfo{"value_dim", KindInt, "width of a head of v", ScopeFormula}
	attrChannels   = AttrInfo{"channels", KindInt, "1: a head of v has one decay; key_dim: each row of its state has its own", ScopeFormula}
	attrDelta      = AttrInfo{"delta", KindBool, "what the state already returns for k is subtracted from v", ScopeFormula}
	attrHeadNorm   = AttrInfo{"norm", KindFactor, "if it is not 0, each head of q and k is divided by the root of this number plus the sum of the head's squares", ScopeFormula}
	attrQueryBy    = AttrInfo{"scale", KindFactor, "factor of q; 0 means 1", ScopeFormula}
	attrLeast      = AttrInfo{"least", KindFactor, "smaller steps are replaced by this one, and have no gradient", ScopeFormula}
	attrWidth      = AttrInfo{"width", KindInt, "number of tokens on which a result depends", ScopeFormula}

	operandDecay     = Operand{Name: "decay", Types: "f32", Dims: "n*batch,heads*shared*channels", Doc: "logarithms, at most 0"}
	operandBeta      = Operand{Name: "beta", Types: "f32", Dims: "n*batch,heads*shared"}
	operandState     = Operand{Name: "state", Types: "f32", Dims: "batch,heads*shared,key_dim,value_dim", Optional: true, Doc: "before the first token; absent: 0"}
	operandDocuments = Operand{Name: "positions", Types: "i32", Dims: "n*batch", Optional: true, Doc: "position of each token in its document, from load_tokens; a document begins at 0, with nothing before it"}
	operandTail      = Operand{Name: "tail", Types: "T", Dims: "width*batch,c", Optional: true, Doc: "the rows before the first, of which the first token's is never used; absent: 0"}
)

// Scores of experts, the values of an attribute of route.
const (
	ScoresSoftmax = iota
	ScoresSigmoid
	ScoresOfChosen
)

// Scores of groups of experts, the values of an attribute of route.
const (
	GroupsByTwo = iota
	GroupsByMax
)

// Attributes of attention in a ring, after each member has gathered all keys.
var (
	attrQueryChunks = AttrInfo{"chunks", KindOption, "if it is not 0, the queries are two of this many chunks of the tokens after the prefix, in zigzag order. The keys are those of all tokens, in order, or, with accumulate, a block of them", ScopePlace}
	attrQueryMember = AttrInfo{"member", KindOption, "with chunks, the queries are the chunk with this number and the one at the same distance from the end", ScopePlace}
)

// Ops is the opcode table. The encoder, decoder, printer, parser, verifier and simulator use it,
// and OPCODES.md is generated from it.
var Ops = [NumOps]OpInfo{
	LoadTokens: {
		Name: "load_tokens", Class: ClassData, Streams: onCompute,
		Doc: "Loads the tokens position .. position+n-1 of the sequences first .. first+batch-1 of this step's batch (or " +
			"of the validation set, in the eval section). Labels are the tokens one position later. With as = 1, a token " +
			"becomes -1 if it begins a document, is padding, or is excluded by the data's mask. With as = 2, each token " +
			"becomes its position in its document: 0, or one more than the position of the token before it.",
		Operands: []Operand{
			{Name: "tokens", Dir: Write, Types: "i32", Dims: "n*batch", Doc: "row t*batch+b is token t of sequence b"},
		},
		Attrs: []AttrInfo{
			{"first", KindInt, "index of the first sequence within the replica's share of the batch", ScopePlace},
			{"replica", KindInt, "number of sequences in the global batch before this replica's share", ScopePlace},
			{"position", KindInt, "position of the first token; a sequence has sequence+1 tokens", ScopePlace},
			attrBatch, attrChunks,
			{"as", KindOption, "0: tokens; 1: labels; 2: positions in documents", ScopeFormula},
		},
		Rule: RuleZigzag, Work: WorkMemory,
	},
	InitNormal: {
		Name: "init_normal", Class: ClassKernel, Streams: onCompute,
		Doc: "Initialises a rectangle of a tensor with normally distributed values of mean 0. Each value depends only on " +
			"(seed, tensor, global element), so any split gives the same model.",
		Operands: []Operand{
			{Name: "w", Dir: Write, Types: "F", Dims: "r,c", Doc: "the rectangle; elements outside the tensor, and rows from end on, become 0"},
		},
		Attrs: []AttrInfo{
			{"tensor", KindTensor, "the tensor whose values are set", ScopeFormula},
			{"row", KindInt, "first row of the rectangle", ScopePlace},
			{"col", KindInt, "first column of the rectangle", ScopePlace},
			{"std", KindFloat, "standard deviation", ScopeFormula},
			{"end", KindOption, "the row of the tensor at which padding starts; 0: padding starts after its last row", ScopeFormula},
		},
		Work: WorkMemory,
	},
	Fill: {
		Name: "fill", Class: ClassKernel, Streams: onCompute,
		Doc:      "Sets every element to a value.",
		Operands: []Operand{{Name: "y", Dir: Write, Types: "any"}},
		Attrs:    []AttrInfo{{"value", KindFloat, "the value", ScopeFormula}},
		Work:     WorkMemory,
	},
	Embed: {
		Name: "embed", Class: ClassKernel, Streams: onCompute,
		Doc: "Looks up the row of each token in the embedding table and multiplies it by scale. Tokens that are not on " +
			"this rank yield zeros, so a sum over ranks completes the rows.",
		Operands: []Operand{
			{Name: "y", Dir: Write, Types: "T", Dims: "r,h"},
			{Name: "tokens", Types: "i32", Dims: "r"},
			{Name: "table", Types: "T", Dims: "v,h"},
		},
		Attrs: []AttrInfo{attrFirst, attrEmbedScale},
		Work:  WorkMemory,
	},
	EmbedGrad: {
		Name: "embed_grad", Class: ClassKernel, Streams: onCompute,
		Doc: "Adds each row of dy, times scale, to the table row of its token, in row order.",
		Operands: []Operand{
			{Name: "dtable", Dir: WriteOrAdd, Types: "f32", Dims: "v,h"},
			{Name: "tokens", Types: "i32", Dims: "r"},
			{Name: "dy", Types: "T", Dims: "r,h"},
		},
		Attrs: []AttrInfo{attrFirst, attrAccumulate, attrEmbedScale},
		Work:  WorkMemory,
	},
	PositionEmbed: {
		Name: "position_embed", Class: ClassKernel, Streams: onCompute,
		Doc: "y = x plus, for each token, the table row of its position, which all batch rows of the token share.",
		Operands: []Operand{
			{Name: "y", Dir: Write, Types: "T", Dims: "n*batch,h"},
			{Name: "x", Types: "T", Dims: "n*batch,h"},
			{Name: "table", Types: "T", Dims: "n,h", Doc: "the rows of these tokens"},
		},
		Attrs: []AttrInfo{attrBatch}, InPlace: true,
		Work: WorkMemory,
	},
	PositionEmbedGrad: {
		Name: "position_embed_grad", Class: ClassKernel, Streams: onCompute,
		Doc: "Computes the gradient of position_embed with respect to the table: the sum of dy over the batch rows of each token.",
		Operands: []Operand{
			{Name: "dtable", Dir: WriteOrAdd, Types: "f32", Dims: "n,h"},
			{Name: "dy", Types: "T", Dims: "n*batch,h"},
		},
		Attrs: []AttrInfo{attrBatch, attrAccumulate},
		Work:  WorkMemory,
	},
	LayerNorm: {
		Name: "layernorm", Class: ClassKernel, Streams: onCompute,
		Doc: "y = (x - mean) / sqrt(variance + eps) * (offset + gamma) + beta, for each row.",
		Operands: []Operand{
			{Name: "y", Dir: Write, Types: "T", Dims: "r,c", Spare: true},
			{Name: "stats", Dir: Write, Types: "f32", Dims: "r,2", Spare: true, Doc: "mean and 1/sqrt(variance + eps)"},
			{Name: "x", Types: "T", Dims: "r,c"},
			{Name: "gamma", Types: "T", Dims: "c"},
			{Name: "beta", Types: "T", Dims: "c"},
		},
		Attrs: []AttrInfo{attrEps, attrOffset},
		Work:  WorkMemory, Source: "Ba, Kiros, Hinton 2016",
	},
	LayerNormGrad: {
		Name: "layernorm_grad", Class: ClassKernel, Streams: onCompute,
		Doc: "Computes the gradients of layernorm. residual, the gradient that reaches x along another path, is added to dx.",
		Operands: []Operand{
			{Name: "dx", Dir: Write, Types: "T", Dims: "r,c", Spare: true},
			{Name: "dgamma", Dir: WriteOrAdd, Types: "f32", Dims: "c", Optional: true},
			{Name: "dbeta", Dir: WriteOrAdd, Types: "f32", Dims: "c", Optional: true},
			{Name: "dy", Types: "T", Dims: "r,c"},
			{Name: "x", Types: "T", Dims: "r,c"},
			{Name: "stats", Types: "f32", Dims: "r,2"},
			{Name: "gamma", Types: "T", Dims: "c"},
			{Name: "residual", Types: "T", Dims: "r,c", Optional: true},
		},
		Attrs: []AttrInfo{attrAccumulate, attrOffset},
		Work:  WorkMemory,
	},
	RMSNorm: {
		Name: "rmsnorm", Class: ClassKernel, Streams: onCompute,
		Doc: "y = x / sqrt(mean square + eps) * (offset + gamma), for each row.",
		Operands: []Operand{
			{Name: "y", Dir: Write, Types: "T", Dims: "r,c", Spare: true},
			{Name: "stats", Dir: Write, Types: "f32", Dims: "r,1", Spare: true, Doc: "1/sqrt(mean square + eps)"},
			{Name: "x", Types: "T", Dims: "r,c"},
			{Name: "gamma", Types: "T", Dims: "c"},
		},
		Attrs: []AttrInfo{attrEps, attrOffset},
		Work:  WorkMemory, Source: "Zhang, Sennrich 2019",
	},
	RMSNormGrad: {
		Name: "rmsnorm_grad", Class: ClassKernel, Streams: onCompute,
		Doc: "Computes the gradients of rmsnorm. residual, the gradient that reaches x along another path, is added to dx.",
		Operands: []Operand{
			{Name: "dx", Dir: Write, Types: "T", Dims: "r,c", Spare: true},
			{Name: "dgamma", Dir: WriteOrAdd, Types: "f32", Dims: "c", Optional: true},
			{Name: "dy", Types: "T", Dims: "r,c"},
			{Name: "x", Types: "T", Dims: "r,c"},
			{Name: "stats", Types: "f32", Dims: "r,1"},
			{Name: "gamma", Types: "T", Dims: "c"},
			{Name: "residual", Types: "T", Dims: "r,c", Optional: true},
		},
		Attrs: []AttrInfo{attrAccumulate, attrOffset},
		Work:  WorkMemory,
	},
	Matmul: {
		Name: "matmul", Class: ClassKernel, Streams: onCompute,
		Doc: "c = op(a) op(b) + bias, or c += op(a) op(b); op transposes its argument if trans_a or trans_b is set. Sums are accumulated in f32.",
		Operands: []Operand{
			{Name: "c", Dir: WriteOrAdd, Types: "F", Dims: "m,n"},
			{Name: "a", Types: "T", Doc: "[m,k], or [k,m] if transposed"},
			{Name: "b", Types: "T", Doc: "[k,n], or [n,k] if transposed"},
			{Name: "bias", Types: "T", Dims: "n", Optional: true},
		},
		Attrs: []AttrInfo{
			{"trans_a", KindBool, "a is stored transposed", ScopeFormula},
			{"trans_b", KindBool, "b is stored transposed", ScopeFormula},
			attrAccumulate,
		},
		Rule: RuleMatmul, Work: WorkMatmul,
	},
	BiasGrad: {
		Name: "bias_grad", Class: ClassKernel, Streams: onCompute,
		Doc: "Sums the columns of dy in f32.",
		Operands: []Operand{
			{Name: "db", Dir: WriteOrAdd, Types: "f32", Dims: "c"},
			{Name: "dy", Types: "T", Dims: "r,c"},
		},
		Attrs: []AttrInfo{attrAccumulate},
		Work:  WorkMemory,
	},
	Rope: {
		Name: "rope", Class: ClassKernel, Streams: onCompute,
		Doc: "Rotary position embedding: rotates the pairs (i, i+head_dim/2) of every head by position * " +
			"theta^(-2i/head_dim), or back if inverse is set. With positions, a token is rotated by its position in its " +
			"document instead. If rotation is set, it selects one of the run's rotations, which replaces this rule: it " +
			"gives the pairs (i, i+pairs), their rates, and the factors for the rotated elements and for the rest, which may " +
			"grow with the position. The " +
			"gradient of rope is rope with inverse set, which applies the same factors.",
		Operands: []Operand{
			{Name: "y", Dir: Write, Types: "F", Dims: "n*batch,heads*head_dim"},
			{Name: "x", Types: "F", Dims: "n*batch,heads*head_dim"},
			operandPositions,
		},
		Attrs: []AttrInfo{
			attrHeads, attrHeadDim, attrBatch,
			{"position", KindInt, "position of the first token", ScopePlace},
			{"theta", KindFloat, "base of the frequencies", ScopeFormula},
			{"inverse", KindBool, "rotate backwards", ScopeFormula},
			attrChunks, {"member", KindOption, "with chunks, the tokens are those of two chunks: the one with this number, and the one at the same distance from the end", ScopePlace},
			{"rotation", KindOption, "number of one of the run's rotations, counted from 1, used instead of theta; 0: none", ScopeFormula},
		},
		InPlace: true, Rule: RuleZigzag, Work: WorkMemory, Source: "Su et al. 2021; pairs are laid out as in GPT-NeoX and Llama",
	},
	Attention: {
		Name: "attention", Class: ClassKernel, Streams: onCompute,
		Doc: "Computes causal attention of n queries over the keys of all tokens so far, or over a block of them: query r " +
			"sees keys 0 .. min(keys-1, prefix+r). Scores are scaled by 1/sqrt(head_dim); query head i uses key head i / " +
			"(heads/kv_heads). Heads of v may have another width, value_dim. " +
			"The scores of an entire row of tokens are never stored. If accumulate is set, the softmax continues from the o and lse of other keys; it must be set if a window leaves a query without a key. " +
			"With positions, a query whose position in its document is p sees no key before prefix+r-p, and thus no key of another document. For a query with no keys, o is 0 and lse is minus infinity.",
		Operands: []Operand{
			{Name: "o", Dir: WriteOrAdd, Types: "F", Dims: "n*batch,heads*value_dim", Doc: "f32 if more blocks follow and activations are bf16, so that it is rounded only once"},
			{Name: "lse", Dir: WriteOrAdd, Types: "f32", Dims: "n*batch,heads", Spare: true, Doc: "natural logarithm of the sum of exponentials of the scores, scaled and capped"},
			{Name: "q", Types: "T", Dims: "n*batch,heads*head_dim"},
			{Name: "k", Types: "T", Dims: "keys*batch,kv_heads*head_dim", Doc: "at most prefix+n tokens"},
			{Name: "v", Types: "T", Dims: "keys*batch,kv_heads*value_dim"},
			operandPositions,
		},
		Attrs: []AttrInfo{attrHeads, attrKVHeads, attrHeadDim, attrBatch, attrPrefix,
			{"accumulate", KindBool, "continue from the existing o and lse instead of overwriting them", ScopePlace}, attrZigzag, attrWindow, attrQueryChunks, attrQueryMember, attrScoreCap},
		Rule: RuleAttention, Work: WorkAttention, Source: "Dao et al. 2022; paper section 2",
	},
	AttentionGrad: {
		Name: "attention_grad", Class: ClassKernel, Streams: onCompute,
		Doc: "Computes the gradients of attention over the same keys, either all of them or a block. o or delta, and lse, " +
			"must have been computed over all keys that a query sees; this makes the contribution of every block exact. dk and dv " +
			"cover all given keys, so that later subsequences add to the rows of earlier ones. Exactly one of o and delta is given.",
		Operands: []Operand{
			{Name: "dq", Dir: WriteOrAdd, Types: "F", Dims: "n*batch,heads*head_dim", Adds: "accumulate_q", Spare: true},
			{Name: "dk", Dir: WriteOrAdd, Types: "f32", Dims: "keys*batch,kv_heads*head_dim", Spare: true},
			{Name: "dv", Dir: WriteOrAdd, Types: "f32", Dims: "keys*batch,kv_heads*value_dim", Spare: true},
			{Name: "do", Types: "T", Dims: "n*batch,heads*value_dim"},
			{Name: "q", Types: "T", Dims: "n*batch,heads*head_dim"},
			{Name: "k", Types: "T", Dims: "keys*batch,kv_heads*head_dim"},
			{Name: "v", Types: "T", Dims: "keys*batch,kv_heads*value_dim"},
			{Name: "o", Types: "T", Dims: "n*batch,heads*value_dim", Optional: true},
			{Name: "lse", Types: "f32", Dims: "n*batch,heads"},
			{Name: "delta", Types: "f32", Dims: "n*batch,heads", Optional: true, Doc: "from attention_delta, if several blocks use it or o is on another rank"},
			operandPositions,
		},
		Attrs: []AttrInfo{attrHeads, attrKVHeads, attrHeadDim, attrBatch, attrPrefix, attrAccumulate,
			{"accumulate_q", KindBool, "add to dq instead of overwriting it", ScopePlace}, attrZigzag, attrWindow, attrQueryChunks, attrQueryMember, attrScoreCap},
		Rule: RuleAttention, Work: WorkAttentionGrad,
	},
	Activation: {
		Name: "activation", Class: ClassKernel, Streams: onCompute,
		Doc: "y = function(x): gelu_tanh is x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))), gelu is x/2 * (1 + erf(x/sqrt(2))), silu is x * sigmoid(x), relu2 is max(x, 0)^2, sigmoid is 1 / (1 + exp(-x)), clamped_silu is x' * sigmoid(1.702 x') with x' = min(x, 7).",
		Operands: []Operand{
			{Name: "y", Dir: Write, Types: "T", Dims: "n,c"},
			{Name: "x", Types: "T", Dims: "n,c"},
			operandLast,
		},
		Attrs:   []AttrInfo{attrFunction, attrShare},
		InPlace: true, Rule: RuleSorted, Work: WorkMemory, Source: "Hendrycks, Gimpel 2016; So et al. 2021 (relu2)",
	},
	ActivationGrad: {
		Name: "activation_grad", Class: ClassKernel, Streams: onCompute,
		Doc: "Computes the gradient of activation.",
		Operands: []Operand{
			{Name: "dx", Dir: Write, Types: "T", Dims: "n,c"},
			{Name: "dy", Types: "T", Dims: "n,c"},
			{Name: "x", Types: "T", Dims: "n,c"},
			operandLast,
		},
		Attrs:   []AttrInfo{attrFunction, attrShare},
		InPlace: true, Rule: RuleSorted, Work: WorkMemory,
	},
	GLU: {
		Name: "glu", Class: ClassKernel, Streams: onCompute,
		Doc: "y = function(gate) * up; with silu, this is SwiGLU. With clamped_silu, up is bounded to -7 to 7 first, and 1 is added.",
		Operands: []Operand{
			{Name: "y", Dir: Write, Types: "T", Dims: "n,c"},
			{Name: "gate", Types: "T", Dims: "n,c"},
			{Name: "up", Types: "T", Dims: "n,c"},
			operandLast,
		},
		Attrs:   []AttrInfo{attrFunction, attrShare},
		InPlace: true, Rule: RuleSorted, Work: WorkMemory, Source: "Shazeer 2020",
	},
	GLUGrad: {
		Name: "glu_grad", Class: ClassKernel, Streams: onCompute,
		Doc: "Computes the gradients of glu.",
		Operands: []Operand{
			{Name: "dgate", Dir: Write, Types: "T", Dims: "n,c", Spare: true},
			{Name: "dup", Dir: Write, Types: "T", Dims: "n,c", Spare: true},
			{Name: "dy", Types: "T", Dims: "n,c"},
			{Name: "gate", Types: "T", Dims: "n,c"},
			{Name: "up", Types: "T", Dims: "n,c"},
			operandLast,
		},
		Attrs:   []AttrInfo{attrFunction, attrShare},
		InPlace: true, Rule: RuleSorted, Work: WorkMemory,
	},
	Add: {
		Name: "add", Class: ClassKernel, Streams: onArrival,
		Doc: "y = a + b. If bias is given, it is added to every row.",
		Operands: []Operand{
			{Name: "y", Dir: Write, Types: "F", Dims: "r,c"},
			{Name: "a", Types: "F", Dims: "r,c"},
			{Name: "b", Types: "F", Dims: "r,c"},
			{Name: "bias", Types: "F", Dims: "c", Optional: true},
		},
		InPlace: true, Work: WorkMemory,
	},
	Cast: {
		Name: "cast", Class: ClassKernel, Streams: onCompute,
		Doc: "Converts between f32 and bf16, rounding to nearest even.",
		Operands: []Operand{
			{Name: "y", Dir: Write, Types: "F", Dims: "r,c"},
			{Name: "x", Types: "F", Dims: "r,c"},
		},
		Work: WorkMemory,
	},
	CrossEntropyStats: {
		Name: "cross_entropy_stats", Class: ClassKernel, Streams: onCompute,
		Doc: "Computes three numbers for each row of this rank's part of the capped logits: the maximum, the sum of " +
			"exponentials relative to the maximum, and the logit of the label (0 if the label is not on this rank).",
		Operands: []Operand{
			{Name: "stats", Dir: Write, Types: "f32", Dims: "r,3"},
			{Name: "logits", Types: "F", Dims: "r,v"},
			{Name: "labels", Types: "i32", Dims: "r"},
		},
		Attrs: []AttrInfo{attrFirst, attrValid, attrSoftcap},
		Work:  WorkMemory,
	},
	CrossEntropy: {
		Name: "cross_entropy", Class: ClassKernel, Streams: onCompute,
		Doc: "Combines the statistics of all parts of the vocabulary and adds scale times the sum over rows of -log " +
			"softmax(logits)[label] to the loss. Rows with a negative label add nothing.",
		Operands: []Operand{
			{Name: "loss", Dir: ReadWrite, Types: "f32", Dims: "1"},
			{Name: "losses", Dir: Write, Types: "f32", Dims: "r", Optional: true, Doc: "-log softmax(logits)[label] for each row; NaN if the label is negative"},
			{Name: "stats", Types: "f32", Dims: "p,r,3", Doc: "one plane for each part, in rank order"},
			{Name: "labels", Types: "i32", Dims: "r", Optional: true, Doc: "required if some may be negative"},
			operandWeight,
		},
		Attrs: []AttrInfo{attrScale},
		Work:  WorkMemory,
	},
	CrossEntropyGrad: {
		Name: "cross_entropy_grad", Class: ClassKernel, Streams: onCompute,
		Doc: "dlogits = (softmax(capped logits) - onehot(label)) * scale times the slope of the cap, for this rank's part; padding and rows with a negative label get 0.",
		Operands: []Operand{
			{Name: "dlogits", Dir: Write, Types: "F", Dims: "r,v"},
			{Name: "logits", Types: "F", Dims: "r,v"},
			{Name: "stats", Types: "f32", Dims: "p,r,3"},
			{Name: "labels", Types: "i32", Dims: "r"},
			operandWeight,
		},
		Attrs:   []AttrInfo{attrScale, attrFirst, attrValid, attrSoftcap},
		InPlace: true, Work: WorkMemory,
	},
	SumSq: {
		Name: "sumsq", Class: ClassKernel, Streams: onCompute,
		Doc: "y = weight * the sum of the squares of x, summed in a fixed order in f64.",
		Operands: []Operand{
			{Name: "y", Dir: Write, Types: "f32", Dims: "1"},
			{Name: "x", Types: "F"},
		},
		Attrs: []AttrInfo{{"weight", KindFloat, "0 if another rank counts its copy of x", ScopePlace}},
		Work:  WorkMemory,
	},
	GradNorm: {
		Name: "grad_norm", Class: ClassKernel, Streams: onCompute,
		Doc: "Computes the global L2 norm from sums of squares, added in index order in f64, and the factor min(1, " +
			"max_norm/norm), which is 1 if max_norm is 0. If the norm is not finite or exceeds limit, the factor is -1, and " +
			"updates that read it change nothing.",
		Operands: []Operand{
			{Name: "y", Dir: Write, Types: "f32", Dims: "2", Doc: "norm, factor"},
			{Name: "sums", Types: "f32", Dims: "k"},
			{Name: "limit", Types: "f32", Dims: "1", Optional: true, Doc: "the largest norm at which weights are updated"},
		},
		Attrs: []AttrInfo{{"max_norm", KindFloat, "0: no clipping", ScopeJob}},
		Work:  WorkMemory,
	},
	AdamW: {
		Name: "adamw", Class: ClassKernel, Streams: onCompute,
		Doc: "Adam with decoupled weight decay: g = factor*grad; m = beta1*m + (1-beta1)*g; v = beta2*v + (1-beta2)*g^2; w -= lr*(m*c1 / (sqrt(v*c2) + eps) + weight_decay*w), each product rounded; m and v are rounded after the update of w. A negative factor leaves w, m and v unchanged.",
		Operands: []Operand{
			{Name: "w", Dir: ReadWrite, Types: "f32", Doc: "master weight"},
			{Name: "m", Dir: ReadWrite, Types: "T"},
			{Name: "v", Dir: ReadWrite, Types: "T"},
			{Name: "copy", Dir: Write, Types: "bf16", Optional: true, Doc: "the rounded weight, for the kernels of the next step"},
			{Name: "grad", Types: "f32"},
			{Name: "step", Types: "f32", Dims: "3", Doc: "lr, c1 = 1/(1-beta1^t), c2 = 1/(1-beta2^t)"},
			{Name: "norm", Types: "f32", Dims: "2", Doc: "from grad_norm"},
		},
		Attrs: []AttrInfo{
			{"beta1", KindFloat, "", ScopeJob}, {"beta2", KindFloat, "", ScopeJob}, {"eps", KindFloat, "", ScopeJob}, attrWeightDecay,
		},
		Updates: true, Rule: RuleUpdate, Work: WorkMemory, Source: "Loshchilov, Hutter 2019",
	},
	CopyD2H: {
		Name: "d2h", Class: ClassMove, Streams: []Stream{D2H},
		Doc: "Copies device bytes to the host (offload).",
		Operands: []Operand{
			{Name: "y", Dir: Write, Types: "any", Dims: "k", Arena: Host},
			{Name: "x", Types: "any", Dims: "k"},
		},
		Work: WorkD2H,
	},
	CopyH2D: {
		Name: "h2d", Class: ClassMove, Streams: []Stream{H2D},
		Doc: "Copies host bytes to the device (reload).",
		Operands: []Operand{
			{Name: "y", Dir: Write, Types: "any", Dims: "k"},
			{Name: "x", Types: "any", Dims: "k", Arena: Host},
		},
		Work: WorkH2D,
	},
	CopyD2D: {
		Name: "d2d", Class: ClassMove, Streams: onCompute,
		Doc: "Copies device bytes.",
		Operands: []Operand{
			{Name: "y", Dir: Write, Types: "any", Dims: "k"},
			{Name: "x", Types: "any", Dims: "k"},
		},
		Work: WorkMemory,
	},
	Send: {
		Name: "send", Class: ClassComm, Streams: []Stream{SendNext, SendPrev, Mux},
		Doc: "Sends a message to a peer. The instruction is complete when the peer has received the message. " +
			"Messages between two ranks on the same stream keep their order.",
		Operands: []Operand{{Name: "x", Types: "any"}},
		Attrs:    []AttrInfo{{"peer", KindRank, "receiver", ScopeFormula}},
		Work:     WorkP2P,
	},
	Recv: {
		Name: "recv", Class: ClassComm, Streams: []Stream{RecvPrev, RecvNext, MuxIn},
		Doc:      "Receives a message from a peer.",
		Operands: []Operand{{Name: "y", Dir: Write, Types: "any"}},
		Attrs:    []AttrInfo{{"peer", KindRank, "sender", ScopeFormula}},
		Work:     WorkP2P,
	},
	AllGather: {
		Name: "all_gather", Class: ClassComm, Streams: onColl,
		Doc: "y = the x of every member, concatenated in group order.",
		Operands: []Operand{
			{Name: "y", Dir: Write, Types: "any"},
			{Name: "x", Types: "any"},
		},
		Attrs: []AttrInfo{attrGroup},
		Rule:  RuleCollective, Work: WorkCollective,
	},
	ReduceScatter: {
		Name: "reduce_scatter", Class: ClassComm, Streams: onColl,
		Doc: "y = the member's share of the sum of every member's x, added in f32 in group order.",
		Operands: []Operand{
			{Name: "y", Dir: Write, Types: "T"},
			{Name: "x", Types: "T"},
		},
		Attrs: []AttrInfo{attrGroup},
		Rule:  RuleCollective, Work: WorkCollective,
	},
	AllReduce: {
		Name: "all_reduce", Class: ClassComm, Streams: onColl,
		Doc: "x = the sum of every member's x, added in f32 in group order.",
		Operands: []Operand{
			{Name: "x", Dir: ReadWrite, Types: "F"},
		},
		Attrs: []AttrInfo{attrGroup},
		Rule:  RuleCollective, Work: WorkCollective,
	},
	Record: {
		Name: "record", Class: ClassSync, Doc: "Marks a point in its stream that wait instructions can wait for. Each " +
			"event is recorded once per section.",
		Attrs: []AttrInfo{attrEvent},
	},
	Wait: {
		Name: "wait", Class: ClassSync, Doc: "Blocks its stream until the event is reached.",
		Attrs: []AttrInfo{attrEvent},
	},
	AllToAll: {
		Name: "all_to_all", Class: ClassComm, Streams: onColl,
		Doc: "Exchanges rows for columns. On member k of a group of t: y [t*r,c] stacks, in group order, column block k/copies of every member's x [r,t/copies*c]. " +
			"Inverse: y [r,t/copies*c] places side by side, in group order, row block k of every member's x [t*r,c]; the blocks of neighbours that hold the same columns (copies is their number) are added, in f32 in group order.",
		Operands: []Operand{
			{Name: "y", Dir: Write, Types: "T", Doc: "[t*r,c], or [r,t/copies*c] if inverse is set"},
			{Name: "x", Types: "T", Doc: "[r,t/copies*c], or [t*r,c] if inverse is set"},
		},
		Attrs: []AttrInfo{
			attrGroup,
			{"copies", KindInt, "number of neighbours in the group that get the same columns; it divides the group size", ScopePlace},
			{"inverse", KindBool, "from columns back to rows", ScopeFormula},
		},
		Rule: RuleCollective, Work: WorkCollective, Source: "Jacobs et al. 2023, DeepSpeed Ulysses",
	},
	AttentionMerge: {
		Name: "attention_merge", Class: ClassKernel, Streams: onCompute,
		Doc: "Merges the results of attention for the same queries over p blocks of keys: lse = log(sum of exp(lses)), o " +
			"= the sum of parts weighted by exp(lses - lse), added in f32 in the order of the blocks and rounded once.",
		Operands: []Operand{
			{Name: "o", Dir: Write, Types: "F", Dims: "r,heads*head_dim"},
			{Name: "lse", Dir: Write, Types: "f32", Dims: "r,heads", Spare: true},
			{Name: "parts", Types: "F", Dims: "p,r,heads*head_dim", Doc: "the o of each block"},
			{Name: "lses", Types: "f32", Dims: "p,r,heads", Doc: "the lse of each block"},
		},
		Attrs: []AttrInfo{attrHeads, attrHeadDim},
		Work:  WorkMemory, Source: "Dao et al. 2023, Flash-Decoding",
	},
	AttentionDelta: {
		Name: "attention_delta", Class: ClassKernel, Streams: onCompute,
		Doc: "delta = the sum of do * o for each head; attention_grad subtracts it from the gradient of every probability.",
		Operands: []Operand{
			{Name: "delta", Dir: Write, Types: "f32", Dims: "r,heads"},
			{Name: "do", Types: "T", Dims: "r,heads*head_dim"},
			{Name: "o", Types: "T", Dims: "r,heads*head_dim"},
		},
		Attrs: []AttrInfo{attrHeads, attrHeadDim},
		Work:  WorkMemory, Source: "Dao et al. 2022",
	},
	Rotate: {
		Name: "rotate", Class: ClassComm, Streams: onColl,
		Doc: "y = the x of the previous member in group order. The last member precedes the first.",
		Operands: []Operand{
			{Name: "y", Dir: Write, Types: "any"},
			{Name: "x", Types: "any"},
		},
		Attrs: []AttrInfo{attrOneGroup},
		Rule:  RuleCollective, Work: WorkCollective, Source: "Liu, Zaharia, Abbeel 2023, Ring Attention; for zigzag " +
			"order, Brandon et al. 2023, Striped Attention, and Zhu 2024",
	},
	SGD: {
		Name: "sgd", Class: ClassKernel, Streams: onCompute,
		Doc: "Gradient descent with momentum and decoupled weight decay: m = momentum*m + factor*grad; w -= lr*(scale*m + " +
			"weight_decay*w), each product rounded. Without m, the step is factor*grad. Without norm, the factor is 1. A " +
			"negative factor leaves w and m unchanged.",
		Operands: []Operand{
			{Name: "w", Dir: ReadWrite, Types: "f32", Doc: "master weight"},
			{Name: "m", Dir: ReadWrite, Types: "F", Optional: true},
			{Name: "copy", Dir: Write, Types: "bf16", Optional: true, Doc: "the rounded weight, for the kernels of the next step"},
			{Name: "grad", Types: "F", Doc: "contains the rows of w, starting at row, which is 0 if both have as many elements; rows of w after its last row are padding: they do not change, and become 0 in copy"},
			{Name: "step", Types: "f32", Dims: "3", Doc: "lr, and two numbers that only adamw uses"},
			{Name: "norm", Types: "f32", Dims: "2", Optional: true, Doc: "from grad_norm"},
		},
		Attrs: []AttrInfo{
			{"momentum", KindFloat, "", ScopeFormula}, attrWeightDecay, {"scale", KindFloat, "multiplies the step", ScopeFormula},
			{"row", KindOption, "row of grad that corresponds to the first row of w", ScopePlace},
			{"scaled", KindOption, "1: grad has already been multiplied by the factor, so the factor counts as 1 unless it is negative", ScopeFormula},
		},
		Updates: true, Rule: RuleUpdate, Work: WorkMemory, Source: "Sutskever et al. 2013; weight decay as in Loshchilov, Hutter 2019",
	},
	Nesterov: {
		Name: "nesterov", Class: ClassKernel, Streams: onCompute,
		Doc: "Nesterov's momentum: g = factor*grad; m = momentum*m + g; y = g + momentum*m, each product rounded. A negative factor leaves m unchanged and sets y to 0.",
		Operands: []Operand{
			{Name: "y", Dir: Write, Types: "F"},
			{Name: "m", Dir: ReadWrite, Types: "F"},
			{Name: "grad", Types: "f32"},
			{Name: "norm", Types: "f32", Dims: "2", Doc: "from grad_norm"},
		},
		Attrs: []AttrInfo{{"momentum", KindFloat, "", ScopeJob}},
		Rule:  RuleUpdate, Work: WorkMemory, Source: "Sutskever et al. 2013",
	},
	Axpby: {
		Name: "axpby", Class: ClassKernel, Streams: onCompute,
		Doc: "y = alpha*a + beta*b, each product rounded in f32. Without b, y = alpha*a.",
		Operands: []Operand{
			{Name: "y", Dir: Write, Types: "T", Dims: "r,c"},
			{Name: "a", Types: "F", Dims: "r,c"},
			{Name: "b", Types: "T", Dims: "r,c", Optional: true},
		},
		Attrs:   []AttrInfo{{"alpha", KindFloat, "", ScopeFormula}, {"beta", KindFloat, "", ScopeFormula}},
		InPlace: true, Work: WorkMemory,
	},
	Normalize: {
		Name: "normalize", Class: ClassKernel, Streams: onCompute,
		Doc: "y = x / (sqrt(sum) + eps): a matrix divided by its Frobenius norm. sum is the sum of the squares of its elements.",
		Operands: []Operand{
			{Name: "y", Dir: Write, Types: "T", Dims: "r,c"},
			{Name: "x", Types: "T", Dims: "r,c"},
			{Name: "sum", Types: "f32", Dims: "1"},
		},
		Attrs:   []AttrInfo{{"eps", KindFloat, "added to the norm", ScopeJob}},
		InPlace: true, Work: WorkMemory,
	},
	Dropout: {
		Name: "dropout", Class: ClassKernel, Streams: onCompute,
		Doc: "Each element of y is x / (1 - rate) with probability 1 - rate, and 0 otherwise. Whether an element is " +
			"dropped depends only on the key, the tensor, the token and the column, so the same elements are " +
			"dropped however the work is divided. The gradient of dropout is dropout of dy.",
		Operands: []Operand{
			{Name: "y", Dir: Write, Types: "T", Dims: "n*batch,c"},
			{Name: "x", Types: "T", Dims: "n*batch,c"},
			{Name: "key", Types: "i32", Dims: "2", Doc: "the step's key: its lower half, then its upper half"},
		},
		Attrs: []AttrInfo{
			{"tensor", KindTensor, "the matrix by which y is multiplied; different matrices drop different elements", ScopeFormula},
			{"rate", KindFloat, "probability that an element is dropped; below 1", ScopeFormula},
			{"col", KindInt, "column of the full input at which x starts", ScopePlace},
			{"first", KindInt, "index of the first sequence within the replica's share of the batch", ScopePlace},
			{"replica", KindInt, "number of sequences in the global batch before this replica's share", ScopePlace},
			{"position", KindInt, "position of the first token in its sequence", ScopePlace},
			attrBatch, attrChunks,
			{"member", KindOption, "without chunks, the tokens are the block of n tokens with this number; with chunks, they are those of two chunks: the one with this number, and the one at the same distance from the end", ScopePlace},
		},
		InPlace: true, Rule: RuleZigzag, Work: WorkMemory, Source: "Srivastava et al. 2014; for the input of adapters, Hu et al. 2021",
	},
	AttentionSink: {
		Name: "attention_sink", Class: ClassKernel, Streams: onCompute,
		Doc: "Adds to the softmax of every query one more key, whose score is the sink of the head and whose value is 0: o *= " +
			"exp(lse - lse') and lse = lse', where lse' = log(exp(lse) + exp(sink)).",
		Operands: []Operand{
			{Name: "o", Dir: ReadWrite, Types: "F", Dims: "r,heads*head_dim"},
			{Name: "lse", Dir: ReadWrite, Types: "f32", Dims: "r,heads", Spare: true},
			{Name: "sink", Types: "F", Dims: "heads"},
		},
		Attrs: []AttrInfo{attrHeads, attrHeadDim},
		Work:  WorkMemory, Source: "Xiao et al. 2024; OpenAI 2025, gpt-oss",
	},
	AttentionSinkGrad: {
		Name: "attention_sink_grad", Class: ClassKernel, Streams: onCompute,
		Doc: "dsink = minus the sum over rows, in order, of exp(sink - lse) times the inner product of do and o in the head.",
		Operands: []Operand{
			{Name: "dsink", Dir: WriteOrAdd, Types: "f32", Dims: "heads"},
			{Name: "do", Types: "T", Dims: "r,heads*head_dim"},
			{Name: "o", Types: "T", Dims: "r,heads*head_dim", Doc: "from attention_sink"},
			{Name: "lse", Types: "f32", Dims: "r,heads", Doc: "from attention_sink"},
			{Name: "sink", Types: "F", Dims: "heads"},
		},
		Attrs: []AttrInfo{attrHeads, attrHeadDim, attrAccumulate},
		Work:  WorkMemory,
	},
	Route: {
		Name: "route", Class: ClassKernel, Streams: onCompute,
		Doc: "Chooses for each token the experts with the highest scores, in descending order; of equal scores, that of the lower " +
			"number. The weights of their results are the scores. places says where the token's rows are once all rows are in the " +
			"order of experts: those of an expert are adjacent, in the order of tokens. If ends is shorter than a row of logits, only the rows of " +
			"these experts have places, and that of a choice of another expert is -1.",
		Operands: []Operand{
			{Name: "weights", Dir: Write, Types: "f32", Dims: "r,top"},
			{Name: "experts", Dir: Write, Types: "i32", Dims: "r,top", Spare: true},
			{Name: "places", Dir: Write, Types: "i32", Dims: "r,top"},
			{Name: "ends", Dir: Write, Types: "i32", Dims: "l", Spare: true, Doc: "for each of the experts from first on, the number of rows of these up to it"},
			{Name: "logits", Types: "F", Dims: "r,e"},
			{Name: "correction", Types: "f32", Dims: "e", Optional: true, Doc: "added to the scores for the choice, but not in the weights"},
		},
		Attrs: []AttrInfo{
			attrTop, attrScores, attrRenormal, attrSumEps, attrWeighted,
			{"groups", KindOption, "the experts are in this many groups of equal size; 0: one group", ScopeFormula},
			{"top_groups", KindOption, "with groups, only experts of the groups with the highest scores are chosen: of this many groups", ScopeFormula},
			{"group_scores", KindOption, "0: the score of a group is the sum of the two highest scores of its experts; 1: the highest", ScopeFormula},
			{"first", KindOption, "the first expert of ends", ScopeFormula},
		},
		Rule: RuleRoute, Work: WorkMemory, Source: "Shazeer et al. 2017; groups and correction: DeepSeek-AI 2024, DeepSeek-V2 and -V3",
	},
	RouteGrad: {
		Name: "route_grad", Class: ClassKernel, Streams: onCompute,
		Doc: "Gradient of route with respect to the logits. The choice has none.",
		Operands: []Operand{
			{Name: "dlogits", Dir: Write, Types: "F", Dims: "r,e"},
			{Name: "dy", Types: "f32", Dims: "r,top", Doc: "gradient of the weights"},
			{Name: "logits", Types: "F", Dims: "r,e"},
			{Name: "experts", Types: "i32", Dims: "r,top", Doc: "from route"},
		},
		Attrs: []AttrInfo{attrTop, attrScores, attrRenormal, attrSumEps, attrWeighted},
		Rule:  RuleRoute, Work: WorkMemory,
	},
	Permute: {
		Name: "permute", Class: ClassKernel, Streams: onCompute,
		Doc: "Copies the row of each token to its places. All other rows remain as they are.",
		Operands: []Operand{
			{Name: "y", Dir: Write, Types: "T", Dims: "n,h"},
			{Name: "x", Types: "T", Dims: "r,h"},
			operandPlaces,
		},
		Attrs: []AttrInfo{attrTop, attrShare},
		Rule:  RulePlaced, Work: WorkMemory,
	},
	PermuteGrad: {
		Name: "permute_grad", Class: ClassKernel, Streams: onCompute,
		Doc: "dx = the sum of the rows of dy at the token's places, added in f32 in this order and rounded once.",
		Operands: []Operand{
			{Name: "dx", Dir: Write, Types: "T", Dims: "r,h"},
			{Name: "dy", Types: "T", Dims: "n,h"},
			operandPlaces,
		},
		Attrs: []AttrInfo{attrTop, attrShare},
		Rule:  RulePlaced, Work: WorkMemory,
	},
	Unpermute: {
		Name: "unpermute", Class: ClassKernel, Streams: onCompute,
		Doc: "y = the sum of the rows of x at the token's places, each times its weight, added in f32 in this order and rounded once.",
		Operands: []Operand{
			{Name: "y", Dir: Write, Types: "T", Dims: "r,h"},
			{Name: "x", Types: "T", Dims: "n,h"},
			operandPlaces, operandWeights,
		},
		Attrs: []AttrInfo{attrTop, attrShare},
		Rule:  RulePlaced, Work: WorkMemory,
	},
	UnpermuteGrad: {
		Name: "unpermute_grad", Class: ClassKernel, Streams: onCompute,
		Doc: "dx = the row of dy of the token, times the weight, at its places, and all other rows remain as they are; dweights = the inner product of this row " +
			"with that of x, or 0 without a place.",
		Operands: []Operand{
			{Name: "dx", Dir: Write, Types: "T", Dims: "n,h", Spare: true},
			{Name: "dweights", Dir: Write, Types: "f32", Dims: "r,top", Spare: true},
			{Name: "dy", Types: "T", Dims: "r,h"},
			{Name: "x", Types: "T", Dims: "n,h"},
			operandPlaces, operandWeights,
		},
		Attrs: []AttrInfo{attrTop, attrShare},
		Rule:  RulePlaced, Work: WorkMemory,
	},
	MatmulGrouped: {
		Name: "matmul_grouped", Class: ClassKernel, Streams: onCompute,
		Doc: "Multiplies the rows of each expert by the expert's matrix, and adds its bias; or adds the products to c. Rows are in the order of experts; those from the last of ends on remain as they are. Sums are accumulated in f32. " +
			"With trans_b, the matrices are stored transposed; c then has the type of a, and there is no bias.",
		Operands: []Operand{
			{Name: "c", Dir: WriteOrAdd, Types: "F", Dims: "n,o"},
			{Name: "a", Types: "T", Dims: "n,k"},
			operandEnds,
			{Name: "b", Types: "T", Doc: "[e,k,o], or [e,o,k] if transposed"},
			{Name: "bias", Types: "T", Dims: "e,o", Optional: true},
		},
		Attrs: []AttrInfo{{"trans_b", KindBool, "b is stored transposed", ScopeFormula}, attrAccumulate, attrShare},
		Rule:  RuleGrouped, Work: WorkMatmul, Source: "Gale et al. 2023, MegaBlocks",
	},
	MatmulGroupedWeightGrad: {
		Name: "matmul_grouped_weight_grad", Class: ClassKernel, Streams: onCompute,
		Doc: "Gradients of matmul_grouped with respect to b and bias: for each expert, the transpose of its rows of a times its rows of dy, " +
			"and the sum of its rows of dy.",
		Operands: []Operand{
			{Name: "db", Dir: WriteOrAdd, Types: "f32", Optional: true, Doc: "[e,k,o], or [e,o,k] if transposed; absent if only the biases are trained"},
			{Name: "dbias", Dir: WriteOrAdd, Types: "f32", Dims: "e,o", Adds: "accumulate_bias", Optional: true},
			{Name: "dy", Types: "T", Dims: "n,o"},
			operandEnds,
			{Name: "a", Types: "T", Dims: "n,k", Optional: true, Doc: "if db is given"},
		},
		Attrs: []AttrInfo{{"trans_b", KindBool, "b and db are stored transposed", ScopeFormula}, attrAccumulate,
			{"accumulate_bias", KindBool, "add to dbias instead of overwriting it", ScopePlace}, attrShare},
		Rule: RuleGrouped, Work: WorkMatmul,
	},
	Scan: {
		Name: "scan", Class: ClassKernel, Streams: onCompute,
		Doc: "Linear attention: from token to token, the state of each head of v, a matrix S, becomes exp(decay) S + k e^T, where e is " +
			"beta v or, with delta, beta (v - (exp(decay) S)^T k); o = S^T (scale q). Before the first token of a document, S is 0.",
		Operands: []Operand{
			{Name: "o", Dir: Write, Types: "T", Dims: "n*batch,heads*shared*value_dim"},
			{Name: "next", Dir: Write, Types: "f32", Dims: "batch,heads*shared,key_dim,value_dim", Spare: true, Doc: "the state after the last token"},
			{Name: "q", Types: "T", Dims: "n*batch,heads*key_dim"},
			{Name: "k", Types: "T", Dims: "n*batch,heads*key_dim"},
			{Name: "v", Types: "T", Dims: "n*batch,heads*shared*value_dim"},
			operandDecay, operandBeta, operandState, operandDocuments,
		},
		Attrs: []AttrInfo{attrScanHeads, attrShared, attrKeyDim, attrValueDim, attrBatch, attrChannels, attrDelta, attrHeadNorm, attrQueryBy},
		Rule:  RuleScan, Work: WorkScan,
		Source: "Yang, Kautz, Hatamizadeh 2024, Gated Delta Networks; by channel: Kimi Team 2025, Kimi Linear; without delta: Dao, Gu 2024, Mamba-2",
	},
	ScanGrad: {
		Name: "scan_grad", Class: ClassKernel, Streams: onCompute,
		Doc: "Computes the gradients of scan. dq and dk are sums over the heads of v that share q and k.",
		Operands: []Operand{
			{Name: "dq", Dir: Write, Types: "T", Dims: "n*batch,heads*key_dim", Spare: true},
			{Name: "dk", Dir: Write, Types: "T", Dims: "n*batch,heads*key_dim", Spare: true},
			{Name: "dv", Dir: Write, Types: "T", Dims: "n*batch,heads*shared*value_dim", Spare: true},
			{Name: "ddecay", Dir: Write, Types: "f32", Dims: "n*batch,heads*shared*channels", Spare: true},
			{Name: "dbeta", Dir: Write, Types: "f32", Dims: "n*batch,heads*shared", Spare: true},
			{Name: "dstate", Dir: Write, Types: "f32", Dims: "batch,heads*shared,key_dim,value_dim", Spare: true},
			{Name: "do", Types: "T", Dims: "n*batch,heads*shared*value_dim"},
			{Name: "dnext", Types: "f32", Dims: "batch,heads*shared,key_dim,value_dim", Optional: true, Doc: "absent: 0"},
			{Name: "q", Types: "T", Dims: "n*batch,heads*key_dim"},
			{Name: "k", Types: "T", Dims: "n*batch,heads*key_dim"},
			{Name: "v", Types: "T", Dims: "n*batch,heads*shared*value_dim"},
			operandDecay, operandBeta, operandState, operandDocuments,
		},
		Attrs: []AttrInfo{attrScanHeads, attrShared, attrKeyDim, attrValueDim, attrBatch, attrChannels, attrDelta, attrHeadNorm, attrQueryBy},
		Rule:  RuleScan, Work: WorkScanGrad,
	},
	Conv: {
		Name: "conv", Class: ClassKernel, Streams: onCompute,
		Doc: "Convolves each column over the last tokens of the document: y = silu(bias + the sum over j < width of w[j] times the x of j tokens before), added in f32 in this order. " +
			"next holds the last rows of tail and x, for the tokens that follow.",
		Operands: []Operand{
			{Name: "y", Dir: Write, Types: "T", Dims: "n*batch,c"},
			{Name: "next", Dir: Write, Types: "T", Dims: "width*batch,c", Spare: true},
			{Name: "x", Types: "T", Dims: "n*batch,c"},
			{Name: "w", Types: "T", Dims: "c,width", Doc: "column width-1-j has w[j], as in PyTorch"},
			{Name: "bias", Types: "T", Dims: "c", Optional: true},
			operandTail, operandDocuments,
		},
		Attrs: []AttrInfo{attrWidth, attrBatch},
		Work:  WorkMemory, Source: "Poli et al. 2023, Hyena; as in Mamba",
	},
	ConvGrad: {
		Name: "conv_grad", Class: ClassKernel, Streams: onCompute,
		Doc: "Computes the gradients of conv. dnext is added to those of the last rows.",
		Operands: []Operand{
			{Name: "dx", Dir: Write, Types: "T", Dims: "n*batch,c", Spare: true},
			{Name: "dw", Dir: WriteOrAdd, Types: "f32", Dims: "c,width", Optional: true},
			{Name: "dbias", Dir: WriteOrAdd, Types: "f32", Dims: "c", Optional: true},
			{Name: "dtail", Dir: Write, Types: "f32", Dims: "width*batch,c", Spare: true},
			{Name: "dy", Types: "T", Dims: "n*batch,c"},
			{Name: "dnext", Types: "f32", Dims: "width*batch,c", Optional: true, Doc: "absent: 0"},
			{Name: "x", Types: "T", Dims: "n*batch,c"},
			{Name: "w", Types: "T", Dims: "c,width"},
			{Name: "bias", Types: "T", Dims: "c", Optional: true},
			operandTail, operandDocuments,
		},
		Attrs: []AttrInfo{attrWidth, attrBatch, attrAccumulate},
		Work:  WorkMemory,
	},
	Decay: {
		Name: "decay", Class: ClassKernel, Streams: onCompute,
		Doc: "step = max(least, ln(1 + exp(x + bias))); y = -exp(rate) step. All columns of a head have one rate.",
		Operands: []Operand{
			{Name: "y", Dir: Write, Types: "f32", Dims: "r,heads*head_dim", Spare: true, Doc: "the decay of scan"},
			{Name: "step", Dir: Write, Types: "f32", Dims: "r,heads*head_dim", Optional: true, Spare: true, Doc: "the beta of scan in Mamba-2"},
			{Name: "x", Types: "T", Dims: "r,heads*head_dim"},
			{Name: "rate", Types: "F", Dims: "heads"},
			{Name: "bias", Types: "F", Dims: "heads*head_dim"},
		},
		Attrs: []AttrInfo{attrDecayHeads, attrHeadDim, attrLeast},
		Work:  WorkMemory, Source: "Gu, Dao 2023, Mamba; Yang, Kautz, Hatamizadeh 2024",
	},
	DecayGrad: {
		Name: "decay_grad", Class: ClassKernel, Streams: onCompute,
		Doc: "Computes the gradients of decay. Sums are over rows.",
		Operands: []Operand{
			{Name: "dx", Dir: Write, Types: "T", Dims: "r,heads*head_dim", Spare: true},
			{Name: "drate", Dir: WriteOrAdd, Types: "f32", Dims: "heads", Optional: true},
			{Name: "dbias", Dir: WriteOrAdd, Types: "f32", Dims: "heads*head_dim", Optional: true},
			{Name: "dy", Types: "f32", Dims: "r,heads*head_dim"},
			{Name: "dstep", Types: "f32", Dims: "r,heads*head_dim", Optional: true, Doc: "absent: 0"},
			{Name: "x", Types: "T", Dims: "r,heads*head_dim"},
			{Name: "rate", Types: "F", Dims: "heads"},
			{Name: "bias", Types: "F", Dims: "heads*head_dim"},
		},
		Attrs: []AttrInfo{attrDecayHeads, attrHeadDim, attrLeast, attrAccumulate},
		Work:  WorkMemory,
	},
	ExpertCounts: {
		Name: "expert_counts", Class: ClassKernel, Streams: onCompute,
		Doc: "Counts, for each sequence, the tokens that have an expert among those with the highest logits; of equal logits, that of " +
			"the lower number counts first.",
		Operands: []Operand{
			{Name: "counts", Dir: WriteOrAdd, Types: "f32", Dims: "batch,e"},
			{Name: "logits", Types: "F", Dims: "n*batch,e"},
		},
		Attrs: []AttrInfo{attrTop, attrBatch, attrAccumulate},
		Rule:  RuleRouterLoss, Work: WorkMemory, Source: "DeepSeek-AI 2024, DeepSeek-V3, equation 18",
	},
	RouterLossGrad: {
		Name: "router_loss_grad", Class: ClassKernel, Streams: onCompute,
		Doc: "Gradient with respect to a router's logits of z/2 times the square of the logarithm of the sum of a row's exponentials, and of balance " +
			"times the sum over experts of counts times probability. Probabilities are the softmax of the logits or, with scores = 1, their " +
			"sigmoids divided by the sum of these.",
		Operands: []Operand{
			{Name: "dlogits", Dir: Write, Types: "F", Dims: "n*batch,e"},
			{Name: "logits", Types: "F", Dims: "n*batch,e"},
			{Name: "counts", Types: "f32", Dims: "batch,e", Optional: true, Doc: "of the whole sequences, from expert_counts; absent: there is no second loss"},
		},
		Attrs: []AttrInfo{attrScores, attrBatch,
			{"z", KindFactor, "twice the coefficient of the first loss", ScopeJob},
			{"balance", KindFactor, "coefficient of the second loss", ScopeJob}},
		Rule: RuleRouterLoss, Work: WorkMemory,
		Source: "z: Zoph et al. 2022, ST-MoE, equation 5; balance: DeepSeek-AI 2024, DeepSeek-V3, equations 17 to 20",
	},
	ScaleColumns: {
		Name: "scale_columns", Class: ClassKernel, Streams: onCompute,
		Doc: "Multiplies the columns of each head by its factor.",
		Operands: []Operand{
			{Name: "y", Dir: Write, Types: "T", Dims: "r,heads*head_dim"},
			{Name: "x", Types: "T", Dims: "r,heads*head_dim"},
			{Name: "factor", Types: "F", Dims: "heads"},
		},
		Attrs: []AttrInfo{attrDecayHeads, attrHeadDim},
		Work:  WorkMemory,
	},
	ScaleColumnsGrad: {
		Name: "scale_columns_grad", Class: ClassKernel, Streams: onCompute,
		Doc: "Computes the gradients of scale_columns. dfactor is a sum over rows and over the columns of a head.",
		Operands: []Operand{
			{Name: "dx", Dir: Write, Types: "T", Dims: "r,heads*head_dim", Spare: true},
			{Name: "dfactor", Dir: WriteOrAdd, Types: "f32", Dims: "heads", Optional: true},
			{Name: "dy", Types: "T", Dims: "r,heads*head_dim"},
			{Name: "x", Types: "T", Dims: "r,heads*head_dim"},
			{Name: "factor", Types: "F", Dims: "heads"},
		},
		Attrs: []AttrInfo{attrDecayHeads, attrHeadDim, attrAccumulate},
		Work:  WorkMemory,
	},
	ExpertLoad: {
		Name: "expert_load", Class: ClassKernel, Streams: onCompute,
		Doc: "Counts the rows that each expert has been chosen for.",
		Operands: []Operand{
			{Name: "load", Dir: WriteOrAdd, Types: "f32", Dims: "e", Doc: "exact up to 2^24"},
			{Name: "experts", Types: "i32", Dims: "r,top", Doc: "from route"},
		},
		Attrs: []AttrInfo{attrAccumulate},
		Work:  WorkMemory,
	},
	ExpertBias: {
		Name: "expert_bias", Class: ClassKernel, Streams: onCompute,
		Doc: "Moves what is added to the scores of experts towards equal loads: w += rate for experts whose load is below the mean, w -= rate " +
			"for those above it. If the factor in norm is negative, w stays as it is.",
		Operands: []Operand{
			{Name: "w", Dir: ReadWrite, Types: "f32", Dims: "e"},
			{Name: "load", Types: "f32", Dims: "e", Doc: "from expert_load, summed over all ranks that count other tokens"},
			{Name: "norm", Types: "f32", Dims: "2", Doc: "from grad_norm"},
		},
		Attrs:   []AttrInfo{{"rate", KindFloat, "", ScopeJob}},
		Updates: true, Rule: RuleUpdate, Work: WorkMemory,
		Source: "Wang et al. 2024, Auxiliary-Loss-Free Load Balancing; DeepSeek-AI 2024, DeepSeek-V3, section 2.1.2",
	},
	ConcatHeads: {
		Name: "concat_heads", Class: ClassKernel, Streams: onCompute,
		Doc: "Puts in each head of y the columns of shared, then those of the head of x.",
		Operands: []Operand{
			{Name: "y", Dir: Write, Types: "T", Dims: "r,heads*head_dim"},
			{Name: "shared", Types: "T", Dims: "r,first"},
			{Name: "x", Types: "T", Dims: "r,heads*rest", Doc: "first + rest = head_dim"},
		},
		Attrs: []AttrInfo{attrHeads, attrHeadDim},
		Rule:  RuleConcat, Work: WorkMemory, Source: "DeepSeek-AI 2024, DeepSeek-V2, equations 15 and 16",
	},
	ConcatHeadsGrad: {
		Name: "concat_heads_grad", Class: ClassKernel, Streams: onCompute,
		Doc: "dshared = the sum over heads, in f32 and in order, of the first columns of dy; dx = the others.",
		Operands: []Operand{
			{Name: "dshared", Dir: Write, Types: "T", Dims: "r,first", Spare: true},
			{Name: "dx", Dir: Write, Types: "T", Dims: "r,heads*rest", Spare: true},
			{Name: "dy", Types: "F", Dims: "r,heads*head_dim"},
		},
		Attrs: []AttrInfo{attrHeads, attrHeadDim},
		Rule:  RuleConcat, Work: WorkMemory,
	},
}

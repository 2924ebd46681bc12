// Package ir is the interface between the compiler and the VM: the opcode table, programs, their
// binary and text formats, and the verifier.
//
// All files use the table in op.go. program.go and instr.go define programs, and check.go decides
// whether a program is well formed. encode.go and decode.go implement the binary format, text.go
// and parse.go the text format. verify.go and the other verify files decide whether a program is
// correct. explain.go writes the reference page. The package does not depend on specs, plans or
// devices.
package ir

import "math"

// DType is the type of the elements of a view.
type DType uint8

// Element types. BF16 is the upper half of an F32, rounded to nearest even.
const (
	F32 DType = iota
	BF16
	I32
	U8
	NumDTypes
)

var dtypes = [NumDTypes]struct {
	name  string
	bytes Bytes
}{{"f32", 4}, {"bf16", 2}, {"i32", 4}, {"u8", 1}}

func (d DType) String() string { return dtypes[d].name }

// Bytes returns the size of one element.
func (d DType) Bytes() Bytes { return dtypes[d].bytes }

// Arena is one of the two allocations of a rank.
type Arena uint8

// Arenas: device memory, and host memory pinned for copies.
const (
	Device Arena = iota
	Host
	NumArenas
)

func (a Arena) String() string { return [...]string{"device", "host"}[a] }

// Stream is an in-order queue of a rank. Streams run concurrently, ordered only by events.
type Stream uint8

// Streams of every rank. Each combination of direction and neighbour has its own stream for messages, so that
// a message that waits for its peer delays nothing else.
const (
	Compute  Stream = iota
	D2H             // offload
	H2D             // reload
	Coll            // collectives
	SendNext        // activations to the next stage
	RecvPrev        // activations from the previous stage
	SendPrev        // gradients to the previous stage
	RecvNext        // gradients from the next stage
	Mux             // shared work: outgoing, to any rank
	MuxIn           // shared work: incoming
	Params          // collectives of weights and gradients among replicas, which may take longer than a layer
	NumStreams
)

var streamNames = [NumStreams]string{"compute", "d2h", "h2d", "coll", "send_next", "recv_prev", "send_prev", "recv_next", "mux", "mux_in", "params"}

func (s Stream) String() string { return streamNames[s] }

// Alignment divides the offset of every placed buffer. It is a multiple of the cache-line size and suits GPU
// copies.
const Alignment Bytes = 256

// Buffer is a named range of an arena. Two buffers with disjoint lifetimes may share bytes.
type Buffer struct {
	Name   string
	Arena  Arena
	Offset Bytes
	Size   Bytes
}

// MaxDims is the largest number of dimensions of a view.
const MaxDims = 4

// NoBuffer marks an absent optional operand.
const NoBuffer = ^uint32(0)

// View is a contiguous row-major piece of a buffer. Unused dimensions are 0.
type View struct {
	Offset Bytes // from the start of the buffer
	Shape  [MaxDims]int64
	Buffer uint32 // index into Code.Buffers, or NoBuffer
	DType  DType
}

// Absent returns the view of an optional operand that is not given.
func Absent() View { return View{Buffer: NoBuffer} }

// Present reports whether an operand is given.
func (v View) Present() bool { return v.Buffer != NoBuffer }

// Dims returns the dimensions in use.
func (v View) Dims() []int64 {
	n := 0
	for n < MaxDims && v.Shape[n] != 0 {
		n++
	}
	return v.Shape[:n]
}

// Elements returns the product of the dimensions, saturated. It is 0 for an absent view.
func (v View) Elements() int64 {
	if !v.Present() || v.Shape[0] == 0 {
		return 0
	}
	return product(v.Dims())
}

func product(dims []int64) int64 {
	n := int64(1)
	for _, d := range dims {
		n = times(n, d)
	}
	return n
}

// Bytes returns the extent of the view, saturated.
func (v View) Bytes() Bytes { return times(Bytes(v.Elements()), v.DType.Bytes()) }

// Rows returns the product of all dimensions except the last. Rows and Cols treat the view as a matrix.
func (v View) Rows() int64 {
	d := v.Dims()
	if len(d) == 0 {
		return 0
	}
	return product(d[:len(d)-1])
}

// Cols returns the last dimension.
func (v View) Cols() int64 {
	d := v.Dims()
	if len(d) == 0 {
		return 0
	}
	return d[len(d)-1]
}

// Phase is the part of training that an instruction belongs to.
type Phase uint8

// Phases, in the order in which they occur in a run, except for PhaseWeights.
const (
	PhaseInit Phase = iota
	PhaseForward
	PhaseBackward
	PhaseOptimizer
	PhaseEval
	PhaseWeights // weight gradients computed in tasks separate from the backward pass
	NumPhases
)

var phaseNames = [NumPhases]string{"init", "forward", "backward", "optimizer", "eval", "weights"}

func (p Phase) String() string { return phaseNames[p] }

// OfTask reports whether instructions of the phase belong to a task of the pipeline: a forward pass, a backward
// pass or a weight gradient.
func (p Phase) OfTask() bool {
	return p == PhaseForward || p == PhaseBackward || p == PhaseWeights
}

// None is the value of a provenance field that does not apply.
const None = -1

// Provenance is the origin of an instruction.
type Provenance struct {
	Microbatch  int32  // index within the replica, or None
	Subsequence int32  // or None
	Layer       int32  // global index, or None
	Stage       int16  // virtual stage
	Line        uint16 // index into Program.Lines: the spec line
	Pass        uint8  // index into Program.Passes: the pass that made the decision
	Phase       Phase
}

// Section is a straight-line part of a program. At its end, the VM waits for all streams.
type Section uint8

// Sections, which run once at the start, once per step, and once per EvalSequences sequences of a validation,
// respectively.
const (
	SectionInit Section = iota
	SectionStep
	SectionEval
	NumSections
)

var sectionNames = [NumSections]string{"init", "step", "eval"}

func (s Section) String() string { return sectionNames[s] }

// Code holds the instructions, buffers and addresses shared by ranks that do the same work.
type Code struct {
	Name     string
	Buffers  []Buffer
	Arenas   [NumArenas]Bytes // end of the highest buffer in each arena: the exact peak
	Sections [NumSections][]Instr
	Events   [NumSections]int32 // number of events each section uses
	States   []State            // persistent state, as in a checkpoint
	Results  []Result           // views that the VM fills before a section or reads after it
}

// Role is the part of a tensor's state that a persistent buffer holds.
type Role uint8

// Roles. The weight is read by the forward pass; the master is its f32 original if the weight is bf16 (f32
// weights have no master). Optimizers keep the moments and the momentum. New roles are appended, because files
// store roles by number.
const (
	RoleWeight Role = iota
	RoleMaster
	RoleMoment1
	RoleMoment2
	RoleGrad
	RoleMomentum
	NumRoles
)

// roles gives the name of each role, and the use of memory that the role's buffers count toward.
var roles = [NumRoles]struct {
	name string
	part Part
}{
	RoleWeight:   {"weight", PartWeights},
	RoleMaster:   {"master", PartOptimizer},
	RoleMoment1:  {"moment1", PartOptimizer},
	RoleMoment2:  {"moment2", PartOptimizer},
	RoleGrad:     {"grad", PartGradients},
	RoleMomentum: {"momentum", PartOptimizer},
}

func (r Role) String() string { return roles[r].name }

// roleNames lists the names of roles, in order.
func roleNames() (names []string) {
	for _, r := range roles {
		names = append(names, r.name)
	}
	return names
}

// Tensor is a complete parameter of the model.
type Tensor struct {
	Name  string   `json:"name"`
	Shape [2]int64 `json:"shape"` // vectors are {n, 1}; without padding
}

// State describes the rectangle of a tensor that a rank holds. Row i, column j of the view is element
// (Row0+i, Col0+j) of the tensor; elements beyond the tensor's shape are padding, as are rows from End on unless
// End is 0.
type State struct {
	Tensor int32
	Role   Role
	View   View
	Row0   Attr
	Col0   Attr
	End    Attr
}

// EndOf returns the first row of a tensor that a state does not hold, or an init_normal instruction does not
// initialise, given the value of its attribute end.
func (t *Tensor) EndOf(end int64) int64 {
	if end == 0 {
		return t.Shape[0]
	}
	return min(end, t.Shape[0])
}

// extent returns the number of rows and columns that a state holds; a vector is a column.
func (s *State) extent() (rows, cols int64) {
	if len(s.View.Dims()) == 1 {
		return s.View.Cols(), 1
	}
	return s.View.Rows(), s.View.Cols()
}

// Result names a view that the VM reads or fills.
type Result struct {
	Name string
	View View
}

// Names of results. ResultStep is filled by the VM before each step: {learning rate, 1/(1-beta1^t),
// 1/(1-beta2^t)}. If the optimizer has no betas, they are taken to be 0. ResultWeight and ResultEvalWeight are
// filled before each step and each eval section, respectively, in programs whose labels may be masked.
// ResultSpike and ResultDropout, if a program has them, are filled before each step with the largest gradient
// norm at which weights are still updated, and with the key of the step's dropout, respectively.
const (
	ResultLoss     = "loss"        // f32 [1]: mean over the tokens of the batch
	ResultEvalLoss = "eval_loss"   // f32 [1]: mean over all tokens in the sequences of one eval section
	ResultLosses   = "eval_losses" // f32 [n]: loss of each token in a replica's sequences in one eval section, in the order of the replica's labels
	ResultGradNorm = "grad_norm"   // f32 [2]: global norm before clipping, and the factor applied (negative if the step was skipped)
	ResultSpike    = "spike"       // f32 [1]
	ResultStep     = "step"        // f32 [3]
	ResultDropout  = "dropout"     // i32 [2]: a 64-bit key, lower half first

	ResultWeight     = "weight"      // f32 [1]: 1 / number of labels in the batch that are included in the loss
	ResultEvalWeight = "eval_weight" // f32 [1]: 1 / number of labels in the eval section that are included in the loss

	ResultExpertLoad = "expert_load" // f32 [layers*experts]: how often tokens of the batch chose each expert of each layer; 0 in layers without experts
)

// Rank is one rank of a job. Ranks with the same code differ in their constants and groups.
type Rank struct {
	Code       int32
	Consts     []int64   // values of Program.Consts
	Groups     [][]int32 // for each of Program.Groups: members of this rank's group, in order; empty if the rank has no such group
	DP, PP, SP int32     // coordinates, for reports
}

// Run describes the training run for the VM.
type Run struct {
	Sequence      int64    `json:"sequence"`
	Batch         int      `json:"batch"`          // sequences per step, over all replicas
	EvalSequences int      `json:"eval_sequences"` // sequences in one eval section, over all replicas
	EvalBatch     int      `json:"eval_batch"`     // sequences in a validation; eval sections run until all are covered
	EvalEvery     int      `json:"eval_every"`
	Steps         int      `json:"steps"`
	Seed          int64    `json:"seed"`
	Vocab         int      `json:"vocab"`
	LR            float64  `json:"lr"`
	MinLR         float64  `json:"min_lr"`
	Warmup        int      `json:"warmup"`
	LRSchedule    string   `json:"lr_schedule"` // one of LRSchedules; empty: constant
	DecaySteps    int      `json:"decay_steps"` // of warmup_stable_decay
	DecayType     string   `json:"decay_type"`  // cosine | linear | sqrt, of warmup_stable_decay
	Beta1         float64  `json:"beta1"`
	Beta2         float64  `json:"beta2"`
	Spikes        float64  `json:"spikes"`      // a step is skipped if its gradient norm exceeds this multiple of the median; 0: no limit
	MaxSkipped    int      `json:"max_skipped"` // maximum number of consecutive steps that may be skipped; 0: no limit
	DataKind      string   `json:"data_kind"`   // text | tokens | random
	DataFiles     []string `json:"data_files"`
	Holdout       float64  `json:"holdout"`

	DataOptions *DataOptions `json:"data_options"` // for data_kind tokens

	// How a step changes weights, in addition to the learning rate and the betas. Instructions have these numbers as attributes, which
	// package meaning compares with them. Numbers that the optimizer does not use are 0.
	Optimizer   string   `json:"optimizer,omitempty"` // adamw | sgd | muon; empty: a hand-written or older program lacks these numbers
	Momentum    float64  `json:"momentum,omitempty"`
	Eps         float64  `json:"eps,omitempty"`
	WeightDecay float64  `json:"weight_decay,omitempty"`
	NoDecay     []string `json:"no_decay,omitempty"` // groups of tensors without weight decay, named as in lang.TensorGroups
	MaxNorm     float64  `json:"max_norm,omitempty"` // limit of the gradient's norm; 0: none
	Frozen      []string `json:"frozen,omitempty"`   // tensors that are not trained
	BiasRate    float64  `json:"moe_router_bias_update_rate,omitempty"`

	// What else determines the gradients of a step.
	RouterAuxLoss float64 `json:"router_aux_loss_coef,omitempty"`
	AuxLoss       string  `json:"aux_loss,omitempty"` // layer | joint; empty: none
	RouterZLoss   float64 `json:"router_z_loss_coef,omitempty"`
	GradReduce    string  `json:"grad_reduce,omitempty"` // bf16; empty: f32

	Rotations []Rotation `json:"rotations"` // rotations for rope, in addition to the plain one by theta

	// Sums lists the decisions that determine the order in which numbers are added. On the same kind of device,
	// programs that train the same model and have equal lists give the same bits. A hand-written program may
	// lack the list.
	Sums []string `json:"sums,omitempty"`
}

// LRSchedules lists the learning-rate schedules after the warm-up, under the names that the transformers
// library gives them. All except constant fall to MinLR by the last step: linear and cosine from the end of
// the warm-up onwards, warmup_stable_decay over the last DecaySteps steps.
var LRSchedules = []string{"constant", "linear", "cosine", LRStableDecay}

// LRStableDecay is the schedule that uses DecaySteps and DecayType.
const LRStableDecay = "warmup_stable_decay"

// DataOptions sets how token files are read; package corpus documents the options.
type DataOptions struct {
	Type      string    `json:"type"`   // auto | uint16 | uint32
	Header    string    `json:"header"` // auto | none | llmc
	Shuffle   bool      `json:"shuffle"`
	Weights   []float64 `json:"weights"`   // one for each pattern in DataFiles; empty: one stream
	Tokenizer string    `json:"tokenizer"` // for text and jsonl; resolved like DataFiles
	Field     string    `json:"field"`     // of jsonl
	AppendEOS bool      `json:"append_eos"`
	Documents string    `json:"documents"` // off | index | the ID of the token that ends a document; attention stays inside each document
	Pack      string    `json:"pack"`      // cut | whole: whether documents are cut at the end of a sequence
	Masks     string    `json:"masks"`     // off | on | ignore
}

// Packs reports whether a sequence may contain several documents.
func (o *DataOptions) Packs() bool { return o != nil && o.Documents != "" && o.Documents != "off" }

// Marked reports whether labels may be masked, at the ends of documents or by masks.
func (o *DataOptions) Marked() bool { return o.Packs() || o != nil && o.Masks == "on" }

// Rotation describes how rope rotates each head. It rotates the pair (i, i+len(Rates)) by Rates[i]
// radians per token. Elements after the last pair are not rotated.
type Rotation struct {
	Rates []float64 `json:"rates"`
	Scale float64   `json:"scale"` // factor applied to the rotated elements
	Rest  float64   `json:"rest"`  // factor applied to the other elements

	// If Beta is not 0, all elements are also multiplied by 1 + Beta ln(1 + floor(position / Period)).
	Beta   float64 `json:"beta,omitempty"`
	Period int64   `json:"period,omitempty"` // tokens
}

// Rotation returns the rotation of a rope instruction. A rotation by theta rotates entire heads.
func (in *Instr) Rotation(run *Run) Rotation {
	if i := in.Attr("rotation").Bits; i > 0 {
		return run.Rotations[i-1]
	}
	dim, theta := int64(in.Attr("head_dim").Bits), math.Float64frombits(in.Attr("theta").Bits)
	r := Rotation{Scale: 1, Rest: 1}
	for i := range dim / 2 {
		r.Rates = append(r.Rates, math.Pow(theta, -2*float64(i)/float64(dim)))
	}
	return r
}

// Program is one training job for all of its ranks. It needs no spec and no plan to run.
type Program struct {
	Name       string
	Run        Run
	Model      Model
	Machine    Machine
	FlopsModel float64  // model FLOPs of a step over all ranks, with causal attention; MFU is computed from them
	Lines      []string // spec lines that instructions refer to: "file:line: text"
	Passes     []string
	Consts     []string // names of per-rank constants
	Groups     []string // names of communication groups
	Tensors    []Tensor
	Codes      []Code
	Ranks      []Rank
}

package lang

import "slices"

// Spec is a checked specification: every name is resolved, every value is in the base unit of its dimension
// (tokens, bytes, bytes per second, FLOP per second, seconds). It consists of plain values, so that a Plan
// can contain parts of it and can be read back without the file.
type Spec struct {
	File     string // as given on the command line
	Name     string // name of the schedule block, for reports
	Model    Model
	Cluster  Cluster
	Train    Train
	Schedule Schedule

	source *source // positions and text, for diagnostics of later phases
}

// Values of model keys that other packages use.
const (
	LayerNorm   = "layernorm"
	RMSNorm     = "rmsnorm"
	NormPre     = "pre"      // x + f(norm(x))
	NormPost    = "post"     // x + norm(f(x))
	NormPrePost = "pre_post" // x + norm(f(norm(x)))
	QKNormNone  = "none"
	QKNormHead  = "head" // each head separately
	QKNormAll   = "all"  // all heads of a token together
	BiasQKV     = "qkv"
	BiasAttnOut = "attn_out"
	BiasMLP     = "mlp"
)

// Position encodings.
const (
	PositionsLearned = "learned" // a learned table of Train.Sequence rows, added to the embedding
	PositionsRope    = "rope"    // rotary embedding of Q and K
	PositionsNone    = "none"
)

// Model describes the neural network. All sizes are those of the whole model, before it is divided
// over ranks. It has the same fields as ir.Model, so that values can be converted. Fields that
// change the computed function are part of the identity of an ir.Model.
type Model struct {
	Name   string `json:"name"`
	Family string `json:"family"` // the family that supplied the defaults; apart from that, only all-linear depends on it

	Layers  int    `json:"layers"`
	Hidden  int    `json:"hidden"`
	Heads   int    `json:"heads"`
	KVHeads int    `json:"kv_heads"` // = Heads unless grouped-query attention
	HeadDim int    `json:"head_dim"` // = Hidden/Heads unless given
	FFN     int    `json:"ffn"`      // width of the MLP
	Vocab   int    `json:"vocab"`    // as given; codegen pads it to SP
	DType   string `json:"dtype"`    // f32 | bf16: storage of weights and activations

	Norm       string   `json:"norm"`        // rmsnorm | layernorm
	NormOffset float64  `json:"norm_offset"` // added to a norm's weights
	NormPlace  string   `json:"norm_place"`  // pre | post | pre_post: position in a residual branch
	NormEps    float64  `json:"norm_eps"`
	Activation string   `json:"activation"` // one of ir.Functions
	Gated      bool     `json:"gated"`      // the MLP multiplies by the activation of a gate
	Bias       []string `json:"bias"`       // subset of qkv, attn_out, mlp, in this order
	QKNorm     string   `json:"qk_norm"`    // none | head | all: RMSNorm of queries and keys

	Positions       string   `json:"positions"`        // learned | rope | none
	PositionPattern []string `json:"position_pattern"` // rope | none for each layer, repeated; empty: Positions in all layers
	RopeTheta       float64  `json:"rope_theta"`       // base of the rotary frequencies
	RopeLocalTheta  float64  `json:"rope_local_theta"` // base in layers with a window, which are then not scaled; 0: as in other layers
	RopePartial     float64  `json:"rope_partial"`     // share of a head that is rotated
	RopeScaling     string   `json:"rope_scaling"`     // none | linear | llama3 | yarn | longrope

	// Fields that RopeScaling does not use are 0, false or empty.
	RopeFactor    float64   `json:"rope_factor"`
	RopeOriginal  int       `json:"rope_original"` // tokens
	RopeLow       float64   `json:"rope_low"`
	RopeHigh      float64   `json:"rope_high"`
	RopeFast      float64   `json:"rope_fast"`
	RopeSlow      float64   `json:"rope_slow"`
	RopeTruncate  bool      `json:"rope_truncate"`
	RopeAmplitude float64   `json:"rope_amplitude"` // 1 unless scaled
	RopeShort     []float64 `json:"rope_short"`
	RopeLong      []float64 `json:"rope_long"`

	Windows      []int64 `json:"windows"`       // tokens that a query attends to, including its own; 0: all. The list repeats over the layers; empty: all
	AttnScale    float64 `json:"attn_scale"`    // factor of attention scores
	AttnSoftcap  float64 `json:"attn_softcap"`  // bound on attention scores; 0: none
	LogitSoftcap float64 `json:"logit_softcap"` // 0: none
	EmbedScale   float64 `json:"embed_scale"`   // factor of the embedding's result
	Tied         bool    `json:"tied"`          // output projection shares the embedding

	InitStd float64 `json:"init_std"` // standard deviation of weight matrices and embeddings; divided by sqrt(2*Layers) for output projections of a layer

	Adapter        string   `json:"adapter,omitempty"` // lora; empty: none
	AdapterRank    int      `json:"adapter_rank,omitempty"`
	AdapterAlpha   float64  `json:"adapter_alpha,omitempty"`
	AdapterDropout float64  `json:"adapter_dropout,omitempty"` // share of the elements of an adapter's input that a step drops
	AdapterTargets []string `json:"adapter_targets,omitempty"` // linear maps of layers that have one, by the names of lang.LinearMap
}

// Rotates reports whether a layer rotates queries and keys by their position.
func (m *Model) Rotates(layer int) bool {
	if n := len(m.PositionPattern); n > 0 {
		return m.PositionPattern[layer%n] == PositionsRope
	}
	return m.Positions == PositionsRope
}

// HasBias reports whether the linear maps of a group have biases.
func (m *Model) HasBias(group string) bool { return slices.Contains(m.Bias, group) }

// NormsBefore and NormsAfter report whether a residual branch has a norm before and after its function.
func (m *Model) NormsBefore() bool { return m.NormPlace != NormPost }
func (m *Model) NormsAfter() bool  { return m.NormPlace != NormPre }

// CurvePoint is one measured efficiency, {size, share}: the share of the peak that an operation with this number of
// rows reaches. It is an alias of a plain type, so that Cluster can be converted to ir.Machine.
type CurvePoint = [2]float64

// Cluster describes the machines. It has the same fields as ir.Machine, so that values can be converted.
type Cluster struct {
	Name                 string       `json:"name"`
	Nodes                int          `json:"nodes"`
	GPUsPerNode          int          `json:"gpus_per_node"`
	DeviceMemory         int64        `json:"device_memory"`          // bytes of a GPU available to its arena
	HostMemory           int64        `json:"host_memory"`            // bytes of a node available to the host arenas of all its ranks
	PeakBF16             float64      `json:"peak_bf16"`              // FLOP/s, dense
	PeakF32              float64      `json:"peak_f32"`               // FLOP/s
	MemoryBandwidth      float64      `json:"memory_bandwidth"`       // bytes/s of device memory
	D2HBandwidth         float64      `json:"d2h_bandwidth"`          // bytes/s per GPU
	H2DBandwidth         float64      `json:"h2d_bandwidth"`          // bytes/s per GPU
	NodeCopyBandwidth    float64      `json:"node_copy_bandwidth"`    // bytes/s that all GPUs of a node share, each way; 0: no shared limit
	CopyDuplex           string       `json:"copy_duplex"`            // full | half: copies in both directions at once, or one at a time
	Parallelism          float64      `json:"parallelism"`            // processors that the ranks of a node share; 0: each has its own
	SpreadEfficiency     float64      `json:"spread_efficiency"`      // share of the rate of several processors that a kernel reaches on them
	NVLinkBandwidth      float64      `json:"nvlink_bandwidth"`       // bytes/s per GPU inside a node, each way
	NodeNetworkBandwidth float64      `json:"node_network_bandwidth"` // bytes/s per node, each way
	NVLinkLatency        float64      `json:"nvlink_latency"`         // seconds
	NetworkLatency       float64      `json:"network_latency"`        // seconds
	KernelLatency        float64      `json:"kernel_latency"`         // seconds from one kernel of a stream to the next
	MatmulEfficiency     []CurvePoint `json:"matmul_efficiency"`      // share of peak by rows; one point means constant
	AttentionEfficiency  []CurvePoint `json:"attention_efficiency"`
	AttentionGradEff     []CurvePoint `json:"attention_grad_efficiency"`
	CopyEfficiency       float64      `json:"copy_efficiency"`       // share of MemoryBandwidth that memory-bound kernels reach
	CollectiveEfficiency float64      `json:"collective_efficiency"` // share of link bandwidth that collectives reach
}

// GPUs returns the number of devices, the maximum number of ranks of a job.
func (c Cluster) GPUs() int { return c.Nodes * c.GPUsPerNode }

// Unit returns the word for one device: GPU, or rank if the ranks of a node share its processors.
func (c Cluster) Unit() string {
	if c.Parallelism > 0 {
		return "CPU rank"
	}
	return "GPU"
}

// Optimizer describes how weights are updated from gradients. Settings that do not apply to the kind are 0.
type Optimizer struct {
	Kind        string  `json:"kind"` // adamw | sgd | muon
	LR          float64 `json:"lr"`
	Momentum    float64 `json:"momentum,omitempty"`
	Beta1       float64 `json:"beta1"`
	Beta2       float64 `json:"beta2"`
	Eps         float64 `json:"eps"`
	Moments     string  `json:"moments,omitempty"` // f32 | bf16: how states are stored
	WeightDecay float64 `json:"weight_decay"`
	NoDecay     Groups  `json:"no_decay"` // groups of tensors without weight decay
}

// Guard defines which steps are skipped.
type Guard struct {
	Spikes float64 `json:"spikes"` // times the median of gradient norms; 0: no limit
	Stop   int     `json:"stop"`   // skipped steps in a row that end the run
}

// Data is the source of tokens.
type Data struct {
	Kind  string   `json:"kind"`  // text: bytes of files, one token per byte | tokens | random: random tokens, for benchmarks
	Files []string `json:"files"` // as written, resolved against the spec's folder, globs not yet expanded

	Options *DataOptions `json:"options,omitempty"` // of tokens
}

// DataOptions sets how token files are read.
type DataOptions struct {
	Type      string    `json:"type"`   // auto | uint16 | uint32
	Header    string    `json:"header"` // auto | none | llmc
	Shuffle   bool      `json:"shuffle"`
	Weights   []float64 `json:"weights"`   // by pattern of Files; empty: one stream
	Tokenizer string    `json:"tokenizer"` // for text and jsonl; resolved like Files
	Field     string    `json:"field"`     // of jsonl
	AppendEOS bool      `json:"append_eos"`
	Documents string    `json:"documents"` // off | index | the ID of the token that ends a document; attention stays inside each document
	Pack      string    `json:"pack"`      // cut | whole: documents in sequences
	Masks     string    `json:"masks"`     // off | on | ignore
}

// Train is one training run.
type Train struct {
	Sequence   int64     `json:"sequence"` // tokens of one sample
	Batch      int       `json:"batch"`    // sequences per step, over all replicas
	Steps      int       `json:"steps"`
	Seed       int64     `json:"seed"`
	Optimizer  Optimizer `json:"optimizer"`
	Warmup     int       `json:"warmup"`                // steps of linear warm-up
	LRSchedule string    `json:"lr_schedule"`           // one of ir.LRSchedules
	MinLR      float64   `json:"min_lr"`                // of the last step, unless LRSchedule is constant
	DecaySteps int       `json:"decay_steps,omitempty"` // of warmup_stable_decay, otherwise 0
	DecayType  string    `json:"decay_type,omitempty"`  // cosine | linear | sqrt, of warmup_stable_decay
	GradClip   float64   `json:"grad_clip"`             // global L2 norm; 0: off
	Guard      Guard     `json:"guard"`
	Data       Data      `json:"data"`
	Holdout    float64   `json:"holdout"`          // share of the data, at its end, reserved for validation; 0: none
	EvalEvery  int       `json:"eval_every"`       // steps between validations; 0: only at the end
	EvalBatch  int       `json:"eval_batch"`       // sequences per validation; 0: none
	Freeze     []string  `json:"freeze,omitempty"` // tensors that are not trained: groups of FreezeGroups, or patterns of names
}

// Validates reports whether a run performs validation, which needs a holdout and at least one sequence.
func (t *Train) Validates() bool { return t.Holdout > 0 && t.EvalBatch > 0 }

// Offload is the policy for Type-1 activations.
type Offload struct {
	Policy string    `json:"policy"`          // auto none full adaptive carry memory ratio list
	Alpha  []float64 `json:"alpha,omitempty"` // ratio: one value; list: one per subsequence
}

// Subsequences is the requested division of a sequence.
type Subsequences struct {
	Auto    bool    `json:"auto,omitempty"`
	Count   int     `json:"count,omitempty"`
	Lengths []int64 `json:"lengths,omitempty"` // given explicitly; Count is their number
}

// Schedule has the values that the user fixed. If the passes choose a value, its integer is 0 or
// its string is "auto".
type Schedule struct {
	SP               int          `json:"sp"`
	PP               int          `json:"pp"`
	DP               int          `json:"dp"`
	SPMode           string       `json:"sp_mode"`                     // megatron | ulysses | ring | auto
	Zero             string       `json:"zero"`                        // 0 | 1 | 2 | 3 | auto
	OptimizerOffload string       `json:"optimizer_offload,omitempty"` // none | host | auto
	Microbatch       int          `json:"microbatch"`                  // sequences that one task processes together
	Subsequences     Subsequences `json:"subsequences"`
	Partition        string       `json:"partition"` // flops | length | time | auto
	Align            int          `json:"align"`     // 0: auto
	Keep             []string     `json:"keep"`      // k, v; nil: auto
	Order            string       `json:"order"`     // sequence | layer | auto
	Recompute        string       `json:"recompute"` // none full selective keep_attention auto
	Strategy         string       `json:"strategy"`  // sppo terapipe ... auto
	VirtualStages    int          `json:"virtual_stages"`
	Offload          Offload      `json:"offload"`
	Mux              string       `json:"mux"`                       // off left right on auto
	CheckpointCopy   string       `json:"checkpoint_copy,omitempty"` // off on
}

// SharesTasks reports whether mux is fixed to a value other than off, so that ranks take over parts
// of each other's tasks.
func (s *Schedule) SharesTasks() bool { return s.Mux != "" && s.Mux != "auto" && s.Mux != "off" }

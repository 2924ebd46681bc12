package lang

import (
	"slices"

	"sppo.dev/ir"
)

// Spec is a checked specification: every name is resolved, and every value is in the base unit of its
// dimension (tokens, bytes, bytes per second, FLOP per second, seconds). It consists of plain values, so
// that a Plan can contain parts of it and can be read back without the file.
type Spec struct {
	File     string // as given on the command line
	Model    Model
	Cluster  Cluster
	Train    Train
	Schedule Schedule

	source *source // positions and text, for diagnostics of later phases
}

// Values of model keys that other packages use.
const (
	LayerNorm     = "layernorm"
	RMSNorm       = "rmsnorm"
	NormPre       = "pre"      // x + f(norm(x))
	NormPost      = "post"     // x + norm(f(x))
	NormPrePost   = "pre_post" // x + norm(f(norm(x)))
	QKNormNone    = "none"
	QKNormHead    = "head"    // each head separately
	QKNormAll     = "all"     // all heads of a token together
	QKNormRotated = "rotated" // each head separately, after rotation
	BiasQKV       = "qkv"
	BiasAttnOut   = "attn_out"
	BiasMLP       = "mlp"
	BiasRouter    = "router"
	BiasExperts   = "experts"
)

// Position encodings.
const (
	PositionsLearned = "learned" // a learned table of Train.Sequence rows, added to the embedding
	PositionsRope    = "rope"    // rotary embedding of Q and K
	PositionsNone    = "none"
)

// Model describes the neural network. All sizes are those of the whole model, before it is divided among ranks.
type Model ir.Model

// Rotates reports whether a layer rotates queries and keys by their position.
func (m *Model) Rotates(layer int) bool {
	if n := len(m.PositionPattern); n > 0 {
		return m.PositionPattern[layer%n] == PositionsRope
	}
	return m.Positions == PositionsRope
}

// HasBias reports whether the linear maps of a group have biases.
func (m *Model) HasBias(group string) bool { return slices.Contains(m.Bias, group) }

// NormsBefore and NormsAfter report whether a residual branch has a norm before or after its function,
// respectively.
func (m *Model) NormsBefore() bool { return m.NormPlace != NormPost }
func (m *Model) NormsAfter() bool  { return m.NormPlace != NormPre }

// CurvePoint is one measured efficiency, {size, share}: an operation on that many rows reaches that share of
// the peak.
type CurvePoint = ir.CurvePoint

// Cluster describes the machines.
type Cluster ir.Machine

// GPUs returns the number of devices, which is also the maximum number of ranks of a job.
func (c Cluster) GPUs() int { return c.Nodes * c.GPUsPerNode }

// Unit returns the word for one device: GPU, or CPU rank if the ranks of a node share its processors.
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
	Spikes float64 `json:"spikes"` // largest gradient norm, as a multiple of the median; 0: no limit
	Stop   int     `json:"stop"`   // number of steps skipped in a row after which the run ends
}

// Data is the source of tokens.
type Data struct {
	Kind  string   `json:"kind"`  // text: each byte is a token | tokens: token files | random: random tokens
	Files []string `json:"files"` // resolved against the folder of the spec file; globs not yet expanded

	Options *DataOptions `json:"options,omitempty"` // only for kind tokens; otherwise nil
}

// DataOptions sets how token files are read.
type DataOptions = ir.DataOptions

// Train is one training run.
type Train struct {
	Sequence   int64     `json:"sequence"` // tokens of one sample
	Batch      int       `json:"batch"`    // sequences per step, over all replicas
	Steps      int       `json:"steps"`
	Seed       int64     `json:"seed"`
	Optimizer  Optimizer `json:"optimizer"`
	Warmup     int       `json:"warmup"`                // steps of linear warm-up
	LRSchedule string    `json:"lr_schedule"`           // one of ir.LRSchedules
	MinLR      float64   `json:"min_lr"`                // LR of the last step, unless LRSchedule is constant
	DecaySteps int       `json:"decay_steps,omitempty"` // only for warmup_stable_decay; otherwise 0
	DecayType  string    `json:"decay_type,omitempty"`  // cosine | linear | sqrt, only for warmup_stable_decay
	GradClip   float64   `json:"grad_clip"`             // global L2 norm; 0: off
	BiasRate   float64   `json:"moe_router_bias_update_rate,omitempty"`
	GradReduce string    `json:"grad_reduce,omitempty"` // f32 | bf16: how gradients are summed over ranks
	Guard      Guard     `json:"guard"`
	Data       Data      `json:"data"`
	Holdout    float64   `json:"holdout"`          // share of the data, at its end, reserved for validation; 0: none
	EvalEvery  int       `json:"eval_every"`       // steps between validations; 0: only at the end
	EvalBatch  int       `json:"eval_batch"`       // sequences per validation; 0: no validation
	Freeze     []string  `json:"freeze,omitempty"` // not trained: any of TensorGroups, or patterns of names
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

// Schedule holds the values that the user fixed. Values that the passes are to choose are 0, "auto" or nil.
type Schedule struct {
	SP               int          `json:"sp"`             // ranks of a stage
	Ring             int          `json:"ring,omitempty"` // the second number of sp, if it is a list: groups of ranks that divide heads
	PP               int          `json:"pp"`
	DP               int          `json:"dp"`
	SPMode           string       `json:"sp_mode"`                     // megatron | ulysses | ring | auto
	LatentCache      string       `json:"latent_cache,omitempty"`      // off | on
	ExpertParallel   string       `json:"expert_parallel,omitempty"`   // off | on | auto
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
	Tasks            *taskFile    `json:"-"`         // only for StrategyCSV; a plan has its tasks instead
	VirtualStages    int          `json:"virtual_stages"`
	LayersPerStage   []int        `json:"layers_per_stage,omitempty"` // by virtual stage, in the order of the model; nil: auto
	Offload          Offload      `json:"offload"`
	Mux              string       `json:"mux"`                       // off left right on auto
	Overlap          string       `json:"overlap,omitempty"`         // on replicas off
	LossChunk        int          `json:"loss_chunk,omitempty"`      // 0: auto
	CheckpointCopy   string       `json:"checkpoint_copy,omitempty"` // off on
}

// SharesTasks reports whether mux is fixed to a value other than off, so that ranks take over parts
// of each other's tasks.
func (s *Schedule) SharesTasks() bool { return s.Mux != "" && s.Mux != "auto" && s.Mux != "off" }

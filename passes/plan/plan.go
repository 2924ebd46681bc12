// Package plan holds a plan: every decision about a job, as plain data that JSON carries. A Plan starts as what the
// spec asks for (New); the passes fill in the rest. Its methods only read it: which rank has a stage, which tokens a
// task has, what ranks divide or share.
//
// Read plan.go for what is decided. The package knows nothing of durations, instructions or devices.
package plan

import (
	"fmt"
	"slices"
	"strings"

	"sppo.dev/graph"
	"sppo.dev/ir"
	"sppo.dev/lang"
	"sppo.dev/schedule"
)

// Policies that weigh fates against each other.
const (
	PolicyAuto   = "auto"
	PolicyMemory = "memory"
)

// UnitSizes are the sizes of a layer's type-1 units for a subsequence, in the order of fate letters.
func UnitSizes(b *graph.Block, z graph.Size) []ir.Bytes {
	sizes := make([]ir.Bytes, len(b.Units))
	for u := range b.Units {
		sizes[u] = b.UnitBytes(&b.Units[u], z)
	}
	return sizes
}

// Plan holds every decision about a job. It is a plain value: passes refine it, JSON carries it, and a plan that
// was edited as JSON compiles as edited. The requested spec travels in it, so that a plan needs no spec.
type Plan struct {
	Name     string        `json:"name"`
	Spec     string        `json:"spec"` // the file it was made from
	Model    lang.Model    `json:"model"`
	Cluster  lang.Cluster  `json:"cluster"`
	Train    lang.Train    `json:"train"`
	Schedule lang.Schedule `json:"schedule"` // as requested; solve pins what was open

	Parallel       Parallel     `json:"parallel"`
	Subsequences   Subsequences `json:"subsequences"`
	LayersPerStage []int        `json:"layers_per_stage"` // by virtual stage
	Stream         Stream       `json:"stream"`
	Tasks          [][]Task     `json:"tasks"`     // [stage]: what a pipeline rank does, in order
	Units          []Unit       `json:"units"`     // of one layer; the same for every layer and subsequence
	Recompute      string       `json:"recompute"` // policy: none, selective, keep_attention, full, auto; Offload.Fate has the units
	Offload        Offload      `json:"offload"`
	Mux            Mux          `json:"mux"`
	Memory         Memory       `json:"memory"`
	Time           Time         `json:"time"`
	Throughput     Throughput   `json:"throughput"`
	Decisions      []Decision   `json:"decisions"`

	Alternatives []Alternative `json:"alternatives"` // the next best of what solve has searched
	Rejected     []Rejection   `json:"rejected"`     // values that it has not taken, and why

	Lines map[string]string `json:"lines"` // key ("schedule.sp") -> "file:line: text" of the spec, for provenance
}

// Parallel is how ranks are laid out: rank = (d*PP + i)*SP + k.
type Parallel struct {
	DP            int    `json:"dp"`
	PP            int    `json:"pp"`
	SP            int    `json:"sp"`
	SPMode        string `json:"sp_mode"` // how the ranks of a stage share a layer: megatron or ulysses
	Zero          int    `json:"zero"`    // ranks that hold the same matrix divide, 1: its optimizer state, 2: its gradient too, 3: the weight too
	VirtualStages int    `json:"virtual_stages"`
	Order         string `json:"order"`        // inside a stage: sequence, or layer, where one stage holds all and a virtual stage is what all subsequences pass in turn
	Placement     string `json:"placement"`    // of virtual stages on the ranks: round or v
	Microbatch    int    `json:"microbatch"`   // sequences that one task carries
	Microbatches  int    `json:"microbatches"` // of one replica in a step
}

// Ranks is the number of devices in use.
func (p Parallel) Ranks() int { return p.DP * p.PP * p.SP }

// Placements of virtual stages on the pipeline ranks.
const (
	PlacedRound = "round" // dealt out in turn; also where the plan says nothing
	PlacedV     = "v"     // dealt out there and back, so that the first rank also has the last stage
)

// Stages is the number of virtual stages: of parts of the model, one behind another.
func (p Parallel) Stages() int { return p.PP * p.VirtualStages }

// Subsequences is the split of a sequence.
type Subsequences struct {
	N         int     `json:"n"`
	Lengths   []int64 `json:"lengths"`
	Align     int64   `json:"align"`
	Imbalance float64 `json:"imbalance"` // largest forward FLOPs of a subsequence over the mean, minus 1
}

// Task is what a pipeline rank runs of one subsequence; Plan.Home says which rank has its stage.
type Task = schedule.Task

// TaskKind is what a task computes.
type TaskKind = schedule.Kind

// Kinds of tasks.
const (
	Forward    = schedule.Forward
	Backward   = schedule.Backward
	WeightGrad = schedule.WeightGrad
)

// UnitType is the paper's class of an activation by its lifespan.
type UnitType int

// Types: needed by every later subsequence; written once in forward and read once in backward; transient.
const (
	Type0 UnitType = iota
	Type1
	Type2
)

// Unit is a group of tensors of a block with one lifespan. Bytes grow with the subsequence.
type Unit struct {
	Block         string   `json:"block"` // layer; or head, for what it saves, which stays on the device
	Name          string   `json:"name"`
	Type          UnitType `json:"type"`
	Values        []string `json:"values"`
	BytesPerToken float64  `json:"bytes_per_token"` // on one rank, of one layer
	Written       string   `json:"written"`         // opcode that makes it
	LastForward   string   `json:"last_forward"`    // last reader in forward
	FirstBackward string   `json:"first_backward"`  // first reader in backward; empty for Type-2
}

// Letters of Offload.Fate.
const (
	FateOffload   = 'o' // to the host and back
	FateKeep      = 'k' // on the device
	FateRecompute = 'r' // nowhere: the backward makes it again
)

// Offload is the fate of Type-1 units. Fate[stage][i] has one letter for every Type-1 unit of the stage's layers (layer by
// layer, units in order of production).
type Offload struct {
	Policy string      `json:"policy"`
	Alpha  [][]float64 `json:"alpha"` // [stage][i]: share of the Type-1 bytes that are not made again that goes to the host, as placed
	Fate   [][]string  `json:"fate"`  // [stage][i]
	Lag    int         `json:"lag"`   // tasks that may run behind a forward before what takes the bytes of its offloaded units waits
	Park   bool        `json:"park"`  // layer order: K and V of a layer wait on the host for its backward
	Ahead  int         `json:"ahead"` // layers of backward before it is needed that a layer's reload is issued
}

// LongestAhead is the longest distance of a reload, in layers of backward: that of the paper, a task. One of a single layer
// is over when the same layer of the next begins.
func (p *Plan) LongestAhead() int { return max(2, slices.Max(p.LayersPerStage)) }

// FateOf has the letters of a task's subsequence for the k-th layer of its virtual stage.
func (p *Plan) FateOf(t Task, k int) string {
	home := p.Home(t.Stage)
	fate := p.Offload.Fate[home][t.Subsequence]
	units := len(fate) / p.LayersOf(home)
	first, _ := p.Span(t.Stage)
	return fate[(first+k)*units : (first+k+1)*units]
}

// LayerOf is the dataflow of the k-th layer of a task's virtual stage, as its fate has it.
func (p *Plan) LayerOf(g *graph.Model, t Task, k int) *graph.Block {
	return g.LayerWithout(RemadeBy(p.FateOf(t, k)))
}

// RemadeBy are the units that the letters of a layer make again.
func RemadeBy(letters string) (remade graph.Units) {
	for u := range len(letters) {
		if letters[u] == FateRecompute {
			remade |= 1 << u
		}
	}
	return remade
}

// Mux is the split of tasks next to bubbles over other stages' ranks.
type Mux struct {
	Left   bool       `json:"left"`  // tasks at the start of the pipeline, and their backwards at its end, are shared
	Right  bool       `json:"right"` // attention of tasks before the turn, and of their backwards behind it, is shared
	Stages []MuxStage `json:"stages"`
	Pieces [][]int64  `json:"pieces,omitempty"` // [i]: tokens of the pieces of a subsequence; those behind are whole
}

// MuxStage is what one stage lends and borrows. Counts of tasks, ranges of stages.
type MuxStage struct {
	Left       int   `json:"left"`
	Steady     int   `json:"steady"`
	Right      int   `json:"right"`
	LeftRange  []int `json:"left_range"`  // every stage of it
	RightRange []int `json:"right_range"` // every stage of it
	Applied    bool  `json:"applied"`

	// Blocks are, for each of its last tasks that has helpers, the borders in tokens of the blocks of its keys that they take, from
	// 0 on.
	Blocks [][]int64 `json:"blocks,omitempty"`
}

// Memory is exact once codegen has placed the plan; Placed says whether it has.
type Memory struct {
	Placed              bool       `json:"placed"`
	DevicePeakBytes     []ir.Bytes `json:"device_peak_bytes"` // [stage]
	HostPeakBytes       []ir.Bytes `json:"host_peak_bytes"`   // [stage], of one rank
	DeviceCapacityBytes ir.Bytes   `json:"device_capacity_bytes"`
	HostCapacityBytes   ir.Bytes   `json:"host_capacity_bytes"` // of one rank
	Fits                bool       `json:"fits"`
	Device              []ir.Peak  `json:"device_peaks,omitempty"` // [stage], what fills it where it is fullest
	Host                []ir.Peak  `json:"host_peaks,omitempty"`   // [stage], of one rank
}

// Time is that of a step on the cluster's cost model: simulated from the program, or estimated from the plan alone.
type Time struct {
	StepS            ir.Seconds   `json:"step_s"`
	EstimateS        ir.Seconds   `json:"estimate_s"`         // of a step; what the search compares plans by
	Simulated        bool         `json:"simulated"`          // all but EstimateS is the simulator's; else estimated, as StepS then is
	BusyS            []ir.Seconds `json:"busy_s"`             // [stage], of a rank, on average, until the end of the pipeline
	OptimizerS       ir.Seconds   `json:"optimizer_s"`        // from the end of the pipeline to the end of the step
	BubbleRatio      float64      `json:"bubble_ratio"`       // idle over busy of all ranks, until the end of the pipeline
	IdleShare        float64      `json:"idle_share"`         // idle over all time of the pipeline
	ExposedTransferS ir.Seconds   `json:"exposed_transfer_s"` // in which the stage that waits longest waits for copies

	CriticalPath []CriticalPart `json:"critical_path,omitempty"` // of a simulated step; its parts add up to the step
}

// CriticalPart is the time that a sort of work of a stage has on the critical path: the chain of work, each part waiting for the one
// before it, that is as long as the step.
type CriticalPart struct {
	Work    string     `json:"work"`
	Stage   int        `json:"stage"` // pipeline rank; -1: nothing ran
	Seconds ir.Seconds `json:"seconds"`
}

// Throughput is simulated or estimated, as Time is.
type Throughput struct {
	TGS        float64 `json:"tgs"`         // tokens per GPU per second
	MFU        float64 `json:"mfu"`         // model FLOPs, attention counted causal, over the cluster's peak
	ModelFlops float64 `json:"model_flops"` // of a step
}

// Decision is one choice and its reason.
type Decision struct {
	Pass  string `json:"pass"`
	What  string `json:"what"`
	Value string `json:"value"`
	Why   string `json:"why"`
}

// New puts a request into a plan: all that is left to decide is still empty.
func New(sp *lang.Spec) *Plan {
	p := &Plan{
		Name: sp.Name, Spec: sp.File,
		Model: sp.Model, Cluster: sp.Cluster, Train: sp.Train, Schedule: sp.Schedule,
		Lines: map[string]string{}, Alternatives: []Alternative{}, Rejected: []Rejection{},
	}
	if p.Name == "" {
		p.Name = p.Model.Name
	}
	for _, b := range lang.Blocks {
		p.noteLine(sp, b.Name)
	}
	for _, k := range lang.Keys {
		p.noteLine(sp, k.Path())
	}
	return p
}

// noteLine keeps the line of the spec where a key or a block was written, for provenance.
func (p *Plan) noteLine(sp *lang.Spec, key string) {
	if d := sp.Diagnose(key, lang.Infeasible, ""); d.Pos.Line > 0 {
		p.Lines[key] = fmt.Sprintf("%s:%d: %s", d.Pos.File, d.Pos.Line, strings.TrimSpace(d.Source))
	}
}

// Decide notes a decision and its reason. What solve has searched is not decided again by what then is given.
func (p *Plan) Decide(pass, what, value, why string) {
	if pass == "solve" && slices.ContainsFunc(p.Decisions, func(d Decision) bool { return d.Pass == pass && d.What == what }) {
		return
	}
	p.Decisions = append(p.Decisions, Decision{pass, what, value, why})
}

// Home is the pipeline rank that has a virtual stage.
func (p *Plan) Home(stage int) int {
	round, at := stage/p.Parallel.PP, stage%p.Parallel.PP
	if p.Parallel.Placement == PlacedV && round%2 == 1 {
		return p.Parallel.PP - 1 - at
	}
	return at
}

// Way is how a task's result gets to the pipeline rank that goes on with it.
type Way uint8

// Ways.
const (
	Stays   Way = iota // the same rank goes on with it, or none does
	Onwards            // to the next rank of the ring
	Back               // to the previous rank of the ring
	Aside              // to or from a rank that helps a stage, past the ring
)

// WayOf returns the way of a task's result. Of two ranks the other one is both the next and the previous: there results of
// forwards go onwards and those of backwards back.
func (p *Plan) WayOf(t Task) Way {
	to, target, ok := p.Target(t)
	from, home, next := p.Runner(t), p.Home(t.Stage), p.Home(target.Stage)
	switch {
	case !ok || from == to:
		return Stays
	case from != home || to != next:
		return Aside
	case p.Parallel.PP == 2 && t.Kind == Forward, p.Parallel.PP > 2 && (from+1)%p.Parallel.PP == to:
		return Onwards
	}
	return Back
}

// Splits are the backwards of a rank whose weight gradients are tasks of their own.
func (p *Plan) Splits(rank int) map[Task]bool {
	split := map[Task]bool{}
	for _, t := range p.Tasks[rank] {
		if t.Kind == WeightGrad {
			split[t.As(Backward)] = true
		}
	}
	return split
}

// StagesOf are the virtual stages of a pipeline rank, in their order in the model.
func (p *Plan) StagesOf(rank int) []int {
	var stages []int
	for j := range p.LayersPerStage {
		if p.Home(j) == rank {
			stages = append(stages, j)
		}
	}
	return stages
}

// Layers are the numbers of the layers of a virtual stage.
func (p *Plan) Layers(stage int) []int {
	first := 0
	for _, n := range p.LayersPerStage[:stage] {
		first += n
	}
	layers := make([]int, p.LayersPerStage[stage])
	for k := range layers {
		layers[k] = first + k
	}
	return layers
}

// LayersOf is the number of layers of a pipeline rank.
func (p *Plan) LayersOf(rank int) int {
	n := 0
	for _, j := range p.StagesOf(rank) {
		n += p.LayersPerStage[j]
	}
	return n
}

// KindsOf counts the layers of each kind that some virtual stages have.
func (p *Plan) KindsOf(g *graph.Model, stages ...int) []int {
	counts := make([]int, g.Kinds())
	for _, j := range stages {
		if len(counts) == 1 {
			counts[0] += p.LayersPerStage[j]
			continue
		}
		for _, layer := range p.Layers(j) {
			counts[g.KindOf(layer)]++
		}
	}
	return counts
}

// Span is where the layers of a virtual stage lie among all layers of its rank, as fates count them.
func (p *Plan) Span(stage int) (first, end int) {
	for _, j := range p.StagesOf(p.Home(stage)) {
		end = first + p.LayersPerStage[j]
		if j == stage {
			break
		}
		first = end
	}
	return first, end
}

// Source is the task that a task's input comes from, and the pipeline rank that does it; ok is false where it comes from
// the tokens or the loss.
func (p *Plan) Source(t Task) (from int, source Task, ok bool) {
	return p.neighbour(t, -1)
}

// Target is the task that goes on with a task's result, and the pipeline rank that does it, if any.
func (p *Plan) Target(t Task) (to int, target Task, ok bool) {
	return p.neighbour(t, +1)
}

// neighbour is the same task some virtual stages on in its direction; gradients of weights go nowhere.
func (p *Plan) neighbour(t Task, on int) (int, Task, bool) {
	switch t.Kind {
	case WeightGrad:
		return 0, Task{}, false
	case Backward:
		on = -on
	}
	t.Stage += on
	if t.Stage < 0 || t.Stage >= p.Parallel.Stages() {
		return 0, Task{}, false
	}
	return p.Runner(t), t, true
}

// SizeOf is the shape of a task.
func (p *Plan) SizeOf(t Task) graph.Size {
	z := p.Size(t.Subsequence)
	if t.Piece > 0 {
		pieces := p.Mux.Pieces[t.Subsequence]
		for _, n := range pieces[:t.Piece-1] {
			z.Prefix += n
		}
		z.Tokens = pieces[t.Piece-1]
	}
	return z
}

// Size is the shape of subsequence i.
func (p *Plan) Size(i int) graph.Size {
	z := graph.Size{
		Sequence: p.Train.Sequence, Tokens: p.Subsequences.Lengths[i],
		Batch: int64(p.Parallel.Microbatch), SP: int64(p.Parallel.SP),
	}
	for _, n := range p.Subsequences.Lengths[:i] {
		z.Prefix += n
	}
	return z
}

// Sizes are the shapes of all subsequences.
func (p *Plan) Sizes() []graph.Size {
	sizes := make([]graph.Size, p.Subsequences.N)
	prefix := int64(0)
	for i, n := range p.Subsequences.Lengths {
		sizes[i] = p.Size(0)
		sizes[i].Prefix, sizes[i].Tokens = prefix, n
		prefix += n
	}
	return sizes
}

// Package plan holds a plan: every decision about a job, as plain data in JSON. A Plan starts as the request
// of the spec (New); the passes fill in the rest. Its methods answer questions such as which rank has a
// stage, which tokens a task has, and what ranks divide or share.
//
// plan.go defines the decisions. The package does not depend on durations, instructions or devices.
package plan

import (
	"fmt"
	"slices"
	"strings"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/schedule"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// Policies that compare placements with each other.
const (
	PolicyAuto   = "auto"
	PolicyMemory = "memory"
)

// UnitSizes returns the sizes of the type-1 units of each kind of layer for a subsequence, in the order of the letters
// in Placement. Units that a layer does not have take no bytes.
func UnitSizes(g *graph.Model, z graph.Size) (sizes [][]ir.Bytes) {
	known := map[*graph.Block][]ir.Bytes{}
	for kind := range g.Kinds() {
		b := g.Plain(kind)
		if known[b] == nil {
			known[b] = make([]ir.Bytes, len(g.UnitNames))
			for u := range b.Units {
				known[b][b.Units[u].Number] = b.UnitBytes(&b.Units[u], z)
			}
		}
		sizes = append(sizes, known[b])
	}
	return sizes
}

// LetterSizes returns the bytes of the units that the letters of a placement stand for, given the kinds of the layers
// and the result of UnitSizes.
func LetterSizes(kinds []int, sizes [][]ir.Bytes) (of []ir.Bytes) {
	for _, kind := range kinds {
		of = append(of, sizes[kind]...)
	}
	return of
}

// KindsOn returns the kind of each layer of a rank, in the order of Offload.Placement.
func (p *Plan) KindsOn(g *graph.Model, rank int) (kinds []int) {
	if g.Kinds() == 1 {
		return make([]int, p.LayersOf(rank))
	}
	for _, j := range p.StagesOf(rank) {
		for _, layer := range p.Layers(j) {
			kinds = append(kinds, g.KindOf(layer))
		}
	}
	return kinds
}

// Plan holds every decision about a job. It is a plain value that passes refine and that JSON can
// represent; a plan that was edited as JSON is compiled as edited. It contains the requested spec,
// so it needs no other file.
type Plan struct {
	Name     string        `json:"name"`
	Spec     string        `json:"spec"` // name of its file
	Model    lang.Model    `json:"model"`
	Cluster  lang.Cluster  `json:"cluster"`
	Train    lang.Train    `json:"train"`
	Schedule lang.Schedule `json:"schedule"` // as requested; solve fills in open values

	Parallel       Parallel     `json:"parallel"`
	Subsequences   Subsequences `json:"subsequences"`
	LayersPerStage []int        `json:"layers_per_stage"` // by virtual stage
	Parameters     Parameters   `json:"parameters"`
	Untrained      int          `json:"untrained_layers,omitempty"` // number of layers at the start that have no backward pass
	Stream         Stream       `json:"stream"`
	Tasks          [][]Task     `json:"tasks"`     // [stage]: tasks of a pipeline rank, in order
	Units          []Unit       `json:"units"`     // of one layer; equal for every layer and subsequence
	Recompute      string       `json:"recompute"` // policy: none, selective, keep_attention, full, auto; Offload.Placement lists the recomputed units
	Offload        Offload      `json:"offload"`
	Mux            Mux          `json:"mux"`
	Memory         Memory       `json:"memory"`
	Time           Time         `json:"time"`
	Throughput     Throughput   `json:"throughput"`
	Documents      *Documents   `json:"documents,omitempty"` // if sequences have several documents
	ExpertsS       ir.Seconds   `json:"experts_s,omitempty"` // with different experts on ranks: the part of a step, on the stage with the longest, that is proportional to the rows of a rank's experts; all times are for equal loads
	Decisions      []Decision   `json:"decisions"`

	Search       *Search       `json:"search,omitempty"` // nil: every value was given
	Alternatives []Alternative `json:"alternatives"`     // the next best plans of solve's search
	Rejected     []Rejection   `json:"rejected"`         // rejected values, with reasons

	Lines map[string]string `json:"lines"` // key ("schedule.sp") -> "file:line: text" of the spec, for provenance
}

// Documents is an estimate for a step with the document boundaries of the data. All other times of a plan are
// for sequences without document boundaries, which take the longest.
type Documents struct {
	Share     float64    `json:"share"`             // query-key pairs within documents divided by those in whole sequences
	Sequences int        `json:"sequences"`         // number of sequences examined, starting with the first
	StepS     ir.Seconds `json:"step_s"`            // of a step with the share of the replica that has the most
	UnequalS  ir.Seconds `json:"unequal_s"`         // part of it that would be saved if all replicas had the same share
	Problem   string     `json:"problem,omitempty"` // why the data could not be read, or empty
}

// Parameters counts the elements of a model's tensors.
type Parameters struct {
	Trained int64 `json:"trained"`
	Frozen  int64 `json:"frozen"`
	Active  int64 `json:"active,omitempty"` // elements that a token uses; 0: all
}

// Parallel is the layout of ranks: rank = (d*PP + i)*SP + k.
type Parallel struct {
	DP               int    `json:"dp"`
	PP               int    `json:"pp"`
	SP               int    `json:"sp"`
	SPMode           string `json:"sp_mode"`                   // how the ranks of a stage share a layer: megatron, ulysses or ring
	Ring             int    `json:"ring,omitempty"`            // if it is not 0, as many groups of SP / Ring adjacent ranks form a ring; those of a group share heads as in SPMode
	ExpertParallel   bool   `json:"expert_parallel,omitempty"` // the ranks that divide heads, or those of a ring if none do, have different experts
	Zero             int    `json:"zero"`                      // what ranks with the same matrix divide: 1: its optimizer state, 2: also its gradient, 3: also its weights
	OptimizerOffload string `json:"optimizer_offload"`         // where the optimizer state of matrices is stored between updates: "host", or "none" for the device
	VirtualStages    int    `json:"virtual_stages"`
	Order            string `json:"order"`        // order inside a stage: "sequence", or "layer" (for a single pipeline stage): all subsequences pass through one virtual stage before any enters the next
	Placement        string `json:"placement"`    // of virtual stages on the ranks: round or v
	Microbatch       int    `json:"microbatch"`   // sequences that one task processes together
	Microbatches     int    `json:"microbatches"` // per replica and step
}

// Ranks returns the number of devices in use.
func (p Parallel) Ranks() int { return p.DP * p.PP * p.SP }

// SPText writes the value of the key sp that gives these ranks.
func (p Parallel) SPText() string {
	if p.Ring > 0 {
		return fmt.Sprintf("[%d, %d]", p.SP/p.Ring, p.Ring)
	}
	return fmt.Sprint(p.SP)
}

// Placements of virtual stages on the pipeline ranks.
const (
	PlacedRound = "round" // assigned round-robin; also the default
	PlacedV     = "v"     // assigned in ascending, then in descending order of ranks, so that the first rank also has the last stage
)

// Stages returns the number of virtual stages, which are consecutive parts of the model.
func (p Parallel) Stages() int { return p.PP * p.VirtualStages }

// Subsequences describes how a sequence is cut.
type Subsequences struct {
	N         int     `json:"n"`
	Lengths   []int64 `json:"lengths"`
	Align     int64   `json:"align"`
	Imbalance float64 `json:"imbalance"` // largest forward FLOPs of a subsequence divided by the mean, minus 1
}

// Task is the work of a pipeline rank for one subsequence. Plan.Home returns the rank of its stage.
type Task = schedule.Task

// TaskKind is the kind of computation of a task.
type TaskKind = schedule.Kind

// Kinds of tasks.
const (
	Forward    = schedule.Forward
	Backward   = schedule.Backward
	WeightGrad = schedule.WeightGrad
)

// UnitType is the paper's classification of activations by lifespan.
type UnitType int

// Types: read by every later subsequence; written in the forward pass and read in the backward pass; temporary.
const (
	Type0 UnitType = iota
	Type1
	Type2
)

// Unit is a group of tensors of a block that have the same lifespan. Its bytes grow with the length of the
// subsequence.
type Unit struct {
	Block         string   `json:"block"` // layer; or head, whose saved tensors stay on the device
	Name          string   `json:"name"`
	Type          UnitType `json:"type"`
	Values        []string `json:"values"`
	BytesPerToken float64  `json:"bytes_per_token"` // on one rank, of one layer
	Written       string   `json:"written"`         // opcode that writes it
	LastForward   string   `json:"last_forward"`    // last reader in the forward pass
	FirstBackward string   `json:"first_backward"`  // first reader in the backward pass; empty for Type-2
}

// Letters of Offload.Placement.
const (
	PlacementOffload   = 'o' // to the host and back
	PlacementKeep      = 'k' // on the device
	PlacementRecompute = 'r' // recomputed in the backward pass
	PlacementUnsaved   = '-' // not saved: the layer's backward does not read it
)

// Offload is the placement of Type-1 units. Placement[stage][i] describes subsequence i: it has one letter for
// every Type-1 unit of the stage's layers (layer by layer, units in order of production).
type Offload struct {
	Policy    string      `json:"policy"`
	Alpha     [][]float64 `json:"alpha"`          // [stage][i]: offloaded share of the Type-1 bytes that are not recomputed, as placed
	Placement [][]string  `json:"unit_placement"` // [stage][i]
	Lag       int         `json:"lag"`            // number of tasks that may run after a forward before the device bytes of its offloaded units are reused; reuse waits for the copies
	Caches    string      `json:"caches"`         // where K and V of a layer are kept between its forwards and its backward: device or, in layer order, host or recompute
	Ahead     int         `json:"ahead"`          // number of backward layers by which a layer's reload is issued in advance
}

// LongestAhead returns the largest useful value of Offload.Ahead: the largest number of layers in a task, as in
// the paper, but at least 2.
func (p *Plan) LongestAhead() int { return max(2, slices.Max(p.LayersPerStage)) }

// PlacementOf returns the letters of a task's subsequence for the k-th layer of its virtual stage.
func (p *Plan) PlacementOf(t Task, k int) string {
	home := p.Home(t.Stage)
	placement := p.Offload.Placement[home][t.Subsequence]
	units := len(placement) / p.LayersOf(home)
	first, _ := p.Span(t.Stage)
	return placement[(first+k)*units : (first+k+1)*units]
}

// LayerOf returns the dataflow of the k-th layer of a task's virtual stage, given its placement.
func (p *Plan) LayerOf(g *graph.Model, t Task, k int) *graph.Block {
	return g.LayerWithout(g.KindOf(p.LayerAt(t.Stage, k)), RecomputedBy(p.PlacementOf(t, k)))
}

// LayerAt returns the number of the k-th layer of a virtual stage.
func (p *Plan) LayerAt(stage, k int) int {
	for _, n := range p.LayersPerStage[:stage] {
		k += n
	}
	return k
}

// RecomputedBy returns the units that, according to a layer's letters, are recomputed or not saved. The
// backward recomputes those that it needs.
func RecomputedBy(letters string) (recomputed graph.Units) {
	for u := range len(letters) {
		if letters[u] == PlacementRecompute || letters[u] == PlacementUnsaved {
			recomputed |= 1 << u
		}
	}
	return recomputed
}

// Mux describes how ranks of other stages share the tasks next to bubbles.
type Mux struct {
	Left   bool       `json:"left"`  // tasks at the start of the pipeline, and their backwards at its end, are shared
	Right  bool       `json:"right"` // attention of tasks before the turnaround, and of their backwards after it, is shared
	Stages []MuxStage `json:"stages"`
	Pieces [][]int64  `json:"pieces,omitempty"` // [i]: tokens of each piece of subsequence i; subsequences after those listed are not divided
}

// MuxStage describes the sharing of one stage's tasks: numbers of tasks and ranges of stages.
type MuxStage struct {
	Left       int   `json:"left"`
	Steady     int   `json:"steady"`
	Right      int   `json:"right"`
	LeftRange  []int `json:"left_range"`  // both ends included
	RightRange []int `json:"right_range"` // both ends included
	Applied    bool  `json:"applied"`

	// Blocks has one entry for each task of the stage that has helpers; these are its last tasks. An entry lists
	// the boundaries of the blocks of keys that the helpers take, in tokens, starting at 0.
	Blocks [][]int64 `json:"blocks,omitempty"`
}

// Memory is exact if Placed is set, that is, once codegen has placed the plan.
type Memory struct {
	Placed              bool       `json:"placed"`
	Microbatches        int        `json:"microbatches,omitempty"` // number that was placed, if the step is long: see strategy.Short
	DevicePeakBytes     []ir.Bytes `json:"device_peak_bytes"`      // [stage]
	HostPeakBytes       []ir.Bytes `json:"host_peak_bytes"`        // [stage], of one rank
	DeviceCapacityBytes ir.Bytes   `json:"device_capacity_bytes"`
	HostCapacityBytes   ir.Bytes   `json:"host_capacity_bytes"` // of one rank, minus the memory that schedule.checkpoint_copy leaves free
	Fits                bool       `json:"fits"`
	Device              []ir.Peak  `json:"device_peaks,omitempty"` // [stage], contents at the peak
	Host                []ir.Peak  `json:"host_peaks,omitempty"`   // [stage], of one rank

	Checkpoint *CheckpointCopy `json:"checkpoint_copy,omitempty"` // nil: unknown, because no program has been built
}

// CheckpointCopy describes the host memory for a copy of the state: while training continues, checkpoints are
// written from this copy. Memory.Fits does not include it, because a run that waits for its checkpoints makes
// no copy.
type CheckpointCopy struct {
	Bytes      []ir.Bytes `json:"bytes"`                 // [stage], of the rank with the largest copy
	Fits       bool       `json:"fits"`                  // in host memory, in addition to the program
	ShortStage int        `json:"short_stage,omitempty"` // the stage with the largest shortfall, if it does not fit
	ShortBytes ir.Bytes   `json:"short_bytes,omitempty"` // the shortfall on each rank of that stage
}

// Time describes a step according to the cluster's cost model: either simulated from the program, or only
// estimated from the plan.
type Time struct {
	StepS            ir.Seconds   `json:"step_s"`
	EstimateS        ir.Seconds   `json:"estimate_s"`             // estimated time of a step, which the search uses to compare plans
	Simulated        bool         `json:"simulated"`              // whether all times except EstimateS are simulated rather than estimated
	BusyS            []ir.Seconds `json:"busy_s"`                 // [stage], average of its ranks, up to the end of the pipeline
	OptimizerS       ir.Seconds   `json:"optimizer_s"`            // from the end of the pipeline to the end of the step
	BubbleRatio      float64      `json:"bubble_ratio"`           // idle divided by busy time of all ranks, up to the end of the pipeline
	IdleShare        float64      `json:"idle_share"`             // idle time of all ranks divided by their total time, up to the end of the pipeline
	ExposedTransferS ir.Seconds   `json:"exposed_transfer_s"`     // longest time that any stage waits for copies
	Microbatches     int          `json:"microbatches,omitempty"` // number that was simulated, if the step is long; the times are extrapolated with the search's estimates

	CriticalPath []CriticalPart `json:"critical_path,omitempty"` // of a simulated step; the parts add up to it
}

// CriticalPart is the time that one kind of work of one stage takes on the critical path. The critical path is
// the chain of work that spans the whole step, each part waiting for the previous one.
type CriticalPart struct {
	Work    string     `json:"work"`
	Stage   int        `json:"stage"` // pipeline rank; -1: nothing ran
	Seconds ir.Seconds `json:"seconds"`
}

// Throughput is simulated or estimated, as Time is.
type Throughput struct {
	TGS        float64 `json:"tgs"`         // tokens per GPU per second
	MFU        float64 `json:"mfu"`         // model FLOPs, with causal attention, divided by the peak of the ranks
	ModelFlops float64 `json:"model_flops"` // of a step
}

// Decision is one choice and its reason.
type Decision struct {
	Pass  string `json:"pass"`
	What  string `json:"what"`
	Value string `json:"value"`
	Why   string `json:"why"`
}

// New returns a plan that contains the request and no decisions.
func New(sp *lang.Spec) *Plan {
	p := &Plan{
		Name: sp.Model.Name, Spec: sp.File,
		Model: sp.Model, Cluster: sp.Cluster, Train: sp.Train, Schedule: sp.Schedule,
		Lines: map[string]string{}, Alternatives: []Alternative{}, Rejected: []Rejection{},
	}
	p.Untrained, p.Parameters = p.trained()
	for _, b := range lang.Blocks {
		p.noteLine(sp, b.Name)
	}
	for _, k := range lang.Keys {
		p.noteLine(sp, k.Path())
	}
	return p
}

// noteLine stores the spec line of a key or block, for provenance.
func (p *Plan) noteLine(sp *lang.Spec, key string) {
	if d := sp.Diagnose(key, lang.Infeasible, ""); d.Pos.Line > 0 {
		p.Lines[key] = fmt.Sprintf("%s:%d: %s", d.Pos.File, d.Pos.Line, strings.TrimSpace(d.Source))
	}
}

// Decide records a decision and its reason. If solve has searched for the value, the search's reason is kept.
func (p *Plan) Decide(pass, what, value, why string) {
	if pass == "solve" && slices.ContainsFunc(p.Decisions, func(d Decision) bool { return d.Pass == pass && d.What == what }) {
		return
	}
	p.Decisions = append(p.Decisions, Decision{pass, what, value, why})
}

// Home returns the pipeline rank that has a virtual stage.
func (p *Plan) Home(stage int) int {
	round, at := stage/p.Parallel.PP, stage%p.Parallel.PP
	if p.Parallel.Placement == PlacedV && round%2 == 1 {
		return p.Parallel.PP - 1 - at
	}
	return at
}

// Way is the direction in which a task's result goes to the pipeline rank that continues with it.
type Way uint8

// Directions.
const (
	Stays   Way = iota // the same rank continues with the result, or no rank does
	Onwards            // to the next rank of the ring
	Back               // to the previous rank of the ring
	Aside              // to or from a rank that helps a stage, outside the ring
)

// WayOf returns the direction of a task's result. With two ranks, each is both the next and the previous rank
// of the other: the direction is then Onwards for forwards, and Back for backwards.
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

// Splits returns those backwards of a rank whose weight gradients are separate tasks.
func (p *Plan) Splits(rank int) map[Task]bool {
	split := map[Task]bool{}
	for _, t := range p.Tasks[rank] {
		if t.Kind == WeightGrad {
			split[t.As(Backward)] = true
		}
	}
	return split
}

// StagesOf returns the virtual stages of a pipeline rank, in their order in the model.
func (p *Plan) StagesOf(rank int) []int {
	var stages []int
	for round := 0; round*p.Parallel.PP < len(p.LayersPerStage); round++ {
		if j := p.stageIn(round, rank); j < len(p.LayersPerStage) {
			stages = append(stages, j)
		}
	}
	return stages
}

// stageIn returns the virtual stage of a pipeline rank in a round, counted from the first: each rank has one in each.
func (p *Plan) stageIn(round, rank int) int {
	if p.Parallel.Placement == PlacedV && round%2 == 1 {
		rank = p.Parallel.PP - 1 - rank
	}
	return round*p.Parallel.PP + rank
}

// Layers returns the numbers of the layers of a virtual stage.
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

// LayersOf returns the number of layers of a pipeline rank.
func (p *Plan) LayersOf(rank int) int { return p.layersBefore(rank, len(p.LayersPerStage)) }

// layersBefore returns how many layers a pipeline rank has in the given number of virtual stages, counted from
// the first. Searches call it for every task, so it visits only the rank's own stages: one in each round.
func (p *Plan) layersBefore(rank, stages int) (n int) {
	for round := 0; round*p.Parallel.PP < stages; round++ {
		if j := p.stageIn(round, rank); j < stages {
			n += p.LayersPerStage[j]
		}
	}
	return n
}

// KindsOf returns the number of layers of each kind in the given virtual stages.
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

// Span returns the range of a virtual stage's layers among all layers of its rank, in the order of Placement.
func (p *Plan) Span(stage int) (first, end int) {
	first = p.layersBefore(p.Home(stage), stage)
	return first, first + p.LayersPerStage[stage]
}

// Source returns the task that provides a task's input, and the rank that runs it; ok is false if the input
// comes from the tokens or the loss.
func (p *Plan) Source(t Task) (from int, source Task, ok bool) {
	return p.neighbour(t, -1)
}

// Target returns the task that continues with a task's result, and the rank that runs it; ok is false if there
// is none.
func (p *Plan) Target(t Task) (to int, target Task, ok bool) {
	return p.neighbour(t, +1)
}

// neighbour returns the task for the same subsequence that is the given number of virtual stages further on in
// the task's direction, and the rank that runs it. Weight gradients are not passed on.
func (p *Plan) neighbour(t Task, on int) (int, Task, bool) {
	switch t.Kind {
	case WeightGrad:
		return 0, Task{}, false
	case Backward:
		on = -on
	}
	if t.Kind == Backward && !p.Undone(t.Stage) {
		return 0, Task{}, false
	}
	t.Stage += on
	if t.Stage < 0 || t.Stage >= p.Parallel.Stages() || t.Kind == Backward && !p.Undone(t.Stage) {
		return 0, Task{}, false
	}
	return p.Runner(t), t, true
}

// Undone reports whether the backwards of a virtual stage compute anything. The backwards of the
// last stage always do, because they include the head.
func (p *Plan) Undone(stage int) bool {
	return p.Untrained == 0 || stage == p.Parallel.Stages()-1 || p.LayerAt(stage+1, 0) > p.Untrained
}

// MostLag returns the largest number of tasks that copies to the host may lag behind.
func (p *Plan) MostLag() int {
	return 2 * p.Subsequences.N * p.Parallel.Microbatches * p.Parallel.VirtualStages
}

// stepsOfLayer is the number of steps of a ring that need as many instructions as a layer without a ring.
const stepsOfLayer = 4

// LayerVisits returns the number of layer forwards that a step of a replica has, or, in a ring, a multiple of it with
// as many instructions.
func (p *Plan) LayerVisits() int64 {
	return int64(max(1, p.Model.Layers*p.Parallel.Microbatches)) * int64(p.Subsequences.N) * max(1, p.Split().Chunks()/2/stepsOfLayer)
}

// SizeOf returns the shape of a task.
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

// Size returns the shape of subsequence i.
func (p *Plan) Size(i int) graph.Size {
	z := p.Split().Size()
	z.Sequence, z.Tokens, z.Batch = p.Train.Sequence, p.Subsequences.Lengths[i], int64(p.Parallel.Microbatch)
	if p.Stream.Latents {
		z.Piece = p.Stream.Block
	}
	for _, n := range p.Subsequences.Lengths[:i] {
		z.Prefix += n
	}
	return z
}

// HeadSize returns the shape of a task's loss head, given that of its layers.
func (p *Plan) HeadSize(z graph.Size) graph.Size {
	z.Chunks = int64(p.Schedule.LossChunk)
	return z
}

// Sizes returns the shapes of all subsequences.
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

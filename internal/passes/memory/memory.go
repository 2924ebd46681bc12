// Package memory computes upper bounds on the device and host memory of a plan, before buffers are
// placed. A Meter goes through the actions of a rank and adds up the bytes held.
//
// tracker.go goes through the actions; live.go computes the bytes that one block holds while it runs.
//
// Passes use these bounds to choose among plans. After codegen has placed the buffers, Plan.Memory has the exact
// bytes; a test in codegen compares the two.
package memory

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/strategy"
	"sppo.dev/internal/passes/walk"
	"sppo.dev/ir"
)

// Term is a purpose for which a rank uses device memory.
type Term int

// Uses of memory.
const (
	TermWeights   Term = iota
	TermOptimizer      // states and f32 masters
	TermGradients      // gradients of weights, from a step's first addition on
	TermKV             // K and V
	TermKVGrads        // dK and dV
	TermLoads          // streamed rows of K, V and their gradients
	TermKept           // units between their forward and their backward
	TermCopies         // units on their way to the host or back
	TermMessages       // messages between stages, and hidden rows that wait for the head
	TermWorking        // the running layer, embedding or chunk of the head
	TermPacking        // gaps that placement may leave
	numTerms
)

var termNames = [numTerms]string{
	"weights", "optimizer state", "gradients", "K and V", "dK and dV", "streamed K and V", "kept activations", "copies in progress",
	"messages", "the running layer", "gaps",
}

// String returns the name that reports use.
func (t Term) String() string { return termNames[t] }

// Peak describes the point at which a stage's ranks hold the most bytes on the device.
type Peak struct {
	Bytes ir.Bytes           // sum of the terms
	Terms [numTerms]ir.Bytes // at that point
	Task  plan.Task          // the task that runs at that point
}

// Footprint holds upper bounds on the sizes of a plan's arenas.
type Footprint struct {
	Device []Peak     // [stage]
	Host   []ir.Bytes // [stage], of one rank
}

// FootprintOf returns an upper bound on the arenas that codegen will place for a plan.
func FootprintOf(p *plan.Plan) Footprint {
	return NewMeter(walk.Must(p), walk.NewShapes(p, p.Graph()), Blocks{}, nil).Footprint()
}

// Fits reports whether the footprint is within the given capacities.
func (f Footprint) Fits(device, host ir.Bytes) bool {
	for s := range f.Device {
		if f.Device[s].Bytes > device || f.Host[s] > host {
			return false
		}
	}
	return true
}

// Meter bounds the memory of one plan.
type Meter struct {
	*walk.Walk
	*walk.Shapes
	blocks Blocks
	recent *[1 << recentBits]heldBytes // [slotOf]: results of recent layers
	work   *walk.Work
}

// recentBits is the number of bits that slotOf returns: enough for all passes of a thousand subsequences.
const recentBits = 12

// heldBytes caches the bytes that a block holds while it runs.
type heldBytes struct {
	workingKey
	bytes ir.Bytes
}

// NewMeter returns a meter for a walk's plan. The meter caches the bytes that blocks hold in b, and counts its
// work in w, unless w is nil.
func NewMeter(r *walk.Walk, s *walk.Shapes, b Blocks, w *walk.Work) *Meter {
	return &Meter{r, s, b, new([1 << recentBits]heldBytes), w}
}

// Of returns a meter for a plan with different tasks of the same sizes.
func (m *Meter) Of(p *plan.Plan) *Meter {
	return &Meter{walk.Must(p), m.Shapes, m.blocks, m.recent, m.work}
}

// Footprint returns the bound on all arenas.
func (m *Meter) Footprint() Footprint {
	f, _ := m.Within(plan.Memory{DeviceCapacityBytes: math.MaxInt64, HostCapacityBytes: math.MaxInt64})
	return f
}

// Within reports whether a plan fits. It stops at the first stage that does not fit, so the
// footprint is then incomplete.
func (m *Meter) Within(limit plan.Memory) (f Footprint, fits bool) {
	p := m.Plan
	if p.Mux.Left {
		return m.leftFootprint(limit)
	}
	f = Footprint{Device: make([]Peak, len(p.Tasks)), Host: make([]ir.Bytes, len(p.Tasks))}
	inputs := m.WaitingInputs()
	for s := range p.Tasks {
		f.Device[s], f.Host[s] = m.Rank(s, inputs[s])
		if f.Device[s].Bytes > limit.DeviceCapacityBytes || f.Host[s] > limit.HostCapacityBytes {
			return f, false
		}
	}
	return f, true
}

// Gaps that placement may leave, as a share of the bytes of temporary buffers. A test compares these values
// with placed plans. Gaps are larger if activations are interleaved, so that lifetimes do not end in the order in
// which they begin.
const (
	packing            = 0.03
	packingInterleaved = 0.08
)

// Packed returns the number of bytes that the placement of n bytes may lose to gaps.
func Packed(p *plan.Plan, n ir.Bytes) ir.Bytes {
	if interleaved(p) {
		return ir.Bytes(float64(n) * packingInterleaved)
	}
	return ir.Bytes(float64(n) * packing)
}

// interleaved reports whether a rank holds activations of several microbatches on several virtual stages, or of split
// backwards, at the same time.
func interleaved(p *plan.Plan) bool {
	s := strategy.Of(p)
	return s.Late || p.Parallel.VirtualStages > 1 && !s.Rounds
}

// InWords lists the terms above one percent of the peak, largest first.
func (k Peak) InWords() string {
	order := make([]Term, numTerms)
	for t := range order {
		order[t] = Term(t)
	}
	slices.SortStableFunc(order, func(a, b Term) int { return cmp.Compare(k.Terms[b], k.Terms[a]) })
	var words []string
	for _, t := range order {
		if k.Terms[t] > k.Bytes/100 {
			words = append(words, fmt.Sprintf("%s of %s", k.Terms[t], t))
		}
	}
	return strings.Join(words, ", ")
}

// Capacities returns the bytes that a rank has in each arena. Host memory reserved for checkpoints is not
// included.
func Capacities(p *plan.Plan) plan.Memory {
	m := ir.Machine(p.Cluster)
	return plan.Memory{DeviceCapacityBytes: ir.Bytes(m.DeviceMemory), HostCapacityBytes: m.HostMemoryPerRank() - CheckpointCopy(p)}
}

// CheckpointCopy returns the host memory per rank that the plan reserves for the copy of a checkpoint: as much
// as a checkpoint saves from a rank of the stage with the most state. The copy may be smaller, because replicas
// share it.
func CheckpointCopy(p *plan.Plan) (most ir.Bytes) {
	if p.Schedule.CheckpointCopy != "on" {
		return 0
	}
	g := p.Graph()
	for s := range p.Parallel.PP {
		var sum ir.Bytes
		for kind, n := range p.KindsOf(g, p.StagesOf(s)...) {
			sum += ir.Bytes(n) * p.SavedBytes(g, g.LayerOf(kind))
		}
		if s == p.Home(0) {
			sum += p.SavedBytes(g, g.Embedding)
		}
		if s == p.Home(p.Parallel.Stages()-1) {
			sum += p.SavedBytes(g, g.Head)
		}
		most = max(most, sum)
	}
	return most
}

// Shortfall returns the largest excess of a footprint over the capacities in m, or nil if it fits.
func (f *Footprint) Shortfall(m plan.Memory) *plan.Shortfall {
	m.DevicePeakBytes, m.HostPeakBytes = make([]ir.Bytes, len(f.Device)), f.Host
	for s := range f.Device {
		m.DevicePeakBytes[s] = f.Device[s].Bytes
	}
	return m.Shortfall()
}

// Slack returns the largest share of a footprint by which the footprint may exceed the placed bytes. A test in
// codegen checks it.
func Slack(p *plan.Plan) float64 {
	if p.Mux.Left { // a footprint assumes that a rank's own and borrowed bytes peak at the same time
		return 0.6
	}
	if interleaved(p) {
		return 0.1
	}
	return 0.04
}

// WithSlack returns the capacities within which a footprint may still fit after placement, given those of a plan.
func WithSlack(p *plan.Plan, m plan.Memory) plan.Memory {
	placed := 1 - Slack(p)
	m.DeviceCapacityBytes = ir.Bytes(float64(m.DeviceCapacityBytes) / placed)
	m.HostCapacityBytes = ir.Bytes(float64(m.HostCapacityBytes) / placed)
	return m
}

// Peaks returns the peak of the fullest stage on the device, and that of the fullest stage on the host.
func (f *Footprint) Peaks() (device, host ir.Bytes) {
	for s := range f.Device {
		device, host = max(device, f.Device[s].Bytes), max(host, f.Host[s])
	}
	return device, host
}

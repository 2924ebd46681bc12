// Package sim runs programs in virtual time: the same instructions in the same order as on any device, but
// instead of doing the work it advances a clock for each stream of each rank. It does not allocate the memory
// of the model.
//
//	sim.go       Options; a world of ranks and the start of a section in it
//	bind.go      from instructions to steps with durations from package internal/cost
//	clock.go     the rules of a rank's clocks: work, record, wait
//	meet.go      messages and collectives, where clocks of several ranks meet; deadlocks
//	fold.go      ranks that provably do the same work at the same times, so that one is simulated for all
//	run.go       Run: a whole section of all ranks in one goroutine, the fast way
//	share.go     the same if ranks share processors or copy bandwidth dynamically: one clock for all
//	device.go    the same as a vm.Device, driven by the interpreter loop of package vm
//	timeline.go  results: times, waits, bubble
//	memory.go    the bytes in use over time, by use
//	path.go      the cause of each instruction's wait, and the critical path
//	measured.go  the same analysis of a measurement
//
// The duration of a copy accounts for other ranks of its node that copy; the duration of a message accounts for
// other groups that communicate. The cost model divides a node's bandwidth by the number of the job's ranks on
// that node, because these ranks copy at the same time. Of the streams of a rank, collectives slow
// down kernels and each other, and copies may take turns. If ranks are threads on one computer, this model is far off. In that case,
// and for copies if Options.Contention is set, share.go divides resources among the work in progress.
//
// The package does not depend on plans, specs or data.
package sim

import (
	"fmt"
	"math"

	"sppo.dev/internal/cost"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// Options of a simulation.
type Options struct {
	// Slow multiplies the durations of a rank's own work: kernels and copies.
	Slow map[int]float64
	// Jitter is the standard deviation of the logarithm of a random factor on every duration; 0: no jitter.
	Jitter float64
	Seed   uint64 // seed of the jitter
	Round  int64  // round of the section that Run runs; each round has its own jitter
	Spans  bool   // keep the start and end of each instruction
	// Scale multiplies the durations of kinds of work on all ranks. Kinds without an entry have the factor 1.
	Scale  map[ir.WorkKind]float64
	NoFold bool // simulate every rank, even if one could represent several
	// Contention makes the ranks of a node share the bandwidth of copies to and from the host dynamically,
	// instead of giving each rank a fixed share. Processors that the machine declares to be shared are always
	// shared dynamically.
	Contention bool
}

// shares reports whether durations depend on the current work of other ranks.
func (o *Options) shares(p *ir.Program) bool {
	return p.Machine.Parallelism > 0 || o.Contention && p.Machine.NodeCopyBandwidth > 0
}

func (o *Options) check(p *ir.Program) error {
	if !(o.Jitter >= 0) || math.IsInf(o.Jitter, 0) {
		return fmt.Errorf("jitter %g must not be negative: it is a standard deviation", o.Jitter)
	}
	for kind, f := range o.Scale {
		if !(f >= 0) || math.IsInf(f, 0) {
			return fmt.Errorf("the factor %[2]g for work of kind %[1]d must not be negative", kind, f)
		}
	}
	for r, f := range o.Slow {
		if r < 0 || r >= len(p.Ranks) {
			return fmt.Errorf("there is no rank %d to slow down: there are %d ranks", r, len(p.Ranks))
		}
		if !(f > 0) || math.IsInf(f, 0) {
			return fmt.Errorf("the slow-down %[2]g of rank %[1]d must be positive", r, f)
		}
	}
	return nil
}

// slow returns the factor by which a rank is slowed down.
func (o *Options) slow(r int) float64 {
	if f, ok := o.Slow[r]; ok {
		return f
	}
	return 1
}

// world holds the ranks in one section.
type world struct {
	program  *ir.Program
	options  Options
	section  ir.Section
	prices   *prices
	bindings []*binding // by code
	classes  []int32    // by rank of the job
	ranks    []*rank    // one for each class
}

// newWorld binds a section, divides the ranks into classes, and sets the simulated ranks to the section's
// start.
func newWorld(p *ir.Program, section ir.Section, pr *prices, o Options) (*world, error) {
	w := &world{program: p, options: o, section: section, prices: pr}
	for c := range p.Codes {
		b, err := bind(p, &p.Codes[c], section, pr)
		if err != nil {
			return nil, err
		}
		w.bindings = append(w.bindings, b)
	}
	for r := range p.Ranks {
		if err := checkPorts(p, r, w.binding(r)); err != nil {
			return nil, err
		}
	}
	f := newFolding(w)
	w.fold(f)
	for r := range p.Ranks {
		if c := int(w.classes[r]); c == len(w.ranks) {
			w.ranks = append(w.ranks, &rank{index: r, class: c, factor: o.slow(r), round: o.Round, binding: w.binding(r)})
		}
	}
	w.connect(f)
	for _, r := range w.ranks {
		w.begin(r, o.Spans)
	}
	return w, nil
}

func (w *world) binding(r int) *binding { return w.bindings[w.program.Ranks[r].Code] }

// begin sets a rank to the start of the section.
func (w *world) begin(r *rank, spans bool) {
	r.begin(w.program.Codes[w.program.Ranks[r.index].Code].Events[w.section], w.prices.model.HostLink(), spans)
}

// work runs an instruction that involves no other rank.
func (w *world) work(r *rank, pc int, st *step) {
	d := w.own(r, pc, st.duration)
	now := r.clocks[st.stream].now
	if w.takesTurns(st) {
		way := cost.Out
		if st.op == ir.CopyH2D {
			way = cost.Back
		}
		end := float64(r.link.Copy(way, ir.Seconds(now), ir.Seconds(d)))
		r.copied(pc, st.stream, now, end-d, end)
		return
	}
	r.occupy(pc, st.stream, now, now+r.lasts(st.stream, now, d))
}

// takesTurns reports whether an instruction is a copy that other copies of its rank may delay.
func (w *world) takesTurns(st *step) bool {
	return w.program.Machine.HalfDuplex() && (st.op == ir.CopyD2H || st.op == ir.CopyH2D)
}

// own returns the time that a rank takes for an instruction that involves no other rank, given the
// instruction's price.
func (w *world) own(r *rank, pc int, price float64) float64 {
	d := price * r.factor
	if w.options.Jitter > 0 {
		d *= w.jitter(r, pc)
	}
	return d
}

// jitter returns the factor on the duration of one instruction. It depends on the instruction, not on the
// order in which ranks are simulated.
func (w *world) jitter(r *rank, pc int) float64 {
	key := w.options.Seed
	for _, x := range [...]uint64{uint64(r.index), uint64(w.section), uint64(r.round), uint64(pc)} {
		key = mix(key ^ mix(x))
	}
	a, b := unit(mix(key+1)), unit(mix(key+2))
	normal := math.Sqrt(-2*math.Log(a)) * math.Cos(2*math.Pi*b)
	return math.Exp(w.options.Jitter * normal)
}

// jitterOf returns the jitter of a meeting: that of its lowest rank's instruction.
func (w *world) jitterOf(m *meeting) float64 {
	if w.options.Jitter == 0 {
		return 1
	}
	first := m.arrived[0]
	for _, a := range m.arrived {
		if a.index < first.index {
			first = a
		}
	}
	return w.jitter(first.rank, first.pc)
}

// mix applies the finaliser of SplitMix64.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// unit returns a number in (0, 1].
func unit(x uint64) float64 { return (float64(x>>11) + 1) / (1 << 53) }

// Check rejects programs that no device can run, and invalid options.
func (o *Options) Check(p *ir.Program) error {
	if err := vm.CheckProgram(p); err != nil {
		return err
	}
	return o.check(p)
}

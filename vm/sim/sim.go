// Package sim runs programs in virtual time: the same instructions in the same order as on any device, each stream of
// each rank with a clock instead of work, and nothing of the model's size in memory.
//
// The map:
//
//	sim.go       Options; a world of ranks and how a section begins in it
//	bind.go      from instructions to steps with durations, which package ir/cost knows
//	clock.go     the rules of a rank's clocks: work, record, wait
//	meet.go      messages and collectives: where clocks of several ranks meet, and deadlocks
//	fold.go      ranks that provably do the same at the same times, of which one is enough
//	run.go       Run: a whole section of all ranks in one goroutine, the fast way
//	share.go     the same where ranks share processors or copies in time: one clock for all
//	device.go    the same as a vm.Device, behind the interpreter loop that every device has
//	timeline.go  what came out: times, waits, bubble, memory
//	path.go      what each instruction waited for, and the critical path
//	measured.go  the same books of what a device measured
//
// What a copy shares with other ranks of its node, and a message with other groups, is in its price: the cost model
// divides what a node has by the ranks of the job on it, which in these programs copy at the same time. Two streams of
// a rank do not slow each other down, but for copies where they take turns. Where ranks are threads of one computer that would be wrong by much, so there, and on
// request for copies, share.go divides by who is at work at the moment.
//
// The package knows no plan, no spec and no data.
package sim

import (
	"fmt"
	"math"

	"sppo.dev/ir"
	"sppo.dev/ir/cost"
	"sppo.dev/vm"
)

// Options of a simulation.
type Options struct {
	// Slow multiplies the durations of a rank's own work: kernels and copies.
	Slow map[int]float64
	// Jitter is the standard deviation of the logarithm of a factor on every single duration; 0: none.
	Jitter float64
	Seed   uint64 // of the jitter
	Round  int64  // of the section that Run runs; each has its own jitter
	Spans  bool   // keep when each instruction began and ended
	// Scale multiplies the durations of kinds of work, of all ranks; 1 where it has no entry.
	Scale  map[ir.WorkKind]float64
	NoFold bool // simulate every rank, also where one stands for several
	// Contention has ranks of a node share copies to and from the host as they come, rather than each have its part. Processors,
	// where the machine says that ranks share them, are always shared so.
	Contention bool
}

// shares reports whether time depends on what other ranks do at the moment.
func (o *Options) shares(p *ir.Program) bool {
	return p.Machine.Parallelism > 0 || o.Contention && p.Machine.NodeCopyBandwidth > 0
}

func (o *Options) check(p *ir.Program) error {
	if !(o.Jitter >= 0) || math.IsInf(o.Jitter, 0) {
		return fmt.Errorf("a jitter of %g: it is a standard deviation, 0 or more", o.Jitter)
	}
	for kind, f := range o.Scale {
		if !(f >= 0) || math.IsInf(f, 0) {
			return fmt.Errorf("work of kind %d is to take %g times as long: a factor is 0 or more", kind, f)
		}
	}
	for r, f := range o.Slow {
		if r < 0 || r >= len(p.Ranks) {
			return fmt.Errorf("rank %d is to be slow: there are %d ranks", r, len(p.Ranks))
		}
		if !(f > 0) || math.IsInf(f, 0) {
			return fmt.Errorf("rank %d is to be slow by %g: a factor is more than 0", r, f)
		}
	}
	return nil
}

// slow is the factor of a rank.
func (o *Options) slow(r int) float64 {
	if f, ok := o.Slow[r]; ok {
		return f
	}
	return 1
}

// world is the ranks in one section.
type world struct {
	program  *ir.Program
	options  Options
	section  ir.Section
	prices   *prices
	bindings []*binding // by code
	classes  []int32    // by rank of the job
	ranks    []*rank    // one for each class
}

// newWorld binds a section, finds what ranks stand for others, and sets them to its start.
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
			w.ranks = append(w.ranks, &rank{index: r, class: c, slow: o.slow(r), round: o.Round, binding: w.binding(r)})
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

// work is an instruction that a rank does by itself.
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
	r.occupy(pc, st.stream, now, now+d)
}

// takesTurns reports whether an instruction is a copy that others of its rank hold up.
func (w *world) takesTurns(st *step) bool {
	return w.program.Machine.HalfDuplex() && (st.op == ir.CopyD2H || st.op == ir.CopyH2D)
}

// own is how long a rank takes for an instruction of its own of that price.
func (w *world) own(r *rank, pc int, price float64) float64 {
	d := price * r.slow
	if w.options.Jitter > 0 {
		d *= w.jitter(r, pc)
	}
	return d
}

// jitter is the factor on the duration of one instruction. It follows from what the instruction is, not from the order
// in which ranks are simulated.
func (w *world) jitter(r *rank, pc int) float64 {
	key := w.options.Seed
	for _, x := range [...]uint64{uint64(r.index), uint64(w.section), uint64(r.round), uint64(pc)} {
		key = mix(key ^ mix(x))
	}
	a, b := unit(mix(key+1)), unit(mix(key+2))
	normal := math.Sqrt(-2*math.Log(a)) * math.Cos(2*math.Pi*b)
	return math.Exp(w.options.Jitter * normal)
}

// jitterOf is that of a meeting: of the instruction of its lowest rank.
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

// mix is the finaliser of SplitMix64.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// unit is a number above 0 and up to 1.
func unit(x uint64) float64 { return (float64(x>>11) + 1) / (1 << 53) }

// check refuses programs that no device can run.
func check(p *ir.Program, o *Options) error {
	if err := vm.CheckProgram(p); err != nil {
		return err
	}
	return o.check(p)
}

package sim

import (
	"fmt"
	"math"
	"slices"

	"sppo.dev/internal/cost"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// kind is the effect of a step on the clocks.
type kind uint8

const (
	kindWork   kind = iota // work that involves no other rank and takes step.duration
	kindRecord             // arg is an event
	kindWait
	kindMeet // arg is a port
)

// step is the part of an instruction that affects clocks.
type step struct {
	duration float64 // duration of the rank's own work, in seconds; on one processor if ranks share processors
	work     int32   // work of a meeting: index into prices
	grouped  int32   // the same as a member of a group; 0: it is none
	arg      int32
	kind     kind
	spreads  bool // can use several processors, if ranks share them
	stream   ir.Stream
	op       ir.Op
}

// port is a connection of a code to other ranks: messages to or from a peer, or collectives of a group on a
// stream.
type port struct {
	team    bool
	stream  ir.Stream // stream of collectives
	group   int32
	peer    ir.Attr
	sends   bool
	channel vm.Channel
}

// binding is a section of a code, turned into steps. All ranks of the code share it.
type binding struct {
	steps []step
	ports []port
	peaks [ir.NumArenas]ir.Bytes // end of the highest byte that any instruction touches
	tasks int                    // 1 + the pc of the last instruction of a task on the compute stream; 0: none
}

// prices caches the duration of each distinct piece of work.
type prices struct {
	model cost.Model
	one   bool // ranks share processors, and durations are for one processor
	scale map[ir.WorkKind]float64
	alone map[ir.Work]float64
	index map[ir.Work]int32
	works []ir.Work               // works of meetings
	links map[cost.Link][]float64 // by index of the work; NaN: not yet computed
}

func newPrices(p *ir.Program, shares bool, scale map[ir.WorkKind]float64) *prices {
	model := cost.New(p.Machine, len(p.Ranks))
	if shares {
		model = model.Alone()
	}
	return &prices{
		model: model, one: p.Machine.Parallelism > 0, scale: scale, alone: map[ir.Work]float64{},
		index: map[ir.Work]int32{}, links: map[cost.Link][]float64{},
	}
}

// own returns the duration of work that involves no other rank.
func (p *prices) own(w ir.Work) float64 {
	t, ok := p.alone[w]
	if !ok {
		t = p.price(w, cost.Link{})
		p.alone[w] = t
	}
	return t
}

// price returns the duration of work on a link.
func (p *prices) price(w ir.Work, l cost.Link) float64 {
	t := float64(p.model.One(w, l))
	if f, ok := p.scale[w.Kind]; ok {
		t *= f
	}
	return t
}

// peak returns the peak FLOP rate for the data type of the matmuls: the highest if there are several types.
func (p *prices) peak() float64 {
	rate := 0.0
	for w := range p.alone {
		if w.Flops > 0 {
			rate = max(rate, p.model.Peak(w.DType))
		}
	}
	return rate
}

// number assigns an index to the work of a meeting.
func (p *prices) number(w ir.Work) int32 {
	i, ok := p.index[w]
	if !ok {
		i = int32(len(p.works))
		p.index[w] = i
		p.works = append(p.works, w)
	}
	return i
}

// on returns the durations of all numbered work on a link.
func (p *prices) on(l cost.Link) []float64 {
	table := p.links[l]
	if len(table) == len(p.works) {
		return table
	}
	for len(table) < len(p.works) {
		table = append(table, math.NaN())
	}
	p.links[l] = table
	return table
}

// bind turns a section of a code into steps. The program must have passed vm.CheckProgram.
func bind(p *ir.Program, code *ir.Code, section ir.Section, pr *prices) (*binding, error) {
	instrs := code.Sections[section]
	b := &binding{steps: make([]step, len(instrs))}
	ports, grouped := map[port]int32{}, vm.Groups(instrs)
	for pc := range instrs {
		in := &instrs[pc]
		s := &b.steps[pc]
		s.stream, s.op = in.Stream, in.Op
		if in.Stream == ir.Compute && in.Prov.Phase.OfTask() && in.Info().Class != ir.ClassSync {
			b.tasks = pc + 1
		}
		switch in.Info().Class {
		case ir.ClassSync:
			s.kind, s.arg = kindRecord, int32(in.Attrs[0].Bits)
			if in.Op == ir.Wait {
				s.kind = kindWait
			}
		case ir.ClassComm:
			w := in.Work()
			s.kind, s.work = kindMeet, pr.number(w)
			if w.Grouped = grouped[pc]; w.Grouped {
				s.grouped = pr.number(w)
			}
			key := portOf(in)
			if key.team && (key.group < 0 || int(key.group) >= len(p.Groups)) {
				return nil, fmt.Errorf("code %q, %s: group %d does not exist", code.Name, vm.At(p, section, pc, in), key.group)
			}
			i, ok := ports[key]
			if !ok {
				i = int32(len(b.ports))
				ports[key] = i
				b.ports = append(b.ports, key)
			}
			s.arg = i
		default:
			w := in.Work()
			s.kind, s.duration, s.spreads = kindWork, pr.own(w), pr.one && cost.Spreads(w)
		}
		if err := b.touch(code, in); err != nil {
			return nil, fmt.Errorf("code %q, %s: %w", code.Name, vm.At(p, section, pc, in), err)
		}
	}
	return b, nil
}

func portOf(in *ir.Instr) port {
	if in.Op == ir.Send || in.Op == ir.Recv {
		return port{peer: in.Attr("peer"), sends: in.Op == ir.Send, channel: vm.ChannelOf(in.Stream)}
	}
	return port{team: true, stream: in.Stream, group: int32(in.Attr("group").Bits)}
}

// touch records how far an instruction's operands reach in their arenas, and rejects operands out of bounds.
func (b *binding) touch(code *ir.Code, in *ir.Instr) error {
	for i := range in.Args {
		v := &in.Args[i]
		if !v.Present() {
			continue
		}
		_, end, err := code.Locate(v)
		if err != nil {
			return fmt.Errorf("%s: %w", in.Info().Operands[i].Name, err)
		}
		arena := code.Buffers[v.Buffer].Arena
		b.peaks[arena] = max(b.peaks[arena], end)
	}
	return nil
}

// resolve returns the rank at the other end of a message port.
func (w *port) resolve(p *ir.Program, rank int) int { return int(w.peer.Int(p.Ranks[rank].Consts)) }

// checkPorts rejects peers and groups that a rank does not have.
func checkPorts(p *ir.Program, rank int, b *binding) error {
	for i := range b.ports {
		port := &b.ports[i]
		if !port.team {
			if peer := port.resolve(p, rank); peer < 0 || peer >= len(p.Ranks) {
				return fmt.Errorf("rank %d: messages go to rank %d of %d", rank, peer, len(p.Ranks))
			}
			continue
		}
		members := p.Ranks[rank].Groups[port.group]
		if !slices.Contains(members, int32(rank)) {
			return fmt.Errorf("rank %d is not in its group %q: %v", rank, p.Groups[port.group], members)
		}
		for _, m := range members {
			if m < 0 || int(m) >= len(p.Ranks) {
				return fmt.Errorf("rank %d: group %q has rank %d of %d", rank, p.Groups[port.group], m, len(p.Ranks))
			}
		}
	}
	return nil
}

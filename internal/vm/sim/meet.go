package sim

import (
	"fmt"
	"slices"
	"strings"

	"sppo.dev/internal/cost"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// meeting is a message or collective among ranks. It begins when the last rank has reached it on its stream,
// takes the duration of its work on the link, and ends for all ranks at the same time.
type meeting struct {
	need    int       // number of ranks that must arrive
	members []int32   // ranks of the job that take part; for messages, used only in errors about missing ranks
	price   []float64 // by work
	link    cost.Link
	share   float64 // of their speed that kernels lose beside it; 0: none, as beside a message
	arrived []arrival
}

// arrival is a rank that has reached its instruction for a meeting.
type arrival struct {
	*rank
	pc int
}

func (a arrival) step() *step { return &a.binding.steps[a.pc] }

// meet makes a rank arrive at the meeting of its current instruction, and reports whether the meeting has taken
// place. In that case, the other ranks have also passed it, and release has been called for each of them.
func (w *world) meet(r *rank, release func(*rank)) (bool, error) {
	m, err := w.arrive(arrival{r, r.pc})
	if err != nil {
		return false, err
	}
	if len(m.arrived) < m.need {
		r.blocked = m
		return false, nil
	}
	begin := 0.0
	for _, x := range m.arrived {
		begin = max(begin, x.clocks[x.step().stream].now)
	}
	end := begin + w.lasts(m, begin)
	for _, x := range m.arrived {
		x.occupy(x.pc, x.step().stream, begin, end)
		if x.rank.pc++; x.rank != r {
			x.blocked = nil
			release(x.rank)
		}
	}
	m.arrived = m.arrived[:0]
	return true, nil
}

// lasts returns how long a meeting takes that begins at a given time. Collectives slow down what runs beside them.
func (w *world) lasts(m *meeting, begin float64) float64 {
	d := ir.Seconds(w.duration(m))
	stream := m.arrived[0].step().stream
	if m.share == 0 || stream == ir.Compute {
		return float64(d)
	}
	c, longest := cost.Collective{Stream: stream, Link: m.link, Share: m.share, Begin: ir.Seconds(begin), D: d}, d
	for _, x := range m.arrived {
		longest = max(longest, x.beside.Takes(&c))
	}
	for _, x := range m.arrived {
		x.beside.Add(&c, longest, ir.Seconds(x.clocks[ir.Compute].now), x.slow)
	}
	return float64(longest)
}

// arrive adds a rank to the meeting of its instruction. All ranks at a meeting must run the same operation.
func (w *world) arrive(a arrival) (*meeting, error) {
	m := a.meetings[a.step().arg]
	if len(m.arrived) > 0 {
		if err := w.match(m.arrived[0], a); err != nil {
			return nil, err
		}
	}
	m.arrived = append(m.arrived, a)
	return m, nil
}

// duration returns the duration of a meeting over the link between its ranks.
func (w *world) duration(m *meeting) float64 {
	of := m.arrived[0].step().grouped
	if of == 0 || slices.ContainsFunc(m.arrived, func(a arrival) bool { return a.step().grouped == 0 }) {
		of = m.arrived[0].step().work
	}
	price := &m.price[of]
	if *price != *price {
		*price = w.prices.price(w.prices.works[of], m.link)
	}
	return *price * w.jitterOf(m)
}

// match returns an error if the instructions of two ranks at a meeting do not match.
func (w *world) match(a, b arrival) error {
	x, y := a.step(), b.step()
	same := x.op == y.op
	if x.op == ir.Send || x.op == ir.Recv {
		same = x.op != y.op
	}
	if same && x.work == y.work {
		return nil
	}
	return fmt.Errorf("%s of %d bytes meets %s of %d bytes", w.at(a.rank, a.pc), w.prices.works[x.work].Bytes, w.at(b.rank, b.pc), w.prices.works[y.work].Bytes)
}

// at describes a rank and one of its instructions.
func (w *world) at(r *rank, pc int) string {
	p := w.program
	code := &p.Codes[p.Ranks[r.index].Code]
	if pc >= len(code.Sections[w.section]) {
		return fmt.Sprintf("rank %d at the end of its %s section", r.index, w.section)
	}
	return fmt.Sprintf("rank %d at %s", r.index, vm.At(p, w.section, pc, &code.Sections[w.section][pc]))
}

// mostBlocked is the maximum number of blocked ranks that an error describes.
const mostBlocked = 8

// DeadlockError reports that ranks wait forever.
type DeadlockError struct {
	Ranks []int // the waiting ranks
	text  string
}

func (e *DeadlockError) Error() string { return e.text }

// deadlock returns the error for ranks that are blocked while none runs.
func (w *world) deadlock() error {
	e := &DeadlockError{}
	var lines []string
	for _, r := range w.ranks {
		if r.blocked == nil {
			continue
		}
		e.Ranks = append(e.Ranks, r.index)
		if len(lines) < mostBlocked {
			lines = append(lines, "  "+w.at(r, r.pc)+" waits for "+w.missing(r))
		}
	}
	if more := len(e.Ranks) - len(lines); more > 0 {
		lines = append(lines, fmt.Sprintf("  and %d more", more))
	}
	e.text = fmt.Sprintf("deadlock: %d ranks wait forever\n%s", len(e.Ranks), strings.Join(lines, "\n"))
	return e
}

// missing describes the ranks that have not arrived at a rank's meeting, and the position of the first of them.
func (w *world) missing(r *rank) string {
	here := map[int32]bool{}
	for _, x := range r.blocked.arrived {
		here[int32(x.index)] = true
	}
	var away []string
	first := -1
	for _, m := range r.blocked.members {
		if !here[m] {
			if first < 0 {
				first = int(m)
			}
			away = append(away, fmt.Sprint(m))
		}
	}
	if first < 0 {
		return "itself"
	}
	if len(away) > mostBlocked {
		away = append(away[:mostBlocked], "...")
	}
	text := "rank " + strings.Join(away, ", ")
	if len(w.ranks) == len(w.program.Ranks) { // every rank is simulated, so its position is known
		text += "; " + w.at(w.ranks[first], w.ranks[first].pc)
	}
	return text
}

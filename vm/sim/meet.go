package sim

import (
	"fmt"
	"strings"

	"sppo/ir"
	"sppo/ir/cost"
	"sppo/vm"
)

// meeting is where the ranks of a message or a collective find each other. It begins when the last one has reached it
// on its stream, lasts what its work takes on the link, and ends for all.
type meeting struct {
	need    int       // ranks that must come
	members []int32   // of the job, for messages that say who is missing
	price   []float64 // by work
	link    cost.Link
	arrived []*rank
}

// meet has a rank arrive with the instruction that it is at. It says whether the meeting has taken place; the others
// then stand behind it, too, and release was called for each.
func (w *world) meet(r *rank, release func(*rank)) (bool, error) {
	st := &r.binding.steps[r.pc]
	m := r.meetings[st.arg]
	if len(m.arrived) > 0 {
		if err := w.match(m.arrived[0], r); err != nil {
			return false, err
		}
	}
	m.arrived = append(m.arrived, r)
	if len(m.arrived) < m.need {
		r.blocked = m
		return false, nil
	}
	begin := 0.0
	for _, x := range m.arrived {
		begin = max(begin, x.clocks[x.binding.steps[x.pc].stream].now)
	}
	end := begin + w.duration(m, st.work)*w.jitterOf(m)
	for _, x := range m.arrived {
		x.occupy(x.pc, x.binding.steps[x.pc].stream, begin, end)
		if x.pc++; x != r {
			x.blocked = nil
			release(x)
		}
	}
	m.arrived = m.arrived[:0]
	return true, nil
}

// duration is what work takes where a meeting's ranks are.
func (w *world) duration(m *meeting, work int32) float64 {
	if t := m.price[work]; t == t {
		return t
	}
	m.price[work] = float64(w.prices.model.Time(w.prices.works[work], m.link))
	return m.price[work]
}

// match refuses a meeting of two different operations.
func (w *world) match(a, b *rank) error {
	x, y := &a.binding.steps[a.pc], &b.binding.steps[b.pc]
	same := x.op == y.op
	if x.op == ir.Send || x.op == ir.Recv {
		same = x.op != y.op
	}
	if same && x.work == y.work {
		return nil
	}
	return fmt.Errorf("%s of %d bytes meets %s of %d bytes", w.at(a), w.prices.works[x.work].Bytes, w.at(b), w.prices.works[y.work].Bytes)
}

// at names a rank and the instruction that it is at.
func (w *world) at(r *rank) string {
	p := w.program
	code := &p.Codes[p.Ranks[r.index].Code]
	if r.pc >= len(code.Sections[w.section]) {
		return fmt.Sprintf("rank %d at the end of its %s section", r.index, w.section)
	}
	return fmt.Sprintf("rank %d at %s", r.index, vm.At(p, w.section, r.pc, &code.Sections[w.section][r.pc]))
}

// mostBlocked is how many of the ranks that wait for ever an error tells of.
const mostBlocked = 8

// DeadlockError says that ranks wait for each other.
type DeadlockError struct {
	Ranks []int // that wait
	text  string
}

func (e *DeadlockError) Error() string { return e.text }

// deadlock is the error of the ranks that are blocked while none runs.
func (w *world) deadlock() error {
	e := &DeadlockError{}
	var lines []string
	for _, r := range w.ranks {
		if r.blocked == nil {
			continue
		}
		e.Ranks = append(e.Ranks, r.index)
		if len(lines) < mostBlocked {
			lines = append(lines, "  "+w.at(r)+" waits for "+w.missing(r))
		}
	}
	if more := len(e.Ranks) - len(lines); more > 0 {
		lines = append(lines, fmt.Sprintf("  and %d more", more))
	}
	e.text = fmt.Sprintf("deadlock: %d ranks wait for ever\n%s", len(e.Ranks), strings.Join(lines, "\n"))
	return e
}

// missing are the ranks that have not come to the meeting of a rank, and where the first of them is.
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
	if len(w.ranks) == len(w.program.Ranks) { // one for each: it is known where
		text += "; " + w.at(w.ranks[first])
	}
	return text
}

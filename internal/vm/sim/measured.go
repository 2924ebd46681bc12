package sim

import (
	"fmt"
	"time"

	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// Measured returns the timeline of a section that a device ran, analysed like a simulation: the instructions
// define the reason for each wait, and the device provides the times. Spans are indexed by rank and pc.
// Measured adjusts their start times to the simulator's definition.
func Measured(p *ir.Program, section ir.Section, device string, spans [][]Span) (*Timeline, error) {
	b, err := NewBooks(p, section)
	if err != nil {
		return nil, err
	}
	if len(spans) != len(p.Ranks) {
		return nil, fmt.Errorf("%d ranks were measured, but the program has %d", len(spans), len(p.Ranks))
	}
	for r := range spans {
		if got, want := len(spans[r]), len(b.world.binding(r).steps); got != want {
			return nil, fmt.Errorf("rank %d: %d instructions were measured, but section %s has %d", r, got, section, want)
		}
	}
	t := b.replay(spans)
	t.Measured = device
	return t, nil
}

// Books holds the part of a program that is needed to analyse measurements of a section. It can be used for any
// number of runs of the section.
type Books struct {
	world    world    // without ranks
	meetings [][]Site // the instructions of each message and collective
}

// NewBooks reads a section of a program.
func NewBooks(p *ir.Program, section ir.Section) (*Books, error) {
	if err := vm.CheckProgram(p); err != nil {
		return nil, err
	}
	w := world{program: p, section: section, prices: newPrices(p, false, nil), options: Options{Spans: true}}
	for c := range p.Codes {
		b, err := bind(p, &p.Codes[c], section, w.prices)
		if err != nil {
			return nil, err
		}
		w.bindings = append(w.bindings, b)
	}
	return &Books{w, meetingsOf(p, section)}, nil
}

// Timeline returns the timeline of the measured ranks; pass nil as the spans of every other rank. If some ranks
// of a message or collective were not measured, it begins when the last measured rank arrives. Start times of
// spans are adjusted as in Measured.
func (b *Books) Timeline(spans [][]Span) *Timeline { return b.replay(spans) }

func (b *Books) replay(spans [][]Span) *Timeline {
	b.align(spans)
	w := b.world
	for index := range spans {
		if spans[index] == nil {
			continue
		}
		steps := w.binding(index)
		r := &rank{index: index, class: len(w.ranks), factor: 1, binding: steps}
		w.classes, w.ranks = append(w.classes, int32(r.class)), append(w.ranks, r)
		w.begin(r, w.options.Spans)
		for pc, span := range spans[index] {
			r.replay(pc, &steps.steps[pc], span)
		}
	}
	return w.timeline()
}

// replay applies a measured instruction. A pause before work that involves no other rank, for example between
// two kernels, is caused by the device itself. Such a pause counts as part of the work when a wait is
// explained, but not as busy time.
func (r *rank) replay(pc int, st *step, span Span) {
	begin, end := float64(span.Begin), float64(span.End)
	c := &r.clocks[st.stream]
	switch st.kind {
	case kindRecord:
		r.record(pc, st)
	case kindWait:
		if e := &r.events[st.arg]; e.at > begin {
			if st.stream == ir.Compute {
				r.blame(begin, *e)
			}
			c.cause = *e
		}
		c.now = max(c.now, end)
	case kindMeet:
		r.occupy(pc, st.stream, max(begin, c.cause.at), max(end, c.cause.at))
	default:
		r.lead(st.stream, min(begin, c.cause.at), end)
		r.worked(pc, st.stream, end-begin)
	}
	r.spans[pc] = span
}

// encounter identifies a meeting by its ranks and its number among their meetings, which all of them issue in
// the same order.
type encounter struct {
	from, to int // ranks of a message; -1 for a collective
	channel  vm.Channel
	group    string
	number   int // among meetings of its kind
}

// meetingsOf finds the instructions of each message and collective.
func meetingsOf(p *ir.Program, section ir.Section) [][]Site {
	numbers := map[encounter]int{}
	var out [][]Site
	for r := range p.Ranks {
		rank := &p.Ranks[r]
		counts := map[encounter]int{}
		for pc := range p.Codes[rank.Code].Sections[section] {
			in := &p.Codes[rank.Code].Sections[section][pc]
			if in.Info().Class != ir.ClassComm {
				continue
			}
			key := encounter{from: -1, to: -1, channel: vm.ChannelOf(in.Stream)}
			switch in.Op {
			case ir.Send:
				key.from, key.to = r, int(in.Attr("peer").Int(rank.Consts))
			case ir.Recv:
				key.from, key.to = int(in.Attr("peer").Int(rank.Consts)), r
			default:
				key.group = fmt.Sprint(in.Stream, rank.Groups[in.Attr("group").Bits])
			}
			kind := key
			counts[kind]++
			key.number = counts[kind]
			n, known := numbers[key]
			if !known {
				n = len(out)
				numbers[key], out = n, append(out, nil)
			}
			out[n] = append(out[n], Site{r, pc})
		}
	}
	return out
}

// align moves the start of messages and collectives to the arrival of the last rank, as in a simulation; a
// device measures them from the arrival of its own rank.
func (b *Books) align(spans [][]Span) {
	for _, all := range b.meetings {
		var last ir.Seconds
		for _, s := range all {
			if spans[s.Rank] != nil {
				last = max(last, spans[s.Rank][s.PC].Begin)
			}
		}
		for _, s := range all {
			if spans[s.Rank] != nil {
				span := &spans[s.Rank][s.PC]
				span.Begin = max(span.Begin, min(last, span.End))
			}
		}
	}
}

// SpansOf arranges the devices' reports on a section by rank and pc, in seconds since the first rank began.
// Ranks without a timeline have no spans.
func SpansOf(p *ir.Program, timelines []*vm.Timeline) [][]Span {
	spans := make([][]Span, len(timelines))
	var start time.Time
	for _, t := range timelines {
		if t != nil && (start.IsZero() || t.Start.Before(start)) {
			start = t.Start
		}
	}
	for r, t := range timelines {
		if t == nil {
			continue
		}
		spans[r] = make([]Span, len(p.Codes[p.Ranks[r].Code].Sections[t.Section]))
		late := ir.Seconds(t.Start.Sub(start).Seconds())
		for _, stream := range t.Streams {
			for _, s := range stream {
				spans[r][s.PC] = Span{late + ir.Seconds(s.Begin.Seconds()), late + ir.Seconds(s.End.Seconds())}
			}
		}
	}
	return spans
}

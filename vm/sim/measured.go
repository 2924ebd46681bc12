package sim

import (
	"fmt"
	"slices"

	"sppo.dev/ir"
	"sppo.dev/vm"
)

// Measured is the timeline of a section that a device ran, with the books of a simulation: who waited for whom follows
// from the same instructions, when from the device. The spans are by rank and pc; their begins are changed to what a
// simulation means by them.
func Measured(p *ir.Program, section ir.Section, device string, spans [][]Span) (*Timeline, error) {
	if err := vm.CheckProgram(p); err != nil {
		return nil, err
	}
	w := &world{program: p, section: section, prices: newPrices(p, false), options: Options{Spans: true}}
	for c := range p.Codes {
		b, err := bind(p, &p.Codes[c], section, w.prices)
		if err != nil {
			return nil, err
		}
		w.bindings = append(w.bindings, b)
	}
	if len(spans) != len(p.Ranks) {
		return nil, fmt.Errorf("%d ranks were measured, the program has %d", len(spans), len(p.Ranks))
	}
	for r := range spans {
		if got, want := len(spans[r]), len(w.binding(r).steps); got != want {
			return nil, fmt.Errorf("rank %d: %d instructions were measured, section %s has %d", r, got, section, want)
		}
	}
	alignMeetings(p, section, spans)
	for index := range p.Ranks {
		b := w.binding(index)
		r := &rank{index: index, class: index, slow: 1, binding: b}
		w.classes, w.ranks = append(w.classes, int32(index)), append(w.ranks, r)
		w.begin(r, w.options.Spans)
		for pc, span := range spans[index] {
			r.replay(pc, &b.steps[pc], span)
		}
	}
	t := w.timeline()
	t.Measured = device
	return t, nil
}

// replay takes up an instruction as it was measured. A pause before work that meets nobody is the device's own, between
// one kernel and the next: it belongs to the work, as far as causes go, but does not count as busy.
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
		c.busy += end - begin
	}
	r.spans[pc] = span
}

// encounter is a meeting of ranks by who they are and how many such there were before: each rank issues them in order.
type encounter struct {
	from, to int // of a message; -1 of a collective
	channel  vm.Channel
	group    string
	number   int // of its kind so far
}

// site is an instruction of a rank.
type site struct{ rank, pc int }

// alignMeetings moves the begin of messages and collectives to when the last of their ranks was there, as a simulation counts: a
// device measures from when its own stream was.
func alignMeetings(p *ir.Program, section ir.Section, spans [][]Span) {
	sites := map[encounter][]site{}
	for r := range spans {
		rank := &p.Ranks[r]
		counts := map[encounter]int{}
		for pc := range spans[r] {
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
			sites[key] = append(sites[key], site{r, pc})
		}
	}
	for _, all := range sites {
		last := slices.MaxFunc(all, func(a, b site) int { return compareBegins(spans, a, b) })
		begin := spans[last.rank][last.pc].Begin
		for _, s := range all {
			span := &spans[s.rank][s.pc]
			span.Begin = max(span.Begin, min(begin, span.End))
		}
	}
}

func compareBegins(spans [][]Span, a, b site) int {
	x, y := spans[a.rank][a.pc].Begin, spans[b.rank][b.pc].Begin
	switch {
	case x < y:
		return -1
	case x > y:
		return 1
	}
	return 0
}

// SpansOf sorts what devices reported of a section by rank and pc, in seconds since the first rank began.
func SpansOf(p *ir.Program, timelines []*vm.Timeline) [][]Span {
	spans := make([][]Span, len(timelines))
	if len(timelines) == 0 {
		return spans
	}
	start := timelines[0].Start
	for _, t := range timelines {
		if t.Start.Before(start) {
			start = t.Start
		}
	}
	for r, t := range timelines {
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

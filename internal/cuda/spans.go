package cuda

import (
	"time"

	"sppo.dev/internal/cuda/driver"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// spanEvents times instructions with one event before and one after each. The events are read when the section
// is joined. Times are GPU times, measured from an event at the start of the section.
type spanEvents struct {
	start driver.Event
	pairs [ir.NumSections][][2]driver.Event
	begun driver.Call
	first ir.Stream // stream that records start
}

// make creates the events, and adds actions that record them before and after each instruction's own actions.
// Sections that are not timed skip the added actions.
func (s *spanEvents) make(d *Device) (err error) {
	if s.start, err = d.newEvent(true); err != nil {
		return err
	}
	for i, stream := range d.streams {
		if stream != 0 {
			s.first, s.begun = ir.Stream(i), d.api.Record(s.start, stream)
			break
		}
	}
	for section := range d.bound {
		s.pairs[section] = make([][2]driver.Event, len(d.bound[section]))
		for pc := range d.bound[section] {
			b, pair := &d.bound[section][pc], &s.pairs[section][pc]
			for i := range pair {
				if pair[i], err = d.newEvent(true); err != nil {
					return err
				}
			}
			before, behind := d.api.Record(pair[0], d.streams[b.stream]), d.api.Record(pair[1], d.streams[b.stream])
			b.actions = append(append([]action{&before}, b.actions...), &behind)
		}
	}
	return nil
}

func (s *spanEvents) begin(d *Device) error {
	if len(d.bound[d.section]) == 0 {
		return nil
	}
	if err := s.begun.Make(); err != nil {
		return err
	}
	err := d.joins[s.first].Make() // otherwise other streams could start before the time origin
	d.env.Spans.Start = time.Now()
	return err
}

// collect reports the section's instructions, stream by stream in issue order.
func (s *spanEvents) collect(d *Device) error {
	for pc, pair := range s.pairs[d.section] {
		var at [2]time.Duration
		for i, e := range pair {
			ms, err := d.api.ElapsedMillis(s.start, e)
			if err != nil {
				return err
			}
			at[i] = time.Duration(float64(ms) * float64(time.Millisecond))
		}
		stream := d.bound[d.section][pc].stream
		d.env.Spans.Streams[stream] = append(d.env.Spans.Streams[stream], vm.Span{PC: int32(pc), Begin: at[0], End: at[1]})
	}
	return nil
}

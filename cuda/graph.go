package cuda

import (
	"errors"
	"fmt"

	"sppo.dev/cuda/driver"
	"sppo.dev/ir"
)

// graphs replay sections: the first time that one is issued its calls are made, since libraries load and set up what they need at
// their first, which a capture may forbid; the second time they are captured, and from then on the driver is handed the whole section
// at once. All arguments are the same every time; tokens are brought to the same place.
type graphs struct {
	origin    driver.Stream // where capture begins and ends, and what graphs are launched on
	fork      driver.Event
	joins     [ir.NumStreams]driver.Event
	issued    [ir.NumSections]bool         // its calls have been made
	launch    [ir.NumSections]*driver.Call // nil: not yet captured
	capturing bool
	replaying bool
}

// makeGraphs is for ranks that meet no others: a peer's part is no part of the graph.
func (d *Device) makeGraphs() (err error) {
	if !d.machine.options.Graphs || d.machine.options.Sync || len(d.code.Sections[ir.SectionStep]) == 0 {
		return nil
	}
	if len(d.program.Ranks) > 1 {
		return fmt.Errorf("graphs hold what one rank does by itself, and the program has %d that meet", len(d.program.Ranks))
	}
	g := &graphs{}
	if g.fork, err = d.newEvent(false); err != nil {
		return err
	}
	for s, stream := range d.streams {
		switch {
		case stream == 0:
			continue
		case g.origin == 0:
			g.origin = stream
		}
		if g.joins[s], err = d.newEvent(false); err != nil {
			return err
		}
	}
	d.graphs = g
	return nil
}

// begin captures or replays a section, unless it is to be timed instruction by instruction.
func (g *graphs) begin(d *Device) error {
	if g == nil || d.timing || d.section == ir.SectionInit {
		return nil
	}
	if g.replaying = g.launch[d.section] != nil; g.replaying {
		return nil
	}
	if !g.issued[d.section] {
		g.issued[d.section] = true
		return nil
	}
	if err := d.api.BeginCapture(g.origin); err != nil {
		return err
	}
	g.capturing = true
	fork := d.api.Record(g.fork, g.origin)
	err := fork.Make()
	for _, stream := range d.streams {
		if err == nil && stream != 0 && stream != g.origin {
			wait := d.api.Wait(stream, g.fork)
			err = wait.Make()
		}
	}
	return err
}

// end launches what was captured, now or before.
func (g *graphs) end(d *Device) error {
	if g == nil || !g.capturing && !g.replaying {
		return nil
	}
	g.replaying = false
	if g.capturing {
		g.capturing = false
		if err := g.keep(d); err != nil {
			return err
		}
	}
	if d.err != nil {
		return nil
	}
	return g.launch[d.section].Make()
}

// keep ends a capture and makes it a graph that can be launched. After an error of an instruction there is nothing to keep.
func (g *graphs) keep(d *Device) (err error) {
	var errs []error
	for s, stream := range d.streams {
		if stream == 0 || stream == g.origin || d.err != nil {
			continue
		}
		record, wait := d.api.Record(g.joins[s], stream), d.api.Wait(g.origin, g.joins[s])
		errs = append(errs, record.Make(), wait.Make())
	}
	graph, err := d.api.EndCapture(g.origin)
	if graph != 0 {
		defer func() { err = errors.Join(err, d.api.DestroyGraph(graph)) }()
	}
	if d.err != nil {
		return nil // told already; that the capture is invalid follows from it
	}
	if err := errors.Join(append(errs, err)...); err != nil {
		return err
	}
	exec, err := d.api.Instantiate(graph)
	if err != nil {
		return err
	}
	d.later(func() error { return d.api.DestroyExec(exec) })
	launch := d.api.LaunchGraph(exec, g.origin)
	g.launch[d.section] = &launch
	return nil
}

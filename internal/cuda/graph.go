package cuda

import (
	"errors"
	"fmt"

	"sppo.dev/internal/cuda/driver"
	"sppo.dev/ir"
)

// graphs captures sections as CUDA graphs and replays them. The first time, a section is issued call by call,
// because libraries load and initialise during their first calls, and a capture may forbid that. The second
// time, it is captured. From then on, the driver receives the entire section in one call. All arguments are the
// same every time; new tokens are copied to the same place.
type graphs struct {
	origin    driver.Stream // stream on which captures begin and end, and on which graphs are launched
	fork      driver.Event
	joins     [ir.NumStreams]driver.Event
	issued    [ir.NumSections]bool         // the section has been issued once
	launch    [ir.NumSections]*driver.Call // nil: not yet captured
	capturing bool
	replaying bool
}

// makeGraphs prepares the capture and replay of sections, if the options ask for it. It refuses ranks with
// peers, because a graph would not contain the peers' work.
func (d *Device) makeGraphs() (err error) {
	if !d.machine.options.Graphs || d.machine.options.Sync || len(d.code.Sections[ir.SectionStep]) == 0 {
		return nil
	}
	if len(d.program.Ranks) > 1 {
		return fmt.Errorf("graphs need a program of a single rank, but this one has %d", len(d.program.Ranks))
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

// begin starts to capture or replay a section, unless it is the init section or its instructions are to be
// timed.
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

// end launches the section's graph, after ending the capture if one is under way.
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

// keep ends a capture and instantiates the graph. If an instruction has failed, there is no graph to keep.
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
		return nil // already reported; the invalid capture is a consequence
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

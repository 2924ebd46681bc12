package main

import (
	"io"

	"sppo/cmd/internal/cli"
	"sppo/cmd/internal/trace"
	"sppo/ir"
	"sppo/vm/sim"
)

// writeProfile writes the last step's timeline, and says how it compares with the simulator's.
func (r *training) writeProfile() error {
	if len(r.meter.last) == 0 {
		r.show.say("no step was measured: %s is not written", r.f.profile)
		return nil
	}
	measured, err := sim.Measured(r.program, ir.SectionStep, r.device, sim.SpansOf(r.program, r.meter.last))
	if err != nil {
		return err
	}
	measured.Round = r.meter.last[0].Round
	all := make([]int, len(r.program.Ranks))
	for rank := range all {
		all[rank] = rank
	}
	if err := cli.WriteFile(r.f.profile, func(w io.Writer) error { return trace.Write(w, r.program, measured, all) }); err != nil {
		return err
	}
	simulated, err := sim.Run(r.program, ir.SectionStep, sim.Options{})
	if err != nil {
		return err
	}
	r.show.say("%s: step %d took %s, %.3f times the %s that are simulated on %s", r.f.profile, measured.Round, measured.Makespan,
		float64(measured.Makespan/simulated.Makespan), simulated.Makespan, r.program.Machine.Name)
	return nil
}

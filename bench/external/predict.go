package main

import (
	"slices"

	"sppo.dev/internal/codegen"
	"sppo.dev/internal/compile"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// predict plans the row's job, builds its program and simulates a step of it.
func (r *row) predict() error {
	p, err := compile.Plan(r.spec, passes.Options{})
	if err != nil {
		return err
	}
	program, err := codegen.Build(p)
	if err != nil {
		return err
	}
	t, err := sim.Run(program, ir.SectionStep, sim.Options{})
	if err != nil {
		return err
	}
	r.predicted, r.fits = float64(t.Makespan), p.Memory.Fits
	r.peak = float64(slices.Max(p.Memory.DevicePeakBytes)) / (1 << 30)
	return nil
}

// error returns by which share the predicted step is longer than the measured one.
func (r *row) error() float64 { return r.predicted/r.measured - 1 }

package estimate

import (
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/walk"
)

// simulate predicts the time of a plan from its costs and writes it into the plan.
func simulate(p *plan.Plan, t *Costs) { newSimulation(walk.Must(p), t, nil).Run().Report(p) }

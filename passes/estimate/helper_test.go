package estimate

import (
	"sppo.dev/passes/plan"
	"sppo.dev/passes/walk"
)

// simulate predicts the time of a plan from its costs and writes it into the plan.
func simulate(p *plan.Plan, t *Costs) { newSimulation(walk.Must(p), t, nil).Run().Report(p) }

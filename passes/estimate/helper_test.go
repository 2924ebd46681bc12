package estimate

import (
	"sppo.dev/passes/plan"
	"sppo.dev/passes/walk"
)

// simulate predicts how long a plan takes.
func simulate(p *plan.Plan, t *Costs) { newSimulation(walk.Must(p), t, nil).Run().Report(p) }

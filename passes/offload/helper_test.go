package offload

import (
	"sppo.dev/lang"
	"sppo.dev/passes/pass"
	"sppo.dev/passes/plan"
)

// RunWith is passes.Run, from a package on a higher floor.
var RunWith func(*lang.Spec, *plan.Plan, pass.Options) error

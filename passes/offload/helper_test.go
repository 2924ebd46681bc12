package offload

import (
	"sppo.dev/lang"
	"sppo.dev/passes/pass"
	"sppo.dev/passes/plan"
)

// RunWith is passes.Run, from a package at a higher level.
var RunWith func(*lang.Spec, *plan.Plan, pass.Options) error

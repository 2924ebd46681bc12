package offload

import (
	"sppo.dev/internal/passes/pass"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/lang"
)

// RunWith is passes.Run, from a package at a higher level.
var RunWith func(*lang.Spec, *plan.Plan, pass.Options) error

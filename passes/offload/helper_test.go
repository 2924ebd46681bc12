package offload

import (
	"sppo.dev/lang"
	"sppo.dev/passes/pass"
	"sppo.dev/passes/plan"
)

// RunWith is passes.Run, which stands on a floor above.
var RunWith func(*lang.Spec, *plan.Plan, pass.Options) error

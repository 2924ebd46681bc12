package search

import (
	"sppo.dev/internal/passes/pass"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/lang"
)

// RunWith is passes.Run, and ContextOf creates a context as passes.Run does; both need packages at a higher
// level.
var (
	RunWith   func(*lang.Spec, *plan.Plan, pass.Options) error
	ContextOf func(*lang.Spec, pass.Options) *pass.Context
)

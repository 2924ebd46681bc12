package search

import (
	"sppo.dev/lang"
	"sppo.dev/passes/pass"
	"sppo.dev/passes/plan"
)

// RunWith is passes.Run, and ContextOf a context as it makes one: both stand on a floor above.
var (
	RunWith   func(*lang.Spec, *plan.Plan, pass.Options) error
	ContextOf func(*lang.Spec, pass.Options) *pass.Context
)

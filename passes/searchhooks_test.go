package passes

import "sppo.dev/lang"

// RunWith is passes.Run, and ContextOf a context as it makes one: both stand on a floor above.
var (
	RunWith   func(*lang.Spec, *Plan, Options) error
	ContextOf func(*lang.Spec, Options) *Context
)

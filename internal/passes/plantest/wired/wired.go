// Package wired lets plantest run the passes. Tests of packages that package passes imports cannot let plantest import
// it, but their external test packages can import this one.
package wired

import (
	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/plantest"
	"sppo.dev/lang"
)

func init() {
	plantest.Run = func(sp *lang.Spec, p *plan.Plan) error { return passes.Run(sp, p, passes.Options{}) }
	plantest.Verify = passes.Verify
}

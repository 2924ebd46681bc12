package estimate_test

import (
	"testing"

	"sppo.dev/lang"
	"sppo.dev/passes"
	"sppo.dev/passes/plan"
	"sppo.dev/passes/plantest"
)

// TestMain gives tests access to packages at higher levels.
func TestMain(m *testing.M) {
	plantest.Run = func(sp *lang.Spec, p *plan.Plan) error { return passes.Run(sp, p, passes.Options{}) }
	plantest.Verify = passes.Verify
	m.Run()
}

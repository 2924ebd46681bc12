package offload_test

import (
	"testing"

	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/offload"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/plantest"
	"sppo.dev/lang"
)

// TestMain gives tests access to packages at higher levels.
func TestMain(m *testing.M) {
	plantest.Run = func(sp *lang.Spec, p *plan.Plan) error { return passes.Run(sp, p, passes.Options{}) }
	plantest.Verify = passes.Verify
	offload.RunWith = passes.Run
	m.Run()
}

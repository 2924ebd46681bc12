package search_test

import (
	"testing"

	"sppo.dev/internal/codegen"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/estimate"
	"sppo.dev/internal/passes/pass"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/plantest"
	"sppo.dev/internal/passes/search"
	"sppo.dev/lang"
)

// TestMain gives tests access to packages at higher levels.
func TestMain(m *testing.M) {
	plantest.Run = func(sp *lang.Spec, p *plan.Plan) error { return passes.Run(sp, p, passes.Options{}) }
	plantest.Verify = passes.Verify
	search.Place, search.RunWith, search.ContextOf = codegen.MeasureFit, passes.Run, contextOf
	m.Run()
}

// contextOf returns a context like the one that passes.Run creates.
func contextOf(sp *lang.Spec, o pass.Options) *pass.Context {
	c := &pass.Context{Spec: sp, Cache: estimate.NewCache(), Options: o}
	for i := range passes.Passes {
		if passes.Passes[i].Run != nil && i > 0 {
			c.Later = append(c.Later, &passes.Passes[i])
		}
	}
	return c
}

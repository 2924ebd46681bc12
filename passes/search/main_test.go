package search_test

import (
	"testing"

	"sppo.dev/codegen"
	"sppo.dev/lang"
	"sppo.dev/passes"
	"sppo.dev/passes/estimate"
	"sppo.dev/passes/pass"
	"sppo.dev/passes/plan"
	"sppo.dev/passes/plantest"
	"sppo.dev/passes/search"
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

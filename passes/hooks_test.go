package passes

import "sppo.dev/lang"

func init() {
	RunPlan = func(sp *lang.Spec, p *Plan) error { return Run(sp, p, Options{}) }
	VerifyPlan, RunWith, ContextOf = Verify, Run, newContext
}

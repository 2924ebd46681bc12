// Package pass says what a pass is: a function over a plan, a check of what it must leave, and what must run before it.
package pass

import (
	"io"

	"sppo.dev/graph"
	"sppo.dev/lang"
	"sppo.dev/passes/estimate"
	"sppo.dev/passes/plan"
	"sppo.dev/passes/walk"
)

// Pass is one step from a requested spec to a program. Its Run refines the plan; Check states what the plan must
// satisfy once the pass has run, whoever made it.
type Pass struct {
	Name  string
	Doc   string
	Run   func(*Context, *plan.Plan) error // nil for the passes of codegen, which refine the program
	Check func(*Context, *plan.Plan) error
	Off   func(*Context, *plan.Plan) // what the plan says where the pass is switched off; nil: the pass is required
	After []Order
}

// Order says that a pass comes later than another, and why.
type Order struct{ Name, Reason string }

// Required says that nothing can be built without the pass.
func (p *Pass) Required() bool { return p.Off == nil }

// Context is what passes of one plan may look at besides it.
type Context struct {
	Spec      *lang.Spec // nil for a plan that came as JSON
	Cache     *estimate.Cache
	Work      *walk.Work
	estimates *estimate.Estimator // of the plan with its present lengths and tasks; nil: none yet
	Candidate bool                // the plan is one of a search, so that nobody reads its reasons
	Untimed   bool                // copies begin as late as they may and last no longer than they must, whatever time that costs

	Options Options
	Later   []*Pass    // behind solve, by default: what its search runs candidates through
	Winner  *plan.Plan // of that search
}

// Model is the dataflow of the plan's model on one rank.
func (c *Context) Model(p *plan.Plan) *graph.Model { return c.Cache.Model(p) }

// Estimator is that of the context's plan, once its lengths and tasks are decided.
func (c *Context) Estimator(p *plan.Plan) *estimate.Estimator {
	if c.estimates == nil {
		c.estimates = estimate.New(c.Cache, c.Work, p)
	}
	return c.estimates
}

// Forget is for passes that change the lengths or the tasks of the plan.
func (c *Context) Forget() { c.estimates = nil }

// Options choose what of the passes runs and what of the plan is shown on the way.
type Options struct {
	Passes     []string  // instead of the default order; empty: all
	Disable    []string  // passes to leave out
	PrintAfter []string  // print the plan after these; "all" is every pass
	StopAfter  string    // run no pass after this one
	Print      io.Writer // where PrintAfter goes

	// Measure fills a plan's Memory by placing it, as codegen does; without it solve goes by the bound that it has.
	Measure func(*plan.Plan) error

	// Fitting asks whether anything fits: solve takes the first plan that does, and looks for no faster one.
	Fitting bool

	// Patience scales the work after which solve accepts a plan that may not be the best; 0 is 1.
	Patience float64
}

// Diagnose points at the keys of the spec that problems are about.
func (c *Context) Diagnose(problems []plan.Problem) error {
	sp := c.Spec
	if sp == nil {
		sp = &lang.Spec{}
	}
	var ds lang.Diagnostics
	for _, f := range problems {
		ds = append(ds, sp.Diagnose(f.Key, f.Code, "%s", f.Message).WithHint("%s", f.Hint))
	}
	return ds.Err()
}

// Package pass defines what a pass is: a function that changes a plan, a check of its result, and
// the passes that must run before it.
package pass

import (
	"io"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/estimate"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/walk"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// Pass is one step from a requested spec to a program. Run refines the plan; Check checks the
// conditions that a plan must satisfy once the pass has run, regardless of the plan's origin.
type Pass struct {
	Name  string
	Doc   string
	Run   func(*Context, *plan.Plan) error // nil for the passes of codegen, which refine the program
	Check func(*Context, *plan.Plan) error
	Off   func(*Context, *plan.Plan) // runs instead of Run if the pass is switched off; nil: the pass is required
	After []Order
}

// Order is the requirement that one pass runs after another, with the reason.
type Order struct{ Name, Reason string }

// Required reports whether the pass cannot be switched off.
func (p *Pass) Required() bool { return p.Off == nil }

// Context holds what passes take as input in addition to the plan.
type Context struct {
	Spec      *lang.Spec // nil for a plan read from JSON
	Cache     *estimate.Cache
	Work      *walk.Work
	estimates *estimate.Estimator // for the plan's current lengths and tasks; nil: not yet computed
	Candidate bool                // the plan is a candidate of a search, so nobody reads the reasons for its decisions
	Untimed   bool                // choose the timing of copies for the least memory, regardless of time

	Options Options
	Later   []*Pass    // the default passes after solve; the search in solve runs them on candidates
	Winner  *plan.Plan // result of that search
}

// Model returns the dataflow of the plan's model on one rank.
func (c *Context) Model(p *plan.Plan) *graph.Model { return c.Cache.Model(p) }

// Estimator returns the estimator of the context's plan, once its lengths and tasks are decided.
func (c *Context) Estimator(p *plan.Plan) *estimate.Estimator {
	if c.estimates == nil {
		c.estimates = estimate.New(c.Cache, c.Work, p)
	}
	return c.estimates
}

// Forget must be called by passes that change the lengths or tasks of the plan.
func (c *Context) Forget() { c.estimates = nil }

// Options select the passes to run and the intermediate plans to print.
type Options struct {
	Disable    []string  // passes to skip
	PrintAfter []string  // print the plan after these; "all" means every pass
	StopAfter  string    // run no pass after this one
	Print      io.Writer // destination of PrintAfter

	Times *Times // measures the passes; nil: nobody asks

	// Measure places the buffers of a plan and returns its shortfall, or nil if it fits. It fills
	// in the plan's Memory, unless it is clear without placement that the plan does not fit. If Measure is nil,
	// solve uses its memory bound.
	Measure func(*plan.Plan) (*plan.Shortfall, error)

	// Fitting means that the caller only wants to know whether any plan fits. solve takes the first
	// plan that fits, and does not look for a faster one.
	Fitting bool

	// Stop ends a search early: once it is closed, solve takes the best plan so far. It may be nil.
	Stop <-chan struct{}

	// Progress, unless it is nil, is called after each candidate of a search.
	Progress func(Progress)

	// Patience scales the amount of work after which solve accepts a plan that may not be the best; 0 means
	// 1.
	Patience float64
}

// Progress describes how far a search has come.
type Progress struct {
	Candidates int        // number of candidates so far, complete or not
	Planned    int        // number of candidates planned in full
	StepS      ir.Seconds // of the best plan so far that fits; 0: none fits yet
}

// Stopped reports whether the user has asked to end the search with the best plan so far.
func (o *Options) Stopped() bool {
	select {
	case <-o.Stop:
		return true
	default:
		return false
	}
}

// Diagnose converts problems to diagnostics that point at the keys of the spec.
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

package passes

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"sppo.dev/graph"
	"sppo.dev/lang"
)

// Pass is one step from a requested spec to a program. Its Run refines the plan; Check states what the plan must
// satisfy once the pass has run, whoever made it.
type Pass struct {
	Name  string
	Doc   string
	Run   func(*Context, *Plan) error // nil for the passes of codegen, which refine the program
	Check func(*Context, *Plan) error
	Off   func(*Context, *Plan) // what the plan says where the pass is switched off; nil: the pass is required
	After []Order
}

// Order says that a pass comes later than another, and why.
type Order struct{ Name, Reason string }

// Required says that nothing can be built without the pass.
func (p *Pass) Required() bool { return p.Off == nil }

// Passes are all passes in the order of a default run.
var Passes = [...]Pass{
	{
		Name: "solve", Run: solve, Check: checkSolved,
		Doc: "Chooses what the spec leaves `auto`: SP, PP, DP, the number of subsequences, the grid of their borders, and how many layers each stage holds.",
	},
	{
		Name: "partition", Run: partition, Check: checkPartition,
		Doc: "Cuts the sequence into subsequences: of equal floating-point operations (`flops`, so that later ones, which look back further, are shorter), of equal length, or as given.",
		After: []Order{
			{"solve", "the number of subsequences and their grid are sizes"},
		},
	},
	{
		Name: "schedule", Run: orderTasks, Check: checkSchedule,
		Doc: "Orders the tasks of every stage by the strategy: forwards of subsequences from the first to the last, backwards from the last to the first, and, where they are put off, gradients of weights.",
		After: []Order{
			{"partition", "tasks are forwards and backwards of subsequences"},
		},
	},
	{
		Name: "lifespan", Run: lifespan, Check: checkLifespan,
		Doc: "Finds in the model's dataflow what one layer leaves in memory and for how long: read by later subsequences (type 0), by the backward pass (type 1), or by the same forward alone (type 2).",
		After: []Order{
			{"solve", "SP divides the rows and columns of values"},
		},
	},
	{
		Name: "offload", Run: offload, Check: checkOffload, Off: offloadOff,
		Doc: "Decides the fate of every type-1 unit, for every stage, subsequence and layer: it stays on the device between forward and backward, goes to the host, or is made again by the backward pass.",
		After: []Order{
			{"partition", "bytes and the time to copy them grow with the length of a subsequence"},
			{"schedule", "a copy runs behind the next task of the stage"},
			{"lifespan", "only whole units of type 1 are offloaded or made again"},
		},
	},
	{
		Name: "mux", Run: mux, Check: checkMux, Off: muxOff,
		Doc: "Says which tasks of a stage lie next to a bubble, and whether stages that idle there take a part of them.",
		After: []Order{
			{"schedule", "the bubbles are known once tasks are ordered"},
			{"offload", "what is offloaded leaves room for borrowed work"},
		},
	},
	{
		Name: "lower",
		Doc:  "Turns the tasks of every stage into instructions: the model's nodes, messages between stages, copies to and from the host.",
		After: []Order{
			{"mux", "every decision of the plan is in the instructions"},
		},
	},
	{
		Name: "place",
		Doc:  "Gives every buffer its offset in the device or host arena; buffers whose lives do not meet share bytes.",
		After: []Order{
			{"lower", "lives are known from first and last use"},
		},
	},
	{
		Name: "sync",
		Doc:  "Orders conflicting accesses of different streams with the fewest events.",
		After: []Order{
			{"place", "buffers that share bytes conflict too"},
		},
	},
}

// Names are the names of all passes in default order: what instructions point to as the pass that decided them.
func Names() []string {
	names := make([]string, len(Passes))
	for i := range Passes {
		names[i] = Passes[i].Name
	}
	return names
}

// Find is the pass of that name, or nil.
func Find(name string) *Pass {
	for i := range Passes {
		if Passes[i].Name == name {
			return &Passes[i]
		}
	}
	return nil
}

// Context is what passes of one plan may look at besides it.
type Context struct {
	spec      *lang.Spec // nil for a plan that came as JSON
	cache     *cache
	work      *work
	estimates *estimator // of the plan with its present lengths and tasks; nil: none yet
	candidate bool       // the plan is one of a search, so that nobody reads its reasons
	untimed   bool       // copies begin as late as they may and last no longer than they must, whatever time that costs

	options Options
	later   []*Pass // behind solve, by default: what its search runs candidates through
	winner  *Plan   // of that search
}

func newContext(sp *lang.Spec, o Options) *Context {
	c := &Context{spec: sp, cache: newCache(), options: o}
	for i := range Passes {
		if Passes[i].Run != nil && i > 0 {
			c.later = append(c.later, &Passes[i])
		}
	}
	return c
}

// Model is the dataflow of the plan's model on one rank.
func (c *Context) Model(p *Plan) *graph.Model { return c.cache.model(p) }

// estimator is that of the context's plan, once its lengths and tasks are decided.
func (c *Context) estimator(p *Plan) *estimator {
	if c.estimates == nil {
		c.estimates = newEstimator(c.cache, c.work, p)
	}
	return c.estimates
}

// forget is for passes that change the lengths or the tasks of the plan.
func (c *Context) forget() { c.estimates = nil }

// Options choose what of the passes runs and what of the plan is shown on the way.
type Options struct {
	Passes     []string  // instead of the default order; empty: all
	Disable    []string  // passes to leave out
	PrintAfter []string  // print the plan after these; "all" is every pass
	StopAfter  string    // run no pass after this one
	Print      io.Writer // where PrintAfter goes

	// Measure fills a plan's Memory by placing it, as codegen does; without it solve goes by the bound that it has.
	Measure func(*Plan) error

	// Fitting asks whether anything fits: solve takes the first plan that does, and looks for no faster one.
	Fitting bool

	// Patience scales the work after which solve accepts a plan that may not be the best; 0 is 1.
	Patience float64
}

// Run refines a plan made by New pass by pass, checking it after each, and predicts what it will cost. A mistake of
// the user is a lang.Diagnostic; sp may be nil for a plan whose spec is not at hand.
func Run(sp *lang.Spec, p *Plan, o Options) error {
	order, err := o.order()
	if err != nil {
		return err
	}
	c := newContext(sp, o)
	var ran []*Pass
	for _, pass := range order {
		if pass.Run == nil {
			break
		}
		if slices.Contains(o.Disable, pass.Name) {
			pass.Off(c, p)
			p.decide(pass.Name, "pass", "off", "switched off by the command line")
		} else if err := pass.Run(c, p); err != nil {
			return err
		}
		ran = append(ran, pass)
		if err := check(c, p, ran); err != nil {
			return fmt.Errorf("after pass %s: %w", pass.Name, err)
		}
		if err := o.print(pass, p); err != nil {
			return err
		}
		if pass.Name == o.StopAfter {
			break
		}
	}
	if complete(ran) {
		c.estimator(p).predict()
		if c.winner != nil && c.winner.Memory.Placed {
			p.Memory = c.winner.Memory // equal requests make equal plans
		}
	}
	return nil
}

// order is what will run: known names, no required pass missing before the last, every constraint kept.
func (o Options) order() ([]*Pass, error) {
	for _, name := range slices.Concat(o.Passes, o.Disable, o.PrintAfter, []string{o.StopAfter}) {
		if name != "" && name != "all" && Find(name) == nil {
			return nil, fmt.Errorf("no pass is named %q: there are %s", name, strings.Join(Names(), ", "))
		}
	}
	for _, name := range o.Disable {
		if p := Find(name); p == nil || p.Required() {
			return nil, fmt.Errorf("pass %s cannot be switched off: nothing can be built without it", name)
		}
	}
	names := o.Passes
	if len(names) == 0 {
		names = Names()
	}
	var order []*Pass
	for i, name := range names {
		p := Find(name)
		if p == nil || slices.Contains(names[:i], name) {
			return nil, fmt.Errorf("pass %q is listed twice or unknown", name)
		}
		for _, before := range p.After {
			if !slices.Contains(names[:i], before.Name) {
				return nil, fmt.Errorf("pass %s needs %s before it: %s", name, before.Name, before.Reason)
			}
		}
		order = append(order, p)
	}
	return order, nil
}

func (o Options) print(pass *Pass, p *Plan) error {
	if o.Print == nil || !slices.Contains(o.PrintAfter, pass.Name) && !slices.Contains(o.PrintAfter, "all") {
		return nil
	}
	if _, err := fmt.Fprintf(o.Print, "# plan after %s\n", pass.Name); err != nil {
		return err
	}
	return p.WriteJSON(o.Print)
}

// complete reports whether every pass of the plan has run.
func complete(ran []*Pass) bool {
	for i := range Passes {
		if Passes[i].Run != nil && !slices.Contains(ran, &Passes[i]) {
			return false
		}
	}
	return true
}

// check applies the invariants of all passes that have run, in order: a later pass may break an earlier one's.
func check(c *Context, p *Plan, ran []*Pass) error {
	for _, pass := range ran {
		if err := pass.Check(c, p); err != nil {
			return err
		}
	}
	return nil
}

// Verify reports whether a complete plan, such as one that was edited, can be compiled.
func Verify(p *Plan) error {
	c := newContext(nil, Options{})
	for i := range Passes {
		if Passes[i].Check == nil {
			continue
		}
		if err := Passes[i].Check(c, p); err != nil {
			return fmt.Errorf("plan %s: %w", p.Name, err)
		}
	}
	return nil
}

// Explain is the reference entry of a pass, or "" where there is none of that name.
func Explain(name string) string {
	p := Find(name)
	if p == nil {
		return ""
	}
	var b strings.Builder
	fmt.Fprintf(&b, "pass %s\n\n%s\n", p.Name, p.Doc)
	if len(p.After) > 0 {
		b.WriteString("\nRuns after\n")
		for _, o := range p.After {
			fmt.Fprintf(&b, "  %s: %s\n", o.Name, o.Reason)
		}
	}
	switch {
	case p.Run == nil:
		b.WriteString("\nPart of code generation: it refines the program, not the plan.\n")
	case p.Required():
		b.WriteString("\nRequired.\n")
	default:
		b.WriteString("\nCan be switched off with --disable=" + p.Name + ".\n")
	}
	return b.String()
}

// Package passes decides how a job runs. A plan starts as the request in the spec (plan.New). The passes of
// one list refine it one after another (Run) until it holds every decision with its reason, and a cost model
// has predicted the result.
//
// Read pass.go for the list, then the package of each pass. The packages below know nothing of instructions,
// addresses or devices: codegen turns a plan into those, and fills in the exact memory.
package passes

import (
	"fmt"
	"slices"
	"strings"

	"sppo.dev/lang"
	"sppo.dev/passes/estimate"
	"sppo.dev/passes/mux"
	"sppo.dev/passes/offload"
	"sppo.dev/passes/partition"
	"sppo.dev/passes/pass"
	"sppo.dev/passes/plan"
	"sppo.dev/passes/search"
)

// Passes lists all passes in the order of a default run.
var Passes = [...]pass.Pass{
	{
		Name: "solve", Run: search.Run, Check: search.Check,
		Doc: "Chooses what the spec leaves `auto`: SP, PP, DP, the number of subsequences, the grid of their boundaries, and the number of layers on each stage.",
	},
	{
		Name: "partition", Run: partition.Run, Check: partition.Check,
		Doc: "Cuts the sequence into subsequences: of equal floating-point operations (`flops`; later ones are then shorter, because they attend to more tokens), of equal length, or as given.",
		After: []pass.Order{
			{Name: "solve", Reason: "the number of subsequences and their grid are sizes"},
		},
	},
	{
		Name: "schedule", Run: orderTasks, Check: checkSchedule,
		Doc: "Orders the tasks of every stage by the strategy: forwards of subsequences from first to last, backwards from last to first, and deferred weight gradients if the strategy has them.",
		After: []pass.Order{
			{Name: "partition", Reason: "tasks are forwards and backwards of subsequences"},
		},
	},
	{
		Name: "lifespan", Run: lifespan, Check: checkLifespan,
		Doc: "Finds in the model's dataflow what one layer keeps in memory and for how long: read by later subsequences (type 0), by the backward pass (type 1), or only by the same forward (type 2).",
		After: []pass.Order{
			{Name: "solve", Reason: "SP divides the rows and columns of values"},
		},
	},
	{
		Name: "offload", Run: offload.Run, Check: offload.Check, Off: offload.Off,
		Doc: "Decides the placement of every type-1 unit, for every stage, subsequence and layer: it stays on the device between forward and backward, is offloaded to the host, or is recomputed by the backward pass.",
		After: []pass.Order{
			{Name: "partition", Reason: "bytes and the time to copy them grow with the length of a subsequence"},
			{Name: "schedule", Reason: "a copy runs during the next task of the stage"},
			{Name: "lifespan", Reason: "only whole units of type 1 are offloaded or recomputed"},
		},
	},
	{
		Name: "mux", Run: mux.Run, Check: mux.Check, Off: mux.Off,
		Doc: "Finds the tasks of each stage that are next to a bubble, and decides whether stages that idle there take over part of them.",
		After: []pass.Order{
			{Name: "schedule", Reason: "the bubbles are known once tasks are ordered"},
			{Name: "offload", Reason: "offloading frees the memory that shared work needs"},
		},
	},
	{
		Name: "lower",
		Doc:  "Turns the tasks of every stage into instructions: the model's nodes, messages between stages, copies to and from the host.",
		After: []pass.Order{
			{Name: "mux", Reason: "the instructions carry out every decision of the plan"},
		},
	},
	{
		Name: "place",
		Doc:  "Gives every buffer its offset in the device or host arena; buffers with disjoint lifetimes share bytes.",
		After: []pass.Order{
			{Name: "lower", Reason: "lifetimes follow from first and last use"},
		},
	},
	{
		Name: "sync",
		Doc:  "Orders conflicting accesses of different streams with the fewest events.",
		After: []pass.Order{
			{Name: "place", Reason: "buffers that share bytes conflict too"},
		},
	},
}

// Names returns the names of all passes in default order; instructions refer to them as the pass that decided
// them.
func Names() []string {
	names := make([]string, len(Passes))
	for i := range Passes {
		names[i] = Passes[i].Name
	}
	return names
}

// Find returns the pass of that name, or nil.
func Find(name string) *pass.Pass {
	for i := range Passes {
		if Passes[i].Name == name {
			return &Passes[i]
		}
	}
	return nil
}

func newContext(sp *lang.Spec, o pass.Options) *pass.Context {
	c := &pass.Context{Spec: sp, Cache: estimate.NewCache(), Options: o}
	for i := range Passes {
		if Passes[i].Run != nil && i > 0 {
			c.Later = append(c.Later, &Passes[i])
		}
	}
	return c
}

// Run refines a plan made by New pass by pass, checks it after each, and predicts its cost. An error of the
// user is a lang.Diagnostic; sp may be nil for a plan without its spec.
func Run(sp *lang.Spec, p *plan.Plan, o pass.Options) error {
	order, err := order(o)
	if err != nil {
		return err
	}
	c := newContext(sp, o)
	c.Untimed = o.Fitting
	var ran []*pass.Pass
	for _, pass := range order {
		if pass.Run == nil {
			break
		}
		if slices.Contains(o.Disable, pass.Name) {
			pass.Off(c, p)
			p.Decide(pass.Name, "pass", "off", "switched off on the command line")
		} else if err := pass.Run(c, p); err != nil {
			return err
		}
		ran = append(ran, pass)
		if err := check(c, p, ran); err != nil {
			return fmt.Errorf("after pass %s: %w", pass.Name, err)
		}
		if err := print(o, pass, p); err != nil {
			return err
		}
		if pass.Name == o.StopAfter {
			break
		}
	}
	if complete(ran) {
		c.Estimator(p).Predict()
		if c.Winner != nil && c.Winner.Memory.Placed {
			p.Memory = c.Winner.Memory // equal requests give equal plans
		}
	}
	return nil
}

// order returns the passes to run, after checking names, required passes and constraints.
func order(o pass.Options) ([]*pass.Pass, error) {
	for _, name := range slices.Concat(o.Passes, o.Disable, o.PrintAfter, []string{o.StopAfter}) {
		if name != "" && name != "all" && Find(name) == nil {
			return nil, fmt.Errorf("there is no pass %q; the passes are %s", name, strings.Join(Names(), ", "))
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
	var order []*pass.Pass
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

func print(o pass.Options, pass *pass.Pass, p *plan.Plan) error {
	if o.Print == nil || !slices.Contains(o.PrintAfter, pass.Name) && !slices.Contains(o.PrintAfter, "all") {
		return nil
	}
	if _, err := fmt.Fprintf(o.Print, "# plan after %s\n", pass.Name); err != nil {
		return err
	}
	return p.WriteJSON(o.Print)
}

// complete reports whether every pass of the plan has run.
func complete(ran []*pass.Pass) bool {
	for i := range Passes {
		if Passes[i].Run != nil && !slices.Contains(ran, &Passes[i]) {
			return false
		}
	}
	return true
}

// check applies the invariants of all passes that have run, in order, because a later pass may break those of
// an earlier one.
func check(c *pass.Context, p *plan.Plan, ran []*pass.Pass) error {
	for _, pass := range ran {
		if err := pass.Check(c, p); err != nil {
			return err
		}
	}
	return nil
}

// Verify reports whether a complete plan, such as an edited one, can be compiled.
func Verify(p *plan.Plan) error {
	c := newContext(nil, pass.Options{})
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

// Explain returns the reference entry of a pass, or "".
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

// Options select the passes to run and the plans to show on the way.
type Options = pass.Options

// Package passes decides how a job runs. A plan starts as the request in the spec (plan.New). Run applies a
// list of passes to it, one after another, until it contains every decision with its reason, and the predicted
// result.
//
// This file lists the passes, which have their own packages. No package below this one depends on programs,
// addresses or devices: codegen turns a plan into instructions and fills in the exact memory.
package passes

import (
	"fmt"
	"slices"
	"strings"

	"sppo.dev/internal/passes/estimate"
	"sppo.dev/internal/passes/lifespan"
	"sppo.dev/internal/passes/mux"
	"sppo.dev/internal/passes/offload"
	"sppo.dev/internal/passes/order"
	"sppo.dev/internal/passes/partition"
	"sppo.dev/internal/passes/pass"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/search"
	"sppo.dev/lang"
)

// Passes lists all passes in their order.
var Passes = [...]pass.Pass{
	{
		Name: "solve", Run: search.Run, Check: search.Check,
		Doc: "Chooses the values that the spec leaves `auto`: SP, PP, DP, the number of subsequences, the grid of their boundaries, and the number of layers on each stage.",
	},
	{
		Name: "partition", Run: partition.Run, Check: partition.Check,
		Doc: "Cuts the sequence into subsequences with equal floating-point operations (`flops`; later subsequences are then shorter, because they attend to more tokens), with equal lengths, or with the given lengths.",
		After: []pass.Order{
			{Name: "solve", Reason: "the pass needs the number of subsequences and the grid of their boundaries"},
		},
	},
	{
		Name: "schedule", Run: order.Run, Check: order.Check,
		Doc: "Orders the tasks of every stage according to the strategy: forward passes of subsequences from first to last, backward passes from last to first, and deferred weight gradients if the strategy has them.",
		After: []pass.Order{
			{Name: "partition", Reason: "each task is the forward or backward pass of a subsequence"},
		},
	},
	{
		Name: "lifespan", Run: lifespan.Run, Check: lifespan.Check,
		Doc: "Determines from the model's dataflow which activations a layer keeps in memory and for how long: those that later subsequences read (type 0), those that only the backward pass reads (type 1), and those that only the same forward task reads (type 2).",
		After: []pass.Order{
			{Name: "solve", Reason: "the shapes of values depend on sp"},
		},
	},
	{
		Name: "offload", Run: offload.Run, Check: offload.Check, Off: offload.Off,
		Doc: "Decides the placement of every type-1 unit, for every stage, subsequence and layer: it stays on the device between forward and backward, is offloaded to the host, or is recomputed by the backward pass.",
		After: []pass.Order{
			{Name: "partition", Reason: "the bytes to copy depend on the length of a subsequence"},
			{Name: "schedule", Reason: "copies run during the next task of the stage"},
			{Name: "lifespan", Reason: "only whole units of type 1 are offloaded or recomputed"},
		},
	},
	{
		Name: "mux", Run: mux.Run, Check: mux.Check, Off: mux.Off,
		Doc: "Finds the tasks of each stage that are adjacent to a bubble, and decides whether idle stages take over part of their work.",
		After: []pass.Order{
			{Name: "schedule", Reason: "the order of tasks determines the bubbles"},
			{Name: "offload", Reason: "offloading frees the memory that shared work needs"},
		},
	},
	{
		Name: "lower",
		Doc:  "Turns the tasks of every stage into instructions: the nodes of the model, messages between stages, and copies to and from the host.",
		After: []pass.Order{
			{Name: "mux", Reason: "mux makes the last decisions in the plan, and the instructions implement them"},
		},
	},
	{
		Name: "place",
		Doc:  "Gives every buffer an offset in the device or host arena. Buffers with disjoint lifetimes can share bytes.",
		After: []pass.Order{
			{Name: "lower", Reason: "the instructions determine the lifetimes of buffers"},
		},
	},
	{
		Name: "sync",
		Doc:  "Inserts the smallest set of events that orders conflicting accesses on different streams.",
		After: []pass.Order{
			{Name: "place", Reason: "accesses also conflict if their buffers share bytes"},
		},
	},
}

// Names returns the names of all passes in their order. Each instruction refers to the pass that
// decided it.
func Names() []string {
	names := make([]string, len(Passes))
	for i := range Passes {
		names[i] = Passes[i].Name
	}
	return names
}

// Find returns the pass with that name, or nil.
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

// Run refines a new plan pass by pass, checks it after each pass, and predicts its cost. If the user's request
// is wrong, the error is of type lang.Diagnostics. The argument sp may be nil for a plan without its spec.
func Run(sp *lang.Spec, p *plan.Plan, o pass.Options) error {
	if err := known(o); err != nil {
		return err
	}
	c := newContext(sp, o)
	c.Untimed = o.Fitting
	var ran []*pass.Pass
	for i := range Passes {
		next := &Passes[i]
		if next.Run == nil {
			break
		}
		if slices.Contains(o.Disable, next.Name) {
			next.Off(c, p)
			p.Decide(next.Name, "pass", "off", "switched off on the command line")
		} else if err := timed(c, next, p); err != nil {
			return err
		}
		ran = append(ran, next)
		if err := check(c, p, ran); err != nil {
			return fmt.Errorf("after pass %s: %w", next.Name, err)
		}
		if err := printAfter(next, o, p); err != nil {
			return err
		}
		if next.Name == o.StopAfter {
			break
		}
	}
	if complete(ran) {
		c.Estimator(p).Predict()
		if c.Winner != nil && c.Winner.Memory.Placed {
			p.Memory = c.Winner.Memory // this plan equals the winner, because equal requests give equal plans
		}
	}
	return nil
}

// timed runs a pass and measures its time.
func timed(c *pass.Context, next *pass.Pass, p *plan.Plan) error {
	defer c.Options.Times.Time(next.Name)()
	return next.Run(c, p)
}

// known returns an error for an unknown pass, and for a required one that is switched off.
func known(o pass.Options) error {
	for _, name := range slices.Concat(o.Disable, o.PrintAfter, []string{o.StopAfter}) {
		if name != "" && name != "all" && Find(name) == nil {
			return fmt.Errorf("there is no pass %q; the passes are %s", name, strings.Join(Names(), ", "))
		}
	}
	for _, name := range o.Disable {
		if p := Find(name); p == nil || p.Required() {
			return fmt.Errorf("pass %s cannot be switched off, because later passes need its result", name)
		}
	}
	return nil
}

func printAfter(ran *pass.Pass, o pass.Options, p *plan.Plan) error {
	if o.Print == nil || !slices.Contains(o.PrintAfter, ran.Name) && !slices.Contains(o.PrintAfter, "all") {
		return nil
	}
	if _, err := fmt.Fprintf(o.Print, "# plan after %s\n", ran.Name); err != nil {
		return err
	}
	return p.WriteJSON(o.Print)
}

// complete reports whether every pass that refines the plan has run.
func complete(ran []*pass.Pass) bool {
	for i := range Passes {
		if Passes[i].Run != nil && !slices.Contains(ran, &Passes[i]) {
			return false
		}
	}
	return true
}

// check applies the checks of all passes that have run, in order: a later pass may break an invariant of an
// earlier one.
func check(c *pass.Context, p *plan.Plan, ran []*pass.Pass) error {
	for _, r := range ran {
		if err := r.Check(c, p); err != nil {
			return err
		}
	}
	return nil
}

// Verify returns an error if a complete plan, such as an edited one, cannot be compiled.
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

// Explain returns the reference entry of a pass, or "" if there is no such pass.
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
		b.WriteString("\nThis pass is part of code generation: it refines the program rather than the plan.\n")
	case p.Required():
		b.WriteString("\nRequired.\n")
	default:
		b.WriteString("\nIt can be switched off with --disable=" + p.Name + ".\n")
	}
	return b.String()
}

// Options select the passes to run and the intermediate plans to print.
type Options = pass.Options

// Times adds up the time of each pass.
type Times = pass.Times

// NewTimes returns Times whose total begins now.
func NewTimes() *Times { return pass.NewTimes() }

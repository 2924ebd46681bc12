// Package lifespan lists the tensors that a layer keeps in memory, and for how long.
//
// Input: Parallel. Output: Units. Paper: section 4.1, which has three types of activations. The list is derived
// from the readers and writers in the dataflow, so it follows changes to the model.
package lifespan

import (
	"fmt"
	"slices"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/pass"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
)

// Run derives the plan's units.
func Run(c *pass.Context, p *plan.Plan) error {
	p.Units = unitsOf(c.Model(p))
	bytes := map[plan.UnitType]float64{}
	for _, u := range p.Units {
		if u.Block == graph.BlockLayer {
			bytes[u.Type] += u.BytesPerToken
		}
	}
	p.Decide("lifespan", "bytes_per_token", fmt.Sprintf("%.6g of type 0, %.6g of type 1", bytes[plan.Type0], bytes[plan.Type1]),
		"per rank and layer: later subsequences read type 0 (K and V); only the backward pass reads type 1")
	return nil
}

func unitsOf(g *graph.Model) []plan.Unit {
	var units []plan.Unit
	for kind := range g.Kinds() {
		for _, u := range layerUnits(g, g.Plain(kind)) {
			if !slices.ContainsFunc(units, func(known plan.Unit) bool { return known.Name == u.Name }) {
				units = append(units, u)
			}
		}
	}
	for i := range g.Head.Units {
		if u := &g.Head.Units[i]; u.Producer < 0 {
			units = append(units, newUnit(g, g.Head, plan.Type1, u.Values, nil))
		}
	}
	return units
}

// layerUnits returns the caches, then the tensors saved for the backward pass in the order of
// graph.Block.Units, then those that only the forward uses.
func layerUnits(g *graph.Model, b *graph.Block) []plan.Unit {
	var units []plan.Unit
	saved := map[int]bool{}
	for v := range b.Values {
		if b.Values[v].Kind == graph.Cache {
			units = append(units, newUnit(g, b, plan.Type0, []int{v}, writer(b, v)))
			saved[v] = true
		}
	}
	for i := range b.Units {
		u := &b.Units[i]
		var by *graph.Node
		if u.Producer >= 0 {
			by = &b.Forward[u.Producer]
		}
		units = append(units, newUnit(g, b, plan.Type1, u.Values, by))
		for _, v := range u.Values {
			saved[v] = true
		}
	}
	for i := range b.Forward {
		n := &b.Forward[i]
		for _, v := range n.Writes() {
			if !saved[v] && v != b.Output && b.Values[v].Kind == graph.Activation {
				units = append(units, newUnit(g, b, plan.Type2, []int{v}, n))
			}
		}
	}
	return units
}

func newUnit(g *graph.Model, b *graph.Block, t plan.UnitType, values []int, by *graph.Node) plan.Unit {
	u := plan.Unit{Block: b.Name, Name: b.Values[values[0]].Name, Type: t, Written: "input"}
	for _, v := range values {
		u.Values = append(u.Values, b.Values[v].Name)
		u.BytesPerToken += bytesPerToken(g, &b.Values[v])
	}
	if by != nil {
		u.Written = ir.Ops[by.Op].Name
	}
	for i := range b.Forward {
		if readsAny(&b.Forward[i], values) {
			u.LastForward = ir.Ops[b.Forward[i].Op].Name
		}
	}
	for i := range b.Backward {
		if t != plan.Type2 && readsAny(&b.Backward[i], values) {
			u.FirstBackward = ir.Ops[b.Backward[i].Op].Name
			break
		}
	}
	return u
}

// bytesPerToken returns the bytes of a value per token, on one rank. It computes them for a number of tokens
// that leaves no remainder in any division, so that the result is exact.
func bytesPerToken(g *graph.Model, v *graph.Value) float64 {
	tokens := int64(g.SP) * int64(ir.Alignment)
	z := g.Split.Size()
	z.Sequence, z.Tokens, z.Batch = tokens, tokens, 1
	return float64(v.Bytes(z)) / float64(tokens)
}

func writer(b *graph.Block, v int) *graph.Node {
	for i := range b.Forward {
		if slices.Contains(b.Forward[i].Writes(), v) {
			return &b.Forward[i]
		}
	}
	return nil
}

func readsAny(n *graph.Node, values []int) bool {
	return slices.ContainsFunc(n.Reads(), func(v int) bool { return slices.Contains(values, v) })
}

// Check checks that the plan's list of units matches the dataflow. The list is for information only and
// must not be edited.
func Check(c *pass.Context, p *plan.Plan) error {
	want := unitsOf(c.Model(p))
	if len(p.Units) != len(want) {
		return fmt.Errorf("units: there are %d, but the model has %d", len(p.Units), len(want))
	}
	for i := range want {
		if p.Units[i].Name != want[i].Name || p.Units[i].Type != want[i].Type {
			return fmt.Errorf("units: %s of type %d is in place of %s of type %d", p.Units[i].Name, p.Units[i].Type, want[i].Name, want[i].Type)
		}
	}
	return nil
}

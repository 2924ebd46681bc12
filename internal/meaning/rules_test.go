package meaning

import (
	"testing"

	"sppo.dev/ir"
)

func TestEveryOpcodeHasARule(t *testing.T) {
	for op := range ir.NumOps {
		has := rules[op] != nil || op == ir.Recv
		if op.Collective() != nil {
			has = gathers[op] != nil
		}
		if !has {
			t.Errorf("%s has no rule", ir.Ops[op].Name)
		}
	}
}

// TestValues checks that equal sums are equal values, in whatever order they are added.
func TestValues(t *testing.T) {
	a, b, c := newKey("a").value(), newKey("b").value(), newKey("c").value()
	if x, y := a.plus(b).plus(c), c.plus(a).plus(b); x != y {
		t.Errorf("%v, %v", x, y)
	}
	if x, y := a.plus(b).times(0.75), a.times(0.75).plus(b.times(0.75)); x != y {
		t.Errorf("%v, %v", x, y)
	}
	if x := a.times(-1).plus(a); !x.isZero() {
		t.Errorf("%v", x)
	}
	if x := a.times(3).times(0.25).times(4); x != a.plus(a).plus(a) {
		t.Errorf("%v", x)
	}
	if a.plus(b) == a.plus(c) || a.times(2) == a {
		t.Error("different sums are equal")
	}
}

// TestCover checks that sets of indices are joined, and refused if they overlap.
func TestCover(t *testing.T) {
	part := func(sequence, lo, hi int64) box {
		return nowhere.by(sequences, interval{sequence, sequence + 1}).by(tokens, interval{lo, hi})
	}
	need := nowhere.by(sequences, interval{0, 2}).by(tokens, interval{0, 9})
	c, disjoint := coverOf(part(1, 4, 9), part(0, 0, 4), part(1, 0, 4))
	if !disjoint || c.has(need) {
		t.Errorf("%v", c)
	}
	if _, ok := c.with(part(1, 8, 10)); ok {
		t.Error("an overlap is not found")
	}
	if c, _ = c.with(part(0, 4, 9)); !c.has(need) || len(c) != 1 {
		t.Errorf("%v", c)
	}
}

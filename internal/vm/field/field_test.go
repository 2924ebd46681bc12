package field

import (
	"math"
	"testing"

	"sppo.dev/ir"
)

// Every opcode has a meaning over finite fields.
func TestEveryOpcode(t *testing.T) {
	for op := range ir.NumOps {
		if info := &ir.Ops[op]; opcodes[op] == nil && op.Collective() == nil && info.Class != ir.ClassSync {
			t.Errorf("%s has no row", info.Name)
		}
	}
}

func TestElements(t *testing.T) {
	for _, x := range []float64{0, 1, -1, 0.375, -12, 1e-6, 3e30} {
		a, b := constant(x), constant(0.75)
		if got, want := a.times(b), constant(x*0.75); x != 1e-6 && x != 3e30 && got != want {
			t.Errorf("%g times 0.75 is %v, not %v", x, got, want)
		}
		if got := a.plus(b).minus(b); got != a {
			t.Errorf("%g plus and minus 0.75 is %v, not %v", x, got, a)
		}
		if x != 0 && uint64(a.value)*uint64(inverse(a.value))%modulus != 1 {
			t.Errorf("%d is not the inverse of %d", inverse(a.value), a.value)
		}
	}
	for _, n := range []float64{3, 7, 96, 1000} {
		if got := constant(1 / n).times(constant(n)); got != one {
			t.Errorf("%g times 1/%g is %v", n, n, got)
		}
	}
	if !math.IsNaN(float64(constant(math.NaN()).float())) {
		t.Error("NaN is a number")
	}
	// Powers map sums to products, and the generator has the order of exponents.
	a, b := digest(1).element(), digest(2).element()
	if got, want := exp(a.plus(b).exponent), uint32(uint64(exp(a.exponent))*uint64(exp(b.exponent))%modulus); got != want {
		t.Errorf("the power of a sum is %d, not %d", got, want)
	}
	if power(generator, order, modulus) != 1 {
		t.Errorf("%d does not have order %d", generator, uint64(order))
	}
	x, y := make([]element, 300), make([]element, 300)
	sum := zero
	for i := range x {
		x[i], y[i] = named("x").with(uint64(i)).element(), named("y").with(uint64(i)).element()
		sum = sum.plus(x[i].times(y[i]))
	}
	if got := dot(x, y); got != sum {
		t.Errorf("a sum of products is %v, not %v", got, sum)
	}
}

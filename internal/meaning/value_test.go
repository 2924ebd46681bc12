package meaning

import "testing"

func TestTimes(t *testing.T) {
	v := newKey("a value").value()
	for _, n := range []float64{2, 3, 7, 96, 1000} {
		var sum value
		for range int(n) {
			sum = sum.plus(v.times(1 / n))
		}
		if sum != v || v.times(2/n) != v.times(1/n).times(2) || v.times(1/n).times(n) != v {
			t.Errorf("%g times 1/%g is not 1", n, n)
		}
	}
	for _, x := range []float64{0.08838834764831845, 3.1e-9, 1e30, 1.0000000000000002, 4294967297} {
		if v.times(x).times(2) != v.times(2*x) || v.times(-x).plus(v.times(x)) != (value{}) || v.times(x) == v {
			t.Errorf("%g: wrong multiples", x)
		}
	}
	if x := v.times(0); !x.isZero() {
		t.Errorf("0 times a value is %v", x)
	}
}

package train

import (
	"math"
	"testing"
)

// Buckets have the right token counts and means, however the losses are divided among calls to Add. NaN is
// ignored.
func TestPositionLosses(t *testing.T) {
	var losses []float32
	for i := range 100 {
		losses = append(losses, float32(i))
	}
	losses[5] = float32(math.NaN())
	var whole, parts PositionLosses
	whole.Add(0, losses)
	parts.Add(0, losses[:7])
	parts.Add(7, losses[7:8])
	parts.Add(8, losses[8:])
	a, b := whole.Buckets(), parts.Buckets()
	if len(a) != 8 || len(b) != 8 {
		t.Fatalf("%+v and %+v", a, b)
	}
	first := int64(0)
	for i, bucket := range a {
		end := int64(1) << i
		sum, n := 0.0, int64(0)
		for p := first; p < min(end, 100); p++ {
			if p != 5 {
				sum, n = sum+float64(p), n+1
			}
		}
		if want := (PositionLoss{first, end, sum / float64(n), n}); bucket != want || b[i] != want {
			t.Errorf("%+v and %+v, want %+v", bucket, b[i], want)
		}
		first = end
	}
	if mean, n := whole.Mean(); n != 99 || mean != (4950.0-5)/99 {
		t.Errorf("mean %v of %d", mean, n)
	}
	var none PositionLosses
	if mean, n := none.Mean(); mean != 0 || n != 0 || len(none.Buckets()) > 0 {
		t.Errorf("nothing has the mean %v of %d", mean, n)
	}
}

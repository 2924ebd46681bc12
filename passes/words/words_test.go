package words

import (
	"testing"
)

func TestNearestValues(t *testing.T) {
	for _, c := range [][2]string{
		{NearDivisors(12, 5), "4 or 6"}, {NearDivisors(12, 20), "12"}, {NearDivisors(7, 2), "1 or 7"},
		{NearMultiples(255, 2), "254 or 256"}, {NearMultiples(3, 8), "8"},
	} {
		if c[0] != c[1] {
			t.Errorf("%s, want %s", c[0], c[1])
		}
	}
}

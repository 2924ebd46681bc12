package words

import (
	"testing"
)

func TestNearestValues(t *testing.T) {
	for _, c := range [][2]string{
		{NearMultiples(255, 2), "254 or 256"}, {NearMultiples(3, 8), "8"},
	} {
		if c[0] != c[1] {
			t.Errorf("%s, want %s", c[0], c[1])
		}
	}
}

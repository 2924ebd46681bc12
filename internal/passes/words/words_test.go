package words

import (
	"slices"
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

// TestFold checks that texts are broken between words, and that nothing is lost.
func TestFold(t *testing.T) {
	for text, want := range map[string][]string{
		"":                         {""},
		"one two":                  {"one two"},
		"one two three four":       {"one two", "three four"},
		"longer_than_the_line":     {"longer_than_the_line"},
		"twelve chars":             {"twelve", "chars"},
		"a longer_than_the_line b": {"a", "longer_than_the_line", "b"},
	} {
		if got := Fold(text, 10); !slices.Equal(got, want) {
			t.Errorf("%q is broken into %q, want %q", text, got, want)
		}
	}
}

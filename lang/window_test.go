package lang

import (
	"slices"
	"strings"
	"testing"
)

// TestWindows checks that window and layer_types are reduced to the shortest equivalent list of windows, and
// that wrong values are refused.
func TestWindows(t *testing.T) {
	for _, c := range []struct {
		set  string
		want []int64
		fail string
	}{
		{"", nil, ""},
		{"model.window=4K", []int64{4096}, ""},
		{"model.window=[1K,0]", []int64{1024, 0}, ""},
		{"model.window=[8,8]", []int64{8}, ""},
		{"model.window=[0,0,0]", nil, ""},
		{"model.window=[1,2,3,4,5,6,7,8,9]", []int64{1, 2, 3, 4}, ""}, // as many windows as layers
		{"model.window=16 model.layer_types=[sliding,full]", []int64{16, 0}, ""},
		{"model.window=16 model.layer_types=sliding", []int64{16}, ""},
		{"model.window=16 model.layer_types=full", nil, ""},
		{"model.layer_types=[sliding,full]", nil, "sliding layers need a window"},
		{"model.window=[4,8] model.layer_types=[sliding,full]", nil, "sliding layers need a window"},
		{"model.window=-1", nil, "must be from 0"},
		{"model.layer_types=[slidin]", nil, "did you mean `sliding`"},
	} {
		s, err := Parse("windows.sppo", []byte(exampleBase), Options{ReadFile: base, Shipped: shipped, Set: strings.Fields(c.set + " model.layers=4")})
		switch {
		case c.fail != "":
			if err == nil || !strings.Contains(err.Error(), c.fail) {
				t.Errorf("%s: %v, want %q", c.set, err, c.fail)
			}
		case err != nil:
			t.Errorf("%s: %v", c.set, err)
		case !slices.Equal(s.Model.Windows, c.want):
			t.Errorf("%s: windows are %v, want %v", c.set, s.Model.Windows, c.want)
		}
	}
}

package ir

import (
	"reflect"
	"slices"
	"testing"
)

// Every field of a model is part of its identity, except the listed ones.
func TestModelDifference(t *testing.T) {
	model := Model{Name: "a", Family: "llama", Layers: 2, Heads: 4, Positions: "rope", RopeTheta: 1e4, NormEps: 1e-5}
	for i := range reflect.TypeOf(model).NumField() {
		other := model
		switch f := reflect.ValueOf(&other).Elem().Field(i); f.Kind() {
		case reflect.String:
			f.SetString("other")
		case reflect.Int:
			f.SetInt(77)
		case reflect.Bool:
			f.SetBool(true)
		case reflect.Slice:
			f.Set(reflect.MakeSlice(f.Type(), 2, 2))
		default:
			f.SetFloat(0.5)
		}
		name := jsonKey(reflect.TypeOf(model).Field(i))
		mine, theirs := model.Difference(&other)
		if free := slices.Contains(ofTraining, name); (mine == "") != free || (theirs == "") != free {
			t.Errorf("%s: %q and %q", name, mine, theirs)
		}
	}
	other := model
	other.Heads, other.NormEps = 2, 1e-6
	mine, theirs := model.Difference(&other)
	if mine != "heads = 4, norm_eps = 1e-05" || theirs != "heads = 2, norm_eps = 1e-06" {
		t.Errorf("%q and %q", mine, theirs)
	}
	model.Positions, other = "none", model
	other.Positions, other.RopeTheta, other.RopeScaling = "none", 7, "linear"
	if mine, _ := model.Difference(&other); mine != "" {
		t.Errorf("where nothing rotates, %q", mine)
	}
}

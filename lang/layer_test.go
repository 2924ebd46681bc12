package lang

import (
	"fmt"
	"strings"
	"testing"
)

// TestForms checks that ffn and layer_types give every layer its mixer and its MLP, are reduced to the shortest
// equivalent lists, and that models without attention, or with empty layers, are refused.
func TestForms(t *testing.T) {
	for set, want := range map[string]string{
		"model.ffn=64":                               "[{attention 64} {attention 64} {attention 64} {attention 64}] []: 64 [] []",
		"model.ffn=[64,64]":                          "[{attention 64} {attention 64} {attention 64} {attention 64}] []: 64 [] []",
		"model.ffn=[32,64,32]":                       "[{attention 32} {attention 64} {attention 32} {attention 32}] []: 64 [32 64 32] []",
		"model.ffn=[64,0]":                           "[{attention 64} {attention 0} {attention 64} {attention 0}] []: 64 [64 0] []",
		"model.ffn=64 model.layer_types=[none,full]": "[{none 64} {attention 64} {none 64} {attention 64}] []: 64 [] [none attention]",
		"model.ffn=64 model.layer_types=[full,full]": "[{attention 64} {attention 64} {attention 64} {attention 64}] []: 64 [] []",
		"model.ffn=64 model.window=16 model.layer_types=[sliding,none]": "[{attention 64} {none 64} {attention 64} {none 64}] [16 0]: 64 [] [attention none]",
		"model.ffn=0":            "must be from 1",
		"model.ffn=[0,0]":        "ffn = 0 must be the largest width",
		"model.layer_types=none": "no layer has attention",
		"model.ffn=[64,0] model.layer_types=[full,none]": "layer 1 has neither attention nor an MLP",
		"model.layer_types=[sliding,none]":               "sliding layers need a window",
	} {
		s, err := Parse("forms.sppo", []byte(exampleBase), Options{ReadFile: base, Shipped: shipped, Set: strings.Fields(set + " model.layers=4")})
		got := fmt.Sprint(err)
		if err == nil {
			var forms []Form
			for layer := range s.Model.Layers {
				forms = append(forms, s.Model.FormOf(layer))
			}
			got = fmt.Sprintf("%v %v: %d %v %v", forms, s.Model.Windows, s.Model.FFN, s.Model.FFNs, s.Model.Mixers)
		}
		if err == nil && got != want || !strings.Contains(got, want) {
			t.Errorf("%s: %s, want %s", set, got, want)
		}
	}
}

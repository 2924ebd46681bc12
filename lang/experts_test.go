package lang

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// A hint names each value once, also one that may stand alone or in a list.
func TestNamesOnce(t *testing.T) {
	_, err := Parse("names.sppo", []byte(exampleBase), Options{ReadFile: base, Shipped: shipped, Set: []string{"train.adapter=lora(targets = foo)"}})
	if err == nil || strings.Count(err.Error(), AllLinear) != 1 {
		t.Error(err)
	}
}

// TestExpertHints draws keys of experts, and replaces values by those that the hints of errors name. One hint must suffice for each error.
func TestExpertHints(t *testing.T) {
	value := regexp.MustCompile(`^(\w+) = (\w+)(?: (?:to|or) (\d+))?$`)
	parse := func(keys map[string]string) (list Diagnostics) {
		set := []string{"model.layers=4"}
		for name, v := range keys {
			set = append(set, "model."+name+"="+v)
		}
		_, err := Parse("experts.sppo", []byte(exampleBase), Options{ReadFile: base, Shipped: shipped, Set: set})
		if err != nil && !errors.As(err, &list) {
			t.Fatal(err)
		}
		return list
	}
	hinted := map[string]bool{}
	for seed := range uint64(400) {
		draw, keys := rand.New(rand.NewPCG(seed, 1)), map[string]string{}
		for name, values := range map[string][]int{
			"num_experts": {0, 1, 3, 6, 7, 8, 9, 12, 16}, "num_experts_per_tok": {1, 2, 3, 4, 5, 8, 9, 20}, "moe_intermediate_size": {16},
			"n_group": {0, 1, 2, 3, 4, 6, 8}, "topk_group": {0, 1, 2, 3, 5},
		} {
			if draw.IntN(6) > 0 {
				keys[name] = strconv.Itoa(values[draw.IntN(len(values))])
			}
		}
		keys["topk_method"] = []string{groupsByTwo, GroupLimited}[draw.IntN(2)]
		keys["e_score_correction_bias"] = strconv.FormatBool(draw.IntN(4) == 0)
		if n := keys["num_experts"]; n == "" || n == "0" {
			for _, name := range []string{"n_group", "topk_group", "topk_method", "e_score_correction_bias"} {
				delete(keys, name)
			}
		}
		for list := parse(keys); len(list) > 0; {
			d := list[0]
			hinted[d.Hint] = true
			before := fmt.Sprint(keys)
			for part := range strings.SplitSeq(strings.ReplaceAll(strings.TrimSuffix(d.Hint, ", for example"), " and ", ", "), ", ") {
				m := value.FindStringSubmatch(part)
				if m == nil {
					t.Fatalf("%s: %q: the hint %q is of no known form", before, d.Message, d.Hint)
				}
				if keys[m[1]] = m[2]; m[3] != "" && draw.IntN(2) > 0 {
					keys[m[1]] = m[3]
				}
			}
			left := parse(keys)
			if len(left) >= len(list) {
				t.Fatalf("%s: %q: with the hint %q, the spec is refused: %v", before, d.Message, d.Hint, left)
			}
			list = left
		}
	}
	if len(hinted) < 10 {
		t.Errorf("only %d hints were drawn", len(hinted))
	}
}

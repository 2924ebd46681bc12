package lang

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const modelSizes = " layers = 4 hidden = 64 heads = 4 vocab = 256 dtype = f32 "

const latentSizes = "layer_types = latent kv_lora_rank = 8 qk_nope_head_dim = 6 qk_rope_head_dim = 4 v_head_dim = 8 "

// TestFamiliesAreDefaults writes the defaults of each family explicitly in a model of another family. Both must
// give the same model.
func TestFamiliesAreDefaults(t *testing.T) {
	for _, f := range Families {
		sizes := modelSizes
		if f.Defaults["scoring_func"]+f.Defaults["norm_topk_prob"] != "" {
			sizes += "num_experts = 4 num_experts_per_tok = 2 moe_intermediate_size = 8 "
		}
		want, err := ParseModel("family = " + f.Name + sizes)
		if err != nil {
			t.Errorf("%s: %v", f.Name, err)
			continue
		}
		keys := ""
		for _, k := range modelKeys {
			if v := f.Defaults[k.Name]; v != "" {
				keys += k.Name + " = " + v + " "
			}
		}
		got, err := ParseModel("family = llama " + sizes + keys)
		if err != nil {
			t.Errorf("%s: %v", f.Name, err)
			continue
		}
		got.Family = f.Name
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("family = %s is not %s (-family +keys):\n%s", f.Name, keys, diff)
		}
	}
}

// TestModelsThatCannotBeBuilt checks that each invalid combination of keys gives exactly one error, which says
// what is wrong.
func TestModelsThatCannotBeBuilt(t *testing.T) {
	for _, c := range []struct{ keys, want string }{
		{"norm_place = post bias = [mlp]", "biases of attention's output and of the MLP are not supported with a norm after them"},
		{"rope_partial = 0.3", "rope_partial = 0.3 of head_dim = 16 is 4.8, which is not an even number of elements"},
		{strings.Replace(latentSizes, "rope_head_dim = 4", "rope_head_dim = 5", 1), "rotary positions need an even qk_rope_head_dim, not 5"},
		{"head_dim = 15", "rotary positions need an even head_dim, not 15"},
		{"rope_scaling = linear", "rope_scaling = linear needs rope_factor"},
		{"rope_scaling = yarn rope_factor = 4", "rope_scaling = yarn needs rope_original"},
		{"rope_scaling = longrope rope_original = 8 rope_short = [1, 1, 1, 1, 1, 1, 1, 1]", "rope_scaling = longrope needs rope_long"},
		{"rope_scaling = longrope rope_original = 8 rope_short = [1, 2] rope_long = [1, 1, 1, 1, 1, 1, 1, 1]", "rope_short lists 2 numbers for 8 rotated pairs"},
		{"rope_low = 2", "rope_low has no effect with rope_scaling = none"},
		{"rope_scaling = llama3 rope_factor = 8 rope_original = 8K rope_low = 4", "rope_low = 4 is not below rope_high = 4"},
		{"activation = swish", "swish"},
		{"bias = [head]", "head"},
		{"norm_offset = -1", "norm_offset"},
		{"rope_local_theta = 10000", "applies to layers with a window, but no layer has one"},
		{"rope_local_theta = -1 window = 8", "rope_local_theta"},
		{"layer_types = latent", "layers of type latent need kv_lora_rank"},
		{"kv_lora_rank = 8", "kv_lora_rank has no effect without layers of type latent"},
		{latentSizes + "head_dim = 12 positions = none", "head_dim = 12, but with latent attention it is qk_nope_head_dim + qk_rope_head_dim = 10"},
		{latentSizes + "rope_partial = 0.8", "the rotated elements are the 4 of qk_rope_head_dim"},
		{latentSizes + "kv_heads = 2", "kv_heads = 2 is not heads = 4"},
		{latentSizes + "qk_norm = head", "qk_norm = head is not supported with it"},
		{latentSizes + "bias = [qkv]", "the linear maps of latent attention have no biases"},
		{strings.Replace(latentSizes, "latent", "[latent, full]", 1), "the keys and values of layers of type latent are not as wide as those of other layers with attention"},
	} {
		_, err := ParseModel("family = llama" + modelSizes + c.keys)
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Count(err.Error(), "error:") != 1 {
			t.Errorf("%s: %v, want one error that says %q", c.keys, err, c.want)
		}
	}
}

// TestFamilyOfWindows checks that the windows in a spec take precedence over those of the family.
func TestFamilyOfWindows(t *testing.T) {
	for keys, want := range map[string]string{
		"":                              "[1024 1024 1024 1024 1024 0] 10000",
		"window = 16":                   "[16 16 16 16 16 0] 10000",
		"window = 0":                    "[] 0",
		"window = [8, 0]":               "[8 0] 10000",
		"layer_types = [full, sliding]": "[0 1024] 10000",
		"layer_types = [full]":          "[] 0",
		"rope_local_theta = 0":          "[1024 1024 1024 1024 1024 0] 0",
		"rope_local_theta = 5 rope_scaling = none": "[1024 1024 1024 1024 1024 0] 5",
	} {
		m, err := ParseModel("family = gemma3 layers = 12 hidden = 16 heads = 2 vocab = 64 dtype = f32 " + keys)
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(m.Windows, m.RopeLocalTheta); got != want {
			t.Errorf("%q: windows and base %s, want %s", keys, got, want)
		}
	}
}

// TestForeignValues checks that values which no spec can express are found in an edited plan.
func TestForeignValues(t *testing.T) {
	for want, edit := range map[string]func(*Model){
		"model.norm_place":    func(m *Model) { m.NormPlace = "behind" },
		"model.bias":          func(m *Model) { m.Bias = []string{"head"} },
		"model.positions":     func(m *Model) { m.PositionPattern = []string{"rope", "alibi"} },
		"model.attn_softcap":  func(m *Model) { m.AttnSoftcap = -1 },
		"model.logit_softcap": func(m *Model) { m.LogitSoftcap = -1 },
		"model.rope_theta":    func(m *Model) { m.RopeTheta = 0 },
		"model.rope_partial":  func(m *Model) { m.RopePartial = 1.5 },
	} {
		m, err := ParseModel("family = llama" + modelSizes)
		if err != nil {
			t.Fatal(err)
		}
		edit(&m)
		if found := m.Problems(); len(found) == 0 || found[0].Keys[0] != want {
			t.Errorf("%v, want a problem of %s", found, want)
		}
	}
}

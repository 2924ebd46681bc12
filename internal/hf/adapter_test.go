package hf

import (
	"slices"
	"testing"

	"sppo.dev/lang"
)

// In layers with experts, adapters of the MLP are those of the shared expert, which PEFT selects by the ends of names.
func TestAdaptersOfSharedExperts(t *testing.T) {
	m := (&lang.Model{Gated: true}).Adapted(4, 8, "q_proj", "up_proj")
	names, err := glmMoENames.adapters(&m)
	if err != nil {
		t.Fatal(err)
	}
	for tensor, module := range map[string]string{
		"layer.wq.lora_a": "self_attn.q_proj.lora_A", "layer.w_up.lora_a": "mlp.up_proj.lora_A",
		"layer.shared.w_up.lora_a": "mlp.shared_experts.up_proj.lora_A", "layer.shared.w_up.lora_b": "mlp.shared_experts.up_proj.lora_B",
	} {
		if got, want := names.tensors[tensor].name, "base_model.model.model.layers.*."+module+".weight"; got != want {
			t.Errorf("%s is %q, not %q", tensor, got, want)
		}
	}
	if len(names.tensors) != 6 {
		t.Errorf("%d tensors, not 6", len(names.tensors))
	}
	if got, want := glmMoENames.targets(&m), []string{"q_proj", "mlp.up_proj", "shared_experts.up_proj"}; !slices.Equal(got, want) {
		t.Errorf("targets are %q, not %q", got, want)
	}
}

// The linear maps of linear attention are fused, and so are their adapters. In Qwen3-Next, every head has a part of each map.
func TestAdaptersOfLinearAttention(t *testing.T) {
	for _, c := range []struct {
		names   *naming
		family  string
		mixer   string
		gate    bool
		targets []string
	}{
		{&qwenNextNames, "qwen3_next", lang.MixerGatedDelta, true, []string{"q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"}},
		{&qwen35Names, "qwen3_5", lang.MixerGatedDelta, true, []string{"q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"}},
		{&kimiNames, "kimi_linear", lang.MixerKimiDelta, true, []string{
			"q_proj", "k_proj", "v_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "b_proj", "forget_gate.f_a_proj", "forget_gate.f_b_proj", "g_a_proj", "g_b_proj"}},
		{&nemotronNames, "nemotron_h", lang.MixerMamba2, false, []string{"q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj"}},
	} {
		other := lang.MixerAttention
		if c.mixer == lang.MixerKimiDelta {
			other = lang.MixerLatent
		}
		m := lang.Model{Family: c.family, Gated: c.gate, AttnGate: c.mixer == lang.MixerGatedDelta, Mixers: []string{c.mixer, other}}.Adapted(4, 8, lang.AllLinear)
		names, err := c.names.adapters(&m)
		if err != nil {
			t.Fatalf("%s: %v", c.family, err)
		}
		if got := slices.DeleteFunc(c.names.targets(&m), func(name string) bool { return !slices.Contains(c.targets, name) }); !slices.Equal(got, c.targets) {
			t.Errorf("%s: targets are %q, not %q", c.family, got, c.targets)
		}
		for weight, p := range c.names.tensors {
			if b, ok := names.tensors[weight+endB]; ok && (b.heads != p.heads || len(b.after) != len(p.after)) {
				t.Errorf("%s: %s is fused as %+v, its adapter as %+v", c.family, weight, p, b)
			}
		}
	}
	m := lang.Model{Family: "qwen3_5", AttnGate: true, Mixers: []string{lang.MixerGatedDelta}}.Adapted(4, 8, "in_proj_z")
	if _, err := qwenNextNames.adapters(&m); err == nil {
		t.Error("a part of in_proj_qkvz has an adapter of its own")
	}
}

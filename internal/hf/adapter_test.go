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

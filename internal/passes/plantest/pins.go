package plantest

import (
	"fmt"

	"sppo.dev/internal/passes/strategy"
	"sppo.dev/lang"
)

// PinnedValues returns, for each key of a schedule, values that a user may write, whether or not the search tries
// them. Some contradict each other or other keys of the job.
func PinnedValues(sp *lang.Spec) map[string][]string {
	gpus, layers, batch := sp.Cluster.GPUs(), sp.Model.Layers, sp.Train.Batch
	few := func(n int) bool { return n <= 4 || n%4 == 0 }
	return map[string][]string{
		"sp":                append(numbers(gpus, func(n int) bool { return sp.Model.Heads%n == 0 || gpus%n == 0 }), rings(sp.Model.Heads, gpus)...),
		"pp":                numbers(min(gpus, layers), few),
		"dp":                numbers(min(gpus, batch), func(n int) bool { return batch%n == 0 }),
		"sp_mode":           {"megatron", "ulysses", "ring"},
		"expert_parallel":   {"off", "on"},
		"zero":              {"0", "1", "2", "3"},
		"optimizer_offload": {"none", "host"},
		"microbatch":        numbers(batch, func(n int) bool { return batch%n == 0 }),
		"subsequences":      {"1", "2", "3", "5", "7", "10", "16", "25", "50", "90", "100", "160", "200", "500"},
		"partition":         {"flops", "time", "length"},
		"align":             {"8", "32", "64", "128", "256", "512"},
		"keep":              {"[]", "[k]", "[v]", "[k, v]"},
		"latent_cache":      {"off", "on"},
		"order":             {"sequence", "layer"},
		"loss_chunk":        {"64", "256", "1000", "1024", "4096"},
		"recompute":         {"none", "full", "full_kv", "selective", "keep_attention"},
		"strategy":          strategy.Names(),
		"virtual_stages":    numbers(min(layers, 40), few),
		"offload":           {"none", "full", "adaptive", "carry", "memory", "0.3", "0.7"},
		"mux":               {"off", "left", "right", "on"},
		"overlap":           {"on", "replicas", "off"},
		"checkpoint_copy":   {"off", "on"},
	}
}

// rings returns lists of two numbers of ranks: those that divide heads, and those of a ring of such groups.
func rings(heads, gpus int) (out []string) {
	for a := 2; a <= gpus/2; a++ {
		for b := 2; heads%a == 0 && a*b <= gpus; b++ {
			if gpus%(a*b) == 0 {
				out = append(out, fmt.Sprintf("[%d, %d]", a, b))
			}
		}
	}
	return out
}

// numbers returns the numbers from 1 to most that suit.
func numbers(most int, suits func(int) bool) (out []string) {
	for n := 1; n <= most; n++ {
		if suits(n) {
			out = append(out, fmt.Sprint(n))
		}
	}
	return out
}

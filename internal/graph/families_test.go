package graph

import (
	"testing"

	"sppo.dev/lang"
)

// TestParameterCounts builds published models from their families and sizes. Their numbers of parameters must
// be exactly those on their model cards.
func TestParameterCounts(t *testing.T) {
	for _, c := range []struct {
		model string
		keys  string
		want  int64
	}{
		{"GPT-2", "family = gpt2 layers = 12 hidden = 768 heads = 12 vocab = 50257", 124_439_808},
		{"Llama-2-7B", "family = llama layers = 32 hidden = 4096 heads = 32 vocab = 32000", 6_738_415_616},
		{"Llama-3.1-8B", "family = llama3_1 layers = 32 hidden = 4096 heads = 32 kv_heads = 8 ffn = 14336 vocab = 128256", 8_030_261_248},
		{"Llama-3.2-1B", "family = llama3_2 layers = 16 hidden = 2048 heads = 32 kv_heads = 8 ffn = 8192 vocab = 128256", 1_235_814_400},
		{"Llama-3.1-70B", "family = llama3_1 layers = 80 hidden = 8192 heads = 64 kv_heads = 8 ffn = 28672 vocab = 128256", 70_553_706_496},
		{"Llama-3.1-405B", "family = llama3_1 layers = 126 hidden = 16384 heads = 128 kv_heads = 8 ffn = 53248 vocab = 128256", 405_853_388_800},
		{"Mistral-7B-v0.3", "family = mistral layers = 32 hidden = 4096 heads = 32 kv_heads = 8 ffn = 14336 vocab = 32768", 7_248_023_552},
		{"Qwen2.5-7B", "family = qwen2 layers = 28 hidden = 3584 heads = 28 kv_heads = 4 ffn = 18944 vocab = 152064", 7_615_616_512},
		{"Qwen2.5-32B", "family = qwen2 layers = 64 hidden = 5120 heads = 40 kv_heads = 8 ffn = 27648 vocab = 152064", 32_763_876_352},
		{"Qwen3-4B", "family = qwen3 layers = 36 hidden = 2560 heads = 32 kv_heads = 8 ffn = 9728 vocab = 151936 tied = true", 4_022_468_096},
		{"Qwen3-14B", "family = qwen3 layers = 40 hidden = 5120 heads = 40 kv_heads = 8 ffn = 17408 vocab = 151936", 14_768_307_200},
		{"Phi-3-mini", "family = phi3 layers = 32 hidden = 3072 heads = 32 ffn = 8192 vocab = 32064", 3_821_079_552},
		{"OLMo-2-7B", "family = olmo2 layers = 32 hidden = 4096 heads = 32 ffn = 11008 vocab = 100352", 7_298_617_344},
		{"SmolLM3-3B", "family = smollm3 layers = 36 hidden = 2048 heads = 16 kv_heads = 4 ffn = 11008 vocab = 128256", 3_075_098_624},
		{"Gemma-2-2B", "family = gemma2 layers = 26 hidden = 2304 heads = 8 kv_heads = 4 ffn = 9216 vocab = 256000", 2_614_341_888},
		{"Gemma-3-1B", "family = gemma3 layers = 26 hidden = 1152 heads = 4 kv_heads = 1 ffn = 6912 vocab = 262144", 999_885_952},
	} {
		m, err := lang.ParseModel(c.keys + " dtype = bf16")
		if err != nil {
			t.Errorf("%s: %v", c.model, err)
			continue
		}
		sequence := int64(1024) // rows of GPT-2's table of positions
		g := New(m, Split{SP: 1}, sequence)
		got := parameters(g.Embedding) + int64(m.Layers)*parameters(g.Plain(0)) + parameters(g.Head)
		if got != c.want {
			t.Errorf("%s has %d parameters, published are %d", c.model, got, c.want)
		}
	}
}

// parameters counts the parameters of a block, without those tied to another block's.
func parameters(b *Block) (n int64) {
	for _, p := range b.Params {
		if !p.Tied {
			n += p.Shape[0] * p.Shape[1]
		}
	}
	return n
}

package hf_test

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/hf"
)

// gemmaVision is the number of parameters in the vision part of Gemma-3, except the matrix that projects its
// 1152 values to the width of the language model. The vision part has patches of 14 by 14 pixels in three
// colours, 64 by 64 positions, 27 layers of attention and MLP with biases, and norms.
const gemmaVision = (3*14*14+1)*1152 + 64*64*1152 + 27*(4*(1152+1)*1152+2*1152*4304+4304+1152+4*1152) + 2*1152 + 1152

// published lists the parameter counts stated on the models' pages. For models with a vision part, the counts
// are those of the language model.
var published = map[string]int64{
	"Llama-3.1-8B": 8_030_261_248, "Llama-3.1-70B": 70_553_706_496, "Llama-3.1-405B": 405_853_388_800,
	"Qwen2.5-7B": 7_615_616_512, "Qwen2.5-32B": 32_763_876_352, "Qwen3-4B": 4_022_468_096, "Qwen3-14B": 14_768_307_200,
	"Mistral-7B-v0.1": 7_241_732_096, "Mistral-7B-v0.3": 7_248_023_552, "Mistral-Small-3.1-24B": 23_572_403_200,
	"Gemma-2-2B": 2_614_341_888, "Gemma-2-9B": 9_241_705_984, "Gemma-2-27B": 27_227_128_320, "Gemma-3-1B": 999_885_952,
	"Gemma-3-4B": 4_300_079_472 - gemmaVision - 1152*2560, "Gemma-3-12B": 12_187_325_040 - gemmaVision - 1152*3840,
	"DistilGPT2": 81_912_576, "GPT-2": 124_439_808, "SmolLM2-135M": 134_515_008, "SmolLM3-3B": 3_075_098_624, "OLMo-2-7B": 7_298_617_344,
	"Phi-3-mini-4K": 3_821_079_552, "Phi-4-mini": 3_836_021_760, "Llama-2-7B": 6_738_415_616, "Llama-3.2-1B": 1_235_814_400,
	"TinyLlama-1.1B": 1_100_048_384, "Qwen2-0.5B": 494_032_768, "Qwen3-0.6B": 596_049_920,
	"Qwen3-30B-A3B": 30_532_122_624, "Qwen3-235B-A22B": 235_093_634_560, "Mixtral-8x7B-v0.1": 46_702_792_704,
	"Kimi-Linear-48B-A3B": 49_122_681_728, "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672,
	"Gemma-3-27B": 27_432_406_640 - gemmaVision - 1152*5376,
}

// rounded lists counts of which the pages have three digits, which may include a layer for multi-token prediction.
var rounded = map[string]float64{"GLM-4.5-Air": 106e9}

func TestRoundedCounts(t *testing.T) {
	for name, want := range rounded {
		if got := float64(countOf(t, name)); math.Abs(got/want-1) > 0.01 {
			t.Errorf("%s: %.4g parameters, published are %.3g", name, got, want)
		}
	}
}

// The configs in testdata/configs are those of the hub's models with the same names.
func TestPublishedModels(t *testing.T) {
	for name, want := range published {
		t.Run(name, func(t *testing.T) {
			if got := countOf(t, name); got != want {
				t.Errorf("%d parameters, published are %d", got, want)
			}
		})
	}
	files, err := filepath.Glob(filepath.Join("testdata", "configs", "*.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if name := strings.TrimSuffix(filepath.Base(file), ".json"); published[name] == 0 && rounded[name] == 0 {
			t.Errorf("%s is a config that nothing tests", file)
		}
	}
}

// countOf returns the number of parameters of a model in testdata/configs.
func countOf(t *testing.T, name string) (n int64) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", "configs", name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	model, err := hf.ReadModel(configFolder(t, text))
	if err != nil {
		t.Fatal(err)
	}
	if notices := strings.Join(model.Notices, "\n"); strings.Contains(notices, "did you mean") {
		t.Errorf("a key of a published config is taken for a misspelt one: %s", notices)
	}
	l, err := model.Lang(1<<10, "")
	if err != nil {
		t.Fatal(err)
	}
	g := graph.New(l, graph.Split{SP: 1}, 1<<10)
	count := func(b *graph.Block) (n int64) {
		for _, p := range b.Params {
			if !p.Tied {
				n += p.Shape[0] * p.Shape[1]
			}
		}
		return n
	}
	n = count(g.Embedding) + count(g.Head)
	for kind := range g.Kinds() {
		n += int64(g.LayersOf(kind)) * count(g.Plain(kind))
	}
	return n
}

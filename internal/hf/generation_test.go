package hf_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/hf"
)

func TestEndTokens(t *testing.T) {
	const config = `{"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 9`
	for _, c := range []struct {
		config, generation string
		want               []uint32
		wrong              string
	}{
		{"", "", nil, ""},
		{`, "eos_token_id": 7`, "", []uint32{7}, ""},
		{`, "eos_token_id": null`, "", nil, ""},
		{`, "eos_token_id": 7`, `{"eos_token_id": [3, 4]}`, []uint32{3, 4}, ""},
		{`, "eos_token_id": 7`, `{"eos_token_id": null}`, []uint32{7}, ""},
		{`, "eos_token_id": 7`, `{}`, []uint32{7}, ""},
		{"", `{"eos_token_id": "</s>"}`, nil, `generation_config.json: eos_token_id = "</s>", which is neither a token nor a list of tokens`},
		{"", `{"eos_token_id": -1}`, nil, "neither a token nor a list"},
		{"", `[1]`, nil, "generation_config.json: is not a JSON object"},
	} {
		dir := t.TempDir()
		files := map[string]string{"config.json": config + c.config + "}"}
		if c.generation != "" {
			files["generation_config.json"] = c.generation
		}
		for name, text := range files {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		model, err := hf.ReadModel(dir)
		if err != nil {
			t.Fatal(err)
		}
		got, err := model.EndTokens()
		if !slices.Equal(got, c.want) || (err == nil) != (c.wrong == "") || err != nil && !strings.Contains(err.Error(), c.wrong) {
			t.Errorf("%s, %s: %v, %v; want %v, %s", c.config, c.generation, got, err, c.want, c.wrong)
		}
	}
}

package hf

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
)

// generationFile contains the recommended sampling settings of a model.
const generationFile = "generation_config.json"

// EndTokens returns the model's end-of-text tokens. They come from generation_config.json or, if that names
// none, from config.json. There may be none.
func (m *Model) EndTokens() ([]uint32, error) {
	for _, name := range []string{generationFile, ConfigFile} {
		c, err := readObject(filepath.Join(m.Dir, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		raw := c.raw("eos_token_id")
		if raw == nil {
			continue
		}
		var list []uint32
		var one uint32
		if json.Unmarshal(raw, &one) == nil {
			list = []uint32{one}
		} else if json.Unmarshal(raw, &list) != nil {
			return nil, fmt.Errorf("%s: eos_token_id = %s, which is neither a token nor a list of tokens", filepath.Join(m.Dir, name), quote(raw))
		}
		return list, nil
	}
	return nil, nil
}

package hf

import (
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"

	"sppo.dev/internal/infile"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// formerPositions lists members with which configs describe positions in a way that describe does not use.
var formerPositions = []string{"rope_scaling", "rope_theta", "rope_local_base_freq", "max_window_layers", "sliding_window_pattern", "_sliding_window_pattern"}

// positions lists the members that describe writes about rotary positions and windows.
var positions = []string{"rope_parameters", "original_max_position_embeddings", "sliding_window", "use_sliding_window", "layer_types", "no_rope_layers"}

// WithPositions returns the folder's config.json with the position settings of another model and with another maximum
// number of tokens per sequence. The result is read back: if transformers would make another model of it, WithPositions
// returns an error. It returns nil if the config already has these settings.
func (m *Model) WithPositions(of *ir.Model, limit int64) ([]byte, error) {
	text, err := infile.Read(filepath.Join(m.Dir, ConfigFile), maxConfig)
	if err != nil {
		return nil, err
	}
	if limit == m.Context() && m.describes(text, of) == nil {
		return nil, nil
	}
	if of.Positions == lang.PositionsLearned {
		return nil, fmt.Errorf("%s: its positions are a table of %d rows, so its sequences cannot have %d tokens", m.Dir, m.Context(), limit)
	}
	edited, err := m.edit(text, map[string]any{"max_position_embeddings": limit})
	if err == nil && m.describes(edited, of) == nil {
		return edited, nil
	}
	all, members := m.arch.describe(of, limit), map[string]any{"max_position_embeddings": limit}
	for _, key := range positions {
		if v, ok := all[key]; ok {
			members[key] = v
		}
	}
	if edited, err = m.edit(text, asReals(members).(map[string]any), formerPositions...); err != nil {
		return nil, err
	}
	if err := m.describes(edited, of); err != nil {
		return nil, fmt.Errorf("%s of transformers has no such positions: %w", m.arch.class, err)
	}
	return edited, nil
}

// edit sets and removes members of the object of config.json that describes the language model.
func (m *Model) edit(text []byte, members map[string]any, remove ...string) ([]byte, error) {
	var whole map[string]any
	decoded := map[string]json.RawMessage{}
	if err := json.Unmarshal(text, &decoded); err != nil {
		return nil, err
	}
	whole = map[string]any{}
	for key, v := range decoded {
		whole[key] = v // as written
	}
	object := whole
	if m.outer {
		inner := map[string]json.RawMessage{}
		if err := json.Unmarshal(decoded["text_config"], &inner); err != nil {
			return nil, err
		}
		object = map[string]any{}
		for key, v := range inner {
			object[key] = v
		}
		whole["text_config"] = object
	}
	for _, key := range remove {
		delete(object, key)
	}
	maps.Copy(object, members)
	edited, err := json.MarshalIndent(whole, "", "  ")
	return append(edited, '\n'), err
}

// describes returns an error if a config.json in the folder would describe another model.
func (m *Model) describes(text []byte, want *ir.Model) error {
	c, err := parseConfig(text)
	if err != nil {
		return err
	}
	read, err := newModel(m.Name, m.Dir, c)
	if err != nil {
		return err
	}
	l, err := read.Lang(anyLength, want.DType)
	if err != nil {
		return err
	}
	got := ir.Model(l)
	if a, b := got.Difference(want); a != "" {
		return fmt.Errorf("it has %s where this model has %s", a, b)
	}
	return nil
}

// anyLength is a length of sequences that every model with rotary positions supports.
const anyLength = 1 << 10

package hf

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"sppo.dev/infile"
)

// ConfigFile is the file that describes a model.
const ConfigFile = "config.json"

// maxConfig is the maximum size of config.json in bytes; the largest on the hub have a few thousand.
const maxConfig = 16 << 20

// config is an object in config.json. It records which members were read, and the first error: a reader may read
// all members and check the error afterwards.
type config struct {
	prefix   string // path of its members in messages: "rope_scaling."
	members  map[string]json.RawMessage
	defaults map[string]any // values of absent members; they do not apply to members that are null
	used     map[string]bool
	err      *error // shared by all objects of a file
}

// readConfig reads the config.json of a folder.
func readConfig(dir string) (*config, error) { return readObject(filepath.Join(dir, ConfigFile)) }

// readObject reads a file that holds a JSON object.
func readObject(path string) (*config, error) {
	text, err := infile.Read(path, maxConfig)
	if err != nil {
		return nil, err
	}
	c, err := parseConfig(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return c, nil
}

func parseConfig(text []byte) (*config, error) {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(text, &members); err != nil {
		return nil, fmt.Errorf("is not a JSON object: %w", err)
	}
	if members == nil {
		return nil, errors.New("is not a JSON object")
	}
	return &config{members: members, used: map[string]bool{}, err: new(error)}, nil
}

// failf keeps the first error.
func (c *config) failf(key, format string, args ...any) {
	if *c.err == nil {
		*c.err = fmt.Errorf("%s%s %s", c.prefix, key, fmt.Sprintf(format, args...))
	}
}

// raw returns a member as written, or its default if it is absent. It returns nil if the member is null, or
// is absent and has no default.
func (c *config) raw(key string) json.RawMessage {
	c.used[key] = true
	v, there := c.members[key]
	switch {
	case there && string(v) == "null":
		return nil
	case there:
		return v
	case c.defaults[key] == nil:
		return nil
	}
	text, _ := json.Marshal(c.defaults[key])
	return text
}

// has reports whether a member exists, or has a default, and is not null.
func (c *config) has(key string) bool {
	used := c.used[key]
	found := c.raw(key) != nil
	c.used[key] = used
	return found
}

// quote returns a value for use in messages, shortened if it is long.
func quote(v json.RawMessage) string {
	const most = 60
	if len(v) > most {
		return strings.ToValidUTF8(string(v[:most]), "") + " ..."
	}
	return string(v)
}

// get decodes a required member.
func get[T any](c *config, key, kind string) T {
	var out T
	v := c.raw(key)
	if v == nil {
		c.failf(key, "is missing")
		return out
	}
	if json.Unmarshal(v, &out) != nil {
		c.failf(key, "= %s is not %s", quote(v), kind)
	}
	return out
}

// count returns a member that must be a positive whole number.
func (c *config) count(key string) int64 {
	v := get[int64](c, key, "a whole number")
	if *c.err == nil && v <= 0 {
		c.failf(key, "= %d is not positive", v)
	}
	return v
}

func (c *config) number(key string) float64 { return get[float64](c, key, "a number") }

func (c *config) positive(key string) float64 {
	v := c.number(key)
	if *c.err == nil && v <= 0 {
		c.failf(key, "= %v is not positive", v)
	}
	return v
}

func (c *config) numbers(key string) []float64 { return get[[]float64](c, key, "list of numbers") }
func (c *config) truth(key string) bool        { return get[bool](c, key, "true or false") }
func (c *config) word(key string) string       { return get[string](c, key, "a string") }
func (c *config) words(key string) []string    { return get[[]string](c, key, "list of strings") }

// object returns a member that must be an object.
func (c *config) object(key string) *config {
	members := get[map[string]json.RawMessage](c, key, "an object")
	return &config{prefix: c.prefix + key + ".", members: members, used: map[string]bool{}, err: c.err}
}

// want refuses a member whose value differs from the one that the language supports.
func (c *config) want(key string, covered any) {
	v := c.raw(key)
	text, _ := json.Marshal(covered)
	if v != nil && string(v) != string(text) {
		c.failf(key, "= %s is not supported; use %s", quote(v), text)
	}
}

// skip marks members that do not affect training as read.
func (c *config) skip(keys ...string) {
	for _, key := range keys {
		c.used[key] = true
	}
}

// finish refuses members that have not been read. Members that are null, false or empty request nothing.
func (c *config) finish() {
	var rest []string
	for key, v := range c.members {
		switch string(v) {
		case "null", "false", "[]", "{}", `""`:
			continue
		}
		if !c.used[key] && !slices.Contains(inert, key) {
			rest = append(rest, key)
		}
	}
	slices.Sort(rest)
	if len(rest) > 0 {
		c.failf(rest[0], "= %s is not supported", quote(c.members[rest[0]]))
	}
}

// inert lists members that do not describe the network in training: names, token ids, settings for generation
// and for other tasks, and settings that every config inherits from a base class.
var inert = []string{
	"_name_or_path", "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "architectures", "attn_implementation",
	"auto_map", "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward", "cache_implementation", "decoder_start_token_id",
	"eos_token_id", "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
	"id2label", "image_token_id", "image_token_index", "initializer_range", "keys_to_ignore_at_inference", "label2id", "language", "length_penalty",
	"license", "max_length", "max_position_embeddings", "min_length", "model_type", "n_ctx", "no_repeat_ngram_size", "num_beam_groups",
	"num_beams", "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores", "pad_token_id",
	"prefix", "pretraining_tp", "problem_type", "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id",
	"suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss", "tokenizer_class", "top_k", "top_p", "torchscript",
	"transformers_version", "typical_p", "unsloth_fixed", "unsloth_version", "use_cache", "diversity_penalty", "early_stopping",
	"encoder_no_repeat_ngram_size", "is_decoder", "remove_invalid_values", "use_bfloat16", "bad_words_ids", "hybrid_cache",
	"summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "gradient_checkpointing",
}

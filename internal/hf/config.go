package hf

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"sppo.dev/internal/infile"
	"sppo.dev/internal/near"
)

// ConfigFile is the file that describes a model.
const ConfigFile = "config.json"

// maxConfig is the maximum size of config.json in bytes; the largest on the hub have a few thousand.
const maxConfig = 16 << 20

// config is an object in config.json. It records which members were read, and the first error: a reader may read
// all members and check the error afterwards.
type config struct {
	prefix  string // path of its members in messages: "rope_scaling."
	members map[string]json.RawMessage
	keys    []key // declared by its class; their defaults do not apply to members that are null
	used    map[string]bool
	usual   map[string]string  // absent keys that were read as defaults of transformers, with these
	nested  map[string]*config // those of its objects that were read
	err     *error             // shared by all objects of a file
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

// nonNumber matches what Python writes for numbers that JSON lacks.
var nonNumber = regexp.MustCompile(`([\[:,]\s*)(-?Infinity|NaN)\b`)

func parseConfig(text []byte) (*config, error) {
	var members map[string]json.RawMessage
	err := json.Unmarshal(text, &members)
	if err != nil && json.Unmarshal(nonNumber.ReplaceAll(text, []byte(`$1"$2"`)), &members) == nil {
		err = nil
	}
	if err != nil {
		return nil, fmt.Errorf("is not a JSON object: %w", err)
	}
	if members == nil {
		return nil, errors.New("is not a JSON object")
	}
	return &config{members: members, used: map[string]bool{}, usual: map[string]string{}, nested: map[string]*config{}, err: new(error)}, nil
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
	if v, there := c.members[key]; there && string(v) == "null" {
		return nil
	} else if there {
		return v
	}
	if row := c.row(key); row != nil && row.value != nil {
		text, _ := json.Marshal(row.value)
		c.usual[key] = string(text)
		return text
	}
	return nil
}

// present reports whether a member exists, even if it is null.
func (c *config) present(key string) bool {
	_, there := c.members[key]
	if !c.used[key] {
		c.used[key] = false // the reader looks for the key
	}
	return there
}

// has reports whether a member exists, or has a default, and is not null.
func (c *config) has(key string) bool {
	if v, there := c.members[key]; there {
		return string(v) != "null"
	}
	row := c.row(key)
	return row != nil && row.value != nil
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
		c.failf(key, "%s", map[bool]string{true: "= null is not supported", false: "is missing"}[c.present(key)])
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
	if c.nested[key] == nil {
		o := &config{prefix: c.prefix + key + ".", used: map[string]bool{}, usual: map[string]string{}, nested: map[string]*config{}, err: c.err}
		if o.members = get[map[string]json.RawMessage](c, key, "an object"); o.members == nil {
			o.members = map[string]json.RawMessage{}
		}
		c.nested[key] = o
	}
	return c.nested[key]
}

// objectOrEmpty returns a member that is an object, or an object without members if it is absent or null.
func (c *config) objectOrEmpty(key string) *config {
	if !c.has(key) {
		return &config{prefix: c.prefix + key + ".", members: map[string]json.RawMessage{}, used: map[string]bool{}, usual: map[string]string{}, nested: map[string]*config{}, err: c.err}
	}
	return c.object(key)
}

// among refuses a word that is not in a list.
func (c *config) among(key, word string, words []string) {
	if *c.err == nil && !slices.Contains(words, word) {
		c.failf(key, "= %q is not supported; use %s", word, strings.Join(words, ", "))
	}
}

// unremarkable lists the keys whose defaults are not worth a notice: weights show biases and tied embeddings, published folders of
// DeepSeek do not state rope_interleave, and the others affect neither shapes nor losses of weights that exist.
var unremarkable = []string{
	"attention_bias", "attention_out_bias", "initializer_range", "max_position_embeddings", "mlp_bias", "num_mtp_layers", "num_nextn_predict_layers",
	"pad_token_id", "rope_interleave", "tie_word_embeddings", "use_bias", "use_sliding_window",
}

// assume gives a member that is absent or null the default of transformers, which no row has.
func (c *config) assume(key, value string) {
	if !c.present(key) {
		c.usual[key] = value
	}
	c.members[key] = json.RawMessage(value)
	c.skip(key)
}

// assumed lists the absent keys that were read as defaults, with these.
func (c *config) assumed() (list []string) {
	for _, key := range slices.Sorted(maps.Keys(c.usual)) {
		if !slices.Contains(unremarkable, key) {
			list = append(list, key+" = "+quote(json.RawMessage(c.usual[key])))
		}
	}
	return list
}

// skip marks members as read that have no effect because of other members.
func (c *config) skip(keys ...string) {
	for _, key := range keys {
		c.used[key] = true
	}
}

// rename gives members the names of keys that the class declares, if it does not declare those that they have.
func (c *config) rename(list []alias) {
	for _, a := range list {
		if v, there := c.members[a.other]; there && c.row(a.other) == nil && c.row(a.name) != nil {
			c.members[a.name] = v
			c.skip(a.other)
		}
	}
}

// misspelt lists the members, also those of nested objects, that are unknown and differ by one edit from an absent key that the
// reader looks for. It returns a question for each.
func (c *config) misspelt() (list []string) {
	for _, o := range c.nested {
		list = append(list, o.misspelt()...)
	}
	for name := range c.members {
		if key := c.meant(name); key != "" {
			list = append(list, fmt.Sprintf("%s%s is ignored, as by transformers; did you mean %s?", c.prefix, name, key))
		}
	}
	slices.Sort(list)
	return list
}

// meant returns the absent key that differs by one edit from the name of an unknown member, or "".
func (c *config) meant(name string) string {
	if c.used[name] || c.row(name) != nil {
		return ""
	}
	absent := slices.Sorted(maps.Keys(c.used)) // also has keys that were looked for but not read
	for i := range c.keys {
		if c.keys[i].use == read {
			absent = append(absent, c.keys[i].name)
		}
	}
	i := slices.IndexFunc(absent, func(key string) bool { return !c.present(key) && near.Distance(name, key) == 1 })
	if i < 0 {
		return ""
	}
	return absent[i]
}

// ignored lists the members, also those of nested objects, that set something and have no effect: neither the reader
// nor transformers reads them. It omits those of misspelt.
func (c *config) ignored() (list []string) {
	for _, o := range c.nested {
		list = append(list, o.ignored()...)
	}
	for name, v := range c.members {
		row := c.row(name)
		switch string(v) {
		case "null", "false", "[]", "{}", `""`:
			continue
		}
		if !c.used[name] && (row == nil || row.use == read) && c.meant(name) == "" {
			list = append(list, c.prefix+name)
		}
	}
	slices.Sort(list)
	return list
}

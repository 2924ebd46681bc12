package hf

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"sppo.dev/examples"
	"sppo.dev/lang"
)

// Key is a key of the language's model block, with its value as written and its origin in config.json.
type Key struct{ Name, Value, From string }

// Model is a Hugging Face model in terms of the language.
type Model struct {
	Name    string // name of the model block
	Dir     string
	Keys    []Key
	Notices []string // messages about what training ignores or does differently from the config

	arch  *architecture
	conf  *config
	outer bool // the language model is a part of the folder's model
}

// Context returns the maximum number of tokens per sequence according to the config, or 0 if it gives none.
func (m *Model) Context() int64 {
	for _, key := range []string{"max_position_embeddings", "n_positions"} {
		if m.conf.has(key) {
			return m.conf.count(key)
		}
	}
	return 0
}

// Architecture returns the model_type of config.json.
func (m *Model) Architecture() string { return m.arch.modelType }

// ReadModel reads the config.json of a folder. An error names the file and the key.
func ReadModel(dir string) (*Model, error) {
	c, err := readConfig(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s has no %s: is it the folder of a model?", dir, ConfigFile)
	}
	if err != nil {
		return nil, err
	}
	m, err := newModel(nameOf(dir, c), dir, c)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, ConfigFile), err)
	}
	return m, nil
}

func newModel(name, dir string, c *config) (*Model, error) {
	if c.has("quantization_config") {
		q := c.object("quantization_config")
		method := "weights"
		if q.has("quant_method") {
			method = q.word("quant_method") + " weights"
		}
		return nil, fmt.Errorf("quantization_config: quantised %s are not supported; use the original folder", method)
	}
	a, inner := find(c)
	if a == nil {
		return nil, *c.err
	}
	m := &Model{Name: name, Dir: dir, arch: a, conf: inner, outer: inner != c}
	m.inherit(c)
	if m.outer {
		m.notice("model_type = %s: only the language model, text_config, is trained", a.outer)
	}
	c = inner
	c.defaults = a.defaults
	m.set("family", m.arch.family, "model_type = "+a.modelType)
	a.read(m, c)
	c.finish()
	if *c.err == nil {
		*c.err = m.covered()
	}
	return m, *c.err
}

// covered refuses settings for which the language has no key or value.
func (m *Model) covered() error {
	for _, k := range m.Keys {
		key := lang.FindKey("model." + k.Name)
		switch {
		case key == nil:
			return fmt.Errorf("%s is not supported: models have no %s", k.From, k.Name)
		case unicode.IsLetter(rune(k.Value[0])) && !slices.Contains(key.Words(), k.Value):
			return fmt.Errorf("%s is not supported: %s = %s does not exist", k.From, k.Name, k.Value)
		}
	}
	return nil
}

// inherit passes settings of the whole model on to the language model: the type of values, and whether the
// output projection is the embedding.
func (m *Model) inherit(whole *config) {
	if key := "tie_word_embeddings"; m.outer && whole.has(key) {
		m.conf.members[key] = whole.raw(key)
	}
	for _, key := range []string{"dtype", "torch_dtype"} {
		if m.outer && whole.has(key) && !m.conf.has("dtype") && !m.conf.has("torch_dtype") {
			m.conf.members[key] = whole.raw(key)
		}
	}
}

// find returns the architecture of a config and the object that describes its language model.
func find(c *config) (*architecture, *config) {
	name := c.word("model_type")
	for i := range architectures {
		a := &architectures[i]
		switch {
		case name == a.modelType:
			return a, c
		case name == a.outer && c.has("text_config"):
			return a, c.object("text_config")
		}
	}
	var names []string
	for i := range architectures {
		names = append(names, architectures[i].modelType)
		if outer := architectures[i].outer; outer != "" {
			names = append(names, outer)
		}
	}
	slices.Sort(names)
	c.failf("model_type", "= %q is not supported; supported are %s", name, strings.Join(names, ", "))
	return nil, c
}

// nameOf returns a name for the model block, derived from the folder's name.
func nameOf(dir string, c *config) string {
	if abs, err := filepath.Abs(dir); err == nil {
		dir = abs
	}
	name := strings.Map(func(r rune) rune {
		switch {
		case r >= 'A' && r <= 'Z':
			return r + 'a' - 'A'
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9', r == '.', r == '-', r == '_':
			return r
		}
		return '-'
	}, filepath.Base(dir))
	name = strings.TrimLeft(name, ".-_0123456789")
	return strings.TrimRight(cmp.Or(name, "model"), ".-")
}

// set adds a key.
func (m *Model) set(name, value, from string) { m.Keys = append(m.Keys, Key{name, value, from}) }

// drop removes a key.
func (m *Model) drop(name string) {
	m.Keys = slices.DeleteFunc(m.Keys, func(k Key) bool { return k.Name == name })
}

func (m *Model) setCount(name string, v int64, from string) {
	m.set(name, strconv.FormatInt(v, 10), from)
}

func (m *Model) setNumber(name string, v float64, from string) { m.set(name, number(v), from) }

func (m *Model) setList(name string, words []string, from string) {
	m.set(name, "["+strings.Join(words, ", ")+"]", from)
}

// value returns the value of a key, or "" if it is not set.
func (m *Model) value(name string) string {
	for _, k := range m.Keys {
		if k.Name == name {
			return k.Value
		}
	}
	return ""
}

func (m *Model) notice(format string, args ...any) {
	m.Notices = append(m.Notices, fmt.Sprintf(format, args...))
}

// number formats a number so that the language reads the same value.
func number(v float64) string {
	if v == math.Trunc(v) && math.Abs(v) < 1e15 {
		return strconv.FormatFloat(v, 'f', -1, 64)
	}
	return strings.Replace(strconv.FormatFloat(v, 'g', -1, 64), "e+", "e", 1)
}

// Text returns the model block, with the origin of each key.
func (m *Model) Text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "model %s {\n", m.Name)
	for _, k := range m.Keys {
		fmt.Fprintf(&b, "%s = %s # %s\n", k.Name, k.Value, k.From)
	}
	b.WriteString("}\n")
	text, err := lang.Format([]byte(b.String()))
	if err != nil {
		panic("internal: the imported model does not parse: " + err.Error())
	}
	return string(text)
}

// Spec returns the text of a complete spec for the model: a shipped cluster with arguments such as "nodes = 1",
// and a run on sequences of the given number of random tokens, as needed to predict memory and time.
func (m *Model) Spec(cluster, arguments, sequence string) string {
	return fmt.Sprintf("import \"clusters/%s.sppo\"\n\n%s\ncluster machines = %s(%s)\n\ntrain {\n  sequence = %s\n  data = random()\n}\n",
		cluster, m.Text(), cluster, arguments, sequence)
}

// Lang returns the model as the language represents it, for sequences of the given number of tokens and with
// weights of the given type, f32 or bf16. An empty type means the config's.
func (m *Model) Lang(sequence int64, dtype string) (lang.Model, error) {
	var set []string
	if dtype != "" {
		set = []string{"model.dtype=" + dtype}
	}
	text := m.Spec("local", "", strconv.FormatInt(sequence, 10))
	spec, err := lang.Parse(filepath.Join(m.Dir, ConfigFile), []byte(text), lang.Options{Shipped: examples.Shipped, Set: set})
	if err != nil {
		return lang.Model{}, err
	}
	return spec.Model, nil
}

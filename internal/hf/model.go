package hf

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"sppo.dev/internal/shipped"
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
	whole *config // differs from conf if outer
	blocks
	outer  bool // the language model is a part of the folder's model
	halves bool // pairs of rotated elements are as ours, in an architecture where they usually are neighbours
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

// Beyond says that sequences are longer than the config supports, or returns "".
func (m *Model) Beyond(sequence int64) string {
	most := m.Context()
	if most == 0 || sequence <= most {
		return ""
	}
	return fmt.Sprintf("sequences of %d tokens are longer than max_position_embeddings = %d of %s", sequence, most, m.Dir)
}

// Architecture returns the model_type of config.json.
func (m *Model) Architecture() string { return m.arch.modelType }

// ReadModel reads the config.json of a folder. An error names the file and the key.
func ReadModel(dir string) (*Model, error) {
	info, err := os.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("there is no folder %s", dir)
	case err == nil && !info.IsDir() && filepath.Base(dir) == ConfigFile:
		return nil, fmt.Errorf("%s is a file: give its folder, %s", dir, filepath.Dir(dir))
	case err == nil && !info.IsDir():
		return nil, fmt.Errorf("%s is a file, not the folder of a model", dir)
	}
	c, err := readConfig(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s has no %s: is it the folder of a model?", dir, ConfigFile)
	}
	if err != nil {
		return nil, err
	}
	m, err := newModel(nameOf(dir, c), dir, c)
	if err != nil {
		for _, question := range c.misspelt() {
			err = fmt.Errorf("%w; %s", err, question)
		}
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, ConfigFile), err)
	}
	return m, nil
}

func newModel(name, dir string, c *config) (*Model, error) {
	quantized, err := readBlocks(c)
	if err != nil {
		return nil, err
	}
	a, inner := find(c)
	if *c.err != nil {
		return nil, *c.err
	}
	m := &Model{Name: name, Dir: dir, arch: a, conf: inner, whole: c, outer: inner != c, blocks: quantized}
	inner.keys = a.keys
	dropouts := inner.accept()
	if m.outer {
		c.keys = a.outerKeys
		c.accept()
		m.inherit()
		m.notice("model_type = %s: only the language model, text_config, is trained", a.outer)
	}
	m.set("family", m.arch.family, "model_type = "+a.modelType)
	a.read(m, inner)
	if note := m.Quantized(); note != "" {
		m.notice("quantization_config: %s", note)
	}
	if inner.row("layer_types") == nil && inner.has("layer_types") {
		m.checkedTypes(inner)
		inner.used["layer_types"] = false
	}
	if *c.err == nil {
		*c.err = m.check()
	}
	if list := inner.assumed(); len(list) > 0 {
		m.notice("%s: not in %s; these are the defaults of transformers for model_type = %s", strings.Join(list, ", "), ConfigFile, a.modelType)
	}
	if len(dropouts) > 0 {
		m.notice("%s: ignored, because the model is trained without dropout", strings.Join(dropouts, ", "))
	}
	for _, question := range c.misspelt() {
		m.notice("%s: %s", ConfigFile, question)
	}
	if list := c.ignored(); len(list) > 0 {
		m.notice("%s: ignored, as by transformers", strings.Join(list, ", "))
	}
	return m, *c.err
}

// check refuses a model that the language refuses. The error names the origin of the key that causes it.
func (m *Model) check() error {
	var text strings.Builder
	for _, k := range m.Keys {
		fmt.Fprintf(&text, "%s = %s\n", k.Name, k.Value)
	}
	_, err := lang.ParseModel(text.String())
	var list lang.Diagnostics
	if !errors.As(err, &list) {
		return err
	}
	from := "model"
	if line := list[0].Pos.Line - 2; line >= 0 && line < len(m.Keys) {
		from = m.Keys[line].From
	}
	return fmt.Errorf("%s is not supported: %s", from, list[0].Message)
}

// inherit passes the type of values of the whole model on to the language model.
func (m *Model) inherit() {
	for _, key := range []string{"dtype", "torch_dtype"} {
		if m.whole.has(key) && !m.conf.has("dtype") && !m.conf.has("torch_dtype") {
			m.conf.members[key] = m.whole.raw(key)
		}
		m.whole.skip(key)
	}
}

// tied sets whether the output projection is the embedding. Of a model with a vision part, the whole config decides.
// If a folder has both tensors and they differ, transformers does not tie them. Without weights, the default of the
// language model applies where the whole config does not decide: earlier versions of transformers had no other.
func (m *Model) tied(c *config) {
	const name = "tie_word_embeddings"
	tied, from := m.whole.has(name) && m.whole.truth(name), name
	weights, differ, err := m.ownHead()
	switch {
	case err != nil:
		c.failf(name, "cannot be compared with the weights: %v", err)
	case tied && differ:
		tied, from = false, "the weights"
		m.notice("%s = true: ignored, as by transformers, because the folder has an output projection that differs from the embedding", name)
	case !weights && m.outer && !m.whole.present(name):
		tied = c.truth(name)
	}
	c.skip(name)
	m.set("tied", fmt.Sprint(tied), from)
}

// find returns the architecture of a config and the object that describes its language model.
func find(c *config) (*architecture, *config) {
	name := c.word("model_type")
	if name == mistral && c.present("layer_types") {
		name = ministral // as in transformers
	}
	if name == kimiK2 { // whose folders say that they load as DeepSeek-V3
		name = deepseek3
	}
	var whole *architecture
	for i := range architectures {
		a := &architectures[i]
		if name == a.modelType {
			return a, c
		}
		if name != a.outer {
			continue
		}
		if inner := c.object("text_config"); !inner.has("model_type") || inner.word("model_type") == a.modelType {
			return a, inner
		}
		whole = a
	}
	if whole != nil {
		inner := c.object("text_config")
		inner.failf("model_type", "= %s is not supported with model_type = %s", quote(inner.raw("model_type")), name)
		return whole, inner
	}
	names := []string{kimiK2}
	for i := range architectures {
		names = append(names, architectures[i].modelType)
		if outer := architectures[i].outer; outer != "" {
			names = append(names, outer)
		}
	}
	slices.Sort(names)
	names = slices.Compact(names)
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

// heads returns the value of a key with a number of heads.
func (m *Model) heads(key string) int64 {
	n, _ := strconv.ParseInt(m.value(key), 10, 64)
	return max(1, n)
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
	text, err := lang.Format("model", []byte(b.String()))
	if err != nil {
		panic("internal: the imported model does not parse: " + err.Error())
	}
	return string(text)
}

// Spec returns the text of a complete spec for the model: a shipped cluster with arguments such as "nodes = 1",
// and a run on sequences of the given number of random tokens, as needed to predict memory and time. Without the name
// of a cluster, the spec has none.
func (m *Model) Spec(cluster, arguments, sequence string) string {
	text := m.Text() + "\n"
	if cluster != "" {
		if arguments != "" {
			arguments = "(" + arguments + ")"
		}
		text = fmt.Sprintf("import \"clusters/%s.sppo\"\n\n%s\ncluster machines = %s%s\n\n", cluster, m.Text(), cluster, arguments)
	}
	return text + "train {\n  sequence = " + sequence + "\n" +
		"  data     = random()   # random tokens; tokens(\"FOLDER\") reads a corpus that sppoc tokenize has written\n}\n"
}

// Lang returns the model as the language represents it, for sequences of the given number of tokens and with
// weights of the given type, f32 or bf16. An empty type means the config's.
func (m *Model) Lang(sequence int64, dtype string) (lang.Model, error) {
	var set []string
	if dtype != "" {
		set = []string{"model.dtype=" + dtype}
	}
	text := m.Spec("local", "", strconv.FormatInt(sequence, 10))
	spec, err := lang.Parse(filepath.Join(m.Dir, ConfigFile), []byte(text), lang.Options{Shipped: shipped.Files, Set: set})
	if err != nil {
		return lang.Model{}, err
	}
	return spec.Model, nil
}

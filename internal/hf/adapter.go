package hf

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"sppo.dev/internal/data/safetensors"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// Files of an adapter in PEFT's layout.
const (
	AdapterConfig  = "adapter_config.json"
	AdapterWeights = "adapter_model.safetensors"
)

// Suffixes of the names of an adapter's tensors, here and in PEFT. PEFT stores both matrices as weights of
// linear maps, that is, transposed.
const (
	endA, endB       = ".lora_a", ".lora_b"
	theirsA, theirsB = ".lora_A.weight", ".lora_B.weight"
	adapterPrefix    = "base_model.model."
)

// sharedPrefix begins the names of the shared expert's tensors in a layer. The adapters of its maps are those of the MLP.
const sharedPrefix = "shared."

// IsAdapter reports whether one of our tensors belongs to an adapter.
func IsAdapter(tensor string) bool {
	return strings.HasSuffix(tensor, endA) || strings.HasSuffix(tensor, endB)
}

// OfAdapter selects the tensors that belong to adapters or, if adapter is false, all others.
func OfAdapter(tensors []ir.Tensor, adapter bool) (list []ir.Tensor) {
	for _, t := range tensors {
		if IsAdapter(t.Name) == adapter {
			list = append(list, t)
		}
	}
	return list
}

// module returns the name of the linear map that holds one of our weights, such as
// model.layers.*.self_attn.q_proj.
func (n *naming) module(weight string) string {
	return strings.TrimSuffix(n.tensors["layer."+weight].name, ".weight")
}

// inMemory returns the names in the memory of transformers, which PEFT has.
func (n *naming) inMemory() *naming {
	other := *n
	other.tensors = merged(n.tensors, n.fused)
	return &other
}

// adapted is a linear map with an adapter: its weights, the name of the adapter's A without its suffix, and its module.
type adapted struct {
	target, tensor, module string
	weights                []string
}

// adapted lists the linear maps of an architecture that have adapters. A map of the MLP is also one of the shared expert.
func (n *naming) adapted(m *lang.Model) (list []adapted) {
	for _, l := range m.Maps() {
		for _, prefix := range []string{"", sharedPrefix} {
			a := adapted{target: l.Name, tensor: prefix + l.Tensor(), module: n.module(prefix + l.Weights[0])}
			for _, w := range l.Weights {
				a.weights = append(a.weights, prefix+w)
			}
			if prefix == "" || a.module != "" {
				list = append(list, a)
			}
		}
	}
	return list
}

// adapters lists where PEFT stores the adapter tensors of a model's linear maps. If the architecture stores one
// of our maps together with others, all of them must be adapted together.
func (n *naming) adapters(m *lang.Model) (*naming, error) {
	n = n.inMemory()
	out, all := &naming{tensors: map[string]place{}}, n.adapted(m)
	for _, a := range all {
		for other, p := range n.tensors {
			covered := slices.ContainsFunc(all, func(o adapted) bool {
				return o.module == a.module && slices.Contains(o.weights, strings.TrimPrefix(other, "layer."))
			})
			if shares := strings.TrimSuffix(p.name, ".weight") == a.module; shares != covered {
				return nil, fmt.Errorf("%s is not a linear map of the architecture, which has %s: PEFT has no such adapter", a.target, path.Base(a.module))
			}
		}
		module := a.module
		if own, ok := strings.CutPrefix(module, n.prefix); ok && n.other != "" {
			module = n.other + own // as in the memory of transformers
		}
		out.tensors["layer."+a.tensor+endA] = linear(adapterPrefix + module + theirsA)
		for _, w := range a.weights {
			var after []string
			for _, other := range n.tensors["layer."+w].after {
				after = append(after, other+endB)
			}
			out.tensors["layer."+w+endB] = place{name: adapterPrefix + module + theirsB, how: transposed, after: after, heads: n.tensors["layer."+w].heads}
		}
	}
	return out, nil
}

// targets returns the modules of a model's adapters as PEFT selects them: by the ends of their names.
func (n *naming) targets(m *lang.Model) (list []string) {
	all := n.inMemory().adapted(m)
	has := map[string]bool{}
	for _, a := range all {
		has[a.module] = true
	}
	for _, a := range all {
		end := path.Ext(a.module)[1:]
		for _, p := range n.tensors {
			if other := strings.TrimSuffix(p.name, ".weight"); strings.HasSuffix(other, "."+end) && other != p.name && !has[other] {
				parts := strings.Split(a.module, ".") // a map without an adapter has a name with the same ending
				end = strings.Join(parts[len(parts)-2:], ".")
				break
			}
		}
		if !slices.Contains(list, end) {
			list = append(list, end)
		}
	}
	return list
}

// adapterConfig is PEFT's config of a LoRA adapter.
type adapterConfig struct {
	Base    string  `json:"base_model_name_or_path"`
	Bias    string  `json:"bias"`
	FanIn   bool    `json:"fan_in_fan_out"`
	Infer   bool    `json:"inference_mode"`
	Init    any     `json:"init_lora_weights"`
	Alpha   float64 `json:"lora_alpha"`
	Dropout float64 `json:"lora_dropout"`
	Type    string  `json:"peft_type"`
	Rank    int     `json:"r"`
	Targets any     `json:"target_modules"` // a list of names, or one pattern
	Task    string  `json:"task_type"`
}

// harmless lists the members of an adapter's config that do not affect its results or that we read. Other
// members are refused if they are set.
var harmless = []string{
	"auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode",
	"layers_pattern", "megatron_core", "peft_version", "qalora_group_size", "revision", "target_modules", "task_type",
	"bias", "init_lora_weights", "lora_alpha", "lora_dropout", "peft_type", "r", // read
}

// changingBase lists initialisations of adapters for which PEFT also changes the matrices of the model.
var changingBase = []string{"pissa", "olora", "loftq", "corda"}

// WriteAdapter writes, in PEFT's format, the adapter that was trained for the model from a folder. dir must be
// absent or empty. It appears complete or not at all.
func (m *Model) WriteAdapter(ctx context.Context, dir string, values Values, tensors []ir.Tensor, of *lang.Model) error {
	names, err := m.arch.names.adapters(of)
	if err != nil {
		return err
	}
	list, err := names.layout(OfAdapter(tensors, true), m.heads)
	if err != nil {
		return err
	}
	targets := any(m.arch.names.targets(of))
	if m.outer { // the vision part has linear maps of the same names
		for _, s := range list {
			module, _ := strings.CutPrefix(s.name, adapterPrefix+m.arch.names.prefix)
			s.name = adapterPrefix + m.arch.names.prefix + inWhole + module
		}
		targets = ".*" + inWhole + ".*(" + strings.Join(m.arch.names.targets(of), "|") + ")"
	}
	config := adapterConfig{
		Base: m.Dir, Bias: "none", FanIn: m.arch.modelType == "gpt2", Infer: true, Init: true, Alpha: of.AdapterAlpha, Dropout: of.AdapterDropout, Type: "LORA",
		Rank: of.AdapterRank, Targets: targets, Task: "CAUSAL_LM",
	}
	text, err := json.MarshalIndent(&config, "", "  ")
	if err != nil {
		return err
	}
	e := Export{Values: paired{values, m.pairing(true)}}
	var sources []safetensors.Source
	for _, s := range list {
		source := safetensors.Source{Info: safetensors.Info{Name: s.name, DType: safetensors.F32, Shape: s.shape}}
		source.Write = func(to io.Writer) error { return e.write(ctx, to, s, safetensors.F32) }
		sources = append(sources, source)
	}
	return newFolder(dir, func(to string) error {
		if err := os.WriteFile(filepath.Join(to, AdapterConfig), append(text, '\n'), 0o644); err != nil {
			return err
		}
		return safetensors.WriteFile(ctx, filepath.Join(to, AdapterWeights), sources, map[string]string{"format": "pt"}, io.Discard)
	})
}

// Adapted returns a model with the adapters that a folder in PEFT's format has: their rank, alpha and linear maps.
func (m *Model) Adapted(dir string, base lang.Model) (lang.Model, error) {
	config, _, err := readAdapterConfig(dir)
	if err != nil {
		return base, err
	}
	all := base.Adapted(config.Rank, config.Alpha, lang.AllLinear)
	names, err := m.arch.names.adapters(&all)
	if err != nil {
		return base, err
	}
	folder, err := safetensors.OpenFile(filepath.Join(dir, AdapterWeights))
	if err != nil {
		return base, err
	}
	defer folder.Close()
	var targets []string
	for _, l := range all.Maps() {
		var ends []string
		for _, prefix := range []string{"", sharedPrefix} {
			if p, ok := names.tensors[layerPrefix+prefix+l.Tensor()+endA]; ok {
				_, end, _ := strings.Cut(p.name, layerMark)
				ends = append(ends, end)
			}
		}
		if slices.ContainsFunc(folder.Tensors(), func(t safetensors.Tensor) bool {
			return slices.ContainsFunc(ends, func(end string) bool { return strings.HasSuffix(t.Name, end) })
		}) {
			targets = append(targets, l.Name)
		}
	}
	if len(targets) == 0 || config.Rank < 1 {
		return base, fmt.Errorf("%s has no adapter of a linear map of the model: it is an adapter of another model", dir)
	}
	return base.Adapted(config.Rank, config.Alpha, targets...), nil
}

// OpenAdapter opens a PEFT adapter for a model whose adapters have the same maps, rank and alpha.
func (m *Model) OpenAdapter(dir string, tensors []ir.Tensor, of *lang.Model) (_ *Weights, err error) {
	names, err := m.arch.names.adapters(of)
	if err != nil {
		return nil, err
	}
	if err := m.acceptsAdapter(dir, of); err != nil {
		return nil, err
	}
	folder, err := safetensors.OpenFile(filepath.Join(dir, AdapterWeights))
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			folder.Close()
		}
	}()
	w := &Weights{folder: folder, places: map[string][]location{}, order: m.pairing(false)}
	if w.stored, err = names.layout(OfAdapter(tensors, true), m.heads); err != nil {
		return nil, err
	}
	known := map[string]bool{}
	has := func(name string) bool { return folder.Find(adapterPrefix+name) != nil }
	rename := m.renaming(has, strings.TrimPrefix(w.stored[0].name, adapterPrefix))
	for _, s := range w.stored {
		s.name = adapterPrefix + rename(strings.TrimPrefix(s.name, adapterPrefix))
		known[s.name] = true
		t := folder.Find(s.name)
		if t == nil {
			return nil, fmt.Errorf("%s has no tensor %q: it is an adapter of another model", dir, s.name)
		}
		if err := s.accepts(&scaled{Tensor: t}); err != nil {
			return nil, fmt.Errorf("%w: it is an adapter of another model", err)
		}
		for i := range s.parts {
			name := s.parts[i].Name
			w.places[name] = append(w.places[name], location{&s.parts[i], &scaled{Tensor: t}})
		}
	}
	for _, t := range folder.Tensors() {
		switch {
		case known[t.Name]:
		case m.outer && !strings.Contains(t.Name, inWhole):
			w.Ignored = append(w.Ignored, t.Name)
		default:
			return nil, fmt.Errorf("%s: the program has no adapter %q", t.File, t.Name)
		}
	}
	if len(w.Ignored) > 0 {
		m.notice("%d tensors of the adapter are ignored, because they belong to the part of the model that is not trained", len(w.Ignored))
	}
	return w, nil
}

// readAdapterConfig returns the config of an adapter, and all its members.
func readAdapterConfig(dir string) (config adapterConfig, all map[string]any, err error) {
	file := filepath.Join(dir, AdapterConfig)
	text, err := os.ReadFile(file)
	if errors.Is(err, os.ErrNotExist) {
		return config, nil, fmt.Errorf("%s contains no adapter: it has no %s", dir, AdapterConfig)
	}
	if err == nil {
		err = errors.Join(json.Unmarshal(text, &all), json.Unmarshal(text, &config))
		if err != nil {
			err = fmt.Errorf("%s: %w", file, err)
		}
	}
	return config, all, err
}

// acceptsAdapter compares the config of an adapter with the program's.
func (m *Model) acceptsAdapter(dir string, of *lang.Model) error {
	config, all, err := readAdapterConfig(dir)
	if err != nil {
		return err
	}
	file := filepath.Join(dir, AdapterConfig)
	if config.Type != "LORA" {
		return fmt.Errorf("%s: peft_type = %q is not supported; use LORA", file, config.Type)
	}
	if config.Rank != of.AdapterRank || config.Alpha != of.AdapterAlpha {
		return fmt.Errorf("%s has r = %d, lora_alpha = %g, but the program has rank = %d, alpha = %g", file, config.Rank, config.Alpha, of.AdapterRank, of.AdapterAlpha)
	}
	if config.Bias != "none" && config.Bias != "" {
		return fmt.Errorf("%s: bias = %q is not supported; use none", file, config.Bias)
	}
	for _, key := range slices.Sorted(maps.Keys(all)) {
		if !slices.Contains(harmless, key) && isSet(all[key]) {
			value, _ := json.Marshal(all[key])
			return fmt.Errorf("%s: %s = %s is not supported", file, key, value)
		}
	}
	if init, ok := config.Init.(string); ok && slices.ContainsFunc(changingBase, func(name string) bool { return strings.HasPrefix(init, name) }) {
		return fmt.Errorf("%s: init_lora_weights = %q is not supported, because it also changes the model's own matrices", file, init)
	}
	if config.Dropout != of.AdapterDropout {
		m.notice("lora_dropout = %v: this run has dropout = %v", config.Dropout, of.AdapterDropout)
	}
	return nil
}

// isSet reports whether a member of a config requests anything.
func isSet(value any) bool {
	switch v := value.(type) {
	case nil:
		return false
	case bool:
		return v
	case []any:
		return len(v) > 0
	case map[string]any:
		return len(v) > 0
	}
	return true
}

// Merged provides the values of a model with its adapters added to the adapted matrices: W + alpha/rank * A B.
type Merged struct {
	Values
	Model *lang.Model
}

// Read implements Values.
func (m *Merged) Read(tensor string, row, col, rows, cols int64, out []float32) error {
	if err := m.Values.Read(tensor, row, col, rows, cols, out); err != nil {
		return err
	}
	key, layer := splitName(tensor)
	a, prefix, weight := "", "", strings.TrimPrefix(key, layerPrefix)
	if own, ok := strings.CutPrefix(weight, sharedPrefix); ok {
		prefix, weight = sharedPrefix, own
	}
	for _, l := range m.Model.Maps() {
		if slices.Contains(l.Weights, weight) {
			a = joinName(layerPrefix+prefix+l.Tensor()+endA, layer)
		}
	}
	if layer == "" || a == "" {
		return nil
	}
	rank, scale := int64(m.Model.AdapterRank), m.Model.AdapterAlpha/float64(m.Model.AdapterRank)
	down, up := make([]float32, rows*rank), make([]float32, rank*cols)
	if err := errors.Join(m.Values.Read(a, row, 0, rows, rank, down), m.Values.Read(tensor+endB, 0, col, rank, cols, up)); err != nil {
		return err
	}
	sums := make([]float64, cols)
	for i := range rows {
		clear(sums)
		for k := range rank {
			x := float64(down[i*rank+k])
			for j, y := range up[k*cols:][:cols] {
				sums[j] += x * float64(y)
			}
		}
		for j, sum := range sums {
			out[i*cols+int64(j)] += float32(scale * sum)
		}
	}
	return nil
}

package hf

import (
	"strings"

	"sppo.dev/internal/data/safetensors"
	"sppo.dev/ir"
)

// Stored lists the tensors in which transformers stores ours.
func (m *Model) Stored(tensors []ir.Tensor) (list []safetensors.Info, err error) {
	names := m.arch.names
	names.tensors = merged(names.tensors, names.fused) // as in the memory of transformers
	all, err := names.layout(tensors, nil)
	for _, s := range all {
		if rest, ok := strings.CutPrefix(s.name, m.arch.names.prefix); ok && m.outer {
			s.name = m.arch.names.prefix + inWhole + rest
		}
		list = append(list, safetensors.Info{Name: s.name, DType: safetensors.F32, Shape: s.shape})
	}
	return list, err
}

// Unread stands for a default without effect.
const Unread = "unread"

// DeclaredKeys lists the rows of the tables by the model_type of their class, as the types and the default. The
// default of a silent row is Unread. The rows of the base class have the name "".
func DeclaredKeys() map[string]map[string][2]any {
	out := map[string]map[string][2]any{"": {}}
	add := func(class string, table []key) {
		out[class] = map[string][2]any{}
		for _, k := range table {
			switch {
			case k.types == "" && rowOf(commonKeys, k.name) != nil:
				out[""][k.name] = [2]any{"", Unread}
			case k.types != "" && k.use == silent:
				out[class][k.name] = [2]any{k.types, Unread}
			case k.types != "":
				value := k.value
				if n, ok := value.(int); ok {
					value = float64(n) // as in JSON
				}
				out[class][k.name] = [2]any{k.types, value}
			}
		}
	}
	for _, a := range architectures {
		add(a.modelType, a.keys)
		if a.outer != "" {
			add(a.outer, a.outerKeys)
		}
	}
	return out
}

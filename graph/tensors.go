package graph

import (
	"fmt"

	"sppo.dev/ir"
)

// LayerPrefix is what the names of a layer's tensors begin with: "layer.3.".
func LayerPrefix(layer int) string { return fmt.Sprintf("layer.%d.", layer) }

// Tensors lists the parameters of the whole model in their order, which does not depend on how the model is divided.
func (g *Model) Tensors() (list []ir.Tensor) {
	add := func(b *Block, prefix string) {
		for i := range b.Params {
			if p := &b.Params[i]; !p.Tied { // which the embedding has
				list = append(list, ir.Tensor{Name: prefix + p.Name, Shape: p.Shape})
			}
		}
	}
	add(g.Embedding, "")
	for i := range g.Layers {
		add(g.Layer, LayerPrefix(i))
	}
	add(g.Head, "")
	return list
}

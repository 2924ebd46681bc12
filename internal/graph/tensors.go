package graph

import (
	"fmt"

	"sppo.dev/ir"
)

// LayerPrefix returns the prefix of the names of a layer's tensors: "layer.3.".
func LayerPrefix(layer int) string { return fmt.Sprintf("layer.%d.", layer) }

// Tensors lists the parameters of the whole model, in an order that does not depend on how the model is divided.
func (g *Model) Tensors() (list []ir.Tensor) {
	g.EachTensor(func(name string, p *Param) { list = append(list, ir.Tensor{Name: name, Shape: p.Shape}) })
	return list
}

// EachTensor visits the parameters of the whole model, with their names, in the same order. A tied
// table is visited once.
func (g *Model) EachTensor(visit func(name string, p *Param)) {
	block := func(b *Block, prefix string) {
		for i := range b.Params {
			if p := &b.Params[i]; !p.Tied {
				visit(prefix+p.Name, p)
			}
		}
	}
	block(g.Embedding, "")
	for layer, r := range g.roles {
		block(r.block, LayerPrefix(layer))
	}
	block(g.Head, "")
}

// Active returns the number of elements of the model's tensors that a token uses: of experts, only those that are chosen for it.
func (g *Model) Active() (n int64) {
	g.EachTensor(func(_ string, p *Param) {
		if size := p.Shape[0] * p.Shape[1]; p.Planes > 0 && !p.Vector {
			n += size / p.Planes * int64(g.TopExperts)
		} else {
			n += size
		}
	})
	return n
}

// Parameters returns the number of trained and of frozen elements in the model's tensors.
func (g *Model) Parameters() (trained, frozen int64) {
	g.EachTensor(func(_ string, p *Param) {
		if n := p.Shape[0] * p.Shape[1]; p.Frozen {
			frozen += n
		} else {
			trained += n
		}
	})
	return trained, frozen
}

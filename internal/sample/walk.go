package sample

import (
	"fmt"
	"slices"

	"sppo.dev/internal/graph"
	"sppo.dev/ir"
)

// placeKey identifies a value. layer is the number of a layer, or shared.
type placeKey struct {
	block *graph.Block
	layer int // shared for values that all layers use in turn, and for other blocks
	value int
}

// shared stands for the layer of values that all layers use in turn, and of values of other blocks.
const shared = -1

// size returns the graph.Size of a subsequence of n tokens after the given number of prefix tokens.
func (s *Model) size(prefix, n int64) graph.Size {
	return graph.Size{Sequence: s.most, Prefix: prefix, Tokens: n, Batch: 1, SP: 1, Rows: n}
}

// blocks visits the embedding, all layers and the head.
func (s *Model) blocks(visit func(b *graph.Block, layer int) error) error {
	if err := visit(s.graph.Embedding, shared); err != nil {
		return err
	}
	for layer := range s.graph.Layers {
		if err := visit(s.graph.Plain(s.graph.KindOf(layer)), layer); err != nil {
			return err
		}
	}
	return visit(s.graph.Head, shared)
}

// each visits every weight that is read from the folder: all except a tied head, which is the embedding.
func (s *Model) each(visit func(key placeKey, b *graph.Block, p *graph.Param) error) error {
	return s.blocks(func(b *graph.Block, layer int) error {
		for i := range b.Values {
			v := &b.Values[i]
			if v.Kind != graph.Weight || b.Params[v.Param].Tied {
				continue
			}
			if err := visit(placeKey{b, layer, i}, b, &b.Params[v.Param]); err != nil {
				return err
			}
		}
		return nil
	})
}

// name returns the name of a parameter's tensor.
func (s *Model) name(layer int, p *graph.Param) string {
	if layer == shared {
		return p.Name
	}
	return graph.LayerPrefix(layer) + p.Name
}

// allocate lays out all buffers. Layers share the buffers of values that do not outlive a layer; their inputs and outputs alternate.
func (s *Model) allocate() {
	add := func(name string, bytes ir.Bytes) uint32 {
		at := s.code.Arenas[ir.Device]
		s.code.Buffers = append(s.code.Buffers, ir.Buffer{Name: name, Arena: ir.Device, Offset: at, Size: bytes})
		s.code.Arenas[ir.Device] = graph.Align(at + bytes)
		return uint32(len(s.code.Buffers) - 1)
	}
	z := s.size(0, min(chunkTokens, s.most))
	hidden := ir.Bytes(z.Tokens*int64(s.graph.Hidden)) * s.graph.DType().Bytes()
	between := [2]uint32{add("hidden.0", hidden), add("hidden.1", hidden)}
	s.places[placeKey{s.graph.Embedding, shared, s.graph.Embedding.Output}] = between[0]
	s.places[placeKey{s.graph.Head, shared, s.graph.Head.Input}] = between[s.graph.Layers%2]
	embed := map[string]uint32{}
	s.blocks(func(b *graph.Block, layer int) error {
		if layer != shared {
			s.places[placeKey{b, layer, b.Input}], s.places[placeKey{b, layer, b.Output}] = between[layer%2], between[1-layer%2]
		}
		for _, i := range s.needed(b) {
			v, key := &b.Values[i], placeKey{b, layer, i}
			if v.Kind == graph.Activation && b != s.graph.Embedding {
				key.layer = shared
			}
			if _, ok := s.places[key]; ok {
				continue
			}
			if _, ok := s.places[placeKey{b, layer, i}]; ok {
				continue
			}
			if v.Kind == graph.Weight && b.Params[v.Param].Tied {
				s.places[key] = embed[b.Params[v.Param].Name]
				continue
			}
			of := z
			if b == s.graph.Head {
				of = s.size(0, 1)
			}
			s.places[key] = add(fmt.Sprintf("%d.%s", layer, v.Name), v.Bytes(of))
			if v.Kind == graph.Weight && layer == shared {
				embed[v.Name] = s.places[key]
			}
		}
		return nil
	})
}

// logitsName is the name of the head's logits, from which a token is sampled.
const logitsName = "logits"

// nodes returns the nodes of a block's forward pass that sampling needs: all or, for the head, those that lead to the logits.
func (s *Model) nodes(b *graph.Block) []graph.Node {
	if b != s.graph.Head {
		return b.Forward
	}
	wanted := map[int]bool{logitsOf(b): true}
	var list []graph.Node
	for i := len(b.Forward) - 1; i >= 0; i-- {
		n := b.Forward[i]
		written := (&ir.Instr{Op: n.Op}).Info().Written()
		if !slices.ContainsFunc(n.Args[:written], func(a graph.Arg) bool { return wanted[a.Value] }) {
			continue
		}
		for _, a := range n.Args[written:] {
			wanted[a.Value] = true
		}
		list = append(list, n)
	}
	slices.Reverse(list)
	return list
}

func logitsOf(b *graph.Block) int {
	return slices.IndexFunc(b.Values, func(v graph.Value) bool { return v.Name == logitsName })
}

// needed returns the values that the nodes of a block read or write for sampling.
func (s *Model) needed(b *graph.Block) (list []int) {
	for _, n := range s.nodes(b) {
		for _, a := range n.Args {
			if a.Value != graph.Missing && !slices.Contains(list, a.Value) {
				list = append(list, a.Value)
			}
		}
	}
	return list
}

// walk lists the instructions of the forward pass of n tokens that follow prefix tokens. If head is set, they
// end with the logits of the next token.
func (s *Model) walk(prefix, n int64, head bool) (list []ir.Instr) {
	s.blocks(func(b *graph.Block, layer int) error {
		z, offset := s.size(prefix, n), ir.Bytes(0)
		switch {
		case b == s.graph.Head && !head:
			return nil
		case b == s.graph.Head: // only for the last token
			z = s.size(prefix+n-1, 1)
			offset = ir.Bytes((n-1)*int64(s.graph.Hidden)) * s.graph.DType().Bytes()
		case layer != shared:
			z = s.graph.OfLayer(z, layer)
		}
		view := func(a graph.Arg, v ir.View) ir.View {
			v.Buffer = s.placeOf(b, layer, a.Value)
			if b == s.graph.Head && a.Value == b.Input {
				v.Offset += offset
			}
			return v
		}
		attr := func(a graph.Attr) ir.Attr { return s.attr(layer, a) }
		for _, n := range s.nodes(b) {
			list = append(list, b.Instr(&n, z, view, attr))
		}
		return nil
	})
	return list
}

// placeOf returns the buffer of a value.
func (s *Model) placeOf(b *graph.Block, layer, value int) uint32 {
	if buffer, ok := s.places[placeKey{b, layer, value}]; ok {
		return buffer
	}
	return s.places[placeKey{b, shared, value}]
}

// attr returns the value of an attribute that does not depend on the size, for the only rank.
func (s *Model) attr(layer int, a graph.Attr) ir.Attr {
	switch {
	case a.Source == graph.FromLayer:
		return ir.Int(s.graph.Rotation(layer, a.Const))
	case a.Source == graph.FromConst && slices.Contains(graph.SPConstNames, a.Const):
		return ir.Int(s.graph.SPConst(a.Const, 0))
	}
	return ir.Int(0) // the first sequence of the first replica
}

// logits returns a view of the head's logits.
func (s *Model) logits() ir.View {
	head := s.graph.Head
	value := logitsOf(head)
	v := head.View(graph.Arg{Value: value}, s.size(0, 1))
	v.Buffer = s.placeOf(head, shared, value)
	return v
}

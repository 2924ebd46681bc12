package hf

// Rotary positions turn pairs of a head's elements. Ours are i and i + half, as in most architectures. In the others, they are
// neighbours, 2i and 2i+1. The scores of attention do not depend on the order of elements, so weights change their order where
// they are read and where they are written.

// headTensors lists our tensors whose columns, or whose elements, are those of rotated heads.
var headTensors = []string{"layer.wq", "layer.wk", "layer.bq", "layer.bk", "layer.wq" + endB, "layer.wk" + endB}

// pairing is the order of elements of heads in the values that its method read returns.
type pairing struct {
	heads  map[string]headOrder // by our tensors; others do not change
	theirs bool                 // the result has the architecture's order; false: ours
}

// headOrder is the order of the elements of a head in an architecture. In ours, the rotated elements come first.
type headOrder struct {
	rest, rotated int64 // elements that are not rotated, which come first, and those that are
	neighbours    bool  // pairs are neighbours; false: they are as ours
}

// pairing returns the order that values of the architecture need to become ours, or ours to become the architecture's.
func (m *Model) pairing(theirs bool) pairing {
	p := pairing{heads: map[string]headOrder{}, theirs: theirs}
	switch of := m.heads; {
	case !m.arch.names.neighbours:
	case m.value("qk_rope_head_dim") != "":
		for _, end := range []string{"", endB} {
			p.heads["layer.wq"+end] = headOrder{of("qk_nope_head_dim"), of("qk_rope_head_dim"), !m.halves}
			p.heads["layer.wk_rope"+end] = headOrder{0, of("qk_rope_head_dim"), !m.halves}
		}
	default:
		for _, name := range headTensors {
			p.heads[name] = headOrder{0, of("head_dim"), true}
		}
	}
	return p
}

func (o headOrder) dim() int64 { return o.rest + o.rotated }

// source returns the place before the change of the element that is at place i of a head after it.
func (p pairing) source(o headOrder, i int64) int64 {
	half := o.rotated / 2
	switch {
	case !p.theirs && i >= o.rotated:
		return i - o.rotated
	case p.theirs && i < o.rest:
		return i + o.rotated
	case !p.theirs && o.neighbours:
		return o.rest + 2*(i%half) + i/half
	case !p.theirs:
		return o.rest + i
	case o.neighbours:
		i -= o.rest
		return i%2*half + i/2
	}
	return i - o.rest
}

// read reads a block like Values.Read. It reads whole heads with the given function and changes the order of their elements.
func (p pairing) read(from func(tensor string, row, col, rows, cols int64, out []float32) error, tensor string, row, col, rows, cols int64, out []float32) error {
	key, layer := splitName(tensor)
	order, ok := p.heads[key]
	if !ok || layer == "" {
		return from(tensor, row, col, rows, cols, out)
	}
	vector := key == "layer.bq" || key == "layer.bk"
	first, n, lines := col, cols, rows
	if vector {
		first, n, lines = row, rows, cols
	}
	dim := order.dim()
	low := first / dim * dim
	width := (first+n+dim-1)/dim*dim - low
	heads := make([]float32, lines*width)
	var err error
	if vector {
		err = from(tensor, low, col, width, cols, heads)
	} else {
		err = from(tensor, row, low, rows, width, heads)
	}
	for line := range lines {
		for i := range n {
			at := first + i - low
			out[line*n+i] = heads[line*width+at/dim*dim+p.source(order, at%dim)]
		}
	}
	return err
}

// paired provides values of ours in the order that an architecture stores.
type paired struct {
	Values
	pairing
}

// Read implements Values.
func (p paired) Read(tensor string, row, col, rows, cols int64, out []float32) error {
	return p.read(p.Values.Read, tensor, row, col, rows, cols, out)
}

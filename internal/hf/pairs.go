package hf

import (
	"slices"
	"strconv"
)

// Rotary positions turn pairs of a head's elements. Ours are i and i + half, as in most architectures. In the others, they are
// neighbours, 2i and 2i+1. The scores of attention do not depend on the order of elements, so weights change their order where
// they are read and where they are written.

// headTensors lists our tensors whose columns, or whose elements, are those of rotated heads.
var headTensors = []string{"layer.wq", "layer.wk", "layer.bq", "layer.bk", "layer.wq" + endB, "layer.wk" + endB}

// pairing is the order of elements of heads in the values that its method read returns.
type pairing struct {
	dim        int64 // elements of a head; 0: the order does not change
	neighbours bool  // pairs become neighbours; false: they become ours
}

// pairing returns the order that values of the architecture need to become ours, or ours to become the architecture's.
func (m *Model) pairing(neighbours bool) pairing {
	if !m.arch.names.neighbours {
		return pairing{}
	}
	dim, _ := strconv.ParseInt(m.value("head_dim"), 10, 64)
	return pairing{dim, neighbours}
}

// source returns the place before the change of the element that is at place i of a head after it.
func (p pairing) source(i int64) int64 {
	half := p.dim / 2
	if p.neighbours {
		return i%2*half + i/2
	}
	return 2*(i%half) + i/half
}

// read reads a block like Values.Read. It reads whole heads with the given function and changes the order of their elements.
func (p pairing) read(from func(tensor string, row, col, rows, cols int64, out []float32) error, tensor string, row, col, rows, cols int64, out []float32) error {
	key, layer := splitName(tensor)
	if p.dim == 0 || layer == "" || !slices.Contains(headTensors, key) {
		return from(tensor, row, col, rows, cols, out)
	}
	vector := key == "layer.bq" || key == "layer.bk"
	first, n, lines := col, cols, rows
	if vector {
		first, n, lines = row, rows, cols
	}
	low := first / p.dim * p.dim
	width := (first+n+p.dim-1)/p.dim*p.dim - low
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
			out[line*n+i] = heads[line*width+at/p.dim*p.dim+p.source(at%p.dim)]
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

package hf

import (
	"cmp"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"slices"
	"strconv"
	"strings"

	"sppo.dev/internal/data/safetensors"
	"sppo.dev/ir"
)

// Values provides the values of our tensors as f32. Read copies a block of rows by cols values of one tensor,
// starting at (row, col), to the slice out, in row-major order.
type Values interface {
	Read(tensor string, row, col, rows, cols int64, out []float32) error
}

// Weights provides the weights of a folder as values of our tensors. Its methods are safe for concurrent use.
type Weights struct {
	// Ignored lists tensors of the folder that the model does not use: buffers, a second copy of a tied
	// embedding, and parts of the folder's model other than the language model.
	Ignored []string

	folder *safetensors.Folder
	stored []*stored             // tensors that the model has, under their names in the folder
	places map[string][]location // by our names; the parts of a tensor have as many rows each
	order  pairing               // from that of the folder to ours
}

type location struct {
	part   *part
	tensor *scaled
}

// OpenWeights opens the weights of a folder for the tensors of a model. The folder must contain all
// of these tensors, with the expected shape and a type that can be converted. Any other tensor is an error unless
// it may be ignored.
func (m *Model) OpenWeights(tensors []ir.Tensor) (_ *Weights, err error) {
	folder, err := safetensors.Open(m.Dir)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			folder.Close()
		}
	}()
	w := &Weights{folder: folder, places: map[string][]location{}, order: m.pairing(false)}
	rename := m.names(folder)
	if w.stored, err = m.arch.names.in(folder).layout(tensors, m.heads); err != nil {
		return nil, err
	}
	known := map[string]bool{}
	for _, s := range w.stored {
		s.name = rename(s.name)
		known[s.name] = true
		t := folder.Find(s.name)
		if t == nil {
			return nil, fmt.Errorf("%s has no tensor %q, which the model needs", m.Dir, s.name)
		}
		values, err := m.blocks.in(folder, t)
		if err != nil {
			return nil, err
		}
		if err := s.accepts(values); err != nil {
			return nil, err
		}
		for i := range s.parts {
			name := s.parts[i].Name
			w.places[name] = append(w.places[name], location{&s.parts[i], values})
		}
	}
	for _, t := range folder.Tensors() {
		if known[t.Name] || m.isScale(folder, t.Name) {
			continue
		}
		if err := w.ignore(m, &t, rename); err != nil {
			return nil, err
		}
	}
	return w, nil
}

// Close closes the files.
func (w *Weights) Close() error { return w.folder.Close() }

// inWhole is what follows the prefix of a tensor's name in models with a vision part.
const inWhole = "language_model."

// renaming returns a function from the architecture's tensor names to a file's: names are unchanged, lack the prefix
// if the file has a model without a head, or have another prefix if the language model is only part of the model. A
// probe is the name of a tensor that the file contains.
func (m *Model) renaming(has func(name string) bool, probe string) func(string) string {
	prefix := m.arch.names.prefix
	for _, form := range []struct{ body, head string }{{prefix, ""}, {inWhole + prefix, inWhole}, {prefix + inWhole, ""}, {"", ""}, {m.arch.names.other, ""}} {
		rename := func(name string) string {
			if rest, ok := strings.CutPrefix(name, prefix); ok {
				return form.body + rest
			}
			return form.head + name
		}
		if has(rename(probe)) {
			return rename
		}
	}
	return func(name string) string { return name }
}

// names returns the function from the architecture's tensor names to those in a folder of weights.
func (m *Model) names(folder *safetensors.Folder) func(string) string {
	return m.renaming(func(name string) bool { return folder.Find(name) != nil }, m.arch.names.tensors["embed"].name)
}

// in returns the names of a folder's tensors.
func (n *naming) in(folder *safetensors.Folder) *naming {
	for _, instead := range []map[string]place{n.fused, n.packed, n.saved} {
		_, end, _ := strings.Cut(cmp.Or(instead["layer.experts.w_down"].name, instead["layer.experts.w2"].name, instead["layer.w_down"].name), layerMark)
		if end != "" && slices.ContainsFunc(folder.Tensors(), func(t safetensors.Tensor) bool { return strings.HasSuffix(t.Name, end) }) {
			other := *n
			other.tensors = merged(n.tensors, instead)
			return &other
		}
	}
	return n
}

// accepts checks the shape and the type of a tensor in the folder. A table of positions may have more rows than
// a run needs.
func (s *stored) accepts(t *scaled) error {
	shape := slices.Clone(s.shape)
	if s.parts[0].Name == posName && len(t.Shape) == 2 {
		if t.Shape[0] < shape[0] {
			return fmt.Errorf("tensor %q has %d positions, but train.sequence is %d", t.Name, t.Shape[0], shape[0])
		}
		shape[0] = t.Shape[0]
	}
	switch {
	case !slices.Equal(t.Shape, shape):
		return fmt.Errorf("%s: tensor %q has shape %v, but the model needs %v", t.File, t.Name, t.Shape, shape)
	case !safetensors.Convertible(t.DType) && t.format == nil:
		return fmt.Errorf("%s: tensor %q has values of type %s; F32, F16 and BF16 are supported", t.File, t.Name, t.DType)
	}
	return nil
}

// isFurther reports whether a tensor belongs to a layer after the last.
func (m *Model) isFurther(tensor string) bool {
	_, rest, _ := strings.Cut(tensor, "model.layers.")
	number, _, found := strings.Cut(rest, ".")
	layer, err := strconv.Atoi(number)
	layers, _ := strconv.Atoi(m.value("layers"))
	return found && err == nil && layer >= layers
}

// posName is the name of our table of learned positions.
const posName = "pos"

// ignore decides whether a tensor that is not part of the model can be ignored.
func (w *Weights) ignore(m *Model, t *safetensors.Tensor, rename func(string) string) error {
	names := &m.arch.names
	head, embed := rename(names.tensors["head"].name), rename(names.tensors["embed"].name)
	switch {
	case names.ignorable(t.Name):
	case t.Name == head:
		same, err := equal(t, w.folder.Find(embed))
		if err != nil {
			return err
		}
		if !same {
			return fmt.Errorf("tensors %q and %q differ, although tie_word_embeddings = true", head, embed)
		}
	case m.outer && !strings.Contains(t.Name, inWhole):
	case names.further && m.isFurther(t.Name), names.others != "" && strings.HasPrefix(t.Name, names.others):
	default:
		return fmt.Errorf("%s: the model has no tensor %q", t.File, t.Name)
	}
	w.Ignored = append(w.Ignored, t.Name)
	return nil
}

// ownHead reports whether there is a folder with weights, and whether it has an output projection that differs from the
// embedding.
func (m *Model) ownHead() (weights, differ bool, err error) {
	if m.Dir == "" {
		return false, false, nil
	}
	folder, err := safetensors.Open(m.Dir)
	if err != nil {
		return false, false, nil
	}
	defer folder.Close()
	rename, names := m.names(folder), m.arch.names.tensors
	head, embed := folder.Find(rename(names["head"].name)), folder.Find(rename(names["embed"].name))
	if head == nil || embed == nil {
		return true, false, nil
	}
	same, err := equal(head, embed)
	return true, !same, err
}

// equal reports whether two tensors have the same type, shape and bytes.
func equal(a, b *safetensors.Tensor) (bool, error) {
	if a.DType != b.DType || !slices.Equal(a.Shape, b.Shape) {
		return false, nil
	}
	const step = 1 << 20
	x, y := make([]byte, step), make([]byte, step)
	for at := int64(0); at < a.Bytes(); at += step {
		n := min(step, a.Bytes()-at)
		for _, r := range []struct {
			t   *safetensors.Tensor
			out []byte
		}{{a, x[:n]}, {b, y[:n]}} {
			if _, err := r.t.ReadAt(r.out, at); err != nil {
				return false, err
			}
		}
		if !slices.Equal(x[:n], y[:n]) {
			return false, nil
		}
	}
	return true, nil
}

// Describe identifies the weights by the names, types and shapes of all tensors, in the order of the files, not
// by their values.
func (w *Weights) Describe() string {
	sum := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	for _, t := range w.folder.Tensors() {
		text, _ := json.Marshal(t.Info)
		sum.Write(text)
	}
	return fmt.Sprintf("weights of %d tensors with checksum %08x", len(w.folder.Tensors()), sum.Sum32())
}

// Wider reports whether the folder's type of a tensor has values that the given type cannot represent exactly.
func (w *Weights) Wider(tensor string, than ir.DType) bool {
	dtype := w.places[tensor][0].tensor.DType
	return than == ir.BF16 && dtype != safetensors.BF16 && dtype != safetensors.F4
}

// bandRows is the number of rows of a stored tensor that are transposed at a time, so that whole cache lines
// are written.
const bandRows = 32

// Read implements Values. It reads only the required bytes of the folder.
func (w *Weights) Read(tensor string, row, col, rows, cols int64, out []float32) error {
	return w.order.read(w.read, tensor, row, col, rows, cols, out)
}

// read reads values in the order of the folder.
func (w *Weights) read(tensor string, row, col, rows, cols int64, out []float32) error {
	at := w.places[tensor]
	if len(at) == 0 {
		return fmt.Errorf("internal: no weights of %s", tensor)
	}
	if n := at[0].part.shape[1]; len(at) > 1 && at[1].part.left > 0 {
		return readBeside(at[col/n:(col+cols-1)/n+1], row, col, rows, cols, out)
	}
	each := at[0].part.shape[0]
	for end := row + rows; row < end; {
		l := at[row/each]
		n := min(end, l.part.first+each) - row
		if err := l.read(row-l.part.first, col, n, cols, out[:n*cols]); err != nil {
			return err
		}
		row, out = row+n, out[n*cols:]
	}
	return nil
}

// readBeside reads a block from parts that lie side by side.
func readBeside(at []location, row, col, rows, cols int64, out []float32) error {
	for i := range at {
		p := at[i].part
		first, end := max(col, p.left), min(col+cols, p.left+p.shape[1])
		values := make([]float32, rows*(end-first))
		if err := at[i].read(row, first-p.left, rows, end-first, values); err != nil {
			return err
		}
		for r := range rows {
			copy(out[r*cols+first-col:], values[r*(end-first):(r+1)*(end-first)])
		}
	}
	return nil
}

// read reads a block of the part.
func (l *location) read(row, col, rows, cols int64, out []float32) error {
	p, t := l.part, l.tensor
	width := lastOf(t.Shape)
	var buffer []byte
	var err error
	if !p.transposed && p.step > 1 {
		line := make([]float32, (cols-1)*p.step+1)
		for r := range rows {
			if buffer, err = t.Float32s(line, (p.row+row+r)*width+p.col+col*p.step, buffer); err != nil {
				return err
			}
			for c := range cols {
				out[r*cols+c] = line[c*p.step]
			}
		}
		return nil
	}
	if !p.transposed {
		if cols == width && p.col == 0 {
			_, err = t.Float32s(out, (p.row+row)*width, nil)
			return err
		}
		for r := range rows {
			from := (p.row+row+r)*width + p.col + col
			if buffer, err = t.Float32s(out[r*cols:(r+1)*cols], from, buffer); err != nil {
				return err
			}
		}
		return nil
	}
	band := make([]float32, bandRows*rows)
	for first := int64(0); first < cols; first += bandRows {
		n := min(bandRows, cols-first)
		for c := range n {
			from := (p.row+(col+first+c)*p.step)*width + p.col + row
			if buffer, err = t.Float32s(band[c*rows:(c+1)*rows], from, buffer); err != nil {
				return err
			}
		}
		for r := range rows {
			line := out[r*cols+first:]
			for c := range n {
				line[c] = band[c*rows+r]
			}
		}
	}
	return nil
}

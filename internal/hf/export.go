package hf

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"sppo.dev/internal/data/safetensors"
	"sppo.dev/internal/infile"
	"sppo.dev/ir"
)

// Types of weights that Export writes, by their names in the language and in transformers.
var (
	exportTypes = map[string]string{"f32": safetensors.F32, "f16": safetensors.F16, "bf16": safetensors.BF16}
	ExportTypes = []string{"f32", "bf16", "f16"}
)

// Files in a folder that are copied along with new weights: those of its tokenizer, and its generation settings and
// documentation.
var (
	tokenizerFiles = []string{
		"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
		"vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
	}
	otherFiles = []string{"generation_config.json", "preprocessor_config.json", "processor_config.json", "LICENSE", "LICENSE.txt", "NOTICE", "USE_POLICY.md"}
)

// Export is a folder to be written.
type Export struct {
	Values    Values
	Tensors   []ir.Tensor
	From      *Model // provides config, names, types and other files: a folder, or the model described by Config
	Config    []byte // the config.json if there is no folder
	Edited    []byte // replaces the folder's config.json; nil: it is copied
	DType     string // type of the weights, except for those that stay in f32; empty: as in From
	Tokenizer string // folder of the tokenizer; empty: From

	shardBytes int64 // 0: safetensors.ShardBytes
}

// Write writes the folder: config.json, weights, and the files that are copied. dir must be absent or empty. It
// appears complete at the end, or not at all. Only part of one tensor is in memory at a time.
func (e *Export) Write(ctx context.Context, dir string) error {
	ordered := *e
	ordered.Values = paired{e.Values, e.From.pairing(true)}
	return newFolder(dir, func(to string) error {
		sources, done, err := ordered.sources(ctx)
		if err != nil {
			return err
		}
		defer done()
		config, err := e.config()
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(to, ConfigFile), config, 0o644); err != nil {
			return err
		}
		if err := errors.Join(copyFiles(to, cmp.Or(e.Tokenizer, e.From.Dir), tokenizerFiles), copyFiles(to, e.From.Dir, otherFiles)); err != nil {
			return err
		}
		shard := e.shardBytes
		if shard == 0 {
			shard = safetensors.ShardBytes
		}
		return safetensors.Write(ctx, to, sources, map[string]string{"format": "pt"}, shard)
	})
}

// newSources returns the tensors to write for a model that did not come from a folder.
func (e *Export) newSources(ctx context.Context) (list []safetensors.Source, done func() error, err error) {
	all, err := e.From.arch.names.layout(e.Tensors, e.From.heads)
	if err != nil {
		return nil, nil, err
	}
	for _, s := range all {
		source := safetensors.Source{Info: safetensors.Info{Name: s.name, DType: exportTypes[cmp.Or(e.DType, e.From.value("dtype"))], Shape: s.shape}}
		if s.f32 {
			source.DType = safetensors.F32
		}
		dtype := source.DType
		source.Write = func(to io.Writer) error { return e.write(ctx, to, s, dtype) }
		list = append(list, source)
	}
	return list, func() error { return nil }, nil
}

// sources returns all tensors of the folder from which the model comes, with new values for the model's own
// tensors.
func (e *Export) sources(ctx context.Context) ([]safetensors.Source, func() error, error) {
	if e.Config != nil {
		return e.newSources(ctx)
	}
	w, err := e.From.OpenWeights(e.Tensors)
	if err != nil {
		return nil, nil, err
	}
	index, err := e.written(w)
	if err != nil {
		return nil, nil, err
	}
	var list []safetensors.Source
	for i := range w.folder.Tensors() {
		t := &w.folder.Tensors()[i]
		if e.From.isScale(w.folder, t.Name) {
			continue
		}
		source := safetensors.Source{Info: t.Info}
		if name, quantized := e.From.matrix(t); quantized {
			source.Name, source.DType = name, exportTypes[cmp.Or(e.DType, e.From.value("dtype"))]
		}
		s := index[source.Name]
		if s != nil && source.Name != t.Name {
			source.Shape = s.shape
		}
		if s == nil && source.DType != t.DType {
			source.Write = func(to io.Writer) error { return e.From.dequantize(ctx, to, w.folder, t, source.DType) }
			list = append(list, source)
			continue
		}
		if s == nil {
			source.Write = func(to io.Writer) error { return copyValues(ctx, to, t, 0) }
			list = append(list, source)
			continue
		}
		if e.DType != "" && !(s.f32 && t.DType == safetensors.F32) {
			source.DType = exportTypes[e.DType]
		}
		dtype := source.DType
		source.Write = func(to io.Writer) error {
			if err := e.write(ctx, to, s, dtype); err != nil {
				return err
			}
			return e.restOf(ctx, to, t, s, dtype)
		}
		list = append(list, source)
	}
	return list, w.Close, nil
}

// written returns the stored tensors of an export by their names. With matrices in MXFP4, names and shapes differ from those of the folder.
func (e *Export) written(w *Weights) (map[string]*stored, error) {
	rename, list, index := e.From.names(w.folder), w.stored, map[string]*stored{}
	if e.From.format == &mxfp4 {
		plain, err := e.From.arch.names.layout(e.Tensors, e.From.heads)
		if err != nil {
			return nil, err
		}
		for _, s := range plain {
			s.name = rename(s.name)
		}
		list = plain
	}
	for _, s := range list {
		index[s.name] = s
	}
	names := e.From.arch.names.tensors
	embed := index[rename(names["embed"].name)]
	// A folder may have a tied table under both names.
	index[rename(names["head"].name)] = cmpOr(index[rename(names["head"].name)], embed)
	return index, nil
}

func cmpOr(a, b *stored) *stored {
	if a != nil {
		return a
	}
	return b
}

// writeElements is the number of values of a tensor that are in memory at a time.
const writeElements = 4 << 20

// write writes our values of a stored tensor, a band of rows at a time.
func (e *Export) write(ctx context.Context, to io.Writer, s *stored, dtype string) error {
	cols := s.cols()
	rows := max(1, writeElements/cols)
	var raw []byte
	for first := int64(0); first < s.rows(); first += rows {
		if err := ctx.Err(); err != nil {
			return err
		}
		n := min(rows, s.rows()-first)
		out := make([]float32, n*cols)
		for i := range s.parts {
			if err := s.parts[i].read(e.Values, first, n, cols, out); err != nil {
				return err
			}
		}
		var err error
		if raw, err = safetensors.Append(raw[:0], out, dtype); err != nil {
			return fmt.Errorf("rows %d to %d: %w", first, first+n-1, err)
		}
		if _, err := to.Write(raw); err != nil {
			return err
		}
	}
	return nil
}

// read reads the part's values in rows first .. first+n-1 of the stored tensor, and puts them in their places in
// out.
func (p *part) read(from Values, first, n, width int64, out []float32) error {
	rows, cols := p.shape[0], p.shape[1] // the part's shape in the stored tensor
	if p.transposed {
		rows, cols = cols, rows
	}
	low, high := max(first, p.row), min(first+n, p.row+rows)
	if low >= high {
		return nil
	}
	count := high - low
	values := make([]float32, count*cols)
	var err error
	if p.transposed {
		err = from.Read(p.Name, p.first, p.left+low-p.row, cols, count, values)
	} else {
		err = from.Read(p.Name, p.first+low-p.row, 0, count, cols, values)
	}
	if err != nil {
		return err
	}
	switch to := out[(low-first)*width+p.col:]; {
	case p.transposed:
		transpose(to, width, values, count, cols)
	case p.step == 1:
		for r := range count {
			copy(to[r*width:], values[r*cols:(r+1)*cols])
		}
	default:
		for i, v := range values {
			to[int64(i)/cols*width+int64(i)%cols*p.step] = v
		}
	}
	return nil
}

// transpose writes the transpose of a matrix with cols rows and count columns, in tiles that fit in a cache.
func transpose(to []float32, width int64, values []float32, count, cols int64) {
	const tile = 32
	for r0 := int64(0); r0 < count; r0 += tile {
		for c0 := int64(0); c0 < cols; c0 += tile {
			for r := r0; r < min(r0+tile, count); r++ {
				line := to[r*width : r*width+cols]
				for c := c0; c < min(c0+tile, cols); c++ {
					line[c] = values[c*count+r]
				}
			}
		}
	}
}

// restOf writes, unchanged, the rows of a position table beyond the length of the run.
func (e *Export) restOf(ctx context.Context, to io.Writer, t *safetensors.Tensor, s *stored, dtype string) error {
	had := s.rows() * s.cols()
	if had >= t.Elements() {
		return nil
	}
	if dtype == t.DType {
		return copyValues(ctx, to, t, t.Bytes()/t.Elements()*had)
	}
	values := make([]float32, t.Elements()-had)
	if _, err := t.Float32s(values, had, nil); err != nil {
		return err
	}
	raw, err := safetensors.Append(nil, values, dtype)
	if err == nil {
		_, err = to.Write(raw)
	}
	return err
}

func copyValues(ctx context.Context, to io.Writer, t *safetensors.Tensor, from int64) error {
	buffer := make([]byte, 1<<20)
	for at := from; at < t.Bytes(); at += int64(len(buffer)) {
		if err := ctx.Err(); err != nil {
			return err
		}
		part := buffer[:min(int64(len(buffer)), t.Bytes()-at)]
		if _, err := t.ReadAt(part, at); err != nil {
			return err
		}
		if _, err := to.Write(part); err != nil {
			return err
		}
	}
	return nil
}

// config returns the config.json of the folder, with the new type of the weights if it has changed.
func (e *Export) config() ([]byte, error) {
	if e.Config != nil && e.DType == "" {
		return e.Config, nil
	}
	if e.Config != nil {
		return withType(e.Config, typeNames[exportTypes[e.DType]])
	}
	text, err := e.Edited, error(nil)
	if text == nil {
		text, err = infile.Read(filepath.Join(e.From.Dir, ConfigFile), maxConfig)
	}
	if err == nil && e.From.format != nil {
		text, err = withoutBlocks(text)
	}
	if err != nil || e.DType == "" {
		return text, err
	}
	return withType(text, typeNames[exportTypes[e.DType]])
}

// withType sets every member of config.json that names the type of weights, and changes nothing else.
func withType(text []byte, name string) ([]byte, error) {
	var spots [][2]int64
	in := json.NewDecoder(bytes.NewReader(text))
	if _, err := in.Token(); err != nil {
		return nil, err
	}
	if err := typeSpots(in, &spots); err != nil {
		return nil, err
	}
	if len(spots) == 0 {
		at := bytes.IndexByte(text, '{') + 1
		return slices.Concat(text[:at], []byte("\n  \"dtype\": \""+name+"\","), text[at:]), nil
	}
	for _, spot := range slices.Backward(spots) {
		text = slices.Concat(text[:spot[0]], []byte(" \""+name+"\""), text[spot[1]:])
	}
	return text, nil
}

// typeSpots finds the values of dtype and torch_dtype in an object whose { has been read, and in nested
// objects.
func typeSpots(in *json.Decoder, spots *[][2]int64) error {
	for in.More() {
		key, err := in.Token()
		if err != nil {
			return err
		}
		start := in.InputOffset() + 1 // after the colon
		value, err := in.Token()
		switch {
		case err != nil:
			return err
		case value == json.Delim('{'):
			err = typeSpots(in, spots)
		case value == json.Delim('['):
			err = skipList(in)
		case key == "dtype" || key == "torch_dtype":
			*spots = append(*spots, [2]int64{start, in.InputOffset()})
		}
		if err != nil {
			return err
		}
	}
	_, err := in.Token()
	return err
}

// skipList reads a list whose [ has been read.
func skipList(in *json.Decoder) error {
	for in.More() {
		var v json.RawMessage
		if err := in.Decode(&v); err != nil {
			return err
		}
	}
	_, err := in.Token()
	return err
}

// copyFiles copies those of the named files that a folder has. A model without a folder has none.
func copyFiles(to, from string, names []string) error {
	for _, name := range names {
		if from == "" {
			break
		}
		if err := copyFile(filepath.Join(to, name), filepath.Join(from, name)); err != nil {
			return err
		}
	}
	return nil
}

// HasTokenizer reports whether a folder has the files of a tokenizer that transformers can load.
func HasTokenizer(dir string) bool {
	return slices.ContainsFunc([]string{"tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"}, func(name string) bool {
		_, err := os.Stat(filepath.Join(dir, name))
		return err == nil
	})
}

func copyFile(to, from string) error {
	text, _, err := infile.Open(from)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer text.Close()
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, text)
	return errors.Join(err, out.Close())
}

// newFolder creates a folder that appears only when complete: fill writes to a temporary folder next to it, which
// is renamed at the end.
func newFolder(dir string, fill func(to string) error) error {
	if err := CheckTarget(dir); err != nil {
		return err
	}
	dir = filepath.Clean(dir)
	to, err := os.MkdirTemp(filepath.Dir(dir), "."+filepath.Base(dir)+".*")
	if err != nil {
		return err
	}
	defer os.RemoveAll(to) // does nothing after success
	if err := errors.Join(fill(to), os.Chmod(to, 0o755)); err != nil {
		return err
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return os.Rename(to, dir)
}

// CheckTarget returns an error if the folder to write exists and is not empty, or if its parent does not exist.
func CheckTarget(dir string) error {
	entries, err := os.ReadDir(dir)
	switch {
	case errors.Is(err, os.ErrNotExist):
		if info, err := os.Stat(filepath.Dir(filepath.Clean(dir))); err != nil || !info.IsDir() {
			return fmt.Errorf("cannot write %s: there is no folder %s", dir, filepath.Dir(filepath.Clean(dir)))
		}
		return nil
	case err != nil:
		return err
	case len(entries) > 0:
		return fmt.Errorf("cannot write %s: the folder is not empty", dir)
	}
	return nil
}

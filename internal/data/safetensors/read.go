package safetensors

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"sppo.dev/internal/infile"
)

// Names of the files in a folder.
const (
	SingleFile = "model.safetensors"
	IndexFile  = "model.safetensors.index.json"
)

// Tensor is a tensor of an open folder.
type Tensor struct {
	Info
	File  string // its path
	begin int64  // offset in the file
	from  io.ReaderAt
}

// Folder provides the weights of a folder for reading. Its methods are safe for concurrent use.
type Folder struct {
	Path     string
	Metadata map[string]string // metadata of the first file
	tensors  []Tensor          // in the order of the files
	index    map[string]int
	files    []*os.File
}

// Open opens and checks the weights of a folder: model.safetensors, or the files listed in
// model.safetensors.index.json. An error names the file.
func Open(dir string) (_ *Folder, err error) {
	f := &Folder{Path: dir, index: map[string]int{}}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	single := filepath.Join(dir, SingleFile)
	if _, err := os.Stat(single); err == nil {
		return f, f.open(single, nil)
	}
	shards, err := readIndex(filepath.Join(dir, IndexFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s has neither %s nor %s", dir, SingleFile, IndexFile)
	}
	if err != nil {
		return nil, err
	}
	for _, shard := range shards {
		if err := f.open(filepath.Join(dir, shard.file), shard); err != nil {
			return nil, err
		}
	}
	return f, nil
}

// OpenFile opens and checks one file.
func OpenFile(path string) (*Folder, error) {
	f := &Folder{Path: path, index: map[string]int{}}
	if err := f.open(path, nil); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// Close closes the files.
func (f *Folder) Close() error {
	var errs []error
	for _, file := range f.files {
		errs = append(errs, file.Close())
	}
	f.files = nil
	return errors.Join(errs...)
}

// Tensors returns all tensors in the order of the files. The caller must not change them.
func (f *Folder) Tensors() []Tensor { return f.tensors }

// Find returns the tensor with the given name, or nil.
func (f *Folder) Find(name string) *Tensor {
	i, ok := f.index[name]
	if !ok {
		return nil
	}
	return &f.tensors[i]
}

// shard is a file that an index lists, with the tensors that the file must contain.
type shard struct {
	file  string
	names map[string]bool
}

// open reads the header of a file and adds its tensors. If s is given, they must be the tensors that the index
// places in this file.
func (f *Folder) open(path string, s *shard) error {
	file, size, err := infile.Open(path)
	if errors.Is(err, fs.ErrNotExist) && s != nil {
		return fmt.Errorf("%s is missing, although %s names it", path, IndexFile)
	}
	if err != nil {
		return err
	}
	f.files = append(f.files, file)
	h, start, err := readHeader(file, size)
	if err != nil {
		return fmt.Errorf("%s %w", path, err)
	}
	if f.Metadata == nil {
		f.Metadata = h.metadata
	}
	for _, e := range h.entries {
		if s != nil && !s.names[e.Name] {
			return fmt.Errorf("%s contains tensor %q, although %s does not place it there", path, e.Name, IndexFile)
		}
		f.index[e.Name] = len(f.tensors)
		f.tensors = append(f.tensors, Tensor{Info: e.Info, File: path, begin: start + e.begin, from: file})
	}
	if s == nil || len(h.entries) == len(s.names) {
		return nil
	}
	for _, name := range sortedKeys(s.names) {
		if f.Find(name) == nil {
			return fmt.Errorf("%s has no tensor %q, although %s places it there", path, name, IndexFile)
		}
	}
	return nil
}

// readIndex returns the files that an index lists, sorted by name, each with the tensors that it must contain.
func readIndex(path string) ([]*shard, error) {
	text, err := infile.Read(path, MaxHeader)
	if err != nil {
		return nil, err
	}
	byFile := map[string]*shard{}
	err = eachMember(text, func(key string, value json.RawMessage) error {
		if key != "weight_map" {
			return nil
		}
		return eachMember(value, func(name string, value json.RawMessage) error {
			var file string
			if json.Unmarshal(value, &file) != nil || file == "" || file != filepath.Base(file) || file == ".." || strings.ContainsAny(file, `/\`) {
				return fmt.Errorf("tensor %q is in %s, which is not a file name", name, clip(string(value)))
			}
			if byFile[file] == nil {
				byFile[file] = &shard{file, map[string]bool{}}
			}
			byFile[file].names[name] = true
			return nil
		})
	})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if len(byFile) == 0 {
		return nil, fmt.Errorf("%s has no weight_map, or an empty one", path)
	}
	var list []*shard
	for _, file := range sortedKeys(byFile) {
		list = append(list, byFile[file])
	}
	return list, nil
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for key := range m {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}

// From returns the tensor, reading its values from r, which has the contents of the tensor's file. Thus it can be read after
// its folder was closed.
func (t *Tensor) From(r io.ReaderAt) *Tensor {
	moved := *t
	moved.from = r
	return &moved
}

// ReadAt reads bytes of the tensor's values, as io.ReaderAt does.
func (t *Tensor) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 || off > t.Bytes() {
		return 0, fmt.Errorf("byte %d of tensor %q, which has %d", off, t.Name, t.Bytes())
	}
	short := int64(len(p)) > t.Bytes()-off
	if short {
		p = p[:t.Bytes()-off]
	}
	n, err := t.from.ReadAt(p, t.begin+off)
	switch {
	case n < len(p) && err == io.EOF:
		err = fmt.Errorf("%s ends inside tensor %q: it is shorter than when it was opened", t.File, t.Name)
	case n == len(p) && short:
		err = io.EOF
	case n == len(p):
		err = nil // io.EOF is possible if the values are the last in the file
	}
	return n, err
}

// Float32s reads len(out) values, starting at the element with index first, and converts them to f32 without
// rounding. The type must be convertible or F8_E4M3. buffer holds raw bytes; it is returned for the next call, enlarged if it
// was too small.
func (t *Tensor) Float32s(out []float32, first int64, buffer []byte) ([]byte, error) {
	if !readable(t.DType) {
		return buffer, fmt.Errorf("tensor %q has values of type %s; F32, F16, BF16 and F8_E4M3 can be read", t.Name, t.DType)
	}
	width := int64(typeBits[t.DType] / 8)
	n := int64(len(out)) * width
	if int64(cap(buffer)) < n {
		buffer = make([]byte, n)
	}
	buffer = buffer[:n]
	if _, err := t.ReadAt(buffer, first*width); err != nil {
		return buffer, err
	}
	widen(out, buffer, t.DType)
	return buffer, nil
}

package store

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"sppo.dev/internal/data/safetensors"
	"sppo.dev/internal/infile"
)

// Checkpoint is a checkpoint open for reading. Its methods are safe for concurrent use.
type Checkpoint struct {
	*Manifest
	Dir   string
	parts map[string][]located // by entry name
	index map[string]*Tensor
}

// located is a part of a tensor: its position in the whole tensor, and its entry in a file.
type located struct {
	row, col, rows, cols int64
	in                   *safetensors.Tensor
}

// Open opens a checkpoint. It checks the manifest, that all shards exist with the right sizes, and that they
// cover every tensor exactly once. Verify checks the contents of the shards. If files have changed since they were
// written, the error is a Damage. A shard is open only while it is read: a large job has more shards than a process
// may have open files.
func Open(dir string) (*Checkpoint, error) {
	m, err := ReadManifest(dir)
	if err != nil {
		return nil, err
	}
	c := &Checkpoint{Manifest: m, Dir: dir, parts: map[string][]located{}, index: map[string]*Tensor{}}
	for i := range m.Tensors {
		c.index[m.Tensors[i].Name()] = &m.Tensors[i]
	}
	for i := range m.Shards {
		s := &m.Shards[i]
		if err := c.sized(s); err != nil {
			return nil, err
		}
		if err := c.readShard(s); err != nil {
			return nil, c.cause(err, func(other *Shard) bool { return other == s })
		}
	}
	for i := range m.Tensors {
		if err := c.covers(&m.Tensors[i]); err != nil {
			return nil, c.cause(err, func(*Shard) bool { return true })
		}
	}
	return c, nil
}

// cause returns the error of shards whose headers cannot be read or make no sense: the damage if the checksum of one
// of the suspects is wrong, and otherwise err.
func (c *Checkpoint) cause(err error, suspect func(*Shard) bool) error {
	return cmp.Or(c.Verify(context.Background(), suspect, func(int64) {}), err)
}

// Close does nothing: no file is open.
func (c *Checkpoint) Close() error { return nil }

// sized checks that a shard exists and has the right size.
func (c *Checkpoint) sized(s *Shard) error {
	info, err := os.Stat(filepath.Join(c.Dir, s.File))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return missing(c.Dir, s.File, fmt.Sprintf("has no %s, although its manifest names it", s.File))
	case err != nil:
		return err
	case info.Size() < s.Bytes:
		return Damaged(s.File, "is truncated: %s has %d bytes instead of %d", s.File, info.Size(), s.Bytes)
	case info.Size() > s.Bytes:
		return Damaged(s.File, "is damaged: %s has %d bytes instead of %d", s.File, info.Size(), s.Bytes)
	}
	return nil
}

// readShard reads the header of a shard.
func (c *Checkpoint) readShard(s *Shard) error {
	f, err := safetensors.OpenFile(filepath.Join(c.Dir, s.File))
	if err != nil {
		return err
	}
	defer f.Close()
	var places map[string]place
	if err := json.Unmarshal([]byte(f.Metadata[torchSharding]), &places); err != nil {
		return fmt.Errorf("it is invalid: %s does not give the positions of its tensors", s.File)
	}
	tensors := f.Tensors()
	for i := range tensors {
		x := &tensors[i]
		t, at := c.index[x.Name], places[x.Name].Offsets
		if t == nil || x.DType != t.DType || len(x.Shape) != len(at) || len(at) < 1 || len(at) > 2 {
			return fmt.Errorf("it is invalid: %s has a tensor %q that the manifest does not name", s.File, x.Name)
		}
		p := located{row: at[0], rows: x.Shape[0], cols: 1, in: x}
		if len(at) == 2 {
			p.col, p.cols = at[1], x.Shape[1]
		}
		if p.row < 0 || p.col < 0 || p.row > t.Shape[0]-p.rows || p.col > t.Shape[1]-p.cols {
			return fmt.Errorf("it is invalid: %s has a part of %s outside its shape %v", s.File, x.Name, t.Shape)
		}
		c.parts[x.Name] = append(c.parts[x.Name], p)
	}
	return nil
}

// covers checks that the parts of a tensor cover it exactly once: no two overlap, and their sizes add up to the
// size of the tensor.
func (c *Checkpoint) covers(t *Tensor) error {
	parts, sum := c.parts[t.Name()], int64(0)
	for i, p := range parts {
		sum += p.rows * p.cols
		for _, q := range parts[:i] {
			if p.row < q.row+q.rows && q.row < p.row+p.rows && p.col < q.col+q.cols && q.col < p.col+p.cols {
				return fmt.Errorf("it is invalid: the parts of %s in %s and %s overlap", t.Name(), filepath.Base(q.in.File), filepath.Base(p.in.File))
			}
		}
	}
	if all := t.Shape[0] * t.Shape[1]; sum != all {
		return fmt.Errorf("it is invalid: its shards have %d of the %d elements of %s", sum, all, t.Name())
	}
	return nil
}

// Verify compares the checksums of shards with the manifest; if one is wrong, the error is a Damage. Processes can
// share the work: Verify reads only the shards for which wanted returns true. It calls progress with the size of each
// block that it has read.
func (c *Checkpoint) Verify(ctx context.Context, wanted func(*Shard) bool, progress func(bytes int64)) error {
	buffer := make([]byte, 4<<20)
	for i := range c.Shards {
		s := &c.Shards[i]
		if !wanted(s) {
			continue
		}
		file, _, err := infile.Open(filepath.Join(c.Dir, s.File))
		if err != nil {
			return err
		}
		sum, err := checksum(ctx, file, buffer, progress)
		file.Close()
		if err != nil {
			return fmt.Errorf("%s: %w", s.File, err)
		}
		if fmt.Sprintf("%08x", sum) != s.CRC32C {
			return Damaged(s.File, "is damaged: %s has a wrong checksum", s.File)
		}
	}
	return nil
}

func checksum(ctx context.Context, in io.Reader, buffer []byte, progress func(bytes int64)) (sum uint32, err error) {
	for err == nil {
		var n int
		n, err = in.Read(buffer)
		sum = crc32.Update(sum, castagnoli, buffer[:n])
		progress(int64(n))
		if ctx.Err() != nil {
			return 0, ctx.Err()
		}
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return sum, err
}

// Find returns the entry with the given name, or nil if there is none.
func (c *Checkpoint) Find(name string) *Tensor { return c.index[name] }

// Read writes a rectangle of an entry to the slice out, row by row: rows by cols values, starting at (row, col).
func (c *Checkpoint) Read(name string, row, col, rows, cols int64, out []float32) error {
	var buffer []byte
	for _, p := range c.parts[name] {
		row0, row1 := max(row, p.row), min(row+rows, p.row+p.rows)
		col0, col1 := max(col, p.col), min(col+cols, p.col+p.cols)
		if row0 >= row1 || col0 >= col1 {
			continue
		}
		file, _, err := infile.Open(p.in.File)
		if err != nil {
			return err
		}
		in := p.in.From(file)
		if col0 == p.col && col1 == p.col+p.cols && cols == p.cols { // the rows are contiguous in the file and in the result
			to := out[(row0-row)*cols : (row1-row)*cols]
			buffer, err = in.Float32s(to, (row0-p.row)*p.cols, buffer)
		} else {
			for r := row0; r < row1 && err == nil; r++ {
				at := (r-row)*cols + col0 - col
				buffer, err = in.Float32s(out[at:at+col1-col0], (r-p.row)*p.cols+col0-p.col, buffer)
			}
		}
		file.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

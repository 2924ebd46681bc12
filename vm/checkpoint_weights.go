package vm

import (
	"fmt"
	"io"
	"os"

	"sppo.dev/infile"
	"sppo.dev/ir"
)

// Checkpoint is a checkpoint file that is open for reading its weights, in the precision in which they were trained.
type Checkpoint struct {
	Program string
	Model   ir.Model
	Step    int64
	Origin  string // of the weights that the run started from; empty: drawn by chance

	file    *os.File
	tensors []ir.Tensor
	places  map[string]int64 // of the values in the file
}

// OpenCheckpoint opens a checkpoint and verifies its checksum.
func OpenCheckpoint(path string) (*Checkpoint, error) {
	file, _, err := infile.Open(path)
	if err != nil {
		return nil, err
	}
	c, err := newCheckpoint(file)
	if err != nil {
		file.Close()
		return nil, fmt.Errorf("checkpoint %s: %w", path, err)
	}
	return c, nil
}

func newCheckpoint(file *os.File) (*Checkpoint, error) {
	header, err := checkFile(file)
	if err != nil {
		return nil, err
	}
	at, err := file.Seek(0, io.SeekCurrent)
	if err != nil {
		return nil, err
	}
	c := &Checkpoint{
		Program: header.Program, Model: header.Model, Step: header.Step, Origin: header.Origin, file: file, places: map[string]int64{},
	}
	for _, e := range header.Entries {
		if e.Role == ir.RoleWeight.String() || e.Role == ir.RoleMaster.String() {
			c.places[e.Tensor] = at
			c.tensors = append(c.tensors, ir.Tensor{Name: e.Tensor, Shape: e.Shape})
		}
		at += 4 * e.Shape[0] * e.Shape[1]
	}
	return c, nil
}

// Close closes the file.
func (c *Checkpoint) Close() error { return c.file.Close() }

// Tensors are the weights, in the program's order.
func (c *Checkpoint) Tensors() []ir.Tensor { return c.tensors }

// Read fills out with rows by columns of a tensor from (row, col) on, rows first.
func (c *Checkpoint) Read(tensor string, row, col, rows, cols int64, out []float32) error {
	for i := range c.tensors {
		t := &c.tensors[i]
		if t.Name != tensor {
			continue
		}
		at := c.places[tensor]
		if cols == t.Shape[1] {
			_, err := c.file.ReadAt(BytesOf(out), at+4*row*cols)
			return err
		}
		for r := range rows {
			line := out[r*cols : (r+1)*cols]
			if _, err := c.file.ReadAt(BytesOf(line), at+4*((row+r)*t.Shape[1]+col)); err != nil {
				return err
			}
		}
		return nil
	}
	return fmt.Errorf("the checkpoint has no tensor %q", tensor)
}

package train

import (
	"context"
	"errors"
	"fmt"

	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// Weights provides the values of tensors at the start of a run. If it has only some tensors, it also implements
// Has(tensor string) bool; the other tensors keep the values of Init.
type Weights interface {
	// Read writes a rectangle of a tensor to the slice out, row by row: rows by cols values, starting with the
	// one at (row, col). Ranks call it concurrently.
	Read(tensor string, row, col, rows, cols int64, out []float32) error
	// Describe identifies the weights.
	Describe() string
}

// loadElements limits the number of values of a tensor that are in memory at a time while a rank loads them.
const loadElements = 8 << 20

// Load sets all weights to the values of Options.Weights. Each rank reads its own parts, a band of rows at a
// time. Call Init first: Load does not change optimizer states. Checkpoints record the argument origin as the
// source of the weights.
func (j *Job) Load(ctx context.Context, origin string) error {
	if j.dead != nil {
		return fmt.Errorf("the job has failed: %w", j.dead)
	}
	if j.weights == nil {
		return errors.New("the job was opened without weights")
	}
	mine := j.weights.Describe()
	answers, err := j.together(Order{What: OrderLoad}, func() error { return j.loadHere(ctx) })
	for i, theirs := range answers {
		if err == nil && string(theirs) != mine {
			err = fmt.Errorf("process %d reads different weights from process 0: %s instead of %s", i+1, theirs, mine)
		}
	}
	if j.dead = err; err == nil {
		j.origin = origin
	}
	return err
}

// loadHere loads the ranks of this process.
func (j *Job) loadHere(ctx context.Context) error {
	if j.weights == nil {
		return errors.New("process without weights: all processes need the same command line")
	}
	some, _ := j.weights.(interface{ Has(tensor string) bool })
	return j.each(func(r *rank) error {
		consts := j.program.Ranks[r.index].Consts
		for i := range r.code.States {
			s := &r.code.States[i]
			if some != nil && !some.Has(j.program.Tensors[s.Tensor].Name) {
				continue
			}
			if s.Role != ir.RoleWeight && s.Role != ir.RoleMaster {
				continue
			}
			t := &j.program.Tensors[s.Tensor]
			rect := rectangleOf(t, s, consts)
			err := loadRectangle(ctx, r.device, t, rect, func(row, col, rows, cols int64, out []float32) error {
				defer j.progress(int64(len(out)))
				return j.weights.Read(t.Name, row, col, rows, cols, out)
			})
			if err != nil {
				return fmt.Errorf("loading %s: %w", t.Name, err)
			}
		}
		return nil
	})
}

// loadRectangle fills a rank's part of a tensor with values obtained from the function read; elements beyond
// the tensor are padding and become 0.
func loadRectangle(ctx context.Context, d vm.Device, t *ir.Tensor, rect rectangle, read func(row, col, rows, cols int64, out []float32) error) error {
	rows := max(1, loadElements/rect.cols)
	cols := min(max(t.Shape[1]-rect.col0, 0), rect.cols)
	for first := int64(0); first < rect.rows; first += rows {
		if err := ctx.Err(); err != nil {
			return err
		}
		n := min(rows, rect.rows-first)
		there := min(max(rect.end-rect.row0-first, 0), n)
		values := make([]float32, there*cols)
		if len(values) > 0 {
			if err := read(rect.row0+first, rect.col0, there, cols, values); err != nil {
				return err
			}
		}
		padded := make([]float32, n*rect.cols)
		for row := range there {
			copy(padded[row*rect.cols:], values[row*cols:(row+1)*cols])
		}
		view := rect.band(first, n)
		bytes := make([]byte, view.Bytes())
		vm.Narrow(bytes, padded, view.DType)
		if err := d.Write(view, bytes); err != nil {
			return err
		}
	}
	return nil
}

// Precision returns the most precise type in which a program holds a tensor: that of its master, if it has one.
func Precision(p *ir.Program, tensor int) ir.DType {
	held := ir.BF16
	for c := range p.Codes {
		for i := range p.Codes[c].States {
			s := &p.Codes[c].States[i]
			if int(s.Tensor) == tensor && (s.Role == ir.RoleWeight || s.Role == ir.RoleMaster) && s.View.DType == ir.F32 {
				held = ir.F32
			}
		}
	}
	return held
}

package train

import (
	"fmt"
	"slices"

	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// Tensor assembles a whole tensor from the rectangles that the ranks hold. It returns the values, row by row,
// and the shape. An f32 weight is its own master, so for RoleMaster it returns the weight.
func (j *Job) Tensor(name string, role ir.Role) ([]float32, [2]int64, error) {
	tensor, err := j.tensor(name)
	if err != nil {
		return nil, [2]int64{}, err
	}
	shape := j.program.Tensors[tensor].Shape
	if role == ir.RoleMaster && !j.holds(tensor, role) {
		role = ir.RoleWeight
	}
	out := make([]float32, shape[0]*shape[1])
	covered := make([]bool, len(out))
	missing := len(out)
	err = j.rectangles(tensor, role, func(r *rank, rect rectangle) error {
		if missing == 0 {
			return nil
		}
		values, err := rect.read(j, r)
		if err != nil {
			return err
		}
		rect.each(shape, func(at, i int64) {
			out[at] = values[i]
			if !covered[at] {
				covered[at] = true
				missing--
			}
		})
		return nil
	})
	if err == nil && missing > 0 {
		err = fmt.Errorf("no rank has %d of the %d elements of %s of %s", missing, len(out), role, name)
	}
	return out, shape, err
}

// SetTensor writes a whole tensor to every rank that has a part of it; padding becomes 0. With RoleMaster it
// also sets the weight, which is derived from the master.
func (j *Job) SetTensor(name string, role ir.Role, values []float32) error {
	tensor, err := j.tensor(name)
	if err != nil {
		return err
	}
	shape := j.program.Tensors[tensor].Shape
	if int64(len(values)) != shape[0]*shape[1] {
		return fmt.Errorf("%d values for %s of shape %v", len(values), name, shape)
	}
	roles := []ir.Role{role}
	if role == ir.RoleMaster {
		roles = []ir.Role{ir.RoleWeight, ir.RoleMaster}
	}
	for _, role := range roles {
		err := j.rectangles(tensor, role, func(r *rank, rect rectangle) error {
			part := make([]float32, rect.rows*rect.cols)
			rect.each(shape, func(at, i int64) { part[i] = values[at] })
			return rect.write(j, r, part)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (j *Job) tensor(name string) (int, error) {
	i := slices.IndexFunc(j.program.Tensors, func(t ir.Tensor) bool { return t.Name == name })
	if i < 0 {
		return 0, fmt.Errorf("the model has no tensor %q", name)
	}
	return i, nil
}

// holds reports whether any rank holds the given role of a tensor.
func (j *Job) holds(tensor int, role ir.Role) bool {
	for _, r := range j.ranks {
		for _, s := range r.code.States {
			if int(s.Tensor) == tensor && s.Role == role {
				return true
			}
		}
	}
	return false
}

// rectangle is the part of a tensor that a view holds, with its padding.
type rectangle struct {
	view       ir.View
	row0, col0 int64
	rows, cols int64
	end        int64 // row of the tensor at which padding starts
}

// rectangleOf returns the part of a tensor that a rank's state holds.
func rectangleOf(t *ir.Tensor, s *ir.State, consts []int64) rectangle {
	rect := rectangle{view: s.View, row0: s.Row0.Int(consts), col0: s.Col0.Int(consts), rows: s.View.Rows(), cols: s.View.Cols(),
		end: t.EndOf(s.End.Int(consts))}
	if len(s.View.Dims()) == 1 { // a vector is a column
		rect.rows, rect.cols = rect.cols, 1
	}
	return rect
}

// band returns a view of some of the rectangle's rows.
func (rect *rectangle) band(first, rows int64) ir.View {
	v := rect.view
	v.Offset += ir.Bytes(first*rect.cols) * v.DType.Bytes()
	v.Shape[0] = rows
	return v
}

// rectangles visits all parts of a tensor with the given role, beginning with those of the first replica.
func (j *Job) rectangles(tensor int, role ir.Role, visit func(*rank, rectangle) error) error {
	ranks := slices.Clone(j.ranks)
	slices.SortStableFunc(ranks, func(a, b *rank) int {
		return int(j.program.Ranks[a.index].DP - j.program.Ranks[b.index].DP)
	})
	for _, r := range ranks {
		consts := j.program.Ranks[r.index].Consts
		for _, s := range r.code.States {
			if int(s.Tensor) != tensor || s.Role != role {
				continue
			}
			if err := visit(r, rectangleOf(&j.program.Tensors[tensor], &s, consts)); err != nil {
				return fmt.Errorf("%s of %s on rank %d: %w", role, j.program.Tensors[tensor].Name, r.index, err)
			}
		}
	}
	return nil
}

// each visits the elements of the rectangle that are not padding, with their indices in the tensor and in the
// view.
func (rect *rectangle) each(shape [2]int64, visit func(at, i int64)) {
	for row := range rect.rows {
		for col := range rect.cols {
			if r, c := rect.row0+row, rect.col0+col; r < rect.end && c < shape[1] {
				visit(r*shape[1]+c, row*rect.cols+col)
			}
		}
	}
}

func (rect *rectangle) read(j *Job, r *rank) ([]float32, error) {
	bytes := make([]byte, rect.view.Bytes())
	if err := j.read(r, rect.view, bytes); err != nil {
		return nil, err
	}
	values := make([]float32, rect.view.Elements())
	vm.Widen(values, bytes, rect.view.DType)
	return values, nil
}

func (rect *rectangle) write(j *Job, r *rank, values []float32) error {
	bytes := make([]byte, rect.view.Bytes())
	vm.Narrow(bytes, values, rect.view.DType)
	return j.write(r, rect.view, bytes)
}

package train

import (
	"math"

	"sppo.dev/ir"
)

// GradNorms returns the norm of the last step's gradients, before clipping, for each group of tensors. It reads
// every gradient from the devices, one tensor at a time. The squares of the norms add up to the square of
// StepResult.GradNorm.
func (j *Job) GradNorms(group func(tensor string) string) (map[string]float64, error) {
	norms := map[string]float64{}
	for i, t := range j.program.Tensors {
		if !j.holds(i, ir.RoleGrad) {
			continue
		}
		values, _, err := j.Tensor(t.Name, ir.RoleGrad)
		if err != nil {
			return nil, err
		}
		sum := 0.0
		for _, v := range values {
			sum += float64(v) * float64(v)
		}
		norms[group(t.Name)] += sum
	}
	for name, sum := range norms {
		norms[name] = math.Sqrt(sum)
	}
	return norms, nil
}

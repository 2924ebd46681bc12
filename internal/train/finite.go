package train

import (
	"cmp"
	"errors"
	"fmt"

	"sppo.dev/ir"
)

// Ruined returns the name of a trained tensor or optimizer state that has a NaN or an infinity, or "" if all values are finite. It
// reads what a checkpoint would contain from the devices.
func (j *Job) Ruined() (string, error) {
	name := ""
	answers, err := j.together(Order{What: OrderFinite}, func() (err error) { name, err = j.ruinedHere(); return err })
	for _, other := range answers {
		name = cmp.Or(name, string(other))
	}
	return name, err
}

// ruinedHere implements Ruined for the ranks of this process.
func (j *Job) ruinedHere() (string, error) {
	parts, _, err := divide(j.program, j.ranks)
	if err != nil {
		return "", err
	}
	found := make([]string, len(j.ranks))
	err = j.each(func(r *rank) error {
		for i := range parts[r.index] {
			p := &parts[r.index][i]
			err := p.stream(r.device, j.counted(finiteOnly(p.held.view.DType)))
			if errors.Is(err, errNotFinite) {
				found[r.index] = fmt.Sprintf("%s of %s", p.of.role, p.of.Tensor.Tensor)
				return nil
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
	return cmp.Or(found...), err
}

var errNotFinite = errors.New("a value is not finite")

// finiteOnly is a writer that accepts whole values of a type, as long as they are finite.
type finiteOnly ir.DType

func (f finiteOnly) Write(b []byte) (int, error) {
	size := int(ir.DType(f).Bytes())
	if t := ir.DType(f); t != ir.F32 && t != ir.BF16 {
		return len(b), nil
	}
	for i := size; i <= len(b); i += size {
		if b[i-1]&0x7f == 0x7f && b[i-2]&0x80 != 0 { // the exponent, in the upper half of the value, is all ones
			return i - size, errNotFinite
		}
	}
	return len(b), nil
}

package cpu

import (
	"fmt"

	"sppo.dev/ir"
)

// Execute runs instructions that are not part of the program, one after another, and returns when they are
// done. Their operands are buffers of the code that the device has loaded; their streams are ignored. No
// section may be running. After an error, the contents of the buffers that the instructions write are
// undefined.
func (d *Device) Execute(instrs []ir.Instr) error {
	if d.direct == nil {
		d.direct = newStream(d, ir.Compute)
	}
	s := d.direct
	list := make([]bound, len(instrs))
	for i := range instrs {
		in := &instrs[i]
		if in.Info().Class == ir.ClassSync {
			return fmt.Errorf("internal: %s orders streams, of which there is one", in.Info().Name)
		}
		b := &binder{device: d, in: in, consts: d.program.Ranks[d.rank].Consts, stream: s}
		if list[i] = b.guarded(); b.err != nil {
			return fmt.Errorf("%s: %w", in.Info().Name, b.err)
		}
	}
	d.growTables()
	if len(s.scratch) < s.scratchNeed {
		s.scratch = make([]float32, s.scratchNeed)
	}
	for i := range list {
		if list[i].kernel != nil {
			list[i].kernel()
		} else if err := list[i].action(); err != nil {
			return fmt.Errorf("%s: %w", instrs[i].Info().Name, err)
		}
	}
	return nil
}

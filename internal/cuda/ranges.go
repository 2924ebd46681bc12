package cuda

import (
	"fmt"

	"sppo.dev/internal/cuda/nvtx"
	"sppo.dev/ir"
)

// ranges describe to a profiler what a rank is issuing: the section and, nested in it, the task and layer of
// the compute stream, in the notation of a program's text form.
type ranges struct {
	profiler *nvtx.Profiler
	sections [ir.NumSections]*nvtx.Name
	names    [ir.NumSections][]*nvtx.Name // name of the range that an instruction begins, or nil
	inside   bool
}

func (d *Device) nameRanges() {
	if d.machine.profiler == nil {
		return
	}
	d.ranges = &ranges{profiler: d.machine.profiler}
	for s := range ir.NumSections {
		d.ranges.sections[s] = nvtx.NameOf(fmt.Sprintf("rank %d %s", d.rank, s))
		code, last := d.code.Sections[s], ""
		d.ranges.names[s] = make([]*nvtx.Name, len(code))
		for pc := range code {
			if text := code[pc].Prov.String(); code[pc].Stream == ir.Compute && text != last {
				d.ranges.names[s][pc], last = nvtx.NameOf(text), text
			}
		}
	}
}

func (r *ranges) begin(s ir.Section) {
	if r != nil {
		r.profiler.Push(r.sections[s])
	}
}

func (r *ranges) at(s ir.Section, pc int) {
	if r == nil || r.names[s][pc] == nil {
		return
	}
	if r.inside {
		r.profiler.Pop()
	}
	r.profiler.Push(r.names[s][pc])
	r.inside = true
}

// issued ends the last inner range once all instructions have been issued; only waiting follows.
func (r *ranges) issued() {
	if r != nil && r.inside {
		r.profiler.Pop()
		r.inside = false
	}
}

func (r *ranges) end() {
	if r != nil {
		r.profiler.Pop()
	}
}

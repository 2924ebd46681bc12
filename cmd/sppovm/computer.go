package main

import (
	"fmt"
	"runtime"

	"sppo.dev/ir"
	"sppo.dev/vm"
	"sppo.dev/vm/cpu"
	"sppo.dev/vm/cpu/simd"
	"sppo.dev/vm/field"
	"sppo.dev/vm/world"
)

// computer holds the devices of the ranks and the transport between the ranks.
type computer struct {
	name      string // description
	kind      string // the same for computers whose results are rounded alike
	device    func(rank int) vm.Device
	transport vm.Transport    // nil: the memory of this process
	threads   int             // shared by the ranks; 0: each rank has its own device
	slowed    bool            // instructions take longer while they are measured
	notes     func() []string // remarks for the user; nil: none
	close     func()
}

// openField opens devices that compute over finite fields.
func openField(p *ir.Program) *computer {
	machine := field.New(p)
	return &computer{
		name: "field: exact sums; the figures are no losses, but those of programs with one meaning are equal", kind: "field",
		device: func(int) vm.Device { return machine.Device() }, close: func() {},
	}
}

// open opens the devices that the flags request. A program too large for the GPUs is refused before anything is
// allocated.
func (f *runFlags) open(p *ir.Program, w *world.World) (*computer, error) {
	switch f.device {
	case "cuda":
		return f.openGPUs(p, w)
	case "field":
		return openField(p), nil
	}
	threads := f.threads
	var transport vm.Transport
	if w != nil {
		local := vm.NewWired(w)
		w.OnFailure(local.Abort)
		transport = local
		if _, n := w.Local(); threads == 0 { // the processes of a host share its processors
			threads = max(1, runtime.NumCPU()/n)
		}
	}
	pool := simd.NewPool(threads)
	kind := simd.ISA()
	if f.blas == "openblas" {
		kind += ", OpenBLAS"
	}
	name := fmt.Sprintf("cpu, %d threads, %s", pool.Threads(), kind)
	return &computer{name: name, kind: kind, threads: pool.Threads(), device: func(int) vm.Device { return cpu.New(pool) },
		transport: transport, close: pool.Close}, nil
}

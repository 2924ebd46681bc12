package main

import (
	"fmt"
	"runtime"

	"sppo.dev/ir"
	"sppo.dev/vm"
	"sppo.dev/vm/cpu"
	"sppo.dev/vm/cpu/simd"
	"sppo.dev/vm/world"
)

// computer is what computes: where the devices of ranks come from, and how they meet.
type computer struct {
	name      string // for people
	kind      string // what it has in common with others that round alike
	device    func(rank int) vm.Device
	transport vm.Transport    // nil: in the memory of this process
	threads   int             // that ranks share; 0: each computes on a device of its own
	slowed    bool            // measuring when instructions run slows them down
	notes     func() []string // what the user should know that stops nothing; nil: nothing
	close     func()
}

// open makes the one that was asked for. A program that GPUs have no room for is refused before anything is allocated.
func (f *runFlags) open(p *ir.Program, w *world.World) (*computer, error) {
	if f.device == "cuda" {
		return f.openGPUs(p, w)
	}
	threads := f.threads
	var transport vm.Transport
	if w != nil {
		local := vm.NewWired(w)
		w.OnFailure(local.Abort)
		transport = local
		if _, n := w.Local(); threads == 0 { // processes of a host share its processors
			threads = max(1, runtime.NumCPU()/n)
		}
	}
	pool := simd.NewPool(threads)
	name := fmt.Sprintf("cpu, %d threads, %s", pool.Threads(), simd.ISA())
	if f.blas == "openblas" {
		name += ", OpenBLAS"
	}
	return &computer{name: name, kind: simd.ISA(), threads: pool.Threads(), device: func(int) vm.Device { return cpu.New(pool) },
		transport: transport, close: pool.Close}, nil
}

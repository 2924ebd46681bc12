package main

import (
	"fmt"
	"os"
	"runtime"

	"sppo.dev/cuda"
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
	transport vm.Transport // nil: in the memory of this process
	threads   int          // that ranks share; 0: each computes on a device of its own
	slowed    bool         // measuring when instructions run slows them down
	close     func()
}

// set says whether a variable of the environment is set.
func set(variable string) bool { return os.Getenv(variable) == "1" }

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

func (f *runFlags) openGPUs(p *ir.Program, w *world.World) (*computer, error) {
	o := cuda.Options{NCCL: f.nccl, Tune: f.tune, Graphs: f.graphs, Sync: set(cuda.SyncVariable), Portable: set(cuda.PortableVariable)}
	if w != nil {
		first, end := w.Ranks()
		local, _ := w.Local()
		o.NCCL = true // memory of another process is out of reach
		o.World = &cuda.World{First: first, End: end, FirstOnHost: local * (end - first), Share: w.Share}
	}
	m, err := cuda.Open(o)
	if err != nil {
		return nil, err
	}
	if err := m.Check(p); err != nil {
		return nil, err
	}
	out := &computer{name: "cuda, " + m.Describe(), kind: m.Describe(), device: m.New, transport: m, slowed: true, close: func() {}}
	if w != nil {
		w.OnFailure(m.Abort)
		out.transport = &onGPUs{m, w}
	}
	return out, nil
}

// onGPUs is how ranks on GPUs of several processes meet: by NCCL, but abort has to reach all processes.
type onGPUs struct {
	*cuda.Machine
	world *world.World
}

// Abort implements vm.Transport.
func (g *onGPUs) Abort(reason error) {
	g.Machine.Abort(reason)
	g.world.Failed(reason)
}

package main

import (
	"fmt"
	"os"

	"sppo/cuda"
	"sppo/ir"
	"sppo/vm"
	"sppo/vm/cpu"
	"sppo/vm/cpu/simd"
)

// computer is what computes: where the devices of ranks come from, and how they meet.
type computer struct {
	name      string // for people
	device    func(rank int) vm.Device
	transport vm.Transport // nil: in the memory of this process
	threads   int          // that ranks share; 0: each computes on a device of its own
	slowed    bool         // measuring when instructions run slows them down
	close     func()
}

// set says whether a variable of the environment is set.
func set(variable string) bool { return os.Getenv(variable) == "1" }

// open makes the one that was asked for. A program that GPUs have no room for is refused before anything is allocated.
func (f *runFlags) open(p *ir.Program) (*computer, error) {
	if f.device == "cuda" {
		m, err := cuda.Open(cuda.Options{NCCL: f.nccl, Tune: f.tune, Graphs: f.graphs, Sync: set(cuda.SyncVariable), Portable: set(cuda.PortableVariable)})
		if err != nil {
			return nil, err
		}
		if err := m.Check(p); err != nil {
			return nil, err
		}
		return &computer{name: "cuda, " + m.Describe(), device: m.New, transport: m, slowed: true, close: func() {}}, nil
	}
	pool := simd.NewPool(f.threads)
	name := fmt.Sprintf("cpu, %d threads, %s", pool.Threads(), simd.ISA())
	if f.blas == "openblas" {
		name += ", OpenBLAS"
	}
	return &computer{name: name, threads: pool.Threads(), device: func(int) vm.Device { return cpu.New(pool) }, close: pool.Close}, nil
}

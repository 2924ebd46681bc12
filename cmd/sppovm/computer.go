package main

import (
	"fmt"
	"runtime"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/passes/words"
	"sppo.dev/internal/train"
	"sppo.dev/internal/train/world"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu"
	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/internal/vm/field"
	"sppo.dev/ir"
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

// open opens the devices that the flags request. A program too large for the GPUs, or for the memory of this computer, is
// refused before anything is allocated.
func (f *runFlags) open(p *ir.Program, w *world.World) (*computer, error) {
	if f.device == "cuda" {
		return f.openGPUs(p, w)
	}
	if err := f.hasMemory(p, w); err != nil {
		return nil, err
	}
	if f.device == "field" {
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
	name := fmt.Sprintf("cpu, %s, %s", words.Plural(pool.Threads(), "thread"), kind)
	return &computer{name: name, kind: kind, threads: pool.Threads(), device: func(int) vm.Device { return cpu.New(pool) },
		transport: transport, close: pool.Close}, nil
}

// hasMemory refuses a program whose ranks on this host need more memory than is free. Processes call it before any of them has
// written to its memory, because no rank writes before all processes are ready. A nil program, that of probe, is small.
func (f *runFlags) hasMemory(p *ir.Program, w *world.World) error {
	if p == nil || f.force {
		return nil
	}
	var arenas [ir.NumArenas]ir.Bytes
	var copies []ir.Bytes
	if f.saves.during() && !f.saves.wait {
		var err error
		if copies, err = train.CopyBytes(p); err != nil {
			return err
		}
	}
	n := 0
	for rank := range p.Ranks {
		if w != nil && !w.OnHost(rank) {
			continue
		}
		n++
		for a, bytes := range p.Codes[p.Ranks[rank].Code].Arenas {
			if f.device == "field" {
				bytes = field.Memory(bytes)
			}
			arenas[a] += bytes
		}
		if copies != nil {
			arenas[ir.Host] += copies[rank]
		}
	}
	need := fmt.Sprintf("%s needs %s of memory on this computer: %s of device memory and %s of host memory for %s", p.Name,
		arenas[ir.Device]+arenas[ir.Host], arenas[ir.Device], arenas[ir.Host], words.Plural(n, "rank"))
	return f.free.check(arenas[ir.Device]+arenas[ir.Host], need,
		"sppovm run --device sim simulates the job; to run it on this computer, compile it with --cluster local, for fewer ranks, or with a smaller model; --force runs it anyway")
}

// freeMemory returns the free memory of this computer; nil: as the operating system reports it.
type freeMemory func() vm.FreeMemory

// check returns an error if more memory is needed than is free.
func (f freeMemory) check(need ir.Bytes, what, hint string) error {
	if f == nil {
		f = vm.ReadFreeMemory
	}
	free := f()
	if need <= free.Bytes() {
		return nil
	}
	return cli.DoesNotFit(fmt.Errorf("%s, but %s; %s", what, free, hint))
}

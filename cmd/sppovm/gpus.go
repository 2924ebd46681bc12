//go:build !static

package main

import (
	"fmt"

	"sppo.dev/internal/cuda"
	"sppo.dev/internal/train/probe"
	"sppo.dev/internal/train/world"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

func (f *runFlags) openGPUs(p *ir.Program, w *world.World) (*computer, error) {
	o := cuda.Options{NCCL: f.nccl, Tune: f.tune, Graphs: f.graphs}
	if w != nil {
		first, end := w.Ranks()
		local, _ := w.Local()
		o.NCCL = true // the memory of other processes cannot be read directly
		o.World = &cuda.World{First: first, End: end, FirstOnHost: local * (end - first), Share: w.Share}
	}
	m, err := cuda.Open(o)
	if err != nil {
		return nil, err
	}
	if err := m.Check(p); err != nil {
		return nil, err
	}
	out := &computer{name: "cuda, " + m.Describe(), kind: m.Kind(), device: m.New, transport: m, slowed: true, notes: m.Notes, close: func() {}}
	if w != nil {
		w.OnFailure(m.Abort)
		out.transport = &onGPUs{m, w}
	}
	return out, nil
}

// onGPUs connects the GPUs of several processes through NCCL; its Abort reaches all processes.
type onGPUs struct {
	*cuda.Machine
	world *world.World
}

// Abort implements vm.Transport.
func (g *onGPUs) Abort(reason error) {
	g.Machine.Abort(reason)
	g.world.Failed(reason)
}

// deviceReserve is the GPU memory left for the context, libraries and workspaces.
const deviceReserve = 4 << 30

func (f *probeFlags) openCUDA(b *bench) error {
	options := cuda.Options{NCCL: f.run.nccl, Tune: f.run.tune}
	m, err := cuda.Open(options)
	if err != nil {
		return err
	}
	cards := m.Cards()
	if b.facts.Ranks == 0 {
		b.facts.Ranks = len(cards)
	}
	shared := int64((b.facts.Ranks + len(cards) - 1) / len(cards))
	b.scale, b.about = probe.GPU, fmt.Sprintf("cuda, %s, %s", m.Describe(), count(b.facts.Ranks, "rank"))
	b.facts.DeviceMemory, b.facts.HostMemory = max(cards[0].Memory-deviceReserve, cards[0].Memory/2)/shared, hostMemory()*3/4
	if c := sheetOf(cards[0].Name); c != nil {
		b.facts.PeakBF16, b.facts.PeakF32, b.facts.PeakSource = c.PeakBF16, c.PeakF32, "not measured: taken from "+c.Name+".sppo, which is shipped"
	}
	b.Open = func(p *ir.Program) (func(int) vm.Device, vm.Transport, error) {
		again, err := m.Again()
		if err != nil {
			return nil, nil, err
		}
		return again.New, again, again.Check(p)
	}
	return nil
}

// reportGPUs describes the available GPUs and libraries, and what is missing.
func reportGPUs() []string { return cuda.Report() }

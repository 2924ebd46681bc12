package kernels_test

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"sppo.dev/internal/cuda/emu"
	"sppo.dev/internal/cuda/kernels"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// device is a vm.Device that runs each kernel in the emulator as soon as it is launched, in this process's
// memory. It tests the table of launches together with the sources. It has one rank and executes all streams as
// one.
type device struct {
	library *emu.Library
	seed    uint64 // for the order of lanes
	hopper  bool   // use the kernels for Hopper
	engine  bool   // use Hopper's copy engine, too
	odd     bool   // use addresses that are not multiples of 16 (needs edged)
	edged   bool   // every buffer ends at the end of mapped memory, so that reading past it faults
	alone   bool   // launch every instruction separately
	own     [][]byte
	plans   []kernels.Plan
	maps    [][]byte
	program *ir.Program
	code    *ir.Code
	env     *vm.Env
	arenas  [ir.NumArenas][]byte
	scratch []byte
	section ir.Section
	round   int64
	peaks   [ir.NumArenas]ir.Bytes
	err     error
}

func (d *device) Load(p *ir.Program, rank int, env *vm.Env) error {
	d.program, d.code, d.env = p, &p.Codes[p.Ranks[rank].Code], env
	for a := range d.arenas {
		m, err := unix.Mmap(-1, 0, int(d.code.Arenas[a])+1, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
		if err != nil {
			return err
		}
		d.arenas[a] = m[:d.code.Arenas[a]]
	}
	if d.edged {
		for _, b := range d.code.Buffers {
			if err := d.edge(int(b.Size)); err != nil {
				return err
			}
		}
	}
	m, err := unix.Mmap(-1, 0, 8<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	d.scratch = m
	return err
}

// edge allocates a buffer that ends at a protected page.
func (d *device) edge(n int) error {
	page, size := os.Getpagesize(), n
	if d.odd { // not aligned for vectors of 16 bytes
		size += 8
	}
	pages := (size+page-1)/page*page + page
	m, err := unix.Mmap(-1, 0, pages, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return err
	}
	d.maps, d.own = append(d.maps, m), append(d.own, m[pages-page-size:][:n:n])
	return unix.Mprotect(m[pages-page:], unix.PROT_NONE)
}

func (d *device) Begin(s ir.Section, round int64) error { d.section, d.round = s, round; return nil }
func (d *device) Comm(pc int)                           { d.err = errors.New("the emulated device has no peers") }
func (d *device) Record(pc int)                         {}
func (d *device) Wait(pc int)                           {}
func (d *device) Join() error                           { return d.err }
func (d *device) Peak(a ir.Arena) ir.Bytes              { return d.peaks[a] }

func (d *device) Copy(pc int) {
	in := d.instr(pc)
	copy(d.view(in.Args[0]), d.view(in.Args[1]))
}

func (d *device) Launch(pc int) {
	in := d.instr(pc)
	if in.Op == ir.LoadTokens {
		d.tokens(in)
	} else if err := d.kernel(pc); err != nil && d.err == nil {
		d.err = err
	}
}

func (d *device) tokens(in *ir.Instr) {
	attr := func(name string) int64 { return in.Attr(name).Int(nil) }
	w := vm.Window{Batch: int(attr("batch")), Chunks: int(attr("chunks")), Sequence: attr("replica") + attr("first"), Position: attr("position")}
	if err := w.Load(d.env.Tokens, d.section, d.round, vm.Int32s(d.view(in.Args[0]))); err != nil {
		d.err = err
	}
}

func (d *device) kernel(pc int) error {
	if d.plans == nil {
		if err := d.bind(); err != nil {
			return err
		}
	}
	plan := d.plans[pc]
	for i := range d.scratch { // exposes kernels that read scratch before they write it
		d.scratch[i] = 0xff
		if int64(i) > plan.WorkspaceBytes+64 {
			break
		}
	}
	for _, l := range plan.Launches {
		if at := d.library.Source(l.Kernel); at != l.Source {
			return fmt.Errorf("the table says that %s stands in %s, but it is in %q", l.Kernel, l.Source, at)
		}
		var table []uint64
		for _, x := range l.Boxes {
			table = append(table, tensorMap(d.value(pc, x.Tensor, nil), x)...)
		}
		for _, a := range l.Table {
			table = append(table, d.value(pc, a, nil))
		}
		table = append(table, 0)
		var pins runtime.Pinner
		pins.Pin(&table[0])
		args := make([]uint64, len(l.Args))
		for i, a := range l.Args {
			args[i] = d.value(pc, a, table)
		}
		err := d.library.Launch(l.Kernel, l.Grid, l.Block, l.SharedBytes, args, d.seed)
		pins.Unpin()
		if err != nil {
			return err
		}
	}
	for i, b := range d.scratch[plan.WorkspaceBytes : plan.WorkspaceBytes+32] {
		if b != 0xff {
			return fmt.Errorf("a kernel wrote %d bytes behind its workspace", i)
		}
	}
	return nil
}

// tensorMap returns a tensor map in the emulator's format.
func tensorMap(at uint64, x kernels.Boxes) []uint64 {
	m := make([]uint64, kernels.MapBytes/8)
	m[0] = at
	stride := uint64(2)
	for i := range x.Extent {
		m[1+i], m[8+i] = uint64(x.Extent[i]), uint64(x.Box[i])
		if stride *= m[1+i]; i < 3 {
			m[5+i] = stride
		}
	}
	return m
}

// bind plans the step's instructions, joining them if allowed.
func (d *device) bind() error {
	card := kernels.Card{Hopper: d.hopper, CopyEngine: d.engine}
	code := d.code.Sections[ir.SectionStep]
	d.plans = make([]kernels.Plan, len(code))
	for pc := range code {
		if code[pc].Info().Class != ir.ClassKernel {
			continue
		}
		var err error
		if d.plans[pc], err = kernels.Bind(card, d.program, 0, &code[pc]); err != nil {
			return err
		}
	}
	if d.alone {
		return nil
	}
	return kernels.Join(card, d.program, 0, d.code, ir.SectionStep, d.plans)
}

// value returns the value of an argument of the plan at pc.
func (d *device) value(pc int, a kernels.Arg, table []uint64) uint64 {
	switch a.Kind {
	case kernels.Operand:
		if v := d.code.Sections[ir.SectionStep][pc+int(a.Apart)].Args[a.Value]; v.Present() {
			return address(d.view(v)) + a.Offset
		}
		return 0
	case kernels.Workspace:
		return address(d.scratch) + a.Value
	case kernels.Table:
		return uint64(uintptr(unsafe.Pointer(&table[0])))
	}
	return a.Value
}

func address(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

func (d *device) instr(pc int) *ir.Instr {
	in := &d.code.Sections[d.section][pc]
	for _, v := range in.Args {
		if v.Present() {
			b := &d.code.Buffers[v.Buffer]
			d.peaks[b.Arena] = max(d.peaks[b.Arena], b.Offset+v.Offset+v.Bytes())
		}
	}
	return in
}

func (d *device) view(v ir.View) []byte {
	b := &d.code.Buffers[v.Buffer]
	if d.edged {
		return d.own[v.Buffer][v.Offset:][:v.Bytes()]
	}
	return d.arenas[b.Arena][b.Offset+v.Offset:][:v.Bytes()]
}

func (d *device) Read(v ir.View, out []byte) error { copy(out, d.view(v)); return nil }
func (d *device) Write(v ir.View, in []byte) error { copy(d.view(v), in); return nil }

func (d *device) Close() error {
	for _, m := range append(append(d.maps, d.scratch), d.arenas[:]...) {
		if m != nil {
			if err := unix.Munmap(m[:cap(m)]); err != nil {
				return err
			}
		}
	}
	return nil
}

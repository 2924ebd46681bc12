// Package cpu implements the device that computes in Go. It is the reference for every other device, and the
// device for machines without a GPU.
//
//	cpu.go        Device: arenas, load, begin, join
//	stream.go     streams and events: goroutines, their queues, how they block and wake
//	execute.go    runs instructions outside a program, one after another
//	bind.go       turns instructions into closures over slices; the table of kernels by opcode
//	activation.go, attention.go, elementwise.go, embed.go, loss.go, matmul.go, norm.go, optimizer.go, rope.go
//	              kernels, one file for each family of opcodes
//	move.go       opcodes that move bytes, exchange messages or read the data set
//	arena_*.go    memory
//	pulse.go      the current speed of the processors, for measurements
//	race_*.go     differences under the race detector
//
// The arithmetic of opcodes is in package simd. Kernels compute in f32; values stored as bf16 are rounded to
// nearest even. Results are bit-identical for any number of threads.
//
// The package depends neither on the purpose of an instruction nor on how ranks are connected; the Transport
// connects them.
package cpu

import (
	"fmt"
	"sync"
	"sync/atomic"

	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/ir"
)

// Device runs one rank on this computer's processors. Streams are goroutines, so a missing event causes a real
// data race.
type Device struct {
	pool    *simd.Pool
	program *ir.Program
	code    *ir.Code
	rank    int
	env     *vm.Env
	arenas  [ir.NumArenas][]byte
	free    []func()

	bound   [ir.NumSections][]bound
	streams [ir.NumStreams]*stream
	direct  *stream // stream for Execute; no goroutine serves it
	events  []event
	tables  map[ropeKey]*ropeTable

	// The section being issued. Written by Begin, while all streams are idle.
	section    ir.Section
	round      int64
	generation uint64 // an event counts as recorded if it holds this value

	joined sync.WaitGroup
	failed atomic.Bool
	once   sync.Once
	err    error
}

// New returns a device whose kernels share the workers of a pool with the pool's other devices; if pool is nil,
// they use one thread.
func New(pool *simd.Pool) *Device {
	if raceEnabled {
		pool = nil // its synchronisation could order streams that nothing else orders, and so hide races
	}
	return &Device{pool: pool}
}

// Load implements vm.Device.
func (d *Device) Load(p *ir.Program, rank int, env *vm.Env) error {
	d.program, d.rank, d.env = p, rank, env
	d.code = &p.Codes[p.Ranks[rank].Code]
	for a := range d.arenas {
		memory, free, err := newArena(int(d.code.Arenas[a]))
		if err != nil {
			return fmt.Errorf("allocating the %s arena of %s: %w", ir.Arena(a), d.code.Arenas[a], err)
		}
		d.arenas[a] = memory
		d.free = append(d.free, free)
	}
	d.tables = map[ropeKey]*ropeTable{}
	d.makeStreams()
	for s := range ir.NumSections {
		if err := d.bind(s); err != nil {
			return err
		}
	}
	d.fillTables()
	for _, s := range d.streams {
		if s == nil {
			continue
		}
		memory, free, err := newArena(4 * s.scratchNeed)
		if err != nil {
			return fmt.Errorf("allocating scratch: %w", err)
		}
		d.free = append(d.free, free)
		s.scratch = vm.Float32s(memory)
		s.serving = true
		go s.serve()
	}
	return nil
}

// makeStreams creates the streams that the code uses, each with a queue that holds its longest section.
func (d *Device) makeStreams() {
	events := int32(0)
	for s := range ir.NumSections {
		var counts [ir.NumStreams]int
		for pc := range d.code.Sections[s] {
			counts[d.code.Sections[s][pc].Stream]++
		}
		for i, n := range counts {
			if n == 0 {
				continue
			}
			if d.streams[i] == nil {
				d.streams[i] = newStream(d, ir.Stream(i))
			}
			if n+1 > len(d.streams[i].queue) { // plus one for the end of the section
				d.streams[i].queue = make([]int32, n+1)
			}
		}
		events = max(events, d.code.Events[s])
	}
	d.events = make([]event, events)
}

// Begin implements vm.Device.
func (d *Device) Begin(section ir.Section, round int64) error {
	d.section, d.round = section, round
	d.generation++
	for _, s := range d.streams {
		if s != nil {
			s.base, s.next = s.issued, s.issued
		}
	}
	return d.err
}

// Launch implements vm.Device.
func (d *Device) Launch(pc int) { d.issue(pc) }

// Copy implements vm.Device.
func (d *Device) Copy(pc int) { d.issue(pc) }

// Comm implements vm.Device.
func (d *Device) Comm(pc int) { d.issue(pc) }

// Record implements vm.Device.
func (d *Device) Record(pc int) { d.issue(pc) }

// Wait implements vm.Device.
func (d *Device) Wait(pc int) { d.issue(pc) }

func (d *Device) issue(pc int) { d.streams[d.bound[d.section][pc].stream].push(int32(pc)) }

// Join implements vm.Device.
func (d *Device) Join() error {
	for _, s := range d.streams {
		if s != nil && s.next != s.base {
			d.joined.Add(1)
			s.push(endOfSection)
			s.publish()
		}
	}
	d.joined.Wait()
	return d.err
}

// Doing implements vm.Watched.
func (d *Device) Doing() (list []vm.Doing) {
	for i, s := range d.streams {
		if s == nil {
			continue
		}
		if pc := s.at.Load(); pc >= 0 {
			list = append(list, vm.Doing{Stream: ir.Stream(i), PC: pc})
		}
	}
	return list
}

// fail keeps the first error, tells the other ranks and wakes every stream, so that no stream waits forever.
func (d *Device) fail(err error) {
	d.once.Do(func() {
		d.err = err
		d.failed.Store(true)
		d.env.Transport.Abort(fmt.Errorf("rank %d: %w", d.rank, err))
		for _, s := range d.streams {
			if s != nil {
				s.rouse()
			}
		}
	})
}

// Read implements vm.Device.
func (d *Device) Read(v ir.View, out []byte) error {
	b, err := d.bytes(v)
	if err == nil && len(b) != len(out) {
		err = fmt.Errorf("reading %d bytes of a view of %d", len(out), len(b))
	}
	copy(out, b)
	return err
}

// Write implements vm.Device.
func (d *Device) Write(v ir.View, in []byte) error {
	b, err := d.bytes(v)
	if err == nil && len(b) != len(in) {
		err = fmt.Errorf("writing %d bytes to a view of %d", len(in), len(b))
	}
	copy(b, in)
	return err
}

// Peak implements vm.Device.
func (d *Device) Peak(a ir.Arena) ir.Bytes {
	peak := ir.Bytes(0)
	for _, s := range d.streams {
		if s != nil {
			peak = max(peak, s.peaks[a])
		}
	}
	return peak
}

// Close implements vm.Device.
func (d *Device) Close() error {
	for _, s := range d.streams {
		if s != nil && s.serving {
			s.base, s.next = s.issued, s.issued
			s.push(endOfStream)
			s.publish()
		}
	}
	d.streams = [ir.NumStreams]*stream{}
	for _, free := range d.free {
		free()
	}
	d.free, d.arenas, d.bound = nil, [ir.NumArenas][]byte{}, [ir.NumSections][]bound{}
	return nil
}

// bytes returns the bytes of a view.
func (d *Device) bytes(v ir.View) ([]byte, error) {
	lo, hi, err := d.code.Locate(&v)
	if err != nil {
		return nil, err
	}
	return d.arenas[d.code.Buffers[v.Buffer].Arena][lo:hi:hi], nil
}

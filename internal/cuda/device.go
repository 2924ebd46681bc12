package cuda

import (
	"cmp"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"sppo.dev/internal/cuda/cublas"
	"sppo.dev/internal/cuda/driver"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// Device is one rank on a GPU. Load locks the calling goroutine to its thread, because contexts belong to
// threads.
type Device struct {
	machine *Machine
	api     *driver.API
	gpu     *gpu
	program *ir.Program
	code    *ir.Code
	rank    int
	env     *vm.Env

	locked       bool
	context      driver.Context
	device       driver.Ptr                // the arena
	host         *pinned                   // the arena, followed by staged tokens
	scratch      [ir.NumStreams]driver.Ptr // workspace of kernels
	scratchBytes [ir.NumStreams]int64
	streams      [ir.NumStreams]driver.Stream
	joins        [ir.NumStreams]driver.Call
	events       []driver.Event
	modules      map[string]driver.Module  // by source
	functions    map[[2]string]driver.Func // by source and name
	allowed      map[driver.Func]int64     // dynamic shared memory above the default limit
	tables       map[string]driver.Ptr     // tables that launches read, by content
	blas         *cublas.Handle            // nil: our own kernels compute products
	free         []func() error            // in the order of creation; Close runs them in reverse
	bound        [ir.NumSections][]bound
	peaks        [ir.NumArenas]ir.Bytes
	spans        *spanEvents      // nil: no section is timed
	timing       bool             // this section is timed
	comms        map[int]*guarded // NCCL's communicators, by index
	ranges       *ranges          // nil: no profiler is attached
	graphs       *graphs          // nil: calls are made one by one
	records      *pinned          // records of waits that gave up; nil: waits are not limited
	recorded     []string         // the sources that have a record, in the order of the records

	section ir.Section
	round   int64
	err     error
	at      atomic.Uint64 // the rank's activity, as encoded by doingAt
}

// bound is an instruction ready to be issued.
type bound struct {
	actions []action
	tokens  *tokenLoad // its token load, or nil
	stream  ir.Stream
	top     [ir.NumArenas]ir.Bytes // highest byte touched
}

// action is a driver call, or a group of calls.
type action interface{ Make() error }

// Load implements vm.Device.
func (d *Device) Load(p *ir.Program, rank int, env *vm.Env) error {
	d.program, d.rank, d.env = p, rank, env
	d.api, d.code = d.machine.api, &p.Codes[p.Ranks[rank].Code]
	d.modules, d.functions, d.allowed = map[string]driver.Module{}, map[[2]string]driver.Func{}, map[driver.Func]int64{}
	d.tables = map[string]driver.Ptr{}
	err := d.load()
	if err != nil {
		d.machine.Abort(fmt.Errorf("rank %d: %w", rank, err))
	}
	return err
}

func (d *Device) load() error {
	steps := []func() error{d.enter, d.reserve, d.makeStreams, d.meet, d.openBLAS, d.bindAll, d.makeGraphs}
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	d.nameRanges()
	return nil
}

// enter makes the GPU's context current on this goroutine's thread.
func (d *Device) enter() (err error) {
	runtime.LockOSThread()
	d.locked = true
	if d.context, err = primary(d.api, d.gpu.device); err != nil {
		return err
	}
	if err := d.api.SetCurrent(d.context); err != nil {
		return err
	}
	d.later(func() error { return d.api.SetCurrent(0) })
	return d.reachPeers()
}

// contexts are the primary contexts of GPUs, kept until the process ends: releasing the last reference
// destroys a context, and the next device would have to wait for a new one.
var contexts = struct {
	mu   sync.Mutex
	held map[driver.Device]driver.Context
}{held: map[driver.Device]driver.Context{}}

func primary(api *driver.API, gpu driver.Device) (driver.Context, error) {
	contexts.mu.Lock()
	defer contexts.mu.Unlock()
	if c, ok := contexts.held[gpu]; ok {
		return c, nil
	}
	c, err := api.Retain(gpu)
	if err == nil {
		contexts.held[gpu] = c
	}
	return c, err
}

// reachPeers lets kernels read the memory of other GPUs, for sums over ranks that communicate by copies.
func (d *Device) reachPeers() error {
	if d.machine.collect != nil {
		return nil
	}
	for _, g := range d.machine.gpus[:min(len(d.machine.gpus), len(d.program.Ranks))] {
		if g == d.gpu {
			continue
		}
		peer, err := primary(d.api, g.device)
		if err != nil {
			return err
		}
		if err := d.api.EnablePeer(peer); err != nil {
			return fmt.Errorf("GPU %d cannot access the memory of GPU %d; connect ranks through NCCL instead: "+
				"%w", d.gpu.index, g.index, err)
		}
	}
	return nil
}

// later registers a function for Close to call.
func (d *Device) later(undo func() error) { d.free = append(d.free, undo) }

// reserve allocates both arenas. Errors give the available and the required size.
func (d *Device) reserve() error {
	need := d.code.Arenas
	free, total, err := d.api.MemInfo()
	if err != nil {
		return err
	}
	if int64(need[ir.Device]) > free {
		return fmt.Errorf("GPU %d (%s) has %s free of %s, but the device arena needs %s (and the host arena %s)",
			d.gpu.index, d.gpu.name, ir.Bytes(free), ir.Bytes(total), need[ir.Device], need[ir.Host])
	}
	if d.device, err = d.alloc(int64(need[ir.Device])); err != nil {
		return fmt.Errorf("allocating the device arena of %s: %w", need[ir.Device], err)
	}
	d.host, err = newPinned(d.api, ir.Plus(int64(need[ir.Host]), d.tokenBytes()), d.machine.piece, d.gpu.bus)
	if err != nil {
		return fmt.Errorf("pinning the host arena of %s: %w", need[ir.Host], err)
	}
	d.later(d.host.close)
	return nil
}

// alloc allocates device memory that Close frees. For 0 bytes, it allocates nothing.
func (d *Device) alloc(bytes int64) (driver.Ptr, error) {
	if bytes == 0 {
		return 0, nil
	}
	p, err := d.api.Alloc(bytes)
	if err == nil {
		d.later(func() error { return d.api.Free(p) })
	}
	return p, err
}

// makeStreams creates the streams and events that the code uses.
func (d *Device) makeStreams() error {
	events := int32(0)
	for s := range ir.NumSections {
		events = max(events, d.code.Events[s])
		for pc := range d.code.Sections[s] {
			if err := d.makeStream(d.code.Sections[s][pc].Stream); err != nil {
				return err
			}
		}
	}
	for range events {
		e, err := d.newEvent(false)
		if err != nil {
			return err
		}
		d.events = append(d.events, e)
	}
	return nil
}

func (d *Device) makeStream(s ir.Stream) error {
	if d.streams[s] != 0 {
		return nil
	}
	// Communication is urgent, so that it need not wait until every block of a long kernel has started.
	stream, err := d.api.NewStream(s != ir.Compute)
	if err != nil {
		return err
	}
	d.streams[s], d.joins[s] = stream, d.api.Join(stream)
	d.later(func() error { return d.api.DestroyStream(stream) })
	return nil
}

// newEvent creates an event that lives until Close.
func (d *Device) newEvent(timed bool) (driver.Event, error) {
	e, err := d.api.NewEvent(timed)
	if err == nil {
		d.later(func() error { return d.api.DestroyEvent(e) })
	}
	return e, err
}

// meet opens the communicators if ranks are connected by NCCL.
func (d *Device) meet() (err error) {
	if d.machine.collect != nil {
		d.comms, err = d.machine.collect.join(d)
	}
	return err
}

func (d *Device) openBLAS() (err error) {
	if d.machine.blas == nil {
		return nil
	}
	if d.blas, err = d.machine.blas.NewHandle(); err == nil {
		d.later(d.blas.Close)
	}
	return err
}

// Begin implements vm.Device.
func (d *Device) Begin(section ir.Section, round int64) error {
	d.section, d.round = section, round
	d.ranges.begin(section)
	if d.timing = d.spans != nil && !d.env.Spans.Off; d.err == nil && d.timing {
		d.keep(d.spans.begin(d))
	}
	if d.err == nil {
		d.keep(d.graphs.begin(d))
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

// issue makes an instruction's calls. After an error nothing more is issued.
func (d *Device) issue(pc int) {
	if d.err != nil {
		return
	}
	d.at.Store(doingAt(doingIssue, int(d.section), pc))
	d.ranges.at(d.section, pc)
	b := &d.bound[d.section][pc]
	if d.graphs != nil && d.graphs.replaying {
		if b.tokens != nil {
			d.failAt(pc, b.tokens.fill())
		}
		return
	}
	actions := b.actions
	if d.spans != nil && !d.timing {
		actions = actions[1 : len(actions)-1]
	}
	for _, a := range actions {
		if err := a.Make(); err != nil {
			d.failAt(pc, err)
			return
		}
	}
	if d.machine.options.Sync {
		if err := cmp.Or(d.api.Synchronize(d.streams[b.stream]), d.gaveUp()); err != nil {
			d.failAt(pc, err)
			return
		}
	}
	d.peaks[ir.Device] = max(d.peaks[ir.Device], b.top[ir.Device])
	d.peaks[ir.Host] = max(d.peaks[ir.Host], b.top[ir.Host])
}

func (d *Device) failAt(pc int, err error) {
	if err == nil {
		return
	}
	d.keep(fmt.Errorf("%s: %w", vm.At(d.program, d.section, pc, &d.code.Sections[d.section][pc]), err))
}

// keep remembers the first error and reports it to the other ranks.
func (d *Device) keep(err error) {
	if err == nil || d.err != nil {
		return
	}
	d.err = err
	reason := fmt.Errorf("rank %d: %w", d.rank, err)
	d.machine.Abort(reason)
	d.env.Transport.Abort(reason)
}

// Join implements vm.Device. Even after a failure, it returns only when no stream uses the arenas any longer.
func (d *Device) Join() error {
	d.ranges.issued()
	defer d.ranges.end()
	d.keep(d.graphs.end(d))
	for s, stream := range d.streams {
		if stream == 0 {
			continue
		}
		d.at.Store(doingAt(doingJoin, s, 0))
		if err := d.await(ir.Stream(s)); err != nil {
			d.keep(fmt.Errorf("section %s, stream %s: %w%s", d.section, ir.Stream(s), err, hintSync(d.machine.options.Sync)))
			_ = d.api.Synchronize(stream) // peers may free their memory next; the first error has been reported
		}
	}
	d.at.Store(0)
	d.keep(d.gaveUp())
	if d.err == nil && d.timing {
		d.keep(d.spans.collect(d))
	}
	return d.err
}

// States of a rank that is not idle: issuing an instruction of a section, or waiting for a stream.
const (
	doingIssue = 1 + iota
	doingJoin
)

func doingAt(what, of, pc int) uint64 { return uint64(what)<<48 | uint64(of)<<32 | uint64(pc) }

// Doing implements vm.Watched. A GPU does not report the current instruction of a stream. But ranks of one
// process wait for each other on the host when they issue messages and collectives, so a rank that waits there
// is known to be issuing that instruction.
func (d *Device) Doing() []vm.Doing {
	at := d.at.Load()
	of, pc := uint16(at>>32), int32(at)
	switch at >> 48 {
	case doingIssue:
		return []vm.Doing{{Stream: d.code.Sections[of][pc].Stream, PC: pc}}
	case doingJoin:
		return []vm.Doing{{Stream: ir.Stream(of), PC: vm.UnknownPC}}
	}
	return nil
}

// hintSync explains how to locate an error that appeared after its instruction was issued.
func hintSync(sync bool) string {
	if sync {
		return ""
	}
	return "; run with " + SyncVariable + "=1 to find the instruction"
}

// SyncVariable sets Options.Sync.
const SyncVariable = "SPPO_CUDA_SYNC"

// await waits for a stream. With NCCL it also checks whether a peer was lost, which the stream itself would
// not report.
func (d *Device) await(stream ir.Stream) error {
	if d.machine.collect != nil {
		return d.machine.collect.await(d, d.streams[stream])
	}
	return d.joins[stream].Make()
}

// Read implements vm.Device.
func (d *Device) Read(v ir.View, out []byte) error {
	p, err := d.place(v)
	switch {
	case err != nil:
		return err
	case len(out) != int(v.Bytes()):
		return fmt.Errorf("reading %d bytes of a view of %d", len(out), v.Bytes())
	case len(out) == 0:
		return nil
	case d.code.Buffers[v.Buffer].Arena == ir.Host:
		copy(out, d.hostBytes(v))
		return nil
	}
	return d.api.ToHost(out, p)
}

// Write implements vm.Device.
func (d *Device) Write(v ir.View, in []byte) error {
	p, err := d.place(v)
	switch {
	case err != nil:
		return err
	case len(in) != int(v.Bytes()):
		return fmt.Errorf("writing %d bytes to a view of %d", len(in), v.Bytes())
	case len(in) == 0:
		return nil
	case d.code.Buffers[v.Buffer].Arena == ir.Host:
		copy(d.hostBytes(v), in)
		return nil
	}
	if err := d.api.ToDevice(p, in); err != nil {
		return err
	}
	// ToDevice returns once the source buffer can be reused. Without this synchronisation, our streams would
	// not wait for the copy to finish.
	return d.api.Synchronize(0)
}

// Peak implements vm.Device.
func (d *Device) Peak(a ir.Arena) ir.Bytes { return d.peaks[a] }

// Close implements vm.Device. It may follow a failed Load.
func (d *Device) Close() error {
	var errs []error
	for _, stream := range d.streams {
		if stream != 0 && d.err == nil {
			errs = append(errs, d.api.Synchronize(stream))
		}
	}
	for i := len(d.free) - 1; i >= 0; i-- {
		errs = append(errs, d.free[i]())
	}
	d.free, d.bound, d.streams = nil, [ir.NumSections][]bound{}, [ir.NumStreams]driver.Stream{}
	if d.locked {
		d.locked = false
		runtime.UnlockOSThread()
	}
	if d.err != nil {
		return nil // after a GPU fault every call fails, and the fault has been reported
	}
	return errors.Join(errs...)
}

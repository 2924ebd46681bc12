package driver

import (
	"errors"
	"fmt"
	"math/bits"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Handles. A Ptr is an address in device memory or, where unified addressing allows it, in host memory.
type (
	Device  int32
	Context uintptr
	Stream  uintptr
	Event   uintptr
	Module  uintptr
	Func    uintptr
	Graph   uintptr
	Exec    uintptr // a graph that can be launched
	Ptr     uintptr
)

// Attributes of devices and functions.
const (
	AttrMultiprocessors      = 16
	AttrCapabilityMajor      = 75
	AttrCapabilityMinor      = 76
	AttrSharedPerBlockOptin  = 97
	funcMaxDynamicSharedSize = 8
)

const (
	streamNonBlocking    = 1
	eventDisableTiming   = 2
	hostRegisterPortable = 1
	hostRegisterMapped   = 2
	captureThreadLocal   = 1
)

// Version returns the CUDA version that the driver supports, such as 12.4.
func (a *API) Version() (string, error) {
	var v int32
	err := a.call(fnDriverGetVersion, uintptr(unsafe.Pointer(&v)))
	return fmt.Sprintf("%d.%d", v/1000, v%1000/10), err
}

// Devices lists the GPUs.
func (a *API) Devices() ([]Device, error) {
	var n int32
	if err := a.call(fnDeviceGetCount, uintptr(unsafe.Pointer(&n))); err != nil {
		return nil, err
	}
	out := make([]Device, n)
	for i := range out {
		if err := a.call(fnDeviceGet, uintptr(unsafe.Pointer(&out[i])), uintptr(i)); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// Name returns the vendor's name of a GPU.
func (a *API) Name(d Device) (string, error) {
	buffer := make([]byte, 256)
	err := a.call(fnDeviceGetName, uintptr(unsafe.Pointer(&buffer[0])), uintptr(len(buffer)-1), uintptr(d))
	return unix.ByteSliceToString(buffer), err
}

// PCIBus returns the PCI address of a GPU, such as 0000:3b:00.0.
func (a *API) PCIBus(d Device) (string, error) {
	buffer := make([]byte, 64)
	err := a.call(fnDeviceGetPCIBusID, uintptr(unsafe.Pointer(&buffer[0])), uintptr(len(buffer)-1), uintptr(d))
	return unix.ByteSliceToString(buffer), err
}

// Attribute returns a property of a GPU.
func (a *API) Attribute(attribute int, d Device) (int, error) {
	var v int32
	err := a.call(fnDeviceGetAttribute, uintptr(unsafe.Pointer(&v)), uintptr(attribute), uintptr(d))
	return int(v), err
}

// TotalMem returns a GPU's memory in bytes.
func (a *API) TotalMem(d Device) (int64, error) {
	var n uint64
	err := a.call(fnDeviceTotalMem, uintptr(unsafe.Pointer(&n)), uintptr(d))
	return int64(n), err
}

// Retain returns the primary context of a GPU, which all users in the process share.
func (a *API) Retain(d Device) (c Context, err error) {
	err = a.call(fnPrimaryCtxRetain, uintptr(unsafe.Pointer(&c)), uintptr(d))
	return c, err
}

// Release drops a reference to the primary context of a GPU.
func (a *API) Release(d Device) error { return a.call(fnPrimaryCtxRelease, uintptr(d)) }

// SetCurrent makes a context current on the calling thread; 0 removes it.
func (a *API) SetCurrent(c Context) error { return a.call(fnCtxSetCurrent, uintptr(c)) }

// EnablePeer lets the current context access the memory of another. It is not an error if access is already
// enabled.
func (a *API) EnablePeer(c Context) error {
	err := a.call(fnCtxEnablePeerAccess, uintptr(c), 0)
	if e := (*Error)(nil); errors.As(err, &e) && e.Code == alreadyEnabled {
		return nil
	}
	return err
}

// MemInfo returns the free and total memory of the current context's GPU.
func (a *API) MemInfo() (free, total int64, err error) {
	var f, t uint64
	err = a.call(fnMemGetInfo, uintptr(unsafe.Pointer(&f)), uintptr(unsafe.Pointer(&t)))
	return int64(f), int64(t), err
}

// Alloc allocates device memory.
func (a *API) Alloc(bytes int64) (p Ptr, err error) {
	err = a.call(fnMemAlloc, uintptr(unsafe.Pointer(&p)), uintptr(bytes))
	return p, err
}

// Free frees device memory.
func (a *API) Free(p Ptr) error { return a.call(fnMemFree, uintptr(p)) }

// Register pins host memory for all contexts, so that kernels can write to it. The memory must be outside the
// Go heap.
func (a *API) Register(memory []byte) error {
	return a.call(fnMemHostRegister, uintptr(unsafe.Pointer(&memory[0])), uintptr(len(memory)), hostRegisterPortable|hostRegisterMapped)
}

// Unregister unpins host memory.
func (a *API) Unregister(memory []byte) error {
	return a.call(fnMemHostUnregister, uintptr(unsafe.Pointer(&memory[0])))
}

// ToDevice copies to device memory and waits.
func (a *API) ToDevice(to Ptr, from []byte) error {
	return a.call(fnMemcpyHtoD, uintptr(to), uintptr(unsafe.Pointer(&from[0])), uintptr(len(from)))
}

// ToHost copies from device memory and waits.
func (a *API) ToHost(to []byte, from Ptr) error {
	return a.call(fnMemcpyDtoH, uintptr(unsafe.Pointer(&to[0])), uintptr(from), uintptr(len(to)))
}

// NewStream creates a stream that does not wait for the default stream. Blocks of an urgent stream's kernels
// are scheduled first when a multiprocessor becomes free.
func (a *API) NewStream(urgent bool) (s Stream, err error) {
	var least, greatest int32
	if err := a.call(fnStreamPriorityRange, uintptr(unsafe.Pointer(&least)), uintptr(unsafe.Pointer(&greatest))); err != nil {
		return 0, err
	}
	priority := least
	if urgent {
		priority = greatest
	}
	err = a.call(fnStreamCreate, uintptr(unsafe.Pointer(&s)), streamNonBlocking, uintptr(priority))
	return s, err
}

// DestroyStream destroys a stream.
func (a *API) DestroyStream(s Stream) error { return a.call(fnStreamDestroy, uintptr(s)) }

// Synchronize waits until a stream has finished everything issued to it.
func (a *API) Synchronize(s Stream) error { return a.call(fnStreamSynchronize, uintptr(s)) }

// Done reports whether a stream has finished everything issued to it.
func (a *API) Done(s Stream) (bool, error) {
	err := a.call(fnStreamQuery, uintptr(s))
	if e := (*Error)(nil); errors.As(err, &e) && e.Code == NotReady {
		return false, nil
	}
	return err == nil, err
}

// NewEvent creates an event; only a timed event records its time.
func (a *API) NewEvent(timed bool) (e Event, err error) {
	flags := uintptr(eventDisableTiming)
	if timed {
		flags = 0
	}
	err = a.call(fnEventCreate, uintptr(unsafe.Pointer(&e)), flags)
	return e, err
}

// DestroyEvent destroys an event.
func (a *API) DestroyEvent(e Event) error { return a.call(fnEventDestroy, uintptr(e)) }

// ElapsedMillis returns the time between two recorded events.
func (a *API) ElapsedMillis(from, to Event) (ms float32, err error) {
	err = a.call(fnEventElapsedTime, uintptr(unsafe.Pointer(&ms)), uintptr(from), uintptr(to))
	return ms, err
}

// LoadModule loads a cubin or PTX into the current context.
func (a *API) LoadModule(image []byte) (m Module, err error) {
	image = append(image[:len(image):len(image)], 0) // PTX is a C string; copying leaves shared images unchanged
	err = a.call(fnModuleLoadData, uintptr(unsafe.Pointer(&m)), uintptr(unsafe.Pointer(&image[0])))
	return m, err
}

// UnloadModule unloads a module.
func (a *API) UnloadModule(m Module) error { return a.call(fnModuleUnload, uintptr(m)) }

// Function returns a kernel of a module.
func (a *API) Function(m Module, name string) (f Func, err error) {
	text := append([]byte(name), 0)
	if err := a.call(fnModuleGetFunction, uintptr(unsafe.Pointer(&f)), uintptr(m), uintptr(unsafe.Pointer(&text[0]))); err != nil {
		return 0, fmt.Errorf("kernel %s: %w", name, err)
	}
	return f, nil
}

// Global returns a variable of a module.
func (a *API) Global(m Module, name string) (p Ptr, err error) {
	text, bytes := append([]byte(name), 0), uint64(0)
	err = a.call(fnModuleGetGlobal, uintptr(unsafe.Pointer(&p)), uintptr(unsafe.Pointer(&bytes)), uintptr(m), uintptr(unsafe.Pointer(&text[0])))
	if err != nil {
		return 0, fmt.Errorf("variable %s: %w", name, err)
	}
	return p, nil
}

// AllowShared raises a kernel's limit on dynamic shared memory, which is 48 KiB by default.
func (a *API) AllowShared(f Func, bytes int) error {
	return a.call(fnFuncSetAttribute, uintptr(f), funcMaxDynamicSharedSize, uintptr(bytes))
}

// TensorMaps reports whether the driver supports tensor maps, as drivers have since CUDA 12.
func (a *API) TensorMaps() bool { return a.Addrs[fnTensorMapEncodeTiled] != 0 }

// Values of the driver's enumerations for tensor maps.
const (
	mapBF16       = 9
	mapSwizzle32  = 1 // of rows of 32 bytes; those of 64 and 128 bytes follow
	mapPromote256 = 3
)

// TensorMap describes a dense bf16 tensor in device memory to the copy engine. The tensor has four dimensions,
// innermost first. It is loaded in boxes, whose rows of 128, 64 or 32 bytes have swizzled chunks. Elements outside
// the tensor are loaded as zeros.
func (a *API) TensorMap(at Ptr, extent, box [4]int64) ([]byte, error) {
	room := make([]byte, 192)
	// The driver requires this alignment; memory that C writes to does not move.
	start := -uintptr(unsafe.Pointer(&room[0])) & 63
	out := room[start : start+128 : start+128]
	var extents, strides [4]uint64
	var boxes, steps [4]uint32
	stride := uint64(2)
	for i := range extent {
		extents[i], boxes[i], steps[i] = uint64(extent[i]), uint32(box[i]), 1
		stride *= extents[i]
		strides[i] = stride // stride of the next dimension
	}
	swizzle := uintptr(mapSwizzle32 + bits.Len64(uint64(2*box[0]/32)) - 1)
	err := a.call(fnTensorMapEncodeTiled, uintptr(unsafe.Pointer(&out[0])), mapBF16, 4, uintptr(at), uintptr(unsafe.Pointer(&extents[0])),
		uintptr(unsafe.Pointer(&strides[0])), uintptr(unsafe.Pointer(&boxes[0])), uintptr(unsafe.Pointer(&steps[0])), 0, swizzle, mapPromote256, 0)
	return out, err
}

// Launch is the shape of a kernel launch and its stream.
type Launch struct {
	Func   Func
	Grid   [3]int
	Block  [3]int
	Shared int // bytes of dynamic shared memory
	Stream Stream
}

// Launch prepares a launch. Each argument consists of the bytes of a value, with the size that the kernel
// declares.
func (a *API) Launch(l Launch, arguments ...[]byte) Call {
	values := make([][]byte, len(arguments))
	// The list is null-terminated, for drivers that do not know the number of parameters.
	params := make([]uintptr, len(arguments)+1)
	for i, value := range arguments {
		aligned := make([]uint64, (len(value)+7)/8+1)
		values[i] = unsafe.Slice((*byte)(unsafe.Pointer(&aligned[0])), len(value))
		copy(values[i], value)
		params[i] = uintptr(unsafe.Pointer(&aligned[0]))
	}
	return Call{api: a, f: fnLaunchKernel, values: values, params: params, args: []uintptr{
		uintptr(l.Func), uintptr(l.Grid[0]), uintptr(l.Grid[1]), uintptr(l.Grid[2]),
		uintptr(l.Block[0]), uintptr(l.Block[1]), uintptr(l.Block[2]),
		uintptr(l.Shared), uintptr(l.Stream), uintptr(unsafe.Pointer(&params[0])), 0,
	}}
}

// Copy prepares a copy on a stream. Each address may be in device or host memory.
func (a *API) Copy(to, from Ptr, bytes int64, s Stream) Call {
	return Call{api: a, f: fnMemcpyAsync, args: []uintptr{uintptr(to), uintptr(from), uintptr(bytes), uintptr(s)}}
}

// Record prepares the recording of an event on a stream.
func (a *API) Record(e Event, s Stream) Call {
	return Call{api: a, f: fnEventRecord, args: []uintptr{uintptr(e), uintptr(s)}}
}

// Wait prepares a call that makes a stream wait for the work that an event recorded last.
func (a *API) Wait(s Stream, e Event) Call {
	return Call{api: a, f: fnStreamWaitEvent, args: []uintptr{uintptr(s), uintptr(e), 0}}
}

// Argument returns the bytes of an argument of a prepared launch.
func (c *Call) Argument(i int) []byte { return c.values[i] }

// SetCopy changes the addresses and size of a prepared copy.
func (c *Call) SetCopy(to, from Ptr, bytes int64) {
	c.args[0], c.args[1], c.args[2] = uintptr(to), uintptr(from), uintptr(bytes)
}

// SetEvent changes the event of a prepared wait.
func (c *Call) SetEvent(e Event) { c.args[1] = uintptr(e) }

// SetGrid changes the number of blocks of a prepared launch.
func (c *Call) SetGrid(blocks int) { c.args[1] = uintptr(blocks) }

// Join prepares a call that makes the host wait for a stream.
func (a *API) Join(s Stream) Call {
	return Call{api: a, f: fnStreamSynchronize, args: []uintptr{uintptr(s)}}
}

// BeginCapture starts a capture on a stream. Until EndCapture, the driver builds a graph from what this thread
// issues to that stream and to streams that wait for it, and runs none of it.
func (a *API) BeginCapture(s Stream) error {
	return a.call(fnStreamBeginCapture, uintptr(s), captureThreadLocal)
}

// EndCapture ends the capture on the stream where it began. All other captured streams must have been joined to
// it.
func (a *API) EndCapture(s Stream) (g Graph, err error) {
	err = a.call(fnStreamEndCapture, uintptr(s), uintptr(unsafe.Pointer(&g)))
	return g, err
}

// graphNodePriority keeps the priorities of the captured streams.
const graphNodePriority = 8

// Instantiate makes a graph executable.
func (a *API) Instantiate(g Graph) (x Exec, err error) {
	err = a.call(fnGraphInstantiate, uintptr(unsafe.Pointer(&x)), uintptr(g), graphNodePriority)
	return x, err
}

// LaunchGraph prepares the launch of an executable graph on a stream.
func (a *API) LaunchGraph(x Exec, s Stream) Call {
	return Call{api: a, f: fnGraphLaunch, args: []uintptr{uintptr(x), uintptr(s)}}
}

// DestroyGraph destroys a graph.
func (a *API) DestroyGraph(g Graph) error { return a.call(fnGraphDestroy, uintptr(g)) }

// DestroyExec destroys an executable graph.
func (a *API) DestroyExec(x Exec) error { return a.call(fnGraphExecDestroy, uintptr(x)) }

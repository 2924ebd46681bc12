package vm

import (
	"time"

	"sppo.dev/ir"
)

// Device holds the memory of one rank and runs its instructions. The loop in vm.go issues these instructions.
// Each stream runs its instructions in order; only events and messages impose an order between streams.
//
// Load does everything expensive: it allocates both arenas at exactly the sizes that the code declares, and
// binds every instruction of every section (cpu: a closure over slices; CUDA: a function and its launch
// arguments; simulator: a duration). Issuing by index then allocates nothing, and an instruction's error is
// reported once, by Join.
//
// All methods are called from one goroutine, which lives as long as the device. Therefore
//   - a CUDA device locks that goroutine to its thread in Load and makes its context current there once. Every method
//     is one or two driver calls without a thread switch: Launch is cuLaunchKernel, Copy cuMemcpyAsync, Comm an NCCL
//     call, Record and Wait cuEventRecord and cuStreamWaitEvent, Join the synchronisation of all streams;
//   - a simulator keeps a clock for each stream: Launch and Copy advance one, Record stores it, Wait takes the later
//     of two, Join the latest of all. Comm exchanges clocks with the peers and may block, because communication is
//     issued in one global order that cannot deadlock. Read returns NaN, nothing as large as the model is
//     allocated, and the device is a Clock;
//   - the cpu device has a goroutine for each stream, fed by queues.
type Device interface {
	// Load allocates the arenas of a rank and binds its code. The initial contents of arenas are unspecified.
	Load(p *ir.Program, rank int, env *Env) error

	// Begin selects the section whose instructions the following calls issue by index, and clears its events.
	// The round is the number of the step, counted from 1, or of the eval section, counted from 0.
	Begin(section ir.Section, round int64) error
	Launch(pc int) // a kernel, or loading tokens
	Copy(pc int)   // within or between arenas
	Comm(pc int)   // a message or a collective
	Record(pc int) // records an event on a stream
	Wait(pc int)   // makes a stream wait for an event
	// Join returns the first error of any stream, once all streams have finished the issued instructions
	Join() error

	// Read and Write copy the bytes of a view. They are called only between sections.
	Read(v ir.View, out []byte) error
	Write(v ir.View, in []byte) error
	// Peak returns the highest byte of an arena that an executed instruction has touched.
	Peak(a ir.Arena) ir.Bytes
	Close() error
}

// Clock is implemented by devices with virtual time.
type Clock interface {
	// Elapsed returns the duration of the last section, or false if the caller must measure it.
	Elapsed() (time.Duration, bool)
}

// Elapsed returns the duration of the last section according to the device's clock, or false if it has no clock.
func Elapsed(d Device) (time.Duration, bool) {
	if c, ok := d.(Clock); ok {
		return c.Elapsed()
	}
	return 0, false
}

// Watched is implemented by devices that know the current instruction of each stream while a section runs.
type Watched interface {
	// Doing returns the current instruction of each stream that has work. Any goroutine may call it during a
	// section.
	Doing() []Doing
}

// Doing is an instruction that has begun but not ended.
type Doing struct {
	Stream ir.Stream
	PC     int32 // or UnknownPC
}

// UnknownPC is the PC of a stream that has work, on a device that cannot tell which instruction is current.
const UnknownPC int32 = -1

// Env is the environment of a rank's device.
type Env struct {
	Transport Transport // connects the rank with others; a device with its own network uses only Abort
	Tokens    Tokens    // source for load_tokens
	Spans     *Spans    // nil: no timeline is recorded
}

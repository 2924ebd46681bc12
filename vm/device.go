package vm

import (
	"time"

	"sppo.dev/ir"
)

// Device owns the bytes and the time of one rank. The loop in vm.go tells it what to issue; what was issued runs in
// the order of its stream, and nothing but events and messages orders one stream against another.
//
// Load does everything that costs: it allocates both arenas in exactly the size that the code declares, and turns
// every instruction of every section into a bound form (the cpu: a closure over slices; CUDA: a function and its
// launch arguments; the simulator: a duration). Issuing by index then allocates nothing, and an instruction's error
// is reported once, by Join.
//
// All methods are called from one goroutine, which lives as long as the device. So
//   - a CUDA device locks that goroutine to its thread in Load, makes its context current there once, and every
//     method is a driver call or two without a hand-over: Launch is cuLaunchKernel, Copy cuMemcpyAsync, Comm an NCCL
//     call, Record and Wait cuEventRecord and cuStreamWaitEvent, Join the synchronisation of all streams;
//   - a simulator keeps a clock for each stream: Launch and Copy advance one, Record stores it, Wait takes the later
//     of two, Join the latest of all. Comm exchanges clocks with the peers and may block there, for communication is
//     issued in one global order that cannot deadlock. Read gives what is no number, nothing of the model's size
//     exists, and the device is a Clock;
//   - the cpu device has a goroutine for each stream, fed by queues.
type Device interface {
	// Load allocates the arenas of a rank and binds its code. Arenas start with unspecified contents.
	Load(p *ir.Program, rank int, env *Env) error

	// Begin names the section that following calls issue, by their index in it, and forgets its events. The round
	// counts steps from 1, and validation sections from 0.
	Begin(section ir.Section, round int64) error
	Launch(pc int) // a kernel, or tokens of the data set
	Copy(pc int)   // inside or between the arenas
	Comm(pc int)   // a message or a collective
	Record(pc int) // of the stream's point
	Wait(pc int)   // of the stream for an event
	// Join returns when every stream has done what was issued, with the first error of any.
	Join() error

	// Read and Write copy the bytes of a view out and in. Only between sections.
	Read(v ir.View, out []byte) error
	Write(v ir.View, in []byte) error
	// Peak is the highest byte of an arena that an executed instruction has touched.
	Peak(a ir.Arena) ir.Bytes
	Close() error
}

// Clock is for devices with a time of their own.
type Clock interface {
	// Elapsed is what the last section took; false if it took as long as the caller saw.
	Elapsed() (time.Duration, bool)
}

// Env is what a device needs from outside its rank.
type Env struct {
	Transport Transport // how it meets other ranks; a device with its own network uses it for Abort alone
	Tokens    Tokens    // where load_tokens takes them from
	Spans     *Spans    // nil: nobody wants to know when instructions ran
}

// Tokens is a source of tokens, safe for concurrent use.
type Tokens interface {
	// Tokens puts token position, position+1, ... of a sequence into out[0], out[stride], ... For a step the round is
	// the step's number and the sequence an index into its global batch; for a validation, into that eval section.
	Tokens(section ir.Section, round, sequence, position int64, out []int32, stride int) error
}

package cpu

import (
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// stream is a goroutine that executes instructions in the order of their issue. The queue holds a whole
// section, so issuing never blocks, and counters never wrap: instruction number n is entry n-base of the queue.
type stream struct {
	device  *Device
	index   ir.Stream
	queue   []int32
	serving bool

	base, next uint64 // used by the issuing goroutine: numbers of the section's first and next instructions
	issued     uint64 // number of the first instruction not yet published
	_          [64]byte
	published  atomic.Uint64
	sleeping   atomic.Bool
	wake       chan struct{}
	signal     func() // the method signalSleeper, bound to this stream
	_          [64]byte

	done        uint64       // used by the stream's goroutine, like all fields below
	at          atomic.Int32 // the entry that is being executed, or idle
	scratch     []float32
	scratchNeed int // grows while binding
	peaks       [ir.NumArenas]ir.Bytes
}

// Queue entries that are not instructions.
const (
	endOfSection int32 = -1
	endOfStream  int32 = -2
	idle         int32 = -3 // the queue is empty
)

// event counts as recorded if its generation equals the device's. A stream that blocks on the event first sets its
// bit in waiters.
type event struct {
	generation atomic.Uint64
	waiters    atomic.Uint32
}

// looks is the number of times that a stream polls before it starts to yield; yields is the number of times that
// it then yields before it blocks. Waking a goroutine costs several microseconds, and most waits are shorter. With
// ten times as many iterations, training is at least 10% slower if there are more ranks than processors.
const (
	looks  = 100
	yields = 20
)

func newStream(d *Device, index ir.Stream) *stream {
	s := &stream{device: d, index: index, wake: make(chan struct{}, 1)}
	s.signal = s.signalSleeper
	return s
}

// push fills the next entry of the queue.
func (s *stream) push(pc int32) {
	s.queue[s.next-s.base] = pc
	s.next++
	if s.next-s.issued >= publishEvery {
		s.publish()
	}
}

// publish hands over the pushed entries.
func (s *stream) publish() {
	s.issued = s.next
	s.published.Store(s.next)
	if s.sleeping.Load() {
		s.rouse()
	}
}

// rouse wakes the stream if it is blocked. A redundant wake is harmless, because the stream checks again. A woken
// goroutine joins the queue of its waker's processor, where a worker spinning on another processor would never
// find it. Therefore, if there is a spinning worker, that worker wakes the stream.
func (s *stream) rouse() {
	if !s.device.pool.Errand(&s.signal) {
		s.signal()
	}
}

func (s *stream) signalSleeper() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// serve is the main loop of the stream.
func (s *stream) serve() {
	for {
		s.at.Store(idle)
		to := s.await()
		for s.done < to {
			if s.execute(to) {
				return
			}
		}
	}
}

// await waits for new instructions and returns the number of instructions published so far.
func (s *stream) await() uint64 {
	for tries := 0; ; tries++ {
		if to := s.published.Load(); to != s.done {
			return to
		}
		switch {
		case tries < looks:
		case tries < looks+yields:
			runtime.Gosched()
		default:
			s.sleeping.Store(true)
			if s.published.Load() == s.done {
				<-s.wake
			}
			s.sleeping.Store(false)
		}
	}
}

// execute runs the queue entries numbered below `to` and reports whether the stream has ended. If a kernel panics,
// the device fails, and the stream skips the remaining entries.
func (s *stream) execute(to uint64) (ended bool) {
	defer func() {
		if r := recover(); r != nil {
			s.fail(fmt.Errorf("internal: %v\n%s", r, stack()))
			s.done++
		}
	}()
	d := s.device
	for ; s.done < to; s.done++ {
		pc := s.queue[s.done-s.base]
		s.at.Store(pc)
		switch {
		case pc == endOfSection:
			s.done++
			d.joined.Done()
			return false
		case pc == endOfStream:
			return true
		case d.failed.Load():
		case d.env.Spans != nil:
			s.timed(pc, d.env.Spans)
		default:
			s.step(&d.bound[d.section][pc])
		}
	}
	return false
}

func stack() string {
	buffer := make([]byte, 4096)
	return string(buffer[:runtime.Stack(buffer, false)])
}

// timed executes one instruction and records its start and end.
func (s *stream) timed(pc int32, spans *vm.Spans) {
	d, begin := s.device, time.Since(spans.Start)
	s.step(&d.bound[d.section][pc])
	spans.Streams[s.index] = append(spans.Streams[s.index], vm.Span{PC: pc, Begin: begin, End: time.Since(spans.Start)})
}

// step executes one instruction.
func (s *stream) step(b *bound) {
	switch {
	case b.kernel != nil:
		b.kernel()
	case b.action != nil:
		if err := b.action(); err != nil {
			s.fail(err)
			return
		}
	case b.record:
		s.recordEvent(&s.device.events[b.event])
	default:
		s.waitEvent(&s.device.events[b.event])
	}
	s.peaks[ir.Device] = max(s.peaks[ir.Device], b.top[ir.Device])
	s.peaks[ir.Host] = max(s.peaks[ir.Host], b.top[ir.Host])
}

func (s *stream) fail(err error) {
	d := s.device
	pc := int(s.at.Load())
	d.fail(fmt.Errorf("%s: %w", vm.At(d.program, d.section, pc, &d.code.Sections[d.section][pc]), err))
}

func (s *stream) recordEvent(e *event) {
	e.generation.Store(s.device.generation)
	if e.waiters.Load() == 0 {
		return
	}
	waiters := e.waiters.Swap(0)
	for i, other := range s.device.streams {
		if waiters>>i&1 != 0 {
			other.rouse()
		}
	}
}

func (s *stream) waitEvent(e *event) {
	d := s.device
	for tries := 0; e.generation.Load() != d.generation && !d.failed.Load(); tries++ {
		switch {
		case tries < looks:
		case tries < looks+yields:
			runtime.Gosched()
		case raceEnabled:
			time.Sleep(20 * time.Microsecond)
		default:
			e.waiters.Or(1 << s.index)
			if e.generation.Load() != d.generation && !d.failed.Load() {
				<-s.wake
			}
		}
	}
}

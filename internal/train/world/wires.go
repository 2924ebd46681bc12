package world

import (
	"bufio"
	"context"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"net"
	"sync"
	"time"

	"sppo.dev/internal/vm"
)

// Bytes are sent between ranks in frames:
//
//	kind   1 byte
//	wire   8 bytes, little-endian: the channel of the message
//	size   8 bytes, little-endian
//	CRC    of the data that follow, 4 bytes
//	CRC    of the 21 bytes before, 4 bytes
//
// The receiving end sends "ready" with the size that it expects. The data then follow in pieces, each in a
// frame with its size, so that messages of several streams can share a connection. The reader of a connection
// always knows the destination of bytes and never waits for anything else, so two processes cannot block each
// other on full sockets.
const (
	frameReady byte = iota
	frameData
	frameBytes = 25
	pieceBytes = 1 << 18
)

// wires holds the connections for bytes, and the channels on them.
type wires struct {
	mu    sync.Mutex
	all   map[uint64]*wire
	links []*link // by process
	done  sync.WaitGroup
}

// link is the connection to another process.
type link struct {
	net.Conn
	in     *bufio.Reader
	mu     sync.Mutex // held while writing
	frame  [frameBytes]byte
	vector [2][]byte
}

// wire is one end of a channel between two ranks. It implements vm.Wire.
type wire struct {
	world    *World
	process  int // process of the other end
	id       uint64
	name     string
	from, to int

	ready   chan uint64   // for sending: the size expected by the receiver
	arrived chan struct{} // for receiving
	mu      sync.Mutex    // held while bytes are written to a message's destination
	place   []byte
	filled  int
	waiting bool
}

// Wire implements vm.Wires.
func (w *World) Wire(from, to int, purpose string) vm.Wire {
	name := fmt.Sprintf("%d to %d, %s", from, to, purpose)
	x := w.wires.get(wireID(name))
	w.wires.mu.Lock()
	defer w.wires.mu.Unlock()
	if x.name != "" && x.name != name {
		panic(fmt.Sprintf("internal: %q and %q have the same number", x.name, name))
	}
	x.world, x.name, x.from, x.to, x.process = w, name, from, to, w.processOf(from)
	if w.Here(from) {
		x.process = w.processOf(to)
	}
	return x
}

func wireID(name string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(name))
	return h.Sum64()
}

// get returns a wire. A peer may use a wire before this process opens it.
func (ws *wires) get(id uint64) *wire {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	x := ws.all[id]
	if x == nil {
		x = &wire{id: id, ready: make(chan uint64, 1), arrived: make(chan struct{}, 1)}
		ws.all[id] = x
	}
	return x
}

// Send implements vm.Link.
func (x *wire) Send(b []byte) error {
	w := x.world
	select {
	case size := <-x.ready:
		if size != uint64(len(b)) {
			err := fmt.Errorf("rank %d sends %d bytes, rank %d receives %d", x.from, len(b), x.to, size)
			w.Failed(err)
			return err
		}
	case <-w.failed:
		return w.aborted()
	}
	for {
		piece := b[:min(len(b), pieceBytes)]
		if err := w.wires.links[x.process].write(frameData, x, piece); err != nil {
			return w.broken(x.process, err)
		}
		if b = b[len(piece):]; len(b) == 0 {
			return nil
		}
	}
}

// Expect implements vm.Wire.
func (x *wire) Expect(y []byte) {
	w := x.world
	x.mu.Lock()
	x.place, x.filled, x.waiting = y, 0, true
	x.mu.Unlock()
	if err := w.wires.links[x.process].write(frameReady, x, y); err != nil {
		_ = w.broken(x.process, err) // Arrived returns the error
	}
}

// Arrived implements vm.Wire.
func (x *wire) Arrived() error {
	select {
	case <-x.arrived:
		return nil
	case <-x.world.failed:
		x.mu.Lock()
		x.place, x.waiting = nil, false
		x.mu.Unlock()
		return x.world.aborted()
	}
}

// Recv implements vm.Link.
func (x *wire) Recv(y []byte) error {
	x.Expect(y)
	return x.Arrived()
}

// write sends a frame, followed by its data, if any.
func (l *link) write(kind byte, x *wire, b []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.frame[0] = kind
	binary.LittleEndian.PutUint64(l.frame[1:], x.id)
	binary.LittleEndian.PutUint64(l.frame[9:], uint64(len(b)))
	l.vector = [2][]byte{l.frame[:], nil}
	if kind == frameData {
		l.vector[1] = b
	}
	sealed(binary.LittleEndian.AppendUint32(l.frame[:17], checksum(l.vector[1])))
	out := net.Buffers(l.vector[:])
	_, err := out.WriteTo(l.Conn)
	return err
}

// broken waits a while for process 0 to explain a broken connection. If it does not, the break itself becomes
// the reason for failure. broken returns the resulting error.
func (w *World) broken(process int, err error) error {
	select {
	case <-w.failed:
	case <-w.ending:
	case <-time.After(farewell):
		if isSilence(err) {
			w.lost(process, err) // the other process notices the silence itself: no message could reach it
			break
		}
		w.Failed(fmt.Errorf("the connection to %s broke: %w", w.name(process), err))
	}
	return w.aborted()
}

// receiveBytes handles the frames from a process until the connection ends. A peer that closes the connection has
// ended or is lost; process 0 reports the loss.
func (w *World) receiveBytes(process int, l *link) {
	defer w.wires.done.Done()
	var frame [frameBytes]byte
	for {
		_, err := io.ReadFull(l.in, frame[:])
		if err == nil && !isSealed(frame[:]) {
			err = &damage{"the header of a frame"}
		}
		if err == nil {
			x, size := w.wires.get(binary.LittleEndian.Uint64(frame[1:])), binary.LittleEndian.Uint64(frame[9:])
			if frame[0] == frameReady {
				err = x.offer(size)
			} else {
				err = x.take(l.in, size, binary.LittleEndian.Uint32(frame[17:]))
			}
		}
		damaged := (*damage)(nil)
		switch {
		case err == nil:
		case errors.Is(err, io.EOF):
			return
		case errors.As(err, &damaged):
			w.Failed(w.received(process, err)) // the connection is whole, so nobody else can explain it
			return
		default:
			_ = w.broken(process, err) // nobody waits for an error from this goroutine
			return
		}
	}
}

var errUnasked = errors.New("received bytes that were not expected")

// offer records the size that the receiving end expects.
func (x *wire) offer(size uint64) error {
	select {
	case x.ready <- size:
		return nil
	default:
		return errUnasked
	}
}

// take writes a piece of a message to its destination and checks its CRC.
func (x *wire) take(in io.Reader, size uint64, crc uint32) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if !x.waiting || size > uint64(len(x.place)-x.filled) {
		return errUnasked
	}
	piece := x.place[x.filled : x.filled+int(size)]
	n, err := io.ReadFull(in, piece)
	x.filled += n
	if err == nil && checksum(piece) != crc {
		err = &damage{fmt.Sprintf("a message of %s", x.name)}
	}
	if err == nil && x.filled == len(x.place) {
		x.waiting, x.place = false, nil
		x.arrived <- struct{}{}
	}
	return err
}

// stop wakes all readers and writers after a failure.
func (ws *wires) stop() {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	for _, l := range ws.links {
		if l != nil {
			_ = l.SetDeadline(time.Unix(1, 0))
		}
	}
}

func (ws *wires) close() {
	ws.mu.Lock()
	for _, l := range ws.links {
		if l != nil {
			l.Close()
		}
	}
	ws.mu.Unlock()
	ws.done.Wait()
}

// joinWires connects this process with all others: it connects to processes with lower numbers and
// accepts connections from those with higher numbers.
func (w *World) joinWires(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithTimeout(ctx, w.options.Timeout)
	defer cancel()
	w.OnFailure(func(error) { cancel() })
	for process := range w.options.Process {
		if err := w.call(ctx, process); err != nil {
			return fmt.Errorf("cannot reach %s: %w", w.name(process), err)
		}
	}
	defer context.AfterFunc(ctx, func() { l.Close() })()
	callers, failed := make(chan struct{}, w.options.Processes), make(chan error, 1)
	go func() {
		for {
			raw, err := l.Accept()
			if err != nil {
				failed <- err
				return
			}
			go func() {
				if w.called(raw) {
					callers <- struct{}{}
				}
			}()
		}
	}()
	for missing := w.options.Processes - 1 - w.options.Process; missing > 0; missing-- {
		select {
		case <-callers:
		case err := <-failed:
			return fmt.Errorf("%d processes cannot reach %s: %w", missing, w.name(w.options.Process), err)
		}
	}
	return nil
}

func (w *World) call(ctx context.Context, process int) error {
	raw, err := (&net.Dialer{}).DialContext(ctx, "tcp", w.Members[process].Address)
	if err != nil {
		return err
	}
	c := newConn(raw)
	w.connect(process, c)
	return c.write(message{Kind: kindWire, Text: w.key, Hello: &hello{Process: w.options.Process}}, nil)
}

// called accepts a connection from a process with a higher number and rejects any other.
func (w *World) called(raw net.Conn) bool {
	c := newConn(raw)
	_ = c.SetReadDeadline(time.Now().Add(introduction))
	m, _, err := c.read(shortText, 0)
	if err != nil || subtle.ConstantTimeCompare([]byte(m.Text), []byte(w.key)) != 1 || m.Hello == nil || m.Hello.Process <= w.options.Process || m.Hello.Process >= w.options.Processes {
		c.Close()
		return false
	}
	_ = c.SetReadDeadline(time.Time{})
	w.connect(m.Hello.Process, c)
	return true
}

func (w *World) connect(process int, c *conn) {
	l := &link{Conn: c.Conn, in: c.in}
	w.wires.mu.Lock()
	w.wires.links[process] = l
	w.wires.mu.Unlock()
	if w.Cause() != nil {
		w.wires.stop()
	}
	w.wires.done.Add(1)
	go w.receiveBytes(process, l)
}

package world

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"net"
	"sync"

	"sppo.dev/vm"
)

// A message of the control plane is
//
//	size   of the text, 4 bytes, little-endian
//	size   of the data, 8 bytes, little-endian
//	text   JSON: message
//	data   bytes

// message has a field for everything that a message may contain; its kind determines which fields are set.
type message struct {
	Kind     string
	Text     string    `json:",omitempty"` // text for users, or the name of a value
	Order    *vm.Order `json:",omitempty"` // without its Data, which follows the JSON
	Greeting *greeting `json:",omitempty"`
	Hello    *hello    `json:",omitempty"`
	Welcome  *welcome  `json:",omitempty"`
}

// Kinds of messages.
const (
	kindGreeting = "greeting" // the first message in both directions
	kindHello    = "hello"    // a process introduces itself to process 0
	kindPing     = "ping"     // process 0 asks a waiting process whether it is still running
	kindPong     = "pong"
	kindSeated   = "seated"  // the process is accepted
	kindWelcome  = "welcome" // all processes are connected
	kindRefused  = "refused" // the process is rejected
	kindWire     = "wire"    // opens a connection for bytes
	kindOrder    = "order"
	kindAnswer   = "answer"
	kindStop     = "stop"   // a user asks for the job to stop
	kindFailed   = "failed" // a process cannot continue
	kindAbort    = "abort"  // the job cannot continue
	kindEnd      = "end"    // the job has ended
	kindPut      = "put"    // a value
	kindGet      = "get"    // a request for a value
	kindValue    = "value"
	kindInspect  = "inspect" // a question about what the process is doing
	kindState    = "state"
)

// conn is a connection of the control plane. Any goroutine may write, but only one may read.
type conn struct {
	net.Conn
	in *bufio.Reader
	mu sync.Mutex
}

func newConn(c net.Conn) *conn {
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetKeepAliveConfig(keepAlive) // optional: without it, a dead host is noticed later
		limitSilence(tcp)
	}
	return &conn{Conn: c, in: newReader(c)}
}

func newReader(in io.Reader) *bufio.Reader { return bufio.NewReaderSize(in, 1<<16) }

func (c *conn) write(m message, data []byte) error {
	text, err := json.Marshal(m)
	if err != nil {
		panic("internal: " + err.Error())
	}
	head := binary.LittleEndian.AppendUint32(nil, uint32(len(text)))
	head = binary.LittleEndian.AppendUint64(head, uint64(len(data)))
	c.mu.Lock()
	defer c.mu.Unlock()
	_, err = (&net.Buffers{append(head, text...), data}).WriteTo(c.Conn)
	return err
}

// Size limits for text from unknown and known peers, and for data.
const (
	shortText   = 1 << 16
	longestText = 1 << 24
	anyLength   = 1 << 62
)

var errForeign = errors.New("it does not speak the protocol of a job's processes")

func (c *conn) read(longest uint32, longestData uint64) (m message, data []byte, err error) {
	var head [12]byte
	if _, err := io.ReadFull(c.in, head[:]); err != nil {
		return m, nil, err
	}
	text, size := binary.LittleEndian.Uint32(head[:]), binary.LittleEndian.Uint64(head[4:])
	if text > longest || size > longestData {
		return m, nil, errForeign
	}
	all := make([]byte, text)
	if _, err := io.ReadFull(c.in, all); err != nil {
		return m, nil, err
	}
	if err := json.Unmarshal(all, &m); err != nil {
		return m, nil, errForeign
	}
	data = make([]byte, size)
	_, err = io.ReadFull(c.in, data)
	return m, data, err
}

// closeWrite announces that nothing more will be sent.
func (c *conn) closeWrite() {
	if tcp, ok := c.Conn.(*net.TCPConn); ok {
		_ = tcp.CloseWrite() // it may be closed already
	}
}

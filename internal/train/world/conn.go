package world

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"hash/crc32"
	"io"
	"net"
	"sync"

	"sppo.dev/internal/train"
)

// A message of the control plane is
//
//	size   of the text, 4 bytes, little-endian
//	size   of the data, 8 bytes
//	CRC    of the text, 4 bytes
//	CRC    of the data, 4 bytes
//	CRC    of the 20 bytes before, 4 bytes
//	text   JSON: message
//	data   bytes
const headBytes = 24

// Every CRC is a CRC-32C (Castagnoli). TCP's own checksum has 16 bits and misses some changed bits; a network card or
// a switch can also change bytes after it has checked them.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func checksum(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

// sealed appends the CRC of the bytes of a header.
func sealed(head []byte) []byte { return binary.LittleEndian.AppendUint32(head, checksum(head)) }

// isSealed reports whether a header ends with the CRC of the bytes before it.
func isSealed(head []byte) bool {
	end := len(head) - 4
	return checksum(head[:end]) == binary.LittleEndian.Uint32(head[end:])
}

// damage is the error of bytes whose CRC is wrong.
type damage struct{ what string }

func (d *damage) Error() string {
	return d.what + " changed on the way (CRC-32C): check the memory and the network cards of both hosts"
}

// message has a field for everything that a message may contain; its kind determines which fields are set.
type message struct {
	Kind     string
	Text     string       `json:",omitempty"` // text for users, or the name of a value
	Order    *train.Order `json:",omitempty"` // without its Data, which follows the JSON
	Greeting *greeting    `json:",omitempty"`
	Hello    *hello       `json:",omitempty"`
	Welcome  *welcome     `json:",omitempty"`
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
	head := framed(text, data)
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
	var head [headBytes]byte
	if _, err := io.ReadFull(c.in, head[:]); err != nil {
		return m, nil, err
	}
	if !isSealed(head[:]) {
		return m, nil, &damage{"the header of a message"}
	}
	text, size := binary.LittleEndian.Uint32(head[:]), binary.LittleEndian.Uint64(head[4:])
	if text > longest || size > longestData {
		return m, nil, errForeign
	}
	all := make([]byte, text)
	if _, err := io.ReadFull(c.in, all); err != nil {
		return m, nil, err
	}
	if checksum(all) != binary.LittleEndian.Uint32(head[12:]) {
		return m, nil, &damage{"a message"}
	}
	if err := json.Unmarshal(all, &m); err != nil {
		return m, nil, errForeign
	}
	data = make([]byte, size)
	if _, err = io.ReadFull(c.in, data); err == nil && checksum(data) != binary.LittleEndian.Uint32(head[16:]) {
		err = &damage{"the data of a message"}
	}
	return m, data, err
}

// framed returns the header of a message.
func framed(text, data []byte) []byte {
	head := binary.LittleEndian.AppendUint32(make([]byte, 0, headBytes+len(text)), uint32(len(text)))
	head = binary.LittleEndian.AppendUint64(head, uint64(len(data)))
	head = binary.LittleEndian.AppendUint32(head, checksum(text))
	return sealed(binary.LittleEndian.AppendUint32(head, checksum(data)))
}

// closeWrite announces that nothing more will be sent.
func (c *conn) closeWrite() {
	if tcp, ok := c.Conn.(*net.TCPConn); ok {
		_ = tcp.CloseWrite() // it may be closed already
	}
}

package world

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// limitSilence makes a connection fail where sent bytes are not acknowledged for the time of silence. Without it the system repeats
// them for a quarter of an hour.
func limitSilence(c *net.TCPConn) {
	raw, err := c.SyscallConn()
	if err != nil {
		return // it is closed
	}
	_ = raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(silence.Milliseconds())) // keep-alive remains
	})
}

package world

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// limitSilence makes a connection fail if sent bytes are not acknowledged within `silence`. By default the
// system retransmits them for a quarter of an hour.
func limitSilence(c *net.TCPConn) {
	raw, err := c.SyscallConn()
	if err != nil {
		return // the connection is closed
	}
	_ = raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(silence.Milliseconds())) // optional: keep-alive also detects a lost host
	})
}

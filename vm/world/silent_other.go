//go:build !linux

package world

import "net"

// limitSilence does nothing: keep-alive alone detects the end of a connection that has nothing to send.
func limitSilence(*net.TCPConn) {}

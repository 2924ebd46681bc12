package main

import (
	"os/exec"
	"syscall"
)

// endWithParent lets the system end a process when the one that started it dies.
func endWithParent(c *exec.Cmd) {
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM, Setpgid: true}
}

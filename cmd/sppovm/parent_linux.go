package main

import (
	"os/exec"
	"syscall"
)

// endWithParent makes the system end a process when the process that started it dies.
func endWithParent(c *exec.Cmd) {
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM, Setpgid: true}
}

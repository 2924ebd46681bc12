//go:build !linux

package main

import (
	"os/exec"
	"syscall"
)

// endWithParent keeps the signals of the terminal from a process: the one that started it passes them on.
func endWithParent(c *exec.Cmd) { c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

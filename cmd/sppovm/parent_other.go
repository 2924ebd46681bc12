//go:build !linux

package main

import (
	"os/exec"
	"syscall"
)

// endWithParent shields a process from the terminal's signals. The process that started it passes them on.
func endWithParent(c *exec.Cmd) { c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

package safetensors

import (
	"os"
	"syscall"
)

// setDirect sets whether writes to a file bypass the page cache, and reports whether the file system supports
// that.
func setDirect(file *os.File, on bool) bool {
	conn, err := file.SyscallConn()
	if err != nil {
		return false
	}
	done := false
	err = conn.Control(func(fd uintptr) {
		flags, _, failed := syscall.Syscall(syscall.SYS_FCNTL, fd, syscall.F_GETFL, 0)
		if failed != 0 {
			return
		}
		flags &^= syscall.O_DIRECT
		if on {
			flags |= syscall.O_DIRECT
		}
		_, _, failed = syscall.Syscall(syscall.SYS_FCNTL, fd, syscall.F_SETFL, flags)
		done = failed == 0
	})
	return err == nil && done
}

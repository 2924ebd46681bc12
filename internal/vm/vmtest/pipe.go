package vmtest

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// FullPipe returns the path of a pipe that is full and that nobody reads until the test ends. A hard link to
// the pipe, in place of a file, blocks everyone who writes to that file, just as an unresponsive file system
// would.
func FullPipe(t testing.TB) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "full")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	pipe, err := syscall.Open(path, syscall.O_RDWR|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // unblock the writers in this process
		buf := make([]byte, 1<<16)
		for {
			if _, err := syscall.Read(pipe, buf); err != nil {
				break
			}
		}
		syscall.Close(pipe)
	})
	for {
		if _, err := syscall.Write(pipe, make([]byte, 1<<12)); errors.Is(err, syscall.EAGAIN) {
			return path
		} else if err != nil {
			t.Fatal(os.NewSyscallError("write", err))
		}
	}
}

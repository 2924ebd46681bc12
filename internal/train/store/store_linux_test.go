package store_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"sppo.dev/internal/train/store"
)

// failing calls f on a thread on which opening a file as infile does fails with an error.
func failing(errno syscall.Errno, f func()) (err error) {
	const flags = unix.O_RDONLY | unix.O_NONBLOCK | unix.O_CLOEXEC
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}, // the number of the system call
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 4, K: unix.SYS_OPENAT},
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 32}, // the lower half of its third argument
		{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: flags | unix.O_DIRECTORY | unix.O_ACCMODE},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: flags},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(errno)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	done := make(chan bool)
	go func() {
		defer close(done)
		runtime.LockOSThread() // the thread ends with this goroutine
		if err = unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return
		}
		if _, _, e := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&program))); e != 0 {
			err = e
			return
		}
		f()
	}()
	<-done
	return err
}

// A file of a checkpoint that cannot be opened because of the network or the disk is not damaged.
func TestUnopened(t *testing.T) {
	path := write(t, create(t, t.TempDir(), 2, -1), 3)
	for _, errno := range []syscall.Errno{syscall.ESTALE, syscall.EIO} {
		for _, file := range []string{store.ManifestFile, "rank-00000.safetensors"} {
			t.Run(fmt.Sprint(errno, file), func(t *testing.T) {
				var err error
				if e := failing(errno, func() {
					if file == store.ManifestFile {
						_, err = store.Open(path)
						return
					}
					c := &store.Checkpoint{Manifest: &store.Manifest{Shards: []store.Shard{{File: file}}}, Dir: path}
					err = c.Verify(t.Context(), func(*store.Shard) bool { return true }, func(int64) {})
				}); e != nil {
					t.Skip("no seccomp: ", e)
				}
				if !errors.Is(err, errno) || errors.As(err, new(*store.Damage)) {
					t.Errorf("%T %v", err, err)
				}
				if _, err := os.Stat(filepath.Join(path, file)); err != nil {
					t.Error(err)
				}
			})
		}
	}
	if _, err := store.Open(path); err != nil {
		t.Error(err)
	}
}

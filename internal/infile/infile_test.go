package infile

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// within fails the test if f does not return soon.
func within(t *testing.T, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Fatal("it waits")
	}
}

func TestRefusesWhatIsNoFile(t *testing.T) {
	dir := t.TempDir()
	pipe, socket, link := filepath.Join(dir, "pipe"), filepath.Join(dir, "socket"), filepath.Join(dir, "link")
	if err := syscall.Mkfifo(pipe, 0o644); err != nil {
		t.Skip(err)
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	if err := os.Symlink(pipe, link); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		pipe: "a pipe", link: "a pipe", socket: "a socket", "/dev/zero": "a device", "/dev/tty": "a device", dir: "a folder",
	} {
		within(t, func() {
			_, err := Read(path, 1000)
			var p *fs.PathError
			if !errors.As(err, &p) || p.Path != path || !strings.Contains(err.Error(), "it is "+want) {
				t.Errorf("%s: %v, want %q", path, err, want)
			}
		})
	}
	if _, err := Read(filepath.Join(dir, "none"), 1); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an absent file: %v", err)
	}
}

func TestLimit(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	for length := range 6 {
		if err := os.WriteFile(path, []byte("abcdef"[:length]), 0o644); err != nil {
			t.Fatal(err)
		}
		for limit := range int64(6) {
			data, err := Read(path, limit)
			if fits := int64(length) <= limit; fits != (err == nil) || fits && string(data) != "abcdef"[:length] {
				t.Errorf("%d bytes with limit %d: %q, %v", length, limit, data, err)
			}
		}
	}
	sparse, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer sparse.Close()
	if err := sparse.Truncate(1 << 40); err != nil {
		t.Skip(err)
	}
	if _, err := Read(path, 3<<20); err == nil || !strings.Contains(err.Error(), "more than 3 MiB") {
		t.Errorf("a TiB of zeros: %v", err)
	}
}

// The limit also applies to a file that reports a size of 0, as files in /proc do.
func TestFileOfUnknownSize(t *testing.T) {
	const path = "/proc/self/status"
	if _, err := os.Stat(path); err != nil {
		t.Skip(err)
	}
	if data, err := Read(path, 1<<20); err != nil || len(data) == 0 {
		t.Errorf("%d bytes, %v", len(data), err)
	}
	if _, err := Read(path, 10); err == nil || !strings.Contains(err.Error(), "more than 10 bytes") {
		t.Errorf("with a limit of 10 bytes: %v", err)
	}
}

// endless is a reader that never ends.
type endless struct{ given int64 }

func (e *endless) Read(b []byte) (int, error) { e.given += int64(len(b)); return len(b), nil }

func TestReadAllStops(t *testing.T) {
	e := new(endless)
	if _, err := ReadAll(e, 0, 1<<20); err == nil || e.given > 4<<20 {
		t.Errorf("%d bytes read, %v", e.given, err)
	}
}

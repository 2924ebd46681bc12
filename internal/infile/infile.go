// Package infile opens files that a user names as input. A device, a pipe or anything else that is not a
// regular file causes an error immediately: opening never waits for a writer. Reads are limited to a given
// number of bytes, so an endless file causes an error too.
package infile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"
)

// kinds names the file types that are not regular.
var kinds = []struct {
	bits fs.FileMode
	name string
}{
	{fs.ModeDir, "a folder"}, {fs.ModeNamedPipe, "a pipe"}, {fs.ModeSocket, "a socket"}, {fs.ModeDevice, "a device"},
}

// regular returns an error for anything but a regular file.
func regular(path string, info fs.FileInfo) error {
	if info.Mode().IsRegular() {
		return nil
	}
	kind := "something else"
	for _, k := range kinds {
		if info.Mode()&k.bits != 0 {
			kind = k.name
			break
		}
	}
	return &fs.PathError{Op: "open", Path: path, Err: fmt.Errorf("it is %s, not a regular file", kind)}
}

// Open opens a regular file and returns its size in bytes. Errors are of type *fs.PathError.
func Open(path string) (*os.File, int64, error) {
	info, err := os.Stat(path) // before opening, because opening some devices has side effects
	if err == nil {
		err = regular(path, info)
	}
	if err != nil {
		return nil, 0, err
	}
	// The file might have been replaced since then. Without O_NONBLOCK, opening a pipe would wait for its
	// writer.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, 0, err
	}
	if info, err = f.Stat(); err == nil {
		err = regular(path, info)
	}
	if err != nil {
		return nil, 0, errors.Join(err, f.Close())
	}
	return f, info.Size(), nil
}

// Read returns the contents of a regular file of at most limit bytes. It does not trust the size that the file
// reports: files in /proc report 0. Errors are of type *fs.PathError.
func Read(path string, limit int64) ([]byte, error) {
	f, size, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := ReadAll(f, size, limit)
	if _, large := err.(TooLargeError); large {
		return nil, &fs.PathError{Op: "read", Path: path, Err: err}
	}
	return data, err
}

// TooLargeError is the error for an input with more bytes than Limit.
type TooLargeError struct{ Limit int64 }

func (e TooLargeError) Error() string {
	return fmt.Sprintf("it has more than %s, the limit for such a file", units(e.Limit))
}

// units formats a number of bytes in the largest binary unit of which it is a multiple.
func units(n int64) string {
	unit := 0
	for n > 0 && n%1024 == 0 && unit < 3 {
		n /= 1024
		unit++
	}
	return fmt.Sprintf("%d %s", n, []string{"bytes", "KiB", "MiB", "GiB"}[unit])
}

// ReadAll reads r to its end. It returns an error if r has more than limit bytes. expected is an estimate
// of the number of bytes; if it exceeds the limit, ReadAll fails without reading.
func ReadAll(r io.Reader, expected, limit int64) ([]byte, error) {
	if expected > limit {
		return nil, TooLargeError{limit}
	}
	var b bytes.Buffer
	b.Grow(int(expected) + bytes.MinRead)
	n, err := b.ReadFrom(io.LimitReader(r, limit+1))
	if err == nil && n > limit {
		err = TooLargeError{limit}
	}
	return b.Bytes(), err
}

package safetensors

import (
	"errors"
	"os"
	"syscall"
	"unsafe"
)

const (
	// diskBytes is the number of bytes that are written to a file at a time.
	diskBytes = 8 << 20
	// diskAlign is a multiple of the alignment that file systems require of direct writes.
	diskAlign = 4096
	// syncBytes is the number of bytes after which a file is synced while it is being written. Otherwise, a file
	// system that does not support direct writes would fill memory with bytes that are not yet on disk, and the last
	// sync would take so long that it could not be distinguished from a disk that hangs.
	syncBytes = 1 << 30
)

// diskWriter writes a file from its start. It bypasses the page cache if the file system supports that, because
// most of the processor time for writing a large file would be spent on copying it into the page cache, which
// would also displace other cached data.
type diskWriter struct {
	file   *os.File
	block  []byte // filled up to its length
	direct bool
	since  int64 // bytes written since the last sync
}

// newDiskWriter returns a writer for a file that will have the given number of bytes.
func newDiskWriter(file *os.File, size int64) *diskWriter {
	size = min(max(size, 1), diskBytes)
	memory := make([]byte, size+diskAlign)
	skip := -int64(uintptr(unsafe.Pointer(&memory[0]))) & (diskAlign - 1)
	return &diskWriter{file: file, block: memory[skip : skip : skip+size]}
}

// Write implements io.Writer.
func (d *diskWriter) Write(p []byte) (int, error) {
	done := 0
	for done < len(p) {
		n := copy(d.block[len(d.block):cap(d.block)], p[done:])
		d.block, done = d.block[:len(d.block)+n], done+n
		if len(d.block) == cap(d.block) {
			if first := d.since == 0; first && len(d.block) == diskBytes {
				d.direct = setDirect(d.file, true)
			}
			if err := d.flush(); err != nil {
				return done, err
			}
		}
	}
	return done, nil
}

// flush writes the block.
func (d *diskWriter) flush() error {
	n, err := d.file.Write(d.block)
	if d.direct && errors.Is(err, syscall.EINVAL) { // the file system requires another alignment
		d.direct = false
		setDirect(d.file, false)
		_, err = d.file.Write(d.block[n:])
	}
	if err != nil {
		return err
	}
	d.since += int64(len(d.block))
	d.block = d.block[:0]
	if d.since > syncBytes {
		d.since = 1 // 0 would mean that the next block is the first
		return d.file.Sync()
	}
	return nil
}

// finish writes the rest, which may have any length, and syncs the file to disk.
func (d *diskWriter) finish() error {
	if d.direct {
		d.direct = false
		setDirect(d.file, false)
	}
	if err := d.flush(); err != nil {
		return err
	}
	return d.file.Sync()
}

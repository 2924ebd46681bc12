package cuda

import (
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	mpolPreferred = 1  // MPOL_BIND would kill the process if the node were full, even if others were not
	populateWrite = 23 // MADV_POPULATE_WRITE
)

// mapMemory maps memory, on a NUMA node if possible. Placement is optional: containers often forbid it, and
// memory elsewhere is only slower.
func mapMemory(bytes int64, node int) ([]byte, func() error, error) {
	memory, err := unix.Mmap(-1, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, nil, err
	}
	if node != noNode {
		mask := uint64(1) << node
		_, _, _ = unix.Syscall6(unix.SYS_MBIND, uintptr(unsafe.Pointer(&memory[0])), uintptr(len(memory)), mpolPreferred,
			uintptr(unsafe.Pointer(&mask)), 65, 0)
	}
	_ = unix.Madvise(memory, unix.MADV_HUGEPAGE)
	return memory, func() error { return unix.Munmap(memory) }, nil
}

// populateShare is the number of bytes that a thread of populate handles at a time; populateThreads is the
// maximum number of threads.
const (
	populateShare   = 256 << 20
	populateThreads = 16
)

// populate allocates the pages with several threads, since a single thread clears only a few GB per second. On
// older kernels, which do not support this, pinning allocates the pages.
func populate(memory []byte) {
	shares := (len(memory) + populateShare - 1) / populateShare
	var next atomic.Int64
	var workers sync.WaitGroup
	for range min(shares, runtime.NumCPU(), populateThreads) {
		workers.Go(func() {
			for share := int(next.Add(1)) - 1; share < shares; share = int(next.Add(1)) - 1 {
				_ = unix.Madvise(memory[share*populateShare:min((share+1)*populateShare, len(memory))], populateWrite)
			}
		})
	}
	workers.Wait()
}

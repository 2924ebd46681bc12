package cuda

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	mpolBind      = 2
	populateWrite = 23 // MADV_POPULATE_WRITE
)

// mapMemory maps memory whose pages exist when it returns, on a NUMA node where that may be asked for. Placement is a
// wish: containers often forbid it, and memory elsewhere is slower, not wrong.
func mapMemory(bytes int64, node int) ([]byte, func() error, error) {
	memory, err := unix.Mmap(-1, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, nil, err
	}
	if node != noNode {
		mask := uint64(1) << node
		_, _, _ = unix.Syscall6(unix.SYS_MBIND, uintptr(unsafe.Pointer(&memory[0])), uintptr(len(memory)), mpolBind,
			uintptr(unsafe.Pointer(&mask)), 65, 0)
	}
	_ = unix.Madvise(memory, unix.MADV_HUGEPAGE)
	_ = unix.Madvise(memory, populateWrite) // older kernels do not know it; the driver's pinning then brings the pages
	return memory, func() error { return unix.Munmap(memory) }, nil
}

package cuda

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"sppo.dev/internal/cuda/driver"
	"sppo.dev/ir"
)

// pinned is page-locked host memory, which the GPU can copy to and from without the processor. It is outside
// the Go heap.
type pinned struct {
	api        *driver.API
	memory     []byte
	piece      int64    // bytes pinned per call
	registered [][]byte // the pieces
	unmap      func() error
}

// pinBytes is the amount of memory that the driver pins per call. Drivers since release 580 refuse to pin 512
// GiB or more at once, because the page table would be too large. Hosts whose memory grows on demand provide it
// only gradually. No copy may cross the boundary between two pieces.
const pinBytes = 4 << 30

// newPinned maps memory, preferably on the NUMA node of the GPU with the given bus address, and pins it in pieces. The
// pages of a piece are allocated just before it is pinned, so that an error tells how much the host could provide.
func newPinned(api *driver.API, bytes, piece int64, bus string) (*pinned, error) {
	p := &pinned{api: api, piece: piece, unmap: func() error { return nil }}
	if bytes == 0 {
		return p, nil
	}
	memory, unmap, err := mapMemory(bytes, nodeOf(bus))
	if err != nil {
		return nil, err
	}
	p.memory, p.unmap = memory, unmap
	for rest := memory; len(rest) > 0; {
		chunk := rest[:min(int64(len(rest)), piece)]
		populate(chunk)
		if err := api.Register(chunk); err != nil {
			pinned := len(memory) - len(rest)
			_ = p.close() // the first error is returned
			return nil, fmt.Errorf("after %s: %w", ir.Bytes(pinned), err)
		}
		p.registered = append(p.registered, chunk)
		rest = rest[len(chunk):]
	}
	return p, nil
}

// at returns the address of a byte.
func (p *pinned) at(offset int64) driver.Ptr {
	return driver.Ptr(uintptr(unsafe.Pointer(unsafe.SliceData(p.memory))) + uintptr(offset))
}

// run returns how many bytes of a range lie in the same piece as its first byte. If the range starts outside
// this memory, all of its bytes count.
func (p *pinned) run(at driver.Ptr, bytes int64) int64 {
	start := p.at(0)
	if at < start || at >= start+driver.Ptr(len(p.memory)) {
		return bytes
	}
	return min(bytes, p.piece-int64(at-start)%p.piece)
}

// close unpins and unmaps the memory. Memory that could not be unregistered stays mapped, because the GPU may
// still write to it.
func (p *pinned) close() error {
	for ; len(p.registered) > 0; p.registered = p.registered[1:] {
		if err := p.api.Unregister(p.registered[0]); err != nil {
			return err
		}
	}
	return p.unmap()
}

// noNode means that the node does not matter or is unknown.
const noNode = -1

// nodeOf returns the NUMA node of a GPU.
func nodeOf(bus string) int {
	text, err := os.ReadFile(filepath.Join("/sys/bus/pci/devices", strings.ToLower(bus), "numa_node"))
	if err != nil {
		return noNode
	}
	node, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || node < 0 || node > 62 {
		return noNode
	}
	return node
}

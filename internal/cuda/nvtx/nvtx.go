// Package nvtx tells a profiler such as Nsight Systems what a thread is doing: nested ranges with names.
//
// There is no library to link to. A profiler sets an environment variable to the path of its own library. This
// package opens that library, which asks for a table of function addresses and fills it. Entries that it leaves
// empty are not called. NVIDIA's header does the same (in NVTX 3, nvtxInit.h, nvtxImpl.h and nvtxTypes.h define
// the tables, their sizes and the order of their entries).
package nvtx

import (
	"fmt"
	"os"
	"sync"
	"unsafe"

	"github.com/ebitengine/purego"
)

// Variable is the environment variable that a profiler sets to the path of its library.
const Variable = "NVTX_INJECTION64_PATH"

// Export tables, by number.
const tableCallbacks, tableVersion = 1, 3

// modules holds the number of entries in each module's table of functions; the first entry of each table is
// unused. Only the first module is called; profilers ask for the others.
var modules = [...]int{1: 16, 2: 9, 3: 15, 4: 7, 5: 16, 6: 7}

// Functions called here, all in module 1.
const (
	core         = 1
	rangePush    = 9  // (char *name): on the calling thread
	rangePop     = 11 // ()
	mostOfModule = 16
)

// apiVersion is the version of the header that this package follows.
const apiVersion = 3

// Memory that the profiler reads and writes. It is global so that it does not move.
var (
	functions [len(modules)][mostOfModule]uintptr
	places    [len(modules)][mostOfModule + 1]*uintptr // null-terminated
	callbacks struct {
		bytes uintptr
		table uintptr // int (*)(int module, void ***out, unsigned *size)
	}
	version struct {
		bytes          uintptr
		number, unused uint32
		setInjection   uintptr // void (*)(uint32)
	}
)

// Profiler is an attached profiler; nil means none.
type Profiler struct{}

var open = sync.OnceValues(func() (*Profiler, error) {
	path := os.Getenv(Variable)
	if path == "" {
		return nil, nil
	}
	handle, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", Variable, err)
	}
	start, err := purego.Dlsym(handle, "InitializeInjectionNvtx2")
	if err != nil {
		return nil, fmt.Errorf("%s: %w", Variable, err)
	}
	if ok, _, _ := purego.SyscallN(start, exportTable()); int32(ok) == 0 {
		return nil, fmt.Errorf("%s: the profiler in %s does not start", Variable, path)
	}
	return &Profiler{}, nil
})

// Open returns the profiler under which the process was started, or nil.
func Open() (*Profiler, error) { return open() }

// exportTable returns the function that gives the profiler its tables.
func exportTable() uintptr {
	for m := range modules {
		for f := range modules[m] {
			places[m][f] = &functions[m][f]
		}
	}
	callbacks.bytes, callbacks.table = unsafe.Sizeof(callbacks), purego.NewCallback(moduleTable)
	version.bytes, version.number = unsafe.Sizeof(version), apiVersion
	version.setInjection = purego.NewCallback(func(uint32) uintptr { return 0 })
	return purego.NewCallback(func(table uint32) unsafe.Pointer {
		switch table {
		case tableCallbacks:
			return unsafe.Pointer(&callbacks)
		case tableVersion:
			return unsafe.Pointer(&version)
		}
		return nil
	})
}

// moduleTable returns the table to which the addresses of a module's functions are written.
func moduleTable(module int32, table *unsafe.Pointer, size *uint32) int32 {
	if module <= 0 || int(module) >= len(modules) {
		return 0
	}
	if size != nil {
		*size = uint32(modules[module])
	}
	if table != nil {
		*table = unsafe.Pointer(&places[module])
	}
	return 1
}

// Name is the name of a range, prepared so that using it allocates nothing.
type Name struct {
	text      []byte
	arguments []uintptr
}

// NameOf prepares a name.
func NameOf(text string) *Name {
	n := &Name{text: append([]byte(text), 0)}
	n.arguments = []uintptr{uintptr(unsafe.Pointer(&n.text[0]))}
	return n
}

// Push begins a range, nested in those that the calling thread has begun and not ended.
func (p *Profiler) Push(name *Name) {
	if f := functions[core][rangePush]; p != nil && f != 0 {
		purego.SyscallN(f, name.arguments...)
	}
}

// Pop ends the innermost range.
func (p *Profiler) Pop() {
	if f := functions[core][rangePop]; p != nil && f != 0 {
		purego.SyscallN(f)
	}
}

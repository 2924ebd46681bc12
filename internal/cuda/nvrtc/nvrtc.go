// Package nvrtc binds NVIDIA's run-time compiler, which compiles CUDA C++ to machine code for one card. It
// needs no GPU.
//
// It has no cache and does not depend on our kernels.
package nvrtc

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"unsafe"

	"github.com/ebitengine/purego"

	"sppo.dev/internal/cuda/library"
)

// Wanted describes how to find the compiler.
var Wanted = library.Wanted{
	Name: "NVIDIA's run-time compiler (libnvrtc)",
	Files: []string{
		"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so",
	},
	Wheel: "cuda_nvrtc",
	Get:   "pip install nvidia-cuda-nvrtc (CUDA 13) or nvidia-cuda-nvrtc-cu12 (CUDA 12, for drivers before 580), or install a CUDA toolkit of either release; libnvrtc-builtins must be in the same folder",
}

type function int

// The functions, in the order of the table below.
const (
	fnVersion function = iota
	fnGetErrorString
	fnGetNumSupportedArchs
	fnGetSupportedArchs
	fnCreateProgram
	fnCompileProgram
	fnDestroyProgram
	fnGetProgramLogSize
	fnGetProgramLog
	fnGetCUBINSize
	fnGetCUBIN
	fnGetPTXSize
	fnGetPTX
	numFunctions
)

var functions = [numFunctions]library.Function{
	fnVersion:              {Name: "nvrtcVersion"},
	fnGetErrorString:       {Name: "nvrtcGetErrorString"},
	fnGetNumSupportedArchs: {Name: "nvrtcGetNumSupportedArchs"},
	fnGetSupportedArchs:    {Name: "nvrtcGetSupportedArchs"},
	fnCreateProgram:        {Name: "nvrtcCreateProgram"},
	fnCompileProgram:       {Name: "nvrtcCompileProgram"},
	fnDestroyProgram:       {Name: "nvrtcDestroyProgram"},
	fnGetProgramLogSize:    {Name: "nvrtcGetProgramLogSize"},
	fnGetProgramLog:        {Name: "nvrtcGetProgramLog"},
	fnGetCUBINSize:         {Name: "nvrtcGetCUBINSize"},
	fnGetCUBIN:             {Name: "nvrtcGetCUBIN"},
	fnGetPTXSize:           {Name: "nvrtcGetPTXSize"},
	fnGetPTX:               {Name: "nvrtcGetPTX"},
}

// API is the open compiler. It is safe for concurrent use.
type API struct{ *library.Library }

// Open finds the compiler.
func Open() (*API, error) {
	lib, err := library.Open(&Wanted, functions[:])
	if err != nil {
		return nil, err
	}
	a := &API{lib}
	a.loadBuiltins()
	return a, nil
}

// loadBuiltins loads the library of built-in functions from the compiler's folder. The compiler asks for that
// library by its bare name. Since CUDA 13, the dynamic loader would otherwise find it only on the loader's own
// search path. If the library is missing, compilation reports that.
func (a *API) loadBuiltins() {
	version, err := a.Version()
	if err != nil || !strings.Contains(a.Path, "/") {
		return
	}
	_, _ = purego.Dlopen(filepath.Join(filepath.Dir(a.Path), "libnvrtc-builtins.so."+version), purego.RTLD_NOW|purego.RTLD_LOCAL)
}

// Error describes a call that failed, with the compiler's log if there is one.
type Error struct {
	Call string
	Code int
	Text string
	Log  string
}

func (e *Error) Error() string {
	text := fmt.Sprintf("%s: %s (code %d)", e.Call, e.Text, e.Code)
	if e.Log != "" {
		text += ":\n" + e.Log
	}
	return text
}

// call makes a call and turns its code into an error.
//
//go:uintptrescapes
func (a *API) call(f function, args ...uintptr) error {
	r, _, _ := purego.SyscallN(a.Addrs[f], args...)
	code := int32(r)
	if code == 0 {
		return nil
	}
	text, _, _ := purego.SyscallN(a.Addrs[fnGetErrorString], uintptr(code))
	return &Error{Call: functions[f].Name, Code: int(code), Text: library.String(text)}
}

// Version returns the compiler's version, such as 12.4.
func (a *API) Version() (string, error) {
	var major, minor int32
	err := a.call(fnVersion, uintptr(unsafe.Pointer(&major)), uintptr(unsafe.Pointer(&minor)))
	return fmt.Sprintf("%d.%d", major, minor), err
}

// Archs lists the supported architectures, such as 80 and 90.
func (a *API) Archs() ([]int, error) {
	var n int32
	if err := a.call(fnGetNumSupportedArchs, uintptr(unsafe.Pointer(&n))); err != nil {
		return nil, err
	}
	archs := make([]int32, n+1)
	if err := a.call(fnGetSupportedArchs, uintptr(unsafe.Pointer(&archs[0]))); err != nil {
		return nil, err
	}
	out := make([]int, n)
	for i := range out {
		out[i] = int(archs[i])
	}
	slices.Sort(out)
	return out, nil
}

// Source is a program: its text, and the headers that it includes by name.
type Source struct {
	Name    string
	Text    string
	Headers map[string]string
}

// Result is the output of a compilation.
type Result struct {
	Image []byte // a cubin for an architecture sm_.., otherwise PTX
	Log   string // warnings, and the output of --ptxas-options
}

// one serialises the compiler calls of a process, because some releases are not safe for concurrent calls, and
// concurrency would gain little.
var one sync.Mutex

// Compile compiles a source. The options must name an architecture (--gpu-architecture=sm_90).
func (a *API) Compile(s Source, options ...string) (*Result, error) {
	one.Lock()
	defer one.Unlock()
	text := library.Bytes(s.Text)
	name := library.Bytes(s.Name)
	names, bodies := &library.Strings{}, &library.Strings{}
	for _, header := range sortedKeys(s.Headers) {
		names.Add(header)
		bodies.Add(s.Headers[header])
	}
	var program uintptr
	if err := a.call(fnCreateProgram, uintptr(unsafe.Pointer(&program)), uintptr(unsafe.Pointer(&text[0])),
		uintptr(unsafe.Pointer(&name[0])), uintptr(names.Len()), uintptr(bodies.Pointer()), uintptr(names.Pointer())); err != nil {
		return nil, err
	}
	out, err := a.compile(program, options)
	if destroyed := a.call(fnDestroyProgram, uintptr(unsafe.Pointer(&program))); err == nil {
		err = destroyed
	}
	return out, err
}

func (a *API) compile(program uintptr, options []string) (*Result, error) {
	list, cubin := &library.Strings{}, false
	for _, option := range options {
		list.Add(option)
		cubin = cubin || strings.HasPrefix(option, "--gpu-architecture=sm_")
	}
	failed := a.call(fnCompileProgram, program, uintptr(list.Len()), uintptr(list.Pointer()))
	log, err := a.bytes(fnGetProgramLogSize, fnGetProgramLog, program)
	if e, ok := failed.(*Error); ok {
		e.Log = strings.TrimRight(string(log), "\x00\n")
		return nil, e
	}
	if err != nil {
		return nil, err
	}
	size, get := fnGetPTXSize, fnGetPTX
	if cubin {
		size, get = fnGetCUBINSize, fnGetCUBIN
	}
	image, err := a.bytes(size, get, program)
	return &Result{Image: image, Log: strings.TrimRight(string(log), "\x00\n")}, err
}

// bytes calls size for the length of an output, and then get for its contents.
func (a *API) bytes(size, get function, program uintptr) ([]byte, error) {
	var n uint64
	if err := a.call(size, program, uintptr(unsafe.Pointer(&n))); err != nil {
		return nil, err
	}
	out := make([]byte, n+1)
	if err := a.call(get, program, uintptr(unsafe.Pointer(&out[0]))); err != nil {
		return nil, err
	}
	return out[:n], nil
}

func sortedKeys(m map[string]string) []string {
	keys := make([]string, 0, len(m))
	for key := range m {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}

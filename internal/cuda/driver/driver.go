// Package driver binds the part of CUDA's driver API that the device needs: contexts, memory, streams,
// events, copies, modules and launches.
//
//	driver.go  API: open, the table of functions, errors, prepared calls
//	calls.go   one method for each function
//
// The package has no state and does not depend on programs. Contexts belong to threads, so callers must
// have locked their goroutine to a thread.
package driver

import (
	"fmt"
	"unsafe"

	"github.com/ebitengine/purego"

	"sppo.dev/internal/cuda/library"
)

// Wanted describes how to find the driver. The driver comes with the kernel module, never with a toolkit.
var Wanted = library.Wanted{
	Name:  "the NVIDIA driver (libcuda)",
	Files: []string{"libcuda.so.1", "libcuda.so"},
	Get:   "install NVIDIA's driver for the GPU of this machine (packages nvidia-driver and libcuda1, or the driver installer); inside a container, start it with the GPU's libraries mapped (--gpus all)",
}

type function int

// The functions, in the order of the table below.
const (
	fnInit function = iota
	fnDriverGetVersion
	fnGetErrorName
	fnGetErrorString
	fnDeviceGetCount
	fnDeviceGet
	fnDeviceGetName
	fnDeviceGetAttribute
	fnDeviceTotalMem
	fnDeviceGetPCIBusID
	fnPrimaryCtxRetain
	fnPrimaryCtxRelease
	fnCtxSetCurrent
	fnCtxEnablePeerAccess
	fnMemGetInfo
	fnMemAlloc
	fnMemFree
	fnMemHostRegister
	fnMemHostUnregister
	fnMemcpyHtoD
	fnMemcpyDtoH
	fnMemcpyAsync
	fnStreamPriorityRange
	fnStreamCreate
	fnStreamDestroy
	fnStreamSynchronize
	fnStreamQuery
	fnStreamWaitEvent
	fnEventCreate
	fnEventDestroy
	fnEventRecord
	fnEventElapsedTime
	fnModuleLoadData
	fnModuleUnload
	fnModuleGetFunction
	fnModuleGetGlobal
	fnFuncSetAttribute
	fnLaunchKernel
	fnStreamBeginCapture
	fnStreamEndCapture
	fnGraphInstantiate
	fnGraphLaunch
	fnGraphDestroy
	fnGraphExecDestroy
	fnTensorMapEncodeTiled
	numFunctions
)

// functions holds the names that the library exports. In C, headers map the plain names to them.
var functions = [numFunctions]library.Function{
	fnInit:                {Name: "cuInit"},
	fnDriverGetVersion:    {Name: "cuDriverGetVersion"},
	fnGetErrorName:        {Name: "cuGetErrorName"},
	fnGetErrorString:      {Name: "cuGetErrorString"},
	fnDeviceGetCount:      {Name: "cuDeviceGetCount"},
	fnDeviceGet:           {Name: "cuDeviceGet"},
	fnDeviceGetName:       {Name: "cuDeviceGetName"},
	fnDeviceGetAttribute:  {Name: "cuDeviceGetAttribute"},
	fnDeviceTotalMem:      {Name: "cuDeviceTotalMem_v2"},
	fnDeviceGetPCIBusID:   {Name: "cuDeviceGetPCIBusId"},
	fnPrimaryCtxRetain:    {Name: "cuDevicePrimaryCtxRetain"},
	fnPrimaryCtxRelease:   {Name: "cuDevicePrimaryCtxRelease_v2"},
	fnCtxSetCurrent:       {Name: "cuCtxSetCurrent"},
	fnCtxEnablePeerAccess: {Name: "cuCtxEnablePeerAccess"},
	fnMemGetInfo:          {Name: "cuMemGetInfo_v2"},
	fnMemAlloc:            {Name: "cuMemAlloc_v2"},
	fnMemFree:             {Name: "cuMemFree_v2"},
	fnMemHostRegister:     {Name: "cuMemHostRegister_v2"},
	fnMemHostUnregister:   {Name: "cuMemHostUnregister"},
	fnMemcpyHtoD:          {Name: "cuMemcpyHtoD_v2"},
	fnMemcpyDtoH:          {Name: "cuMemcpyDtoH_v2"},
	fnMemcpyAsync:         {Name: "cuMemcpyAsync"},
	fnStreamPriorityRange: {Name: "cuCtxGetStreamPriorityRange"},
	fnStreamCreate:        {Name: "cuStreamCreateWithPriority"},
	fnStreamDestroy:       {Name: "cuStreamDestroy_v2"},
	fnStreamSynchronize:   {Name: "cuStreamSynchronize"},
	fnStreamQuery:         {Name: "cuStreamQuery"},
	fnStreamWaitEvent:     {Name: "cuStreamWaitEvent"},
	fnEventCreate:         {Name: "cuEventCreate"},
	fnEventDestroy:        {Name: "cuEventDestroy_v2"},
	fnEventRecord:         {Name: "cuEventRecord"},
	fnEventElapsedTime:    {Name: "cuEventElapsedTime"},
	fnModuleLoadData:      {Name: "cuModuleLoadData"},
	fnModuleUnload:        {Name: "cuModuleUnload"},
	fnModuleGetFunction:   {Name: "cuModuleGetFunction"},
	fnModuleGetGlobal:     {Name: "cuModuleGetGlobal_v2"},
	fnFuncSetAttribute:    {Name: "cuFuncSetAttribute"},
	fnLaunchKernel:        {Name: "cuLaunchKernel"},
	fnStreamBeginCapture:  {Name: "cuStreamBeginCapture_v2"},
	fnStreamEndCapture:    {Name: "cuStreamEndCapture"},
	fnGraphInstantiate:    {Name: "cuGraphInstantiateWithFlags"},
	fnGraphLaunch:         {Name: "cuGraphLaunch"},
	fnGraphDestroy:        {Name: "cuGraphDestroy"},
	fnGraphExecDestroy:    {Name: "cuGraphExecDestroy"},

	fnTensorMapEncodeTiled: {Name: "cuTensorMapEncodeTiled", Optional: true},
}

// API is the open driver.
type API struct{ *library.Library }

// Open finds the driver and initialises it.
func Open() (*API, error) {
	lib, err := library.Open(&Wanted, functions[:])
	if err != nil {
		return nil, err
	}
	a := &API{lib}
	return a, a.call(fnInit, 0)
}

// Codes that callers check.
const (
	OutOfMemory    = 2
	NoDevice       = 100
	NotReady       = 600
	alreadyEnabled = 704
)

// Error describes a call that failed.
type Error struct {
	Call string
	Code int
	Name string // CUDA_ERROR_...
	Text string
}

func (e *Error) Error() string {
	return fmt.Sprintf("%s: %s (%s, code %d)", e.Call, e.Text, e.Name, e.Code)
}

// call makes a call and turns its code into an error. Callers convert pointers in the argument list itself, so that
// what they point to stays on the heap and alive until the call returns.
//
//go:uintptrescapes
func (a *API) call(f function, args ...uintptr) error {
	r, _, _ := purego.SyscallN(a.Addrs[f], args...)
	if code := int32(r); code != 0 {
		return a.fail(f, int(code))
	}
	return nil
}

func (a *API) fail(f function, code int) error {
	e := &Error{Call: functions[f].Name, Code: code, Name: "unknown error", Text: "unknown error"}
	for i, to := range []*string{&e.Name, &e.Text} {
		var text uintptr
		r, _, _ := purego.SyscallN(a.Addrs[fnGetErrorName+function(i)], uintptr(code), uintptr(unsafe.Pointer(&text)))
		if int32(r) == 0 && text != 0 {
			*to = library.String(text)
		}
	}
	return e
}

// Call is a prepared call: a function and its arguments. It can be made repeatedly without allocating.
type Call struct {
	api  *API
	f    function
	args []uintptr

	values [][]byte  // for a launch: its arguments, which may be changed between calls
	params []uintptr // their addresses
}

// Make makes the call.
func (c *Call) Make() error {
	r, _, _ := purego.SyscallN(c.api.Addrs[c.f], c.args...)
	if code := int32(r); code != 0 {
		return c.api.fail(c.f, int(code))
	}
	return nil
}

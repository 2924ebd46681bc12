// Package nccl binds NCCL, NVIDIA's library of collectives. Its communicators never block the host, put
// messages and collectives on streams, and can be polled for errors and aborted.
//
// It does not depend on how ranks exchange IDs or which communicators a program needs.
package nccl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"runtime"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"

	"sppo.dev/internal/cuda/library"
)

// Wanted describes how to find the library.
var Wanted = library.Wanted{
	Name:  "NVIDIA's collectives (libnccl)",
	Files: []string{"libnccl.so.2", "libnccl.so"},
	Wheel: "nccl",
	Get:   "pip install nvidia-nccl-cu13 (CUDA 13) or nvidia-nccl-cu12 (CUDA 12, for drivers before 580), or install the package libnccl2; release 2.18 or later",
}

type function int

// The functions, in the order of the table below.
const (
	fnGetVersion function = iota
	fnGetErrorString
	fnGetLastError
	fnGetUniqueID
	fnCommInitRankConfig
	fnCommGetAsyncError
	fnCommFinalize
	fnCommDestroy
	fnCommAbort
	fnGroupStart
	fnGroupEnd
	fnSend
	fnRecv
	fnAllGather
	fnReduceScatter
	fnAllReduce
	numFunctions
)

var functions = [numFunctions]library.Function{
	fnGetVersion:         {Name: "ncclGetVersion"},
	fnGetErrorString:     {Name: "ncclGetErrorString"},
	fnGetLastError:       {Name: "ncclGetLastError"},
	fnGetUniqueID:        {Name: "ncclGetUniqueId"},
	fnCommInitRankConfig: {Name: "ncclCommInitRankConfig"},
	fnCommGetAsyncError:  {Name: "ncclCommGetAsyncError"},
	fnCommFinalize:       {Name: "ncclCommFinalize"},
	fnCommDestroy:        {Name: "ncclCommDestroy"},
	fnCommAbort:          {Name: "ncclCommAbort"},
	fnGroupStart:         {Name: "ncclGroupStart"},
	fnGroupEnd:           {Name: "ncclGroupEnd"},
	fnSend:               {Name: "ncclSend"},
	fnRecv:               {Name: "ncclRecv"},
	fnAllGather:          {Name: "ncclAllGather"},
	fnReduceScatter:      {Name: "ncclReduceScatter"},
	fnAllReduce:          {Name: "ncclAllReduce"},
}

// DType is the storage type of elements.
type DType int

// Types.
const (
	Int8 DType = 0
	F32  DType = 7
	BF16 DType = 9
)

const (
	sum        = 0
	inProgress = 7
)

// oldest is the release whose configuration and calls we use; newer ones accept them unchanged.
const oldest = 21800

// API is the open library.
type API struct{ *library.Library }

// Open finds the library, and refuses one that is too old.
func Open() (*API, error) {
	lib, err := library.Open(&Wanted, functions[:])
	if err != nil {
		return nil, err
	}
	a := &API{lib}
	version, err := a.number()
	if err == nil && version < oldest {
		err = fmt.Errorf("%s is release %s: %s", a.Path, release(version), Wanted.Get)
	}
	return a, err
}

func (a *API) number() (int, error) {
	var v int32
	err := a.call(fnGetVersion, 0, uintptr(unsafe.Pointer(&v)))
	return int(v), err
}

// Version returns the library's release, such as 2.21.5.
func (a *API) Version() (string, error) {
	v, err := a.number()
	return release(v), err
}

func release(v int) string { return fmt.Sprintf("%d.%d.%d", v/10000, v%10000/100, v%100) }

// Error describes a call that failed.
type Error struct {
	Call string
	Code int
	Text string
	Last string // the library's last message
}

func (e *Error) Error() string {
	text := fmt.Sprintf("%s: %s (code %d)", e.Call, e.Text, e.Code)
	if e.Last != "" {
		text += ": " + e.Last
	}
	return text
}

// call makes a call and turns its code into an error, with the library's last message for the communicator, if
// any.
//
//go:uintptrescapes
func (a *API) call(f function, comm uintptr, args ...uintptr) error {
	r, _, _ := purego.SyscallN(a.Addrs[f], args...)
	return a.check(f, comm, int32(r))
}

func (a *API) check(f function, comm uintptr, code int32) error {
	if code == 0 || code == inProgress {
		return nil // progress is reported by Poll
	}
	text, _, _ := purego.SyscallN(a.Addrs[fnGetErrorString], uintptr(code))
	last, _, _ := purego.SyscallN(a.Addrs[fnGetLastError], comm)
	return &Error{Call: functions[f].Name, Code: int(code), Text: library.String(text), Last: library.String(last)}
}

// ID identifies a communicator to its members. It can be used for only one initialisation.
type ID [128]byte

// NewID creates an ID. It must be called in a member's process.
func (a *API) NewID() (id ID, err error) {
	err = a.call(fnGetUniqueID, 0, uintptr(unsafe.Pointer(&id)))
	return id, err
}

// config mirrors ncclConfig_t as of NCCL 2.18. Newer libraries read as many bytes as its size field says, and
// treat the rest as unset.
type config struct {
	size       uint64
	magic      uint32
	version    uint32
	blocking   int32
	cgaCluster int32
	minCTAs    int32
	maxCTAs    int32
	netName    uintptr
	splitShare int32
}

const (
	configSize  = 44
	configMagic = 0xcafebeef
	unset       = math.MinInt32
)

// Comm is one rank's side of a communicator. Its methods must be called on a thread whose current context is on
// the rank's GPU. Only Abort may be called from any thread, and no call may follow it.
type Comm struct {
	api    *API
	handle uintptr
}

// Init begins to join a communicator and returns immediately. Poll reports when the communicator is ready. The
// communicator uses at most the given number of channels; if that is 0, NCCL chooses.
func (a *API) Init(ranks int, id ID, rank, channels int) (*Comm, error) {
	cfg := config{
		size: configSize, magic: configMagic, version: oldest, blocking: 0,
		cgaCluster: unset, minCTAs: unset, maxCTAs: unset, splitShare: unset,
	}
	if channels > 0 {
		cfg.maxCTAs = int32(channels)
	}
	c := &Comm{api: a}
	return c, a.init(&c.handle, ranks, id, rank, &cfg)
}

// init passes the ID by value. On amd64, a value too large for registers is passed on the stack, so its words
// follow the six register arguments; elsewhere it is passed by address.
func (a *API) init(handle *uintptr, ranks int, id ID, rank int, cfg *config) error {
	if runtime.GOARCH != "amd64" {
		return a.call(fnCommInitRankConfig, 0, uintptr(unsafe.Pointer(handle)), uintptr(ranks),
			uintptr(unsafe.Pointer(&id)), uintptr(rank), uintptr(unsafe.Pointer(cfg)))
	}
	var w [16]uintptr
	for i := range w {
		w[i] = uintptr(binary.LittleEndian.Uint64(id[8*i:]))
	}
	return a.call(fnCommInitRankConfig, 0, uintptr(unsafe.Pointer(handle)), uintptr(ranks), uintptr(rank),
		uintptr(unsafe.Pointer(cfg)), 0, 0,
		w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12], w[13], w[14], w[15])
}

// Poll reports whether a communicator has accepted all calls so far, and returns any error that has occurred.
func (c *Comm) Poll() (settled bool, err error) {
	var state int32
	if err := c.api.call(fnCommGetAsyncError, c.handle, c.handle, uintptr(unsafe.Pointer(&state))); err != nil {
		return false, err
	}
	return state != inProgress, c.api.check(fnCommGetAsyncError, c.handle, state)
}

// Settle polls until a communicator has accepted all calls. It gives up when stop returns an error, and returns
// that error.
func (c *Comm) Settle(stop func() error) error {
	for pause := 10 * time.Microsecond; ; pause = min(2*pause, time.Millisecond) {
		settled, err := c.Poll()
		if settled || err != nil {
			return err
		}
		if err := stop(); err != nil {
			return err
		}
		time.Sleep(pause)
	}
}

// Abort shuts a communicator down immediately, even if operations are in progress. After an error, it is the
// only way to do so.
func (c *Comm) Abort() error { return c.api.call(fnCommAbort, 0, c.handle) }

// Destroy shuts down a communicator that has finished its work.
func (c *Comm) Destroy(stop func() error) error {
	if err := c.api.call(fnCommFinalize, c.handle, c.handle); err != nil {
		return err
	}
	if err := c.Settle(stop); err != nil {
		return err
	}
	return c.api.call(fnCommDestroy, 0, c.handle)
}

// Group combines the calls that f makes into one operation. The calls must stay on one thread, because groups
// belong to threads.
func (a *API) Group(f func() error) error {
	if err := a.call(fnGroupStart, 0); err != nil {
		return err
	}
	return errors.Join(f(), a.call(fnGroupEnd, 0))
}

// Send sends elements to a member; addresses are in device memory.
func (c *Comm) Send(x uintptr, count int64, t DType, peer int, stream uintptr) error {
	return c.api.call(fnSend, c.handle, x, uintptr(count), uintptr(t), uintptr(peer), c.handle, stream)
}

// Recv receives elements from a member.
func (c *Comm) Recv(y uintptr, count int64, t DType, peer int, stream uintptr) error {
	return c.api.call(fnRecv, c.handle, y, uintptr(count), uintptr(t), uintptr(peer), c.handle, stream)
}

// AllGather copies count elements from each member to all members.
func (c *Comm) AllGather(y, x uintptr, count int64, t DType, stream uintptr) error {
	return c.api.call(fnAllGather, c.handle, x, y, uintptr(count), uintptr(t), c.handle, stream)
}

// ReduceScatter adds up the members' elements and gives each member its share of the sum, which has count elements.
func (c *Comm) ReduceScatter(y, x uintptr, count int64, t DType, stream uintptr) error {
	return c.api.call(fnReduceScatter, c.handle, x, y, uintptr(count), uintptr(t), sum, c.handle, stream)
}

// AllReduce replaces every member's elements with their sum.
func (c *Comm) AllReduce(x uintptr, count int64, t DType, stream uintptr) error {
	return c.api.call(fnAllReduce, c.handle, x, x, uintptr(count), uintptr(t), sum, c.handle, stream)
}

// Package cublas binds cuBLASLt: matrix products of row-major operands with f32 sums, an optional bias, and the
// choice of an algorithm for each shape.
//
// It allocates no device memory; the caller provides the workspace. Shape describes a product completely.
package cublas

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"unsafe"

	"github.com/ebitengine/purego"

	"sppo.dev/internal/cuda/library"
)

// Wanted describes how to find the library.
var Wanted = library.Wanted{
	Name:  "NVIDIA's matrix products (libcublasLt)",
	Files: []string{"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so.11", "libcublasLt.so"},
	Wheel: "cublas",
	Get:   "pip install nvidia-cublas (CUDA 13) or nvidia-cublas-cu12 (CUDA 12, for drivers before 580), or install a CUDA toolkit; without it our own, slower kernels compute products",
}

type function int

// The functions, in the order of the table below.
const (
	fnGetVersion function = iota
	fnCreate
	fnDestroy
	fnMatmulDescCreate
	fnMatmulDescDestroy
	fnMatmulDescSetAttribute
	fnLayoutCreate
	fnLayoutDestroy
	fnPreferenceCreate
	fnPreferenceDestroy
	fnPreferenceSetAttribute
	fnHeuristic
	fnMatmul
	numFunctions
)

var functions = [numFunctions]library.Function{
	fnGetVersion:             {Name: "cublasLtGetVersion"},
	fnCreate:                 {Name: "cublasLtCreate"},
	fnDestroy:                {Name: "cublasLtDestroy"},
	fnMatmulDescCreate:       {Name: "cublasLtMatmulDescCreate"},
	fnMatmulDescDestroy:      {Name: "cublasLtMatmulDescDestroy"},
	fnMatmulDescSetAttribute: {Name: "cublasLtMatmulDescSetAttribute"},
	fnLayoutCreate:           {Name: "cublasLtMatrixLayoutCreate"},
	fnLayoutDestroy:          {Name: "cublasLtMatrixLayoutDestroy"},
	fnPreferenceCreate:       {Name: "cublasLtMatmulPreferenceCreate"},
	fnPreferenceDestroy:      {Name: "cublasLtMatmulPreferenceDestroy"},
	fnPreferenceSetAttribute: {Name: "cublasLtMatmulPreferenceSetAttribute"},
	fnHeuristic:              {Name: "cublasLtMatmulAlgoGetHeuristic"},
	fnMatmul:                 {Name: "cublasLtMatmul"},
}

// DType is the storage type of elements. Its values are those of cudaDataType.
type DType int

// Types.
const (
	F32  DType = 0
	BF16 DType = 14
)

// Values of the library's enumerations.
const (
	computeF32        = 68
	opTranspose       = 1
	descTransA        = 3
	descTransB        = 4
	descEpilogue      = 7
	descBiasPointer   = 8
	descBiasType      = 26
	epilogueBias      = 4
	preferWorkspace   = 1
	preferAlignment   = 5 // alignment of a; those of b, c and d follow
	algorithmWords    = 8 // 64-bit words of cublasLtMatmulAlgo_t
	mostProposals     = 8
	statusInvalid     = 7
	statusUnsupported = 15
)

// statuses describes the library's status codes.
var statuses = map[int]string{
	1: "not initialised", 3: "allocation failed", statusInvalid: "invalid value", 8: "architecture mismatch", 11: "mapping error",
	13: "execution failed", 14: "internal error", statusUnsupported: "not supported", 16: "licence error",
}

// API is the open library.
type API struct{ *library.Library }

// Open finds the library.
func Open() (*API, error) {
	lib, err := library.Open(&Wanted, functions[:])
	if err != nil {
		return nil, err
	}
	a := &API{lib}
	return a, nil
}

// Version returns the library's version, such as 12.4.5.
func (a *API) Version() string {
	v, _, _ := purego.SyscallN(a.Addrs[fnGetVersion])
	n := int(v)
	if n >= 100000 { // 11.4 and later have two digits for the minor version
		return fmt.Sprintf("%d.%d.%d", n/10000, n/100%100, n%100)
	}
	return fmt.Sprintf("%d.%d.%d", n/1000, n/100%10, n%100)
}

// Error describes a call that failed.
type Error struct {
	Call string
	Code int
}

func (e *Error) Error() string {
	text := statuses[e.Code]
	if text == "" {
		text = "unknown error"
	}
	return fmt.Sprintf("%s: %s (code %d)", e.Call, text, e.Code)
}

// Unsupported reports whether there is no algorithm for the request. Releases differ in which combinations of
// types they report as unsupported and which as invalid.
func (e *Error) Unsupported() bool {
	return e.Code == statusUnsupported || e.Code == statusInvalid && e.Call == functions[fnHeuristic].Name
}

// call makes a call and turns its code into an error.
//
//go:uintptrescapes
func (a *API) call(f function, args ...uintptr) error {
	r, _, _ := purego.SyscallN(a.Addrs[f], args...)
	if code := int32(r); code != 0 {
		return &Error{Call: functions[f].Name, Code: int(code)}
	}
	return nil
}

// Handle is the library's state for the context that was current when the handle was created.
type Handle struct {
	api    *API
	handle uintptr
}

// NewHandle creates a handle.
func (a *API) NewHandle() (*Handle, error) {
	h := &Handle{api: a}
	return h, a.call(fnCreate, uintptr(unsafe.Pointer(&h.handle)))
}

// Close frees the handle.
func (h *Handle) Close() error { return h.api.call(fnDestroy, h.handle) }

// Shape is a product c[m,n] = op(a) op(b) of row-major matrices, plus a bias for each column or the old
// contents of c.
type Shape struct {
	M, N, K        int64
	TransA, TransB bool // a is stored [k,m], b is stored [n,k]
	In, Out        DType
	Accumulate     bool
	Bias           bool // in the type of the inputs
}

// Product is a product at fixed addresses on a stream, which can be run repeatedly without allocating.
type Product struct {
	handle  *Handle
	objects []object
	scale   [2]float32 // alpha and beta
	algo    [algorithmWords]uint64
	args    []uintptr
}

// Choices remembers algorithms, keyed by everything that they depend on. Ranks on identical cards share it, so
// that equal products use the same algorithm.
type Choices struct {
	Kept Keeper // cache of the fastest algorithms, shared with other processes; nil: none

	mu   sync.Mutex
	made map[choice][algorithmWords]uint64
}

// Keeper caches small values, keyed by everything that they depend on.
type Keeper interface {
	Get(key string) ([]byte, bool)
	Put(key string, value []byte)
}

// Len returns the number of products with a known algorithm.
func (c *Choices) Len() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.made)
}

type choice struct {
	shape     Shape
	alignment [4]uint32 // in bytes, of the library's a, b, c and d
	workspace int64
}

// choiceOf returns a product's key in Choices. Views start anywhere in an arena, so an algorithm must not
// assume more alignment than there is. The alignment of the bias cannot be given separately: the library reads
// the bias with the vector width that it uses to write the result.
func choiceOf(s Shape, o Operands) choice {
	c := choice{shape: s, workspace: o.WorkspaceBytes}
	for i, at := range [...]uintptr{o.B, o.A, o.C, o.C | o.Bias} {
		c.alignment[i] = 256
		if low := uint32(at & -at); low != 0 && low < 256 {
			c.alignment[i] = low
		}
	}
	return c
}

// object is an object created by the library.
type object struct {
	destroy function
	at      uintptr
}

// Operands holds the device addresses that a product uses.
type Operands struct {
	C, A, B, Bias  uintptr
	Workspace      uintptr
	WorkspaceBytes int64
	Stream         uintptr
}

// heuristic is cublasLtMatmulHeuristicResult_t.
type heuristic struct {
	algo      [algorithmWords]uint64
	workspace uint64
	state     int32
	waves     float32
	reserved  [4]int32
}

// Prepare sets up a product. Unless choices already has an algorithm for it, Prepare chooses one: the fastest
// of several if there is a timer, otherwise the first. The library stores matrices in column-major order, so it
// sees the transposes of ours. It is asked for c' = op(b)' op(a)', which needs no copy.
func (h *Handle) Prepare(s Shape, o Operands, choices *Choices, time Timer) (*Product, error) {
	p := &Product{handle: h, scale: [2]float32{1, 0}}
	if s.Accumulate {
		p.scale[1] = 1
	}
	if err := p.prepare(s, o, choices, time); err != nil {
		p.Close()
		return nil, fmt.Errorf("product of [%d,%d] and [%d,%d]: %w", s.M, s.K, s.K, s.N, err)
	}
	return p, nil
}

func (p *Product) prepare(s Shape, o Operands, choices *Choices, time Timer) error {
	desc, err := p.describe(s, o)
	if err != nil {
		return err
	}
	// Layouts of the transposed matrices: rows, columns and leading dimension as the library counts them.
	first, err := p.layout(s.In, s.N, s.K, s.TransB)
	if err != nil {
		return err
	}
	second, err := p.layout(s.In, s.K, s.M, s.TransA)
	if err != nil {
		return err
	}
	out, err := p.layout(s.Out, s.N, s.M, false)
	if err != nil {
		return err
	}
	p.args = []uintptr{
		p.handle.handle, desc, uintptr(unsafe.Pointer(&p.scale[0])), o.B, first, o.A, second,
		uintptr(unsafe.Pointer(&p.scale[1])), o.C, out, o.C, out, uintptr(unsafe.Pointer(&p.algo)),
		o.Workspace, uintptr(o.WorkspaceBytes), o.Stream,
	}
	key := choiceOf(s, o)
	choices.mu.Lock()
	defer choices.mu.Unlock()
	if algo, ok := choices.made[key]; ok {
		p.algo = algo
		return nil
	}
	proposals, err := p.propose(desc, first, second, out, key, time != nil)
	if err != nil {
		return err
	}
	if !p.kept(choices.Kept, key, proposals, time) {
		if err := p.choose(proposals, time); err != nil {
			return err
		}
		p.keep(choices.Kept, key, time)
	}
	if choices.made == nil {
		choices.made = map[choice][algorithmWords]uint64{}
	}
	choices.made[key] = p.algo
	return nil
}

// made registers an object created by the library, so that Close destroys it.
func (p *Product) made(destroy function, at uintptr, err error) (uintptr, error) {
	if err == nil {
		p.objects = append(p.objects, object{destroy, at})
	}
	return at, err
}

func (p *Product) describe(s Shape, o Operands) (uintptr, error) {
	a := p.handle.api
	var at uintptr
	err := a.call(fnMatmulDescCreate, uintptr(unsafe.Pointer(&at)), computeF32, uintptr(F32))
	desc, err := p.made(fnMatmulDescDestroy, at, err)
	if err != nil {
		return 0, err
	}
	set := func(attribute int, value int32) {
		if err == nil {
			err = a.call(fnMatmulDescSetAttribute, desc, uintptr(attribute), uintptr(unsafe.Pointer(&value)), unsafe.Sizeof(value))
		}
	}
	if s.TransB {
		set(descTransA, opTranspose)
	}
	if s.TransA {
		set(descTransB, opTranspose)
	}
	if s.Bias && err == nil {
		set(descEpilogue, epilogueBias)
		if s.In != s.Out { // older releases accept no type other than the result's
			set(descBiasType, int32(s.In))
		}
		bias := uint64(o.Bias)
		if err == nil {
			err = a.call(fnMatmulDescSetAttribute, desc, descBiasPointer, uintptr(unsafe.Pointer(&bias)), unsafe.Sizeof(bias))
		}
	}
	return desc, err
}

// layout creates the library's description of a stored matrix of rows by cols, or of its transpose.
func (p *Product) layout(t DType, rows, cols int64, transposed bool) (uintptr, error) {
	if transposed {
		rows, cols = cols, rows
	}
	var at uintptr
	err := p.handle.api.call(fnLayoutCreate, uintptr(unsafe.Pointer(&at)), uintptr(t), uintptr(rows), uintptr(cols), uintptr(rows))
	return p.made(fnLayoutDestroy, at, err)
}

// propose asks the library for algorithms, fastest first according to the library's own estimate.
func (p *Product) propose(desc, first, second, out uintptr, c choice, several bool) ([]heuristic, error) {
	a := p.handle.api
	var preference uintptr
	if err := a.call(fnPreferenceCreate, uintptr(unsafe.Pointer(&preference))); err != nil {
		return nil, err
	}
	defer a.call(fnPreferenceDestroy, preference) // an error would not matter: nothing uses the preference any longer
	limit := uint64(c.workspace)
	if err := a.call(fnPreferenceSetAttribute, preference, preferWorkspace, uintptr(unsafe.Pointer(&limit)), unsafe.Sizeof(limit)); err != nil {
		return nil, err
	}
	for i := range c.alignment {
		if err := a.call(fnPreferenceSetAttribute, preference, uintptr(preferAlignment+i), uintptr(unsafe.Pointer(&c.alignment[i])), 4); err != nil {
			return nil, err
		}
	}
	wanted, found := 1, int32(0)
	if several {
		wanted = mostProposals
	}
	results := make([]heuristic, wanted)
	err := a.call(fnHeuristic, p.handle.handle, desc, first, second, out, out, preference, uintptr(wanted),
		uintptr(unsafe.Pointer(&results[0])), uintptr(unsafe.Pointer(&found)))
	results = slices.DeleteFunc(results[:found], func(h heuristic) bool { return h.state != 0 })
	if err == nil && len(results) == 0 {
		err = &Error{Call: functions[fnHeuristic].Name, Code: statusUnsupported}
	}
	return results, err
}

// Timer returns the time of a product, in seconds.
type Timer func(product func() error) (float64, error)

// choose takes the fastest algorithm or, without a timer, the first. Algorithms that fail when tried are
// skipped.
func (p *Product) choose(proposals []heuristic, time Timer) error {
	best, chosen := math.Inf(1), proposals[0].algo
	for i := range proposals {
		if time == nil || len(proposals) == 1 {
			break
		}
		p.algo = proposals[i].algo
		seconds, err := time(p.Make)
		if e := (*Error)(nil); errors.As(err, &e) {
			continue
		}
		if err != nil {
			return err
		}
		if seconds < best {
			best, chosen = seconds, p.algo
		}
	}
	p.algo = chosen
	return nil
}

// kept takes the algorithm that was fastest when it was timed, if the library still proposes it.
func (p *Product) kept(k Keeper, c choice, proposals []heuristic, time Timer) bool {
	if k == nil || time == nil {
		return false
	}
	value, ok := k.Get(fmt.Sprintf("%+v", c))
	for i := range proposals {
		if ok && bytes.Equal(value, proposals[i].bytes()) {
			p.algo = proposals[i].algo
			return true
		}
	}
	return false
}

func (p *Product) keep(k Keeper, c choice, time Timer) {
	if k != nil && time != nil {
		h := heuristic{algo: p.algo}
		k.Put(fmt.Sprintf("%+v", c), h.bytes())
	}
}

// bytes returns the algorithm as bytes.
func (h *heuristic) bytes() (out []byte) {
	for _, w := range h.algo {
		out = binary.LittleEndian.AppendUint64(out, w)
	}
	return out
}

// Make runs the product on its stream.
func (p *Product) Make() error {
	r, _, _ := purego.SyscallN(p.handle.api.Addrs[fnMatmul], p.args...)
	if code := int32(r); code != 0 {
		return &Error{Call: functions[fnMatmul].Name, Code: int(code)}
	}
	return nil
}

// Close frees the product's objects.
func (p *Product) Close() error {
	var first error
	for _, o := range p.objects {
		if err := p.handle.api.call(o.destroy, o.at); err != nil && first == nil {
			first = err
		}
	}
	p.objects = nil
	return first
}

package simd

import (
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"sync"
	"unsafe"
)

// openBLASNames are the names under which the library may be installed.
var openBLASNames = []string{"libopenblas.so.0", "libopenblas.so", "libopenblas.0.dylib", "libopenblas.dylib"}

// coreType is the environment variable that overrides the processor type that OpenBLAS detects.
const coreType = "OPENBLAS_CORETYPE"

// blas is the library, once it has been opened.
type blas struct {
	once  sync.Once
	err   error
	sgemm uintptr
	use   bool
}

var openBLAS blas

// UseOpenBLAS sets whether float32 products use an installed OpenBLAS. Their results may then depend on the
// number of threads. UseOpenBLAS must not be called while a product runs.
func UseOpenBLAS(use bool) error {
	if use {
		if err := openBLAS.open(); err != nil {
			return err
		}
	}
	openBLAS.use = use
	return nil
}

// open finds the library and makes it single-threaded, because our own workers run the parts of a product.
func (b *blas) open() error {
	b.once.Do(func() {
		// Unless the variable is set, an OpenBLAS release older than the processor falls back to kernels
		// without AVX.
		if _, told := os.LookupEnv(coreType); !told && active.name == "avx512" && os.Setenv(coreType, "SKYLAKEX") == nil {
			defer os.Unsetenv(coreType)
		}
		var errs []error
		for _, name := range openBLASNames {
			lib, err := openLibrary(name)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			setThreads, err := symbol(lib, "openblas_set_num_threads")
			if err == nil {
				b.sgemm, err = symbol(lib, "sgemm_")
			}
			if err != nil {
				b.err = fmt.Errorf("%s is not a usable OpenBLAS: %w", name, err)
				return
			}
			callC(setThreads, 1)
			return
		}
		b.err = fmt.Errorf("OpenBLAS is not installed: %w", errors.Join(errs...))
	})
	return b.err
}

// gemm computes the product if OpenBLAS is in use and the operands are float32, and reports whether it did. It
// splits c among threads along its longer side.
func (b *blas) gemm(p *Pool, transA, transB bool, m, n, k int, a, bm Mat, accumulate bool, bias []float32, c Mat) bool {
	if !b.use || a.BF16 != nil || bm.BF16 != nil || c.BF16 != nil || k == 0 {
		return false
	}
	if max(m, n, k, a.Ld, bm.Ld, c.Ld) > math.MaxInt32 { // the library's integers have 32 bits
		return false
	}
	parts, rows := max(1, min(p.Threads(), m*n/4096)), m >= n
	p.Run(parts, func(part int) {
		i0, i1, j0, j1 := 0, m, 0, n
		if rows {
			i0, i1 = cut(m, parts, part, 16)
		} else {
			j0, j1 = cut(n, parts, part, 16)
		}
		if i0 == i1 || j0 == j1 {
			return
		}
		b.sgemmRowMajor(transA, transB, i1-i0, j1-j0, k, rowsOf(a, transA, i0), rowsOf(bm, !transB, j0), accumulate, c.at(i0, j0))
		for i := i0; bias != nil && i < i1; i++ {
			row := c.at(i, j0).F32[:j1-j0]
			Add(row, row, bias[j0:])
		}
	})
	return true
}

// rowsOf returns the part of a matrix that starts at the given row or, if the matrix is transposed, at the
// given column.
func rowsOf(m Mat, transposed bool, first int) Mat {
	if transposed {
		return m.at(0, first)
	}
	return m.at(first, 0)
}

// sgemmArguments holds the values whose addresses the library receives. They live on the heap because stacks
// can move.
type sgemmArguments struct {
	transA, transB         [8]byte
	m, n, k, lda, ldb, ldc int32
	alpha, beta            float32
}

var sgemmCalls = sync.Pool{New: func() any { return new(sgemmArguments) }}

// sgemmRowMajor calls the column-major library: row-major c = a*b is column-major c = b*a.
func (b *blas) sgemmRowMajor(transA, transB bool, m, n, k int, a, bm Mat, accumulate bool, c Mat) {
	x := sgemmCalls.Get().(*sgemmArguments)
	defer sgemmCalls.Put(x)
	*x = sgemmArguments{m: int32(m), n: int32(n), k: int32(k), lda: int32(a.Ld), ldb: int32(bm.Ld), ldc: int32(c.Ld), alpha: 1}
	x.transA[0], x.transB[0] = 'N', 'N'
	if transA {
		x.transA[0] = 'T'
	}
	if transB {
		x.transB[0] = 'T'
	}
	if accumulate {
		x.beta = 1
	}
	at := func(p unsafe.Pointer) uintptr { return uintptr(p) }
	callC(b.sgemm,
		at(unsafe.Pointer(&x.transB)), at(unsafe.Pointer(&x.transA)),
		at(unsafe.Pointer(&x.n)), at(unsafe.Pointer(&x.m)), at(unsafe.Pointer(&x.k)), at(unsafe.Pointer(&x.alpha)),
		at(unsafe.Pointer(&bm.F32[0])), at(unsafe.Pointer(&x.ldb)),
		at(unsafe.Pointer(&a.F32[0])), at(unsafe.Pointer(&x.lda)),
		at(unsafe.Pointer(&x.beta)), at(unsafe.Pointer(&c.F32[0])), at(unsafe.Pointer(&x.ldc)))
	runtime.KeepAlive(a.F32)
	runtime.KeepAlive(bm.F32)
	runtime.KeepAlive(c.F32)
}

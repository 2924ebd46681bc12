// Package simd implements the float32 primitives of the cpu device: matrix products, causal attention,
// normalisation, activation functions, cross-entropy rows, AdamW and conversions from and to bfloat16.
//
// It does not depend on programs, opcodes, buffers or ranks: all functions take slices and sizes. The opcode
// kernels in internal/vm/cpu use them.
//
//	pool.go       Pool, the workers that share one call's work
//	isa.go        the instruction sets, and the table of kernels that each of them fills
//	portable.go   the kernels in plain Go, which define the results of all others
//	*_amd64.s     the same kernels for AVX2+FMA, AVX-512 and AVX512-BF16, written by internal/gen (go generate)
//	mat.go        Mat, an operand stored as float32 or bfloat16
//	gemm.go       the matrix product driver, built on the instruction set's micro-kernels
//	pack.go       packing, conversion and prefetching of the matrix product's operands
//	pairs.go      bfloat16 operands that are multiplied without conversion (AVX512-BF16)
//	attention.go, attention_backward.go
//	              causal attention with a prefix; holds tiles or a panel of the score matrix, never all of it
//	attention_blocks.go
//	              joins the results of attention over blocks of keys
//	scan.go, scan_backward.go
//	              linear attention, chunk by chunk; conv.go, the convolution before it
//	rows.go       parallel operations on the rows of a matrix: norms, column sums, cross-entropy
//	vector.go     the serial primitives over slices
//	openblas.go   optional use of an installed OpenBLAS for plain products
//	scratch.go, alloc_*.go
//	              working buffers for calls, on huge pages
//
// Results are bit-identical for any number of threads: work is split only among independent outputs, and sums run
// in an order that depends only on shapes. The last bits differ between instruction sets. Under the race detector,
// which cannot check assembly, only the portable kernels are built in.
package simd

// Package simd holds the float32 primitives of the cpu device: matrix products, causal attention, normalisation,
// activation functions, cross-entropy rows, AdamW and conversions from and to bfloat16.
//
// It knows nothing of programs, opcodes, buffers or ranks: everything here takes slices and sizes. The opcode
// kernels in vm/cpu stand on top.
//
// The map:
//
//	pool.go       Pool, the workers that share one call's work
//	isa.go        the instruction sets and the table of kernels that each fills
//	portable.go   the kernels in plain Go: the definition of what all others compute
//	*_amd64.s     the same for AVX2+FMA, AVX-512 and AVX512-BF16, written by internal/gen (go generate)
//	mat.go        Mat, an operand stored as float32 or bfloat16
//	gemm.go       the one matrix product driver, over the micro-kernels of the instruction set
//	pack.go       how its operands are gathered, converted and fetched ahead
//	pairs.go      operands of bfloat16 that are multiplied without converting them (AVX512-BF16)
//	attention.go, attention_backward.go
//	              causal attention with a prefix; never holds more than tiles of the score matrix, or a panel
//	attention_blocks.go
//	              joining what attention gave over blocks of keys
//	rows.go       operations on the rows of a matrix, in parallel: norms, column sums, cross-entropy
//	vector.go     the serial primitives over slices
//	openblas.go   the option to hand plain products to an installed OpenBLAS
//	scratch.go, alloc_*.go
//	              buffers that calls work in, on huge pages
//
// Results are bit-identical for any number of threads: work is only ever split over independent outputs, and sums
// run in an order that depends on shapes alone. Between instruction sets the last bits differ. Under the race
// detector, which cannot see into assembly, only the portable kernels are built in.
package simd

package vm

import (
	"math"
	"unsafe"

	"sppo.dev/ir"
)

// Float32s views bytes as f32 values. The slice must be 4-byte aligned.
func Float32s(b []byte) []float32 { return elements[float32](b) }

// Uint16s views bytes as the bits of bf16 values. The slice must be 2-byte aligned.
func Uint16s(b []byte) []uint16 { return elements[uint16](b) }

// Int32s views bytes as i32 values. The slice must be 4-byte aligned.
func Int32s(b []byte) []int32 { return elements[int32](b) }

func elements[T float32 | uint16 | int32](b []byte) []T {
	var one T
	if len(b) == 0 {
		return nil
	}
	if uintptr(unsafe.Pointer(&b[0]))%unsafe.Sizeof(one) != 0 {
		panic("internal: vm: misaligned view of bytes")
	}
	return unsafe.Slice((*T)(unsafe.Pointer(&b[0])), len(b)/int(unsafe.Sizeof(one)))
}

// BytesOf views f32 values as bytes.
func BytesOf(f []float32) []byte {
	if len(f) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&f[0])), 4*len(f))
}

// BF16 rounds to the nearest bf16, ties to even. NaN stays NaN.
func BF16(f float32) uint16 {
	bits := math.Float32bits(f)
	if f != f {
		return uint16(bits>>16) | 0x40
	}
	return uint16((bits + 0x7fff + bits>>16&1) >> 16)
}

// FromBF16 returns the value of bf16 bits.
func FromBF16(h uint16) float32 { return math.Float32frombits(uint32(h) << 16) }

// Widen converts bytes of f32 or bf16 to f32 values.
func Widen(out []float32, b []byte, t ir.DType) {
	if t == ir.F32 {
		copy(out, Float32s(b))
		return
	}
	for i, h := range Uint16s(b) {
		out[i] = FromBF16(h)
	}
}

// Narrow is the inverse of Widen.
func Narrow(b []byte, in []float32, t ir.DType) {
	if t == ir.F32 {
		copy(Float32s(b), in)
		return
	}
	for i, h := 0, Uint16s(b); i < len(h); i++ {
		h[i] = BF16(in[i])
	}
}

// Stored returns values encoded as f32 or bf16, rounded to nearest even. The result may share memory with the
// values.
func Stored(values []float32, t ir.DType) []byte {
	if t == ir.F32 {
		return BytesOf(values)
	}
	out := make([]byte, 2*len(values))
	Narrow(out, values, t)
	return out
}

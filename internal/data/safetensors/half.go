package safetensors

import (
	"encoding/binary"
	"fmt"
	"math"
)

// Convertible reports whether values of a type can be read and written as f32.
func Convertible(dtype string) bool { return dtype == F32 || dtype == F16 || dtype == BF16 }

// readable reports whether values of a type can be read as f32.
func readable(dtype string) bool { return Convertible(dtype) || dtype == F8E4M3 }

// widen converts little-endian values of a readable type to f32 without rounding.
func widen(out []float32, in []byte, dtype string) {
	switch dtype {
	case F32:
		for i := range out {
			out[i] = math.Float32frombits(binary.LittleEndian.Uint32(in[4*i:]))
		}
	case BF16:
		for i := range out {
			out[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(in[2*i:])) << 16)
		}
	case F16:
		for i := range out {
			out[i] = fromF16(binary.LittleEndian.Uint16(in[2*i:]))
		}
	case F8E4M3:
		for i := range out {
			out[i] = fromF8(in[i])
		}
	}
}

// fromF8 returns the value of a number in FP8 with four bits of exponent and three of mantissa, which has no infinities.
func fromF8(b byte) float32 {
	exponent, mantissa := int(b>>3&15), float64(b&7)/8
	value := math.Ldexp(1+mantissa, exponent-7)
	switch {
	case b&0x7f == 0x7f:
		value = math.NaN()
	case exponent == 0:
		value = math.Ldexp(mantissa, -6)
	}
	return float32(math.Copysign(value, 1-2*float64(b>>7)))
}

// Append converts f32 values to a convertible type, rounding to nearest, ties to even, and appends them. If a
// finite value is too large for f16, the error gives the value's index.
func Append(out []byte, values []float32, dtype string) ([]byte, error) {
	for i, v := range values {
		switch dtype {
		case F32:
			out = binary.LittleEndian.AppendUint32(out, math.Float32bits(v))
		case BF16:
			out = binary.LittleEndian.AppendUint16(out, toBF16(v))
		case F16:
			h := toF16(v)
			if h&0x7fff == 0x7c00 && !math.IsInf(float64(v), 0) {
				return nil, fmt.Errorf("value %d is %g; the largest value of f16 is 65504", i, v)
			}
			out = binary.LittleEndian.AppendUint16(out, h)
		default:
			return nil, fmt.Errorf("values of type %s cannot be written", dtype)
		}
	}
	return out, nil
}

func toBF16(f float32) uint16 {
	b := math.Float32bits(f)
	if f != f {
		return uint16(b>>16) | 0x40 // a NaN must not become an infinity
	}
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}

// fromF16 returns the value of IEEE 754 binary16 bits.
func fromF16(h uint16) float32 {
	sign, exponent, fraction := uint32(h>>15)<<31, uint32(h>>10&31), uint32(h&0x3ff)
	switch exponent {
	case 31:
		return math.Float32frombits(sign | 0xff<<23 | fraction<<13)
	case 0:
		v := float32(fraction) * (1.0 / (1 << 24)) // exact
		return math.Float32frombits(sign | math.Float32bits(v))
	}
	return math.Float32frombits(sign | (exponent+127-15)<<23 | fraction<<13)
}

// toF16 rounds to the nearest binary16, ties to even.
func toF16(f float32) uint16 {
	b := math.Float32bits(f)
	sign, magnitude := uint16(b>>16&0x8000), b&0x7fffffff
	switch {
	case magnitude > 0x7f800000: // NaN: keep the upper bits of the payload
		return sign | 0x7e00 | uint16(magnitude>>13&0x3ff)
	case magnitude >= 0x477ff000: // rounds to 2^16 or more
		return sign | 0x7c00
	case magnitude < 0x38800000: // below 2^-14: a multiple of 2^-24
		scaled := math.Float32frombits(magnitude) * (1 << 24)
		return sign | uint16(math.RoundToEven(float64(scaled)))
	}
	rounded := magnitude + 0xfff + magnitude>>13&1
	return sign | uint16((rounded-(127-15)<<23)>>13)
}

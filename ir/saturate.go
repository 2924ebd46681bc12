package ir

import (
	"math"
	"math/bits"
)

// Sizes come from files as well as from the compiler, so their sums and products stay at the largest number where they
// would leave the range of 64 bits. A saturated size exceeds every buffer, since an arena holds fewer bytes than that.
// The operands of both functions are not negative.

// Plus returns a+b, or math.MaxInt64 where the sum exceeds it.
func Plus[T ~int64](a, b T) T {
	if sum := a + b; sum >= 0 {
		return sum
	}
	return math.MaxInt64
}

// Times returns a*b, or math.MaxInt64 where the product exceeds it.
func Times[T ~int64](a, b T) T {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	if hi != 0 || lo > math.MaxInt64 {
		return math.MaxInt64
	}
	return T(lo)
}

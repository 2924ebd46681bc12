package ir

import (
	"fmt"
	"math"
	"math/bits"
	"slices"
)

// Sizes come from files as well as from the compiler, so their sums and products saturate at math.MaxInt64. A
// saturated size is larger than any buffer, because arenas are smaller. The operands of Plus and times must not
// be negative.

// Plus returns a+b, or math.MaxInt64 if the sum exceeds it.
func Plus[T ~int64](a, b T) T {
	if sum := a + b; sum >= 0 {
		return sum
	}
	return math.MaxInt64
}

// times returns a*b, or math.MaxInt64 if the product exceeds it.
func times[T ~int64](a, b T) T {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	if hi != 0 || lo > math.MaxInt64 {
		return math.MaxInt64
	}
	return T(lo)
}

// Locate returns the range of arena bytes that a view occupies. It fails unless the view is in its buffer,
// the buffer is in its arena, and the address of the first byte is a multiple of the element's size. It
// accepts any view, well formed or not, so that devices are safe even if a program was not verified.
func (c *Code) Locate(v *View) (lo, hi Bytes, err error) {
	if int64(v.Buffer) >= int64(len(c.Buffers)) {
		return 0, 0, fmt.Errorf("buffer %d of %d", v.Buffer, len(c.Buffers))
	}
	b := &c.Buffers[v.Buffer]
	if err := c.holds(b); err != nil {
		return 0, 0, err
	}
	if v.DType >= NumDTypes || slices.Min(v.Shape[:]) < 0 || v.Offset < 0 {
		return 0, 0, fmt.Errorf("%v of %s at byte %d", v.Shape, describeType(v.DType), int64(v.Offset))
	}
	n := v.Bytes()
	switch lo = b.Offset + v.Offset; { // may have wrapped around; the first two cases exclude that
	case n > b.Size:
		return 0, 0, fmt.Errorf("%v of %s does not fit into %d bytes of %s", v.Dims(), v.DType, int64(b.Size), b.Name)
	case v.Offset > b.Size-n:
		return 0, 0, fmt.Errorf("bytes %d to %d of the %d of %s", int64(v.Offset), int64(Plus(v.Offset, n)), int64(b.Size), b.Name)
	case n > 0 && lo%v.DType.Bytes() != 0:
		return 0, 0, fmt.Errorf("%s at address %d, which is not a multiple of %d", v.DType, int64(lo), int64(v.DType.Bytes()))
	}
	return lo, lo + n, nil
}

// holds checks that a buffer is inside its arena.
func (c *Code) holds(b *Buffer) error {
	switch {
	case b.Arena >= NumArenas:
		return fmt.Errorf("buffer %s is in arena %d of %d", b.Name, b.Arena, NumArenas)
	case b.Offset < 0 || b.Size < 0:
		return fmt.Errorf("buffer %s has %d bytes at %d", b.Name, int64(b.Size), int64(b.Offset))
	case b.Size > c.Arenas[b.Arena] || b.Offset > c.Arenas[b.Arena]-b.Size:
		return fmt.Errorf("buffer %s ends at byte %d of a %s arena of %d", b.Name, int64(Plus(b.Offset, b.Size)), b.Arena, int64(c.Arenas[b.Arena]))
	}
	return nil
}
